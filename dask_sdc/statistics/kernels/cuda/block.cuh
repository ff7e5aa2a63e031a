// What all kernels share. Compiled as it stands by NVRTC and nvcc, and by a host compiler with the emulation of
// tests/cuda/host_cuda.h; no header of the toolkit is needed.
#ifndef DASK_SDC_BLOCK_CUH
#define DASK_SDC_BLOCK_CUH

#define SDC_DEVICE static __device__ __forceinline__
#define SDC_DEVICE_MEMBER __device__ __forceinline__

#define SDC_NOINLINE static __device__ __noinline__

// The dynamic shared memory of a launch. All shared memory is dynamic: the emulation fills it with NaN between blocks.
#ifndef SDC_SHARED
#define SDC_SHARED(type, name)                                       \
    extern __shared__ __align__(16) unsigned char sdc_shared_bytes[]; \
    type* const name = reinterpret_cast<type*>(sdc_shared_bytes)
#endif

// A pragma that a host compiler does not know.
#ifndef SDC_UNROLL
#define SDC_UNROLL _Pragma("unroll")
#endif

typedef long long Index;

static constexpr double kHuge = 1.7976931348623157e308;  // the largest float64

// V elements that are loaded by one instruction where they are 16 bytes.
template <typename T, int V>
struct alignas(sizeof(T) * V) Pack {
    T v[V];
};

template <typename T, int V>
SDC_DEVICE Pack<T, V> load(const T* at) {
    return *reinterpret_cast<const Pack<T, V>*>(at);
}

// Bring `width` features, from `from` on, of `rows` rows into shared memory, in rows of `stride` elements. A thread goes
// on by blockDim.x elements: quotient and remainder are added up, as dividing each index would cost more than the load.
template <typename T>
SDC_DEVICE void load_tile(const T* x, Index first, int rows, Index d, int from, int width, int stride, T* tile) {
    const int size = static_cast<int>(blockDim.x), down = size / width, along = size % width;
    int r = static_cast<int>(threadIdx.x) / width, j = static_cast<int>(threadIdx.x) % width;
    while (r < rows) {
        tile[r * stride + j] = x[(first + r) * d + from + j];
        r += down;
        j += along;
        if (j >= width) {
            j -= width;
            ++r;
        }
    }
}

// Add to the pair (high, low) without an error of the sum (Knuth's TwoSum). The intrinsics are never contracted: a
// product that is fused into one of these sums would not be the term that the others see.
SDC_DEVICE void add_exact(double& high, double& low, double value) {
    const double total = __dadd_rn(high, value);
    const double back = __dsub_rn(total, high);
    const double lost = __dadd_rn(__dsub_rn(high, __dsub_rn(total, back)), __dsub_rn(value, back));
    low = __dadd_rn(low, lost);
    high = total;
}

// Sum over a warp; every lane gets the same bits, as each adds the same two values in each step.
template <typename T>
SDC_DEVICE T warp_sum(T value) {
    for (int apart = 16; apart > 0; apart /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, apart);
    }
    return value;
}

template <typename T>
SDC_DEVICE T warp_max(T value) {
    for (int apart = 16; apart > 0; apart /= 2) {
        const T other = __shfl_xor_sync(0xffffffffu, value, apart);
        value = other > value ? other : value;
    }
    return value;
}

// Sum over a block of whole warps, the same bits in every thread. `shared` has room for a value per warp.
template <typename T>
SDC_DEVICE T block_sum(T value, T* shared) {
    const int warps = static_cast<int>(blockDim.x) / 32;
    value = warp_sum(value);
    __syncthreads();  // an earlier sum may still be read
    if (threadIdx.x % 32 == 0) {
        shared[threadIdx.x / 32] = value;
    }
    __syncthreads();
    T total = shared[0];
    for (int w = 1; w < warps; ++w) {
        total += shared[w];
    }
    return total;
}

template <typename T>
SDC_DEVICE T block_max(T value, T* shared) {
    const int warps = static_cast<int>(blockDim.x) / 32;
    value = warp_max(value);
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        shared[threadIdx.x / 32] = value;
    }
    __syncthreads();
    T most = shared[0];
    for (int w = 1; w < warps; ++w) {
        most = shared[w] > most ? shared[w] : most;
    }
    return most;
}

// Fold the partial sums of `parts` parts, which lie as (parts, cells), to one pair per cell: out[cell], then
// out[cells + cell] what rounding left over. A row of threads takes a cell each, threadIdx.y goes down the parts; the
// order of additions depends on the shape of the block alone.
SDC_DEVICE void fold_cells(const double* partial, Index parts, Index cells, double* out, double* shared) {
    const Index cell = static_cast<Index>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int wide = static_cast<int>(blockDim.x), tall = static_cast<int>(blockDim.y);
    const int x = static_cast<int>(threadIdx.x), y = static_cast<int>(threadIdx.y);
    double high = 0.0, low = 0.0;
    if (cell < cells) {
        for (Index part = y; part < parts; part += tall) {
            add_exact(high, low, partial[part * cells + cell]);
        }
    }
    double* const lows = shared + wide * tall;
    for (int have = tall; have > 1;) {
        const int half = (have + 1) / 2;
        shared[y * wide + x] = high;
        lows[y * wide + x] = low;
        __syncthreads();
        if (y + half < have) {
            add_exact(high, low, shared[(y + half) * wide + x]);
            low += lows[(y + half) * wide + x];
        }
        __syncthreads();
        have = half;
    }
    if (y == 0 && cell < cells) {
        const double total = high + low;
        out[cell] = total;
        out[cells + cell] = low - (total - high);
    }
}

#endif
