// Products of rows and weights, for few rows: memory for the weights is what they cost. A row has the same bits whatever the
// other rows of its launch.
#include "block.cuh"

// Weights as float32: bfloat16 is its upper half, float16 has its exponent moved, and kept where it says infinite or NaN.
SDC_DEVICE float widened(float w) { return w; }
SDC_DEVICE float widened(unsigned short w) { return __uint_as_float(static_cast<unsigned>(w) << 16); }
SDC_DEVICE float widened(short w) {
    const unsigned bits = static_cast<unsigned short>(w), sign = (bits & 0x8000u) << 16, size = (bits & 0x7fffu) << 13;
    if (size >= 0x7c00u << 13) {
        return __uint_as_float(sign | 0x7f800000u | size);
    }
    const float value = __uint_as_float(size) * 5.192296858534828e33f;  // 2^112, exact for subnormal numbers too
    return (bits & 0x8000u) != 0 ? -value : value;
}

// Sums over a warp of one value per row; a lane gets that of row lane / (32 / ROWS). In each step a lane gives away the rows
// that it does not go on with. Pairs are those of `warp_sum`, whatever ROWS is, and so are the bits.
template <int ROWS>
SDC_DEVICE float warp_sums(float (&sum)[ROWS], int lane) {
    int apart = 16;
    SDC_UNROLL
    for (int half = ROWS / 2; half > 0; half /= 2) {
        const bool upper = (lane & apart) != 0;
        SDC_UNROLL
        for (int r = 0; r < half; ++r) {
            const float kept = upper ? sum[half + r] : sum[r], given = upper ? sum[r] : sum[half + r];
            sum[r] = kept + __shfl_xor_sync(0xffffffffu, given, apart);
        }
        apart /= 2;
    }
    float value = sum[0];
    for (; apart > 0; apart /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, apart);
    }
    return value;
}

// y (R, O) = x (R, D) * w (O, pitch) transposed, + bias (O) + add (R, O), which may be null; columns of w from D on are
// zero, pitch is a multiple of 16. Grid (any, any): outputs, rows; blocks of whole warps. A warp takes an output of ROWS
// rows, a lane 16 bytes of the weights at a time. WHOLE says that x may be loaded four elements at once. Neither WHOLE nor
// ROWS changes the order of additions, and what is fused is said here, not left to the compiler.
template <typename T, bool WHOLE, int ROWS>
__global__ void __launch_bounds__(256)
    row_product(const float* x, const T* w, const float* bias, const float* add, int rows, int d, int pitch, int outputs,
                float* y) {
    constexpr int kEach = 16 / sizeof(T);
    const int lane = static_cast<int>(threadIdx.x) % 32, warps = static_cast<int>(blockDim.x) / 32;
    const int from = static_cast<int>(blockIdx.x) * warps + static_cast<int>(threadIdx.x) / 32;
    for (int first = static_cast<int>(blockIdx.y) * ROWS; first < rows; first += static_cast<int>(gridDim.y) * ROWS) {
        const int here = rows - first < ROWS ? rows - first : ROWS;
        const float* const top = x + static_cast<Index>(first) * d;
        for (int o = from; o < outputs; o += static_cast<int>(gridDim.x) * warps) {
            const T* const mine = w + static_cast<Index>(o) * pitch;
            float sum[ROWS];
            SDC_UNROLL
            for (int r = 0; r < ROWS; ++r) {
                sum[r] = 0.0f;
            }
            for (int i = lane * kEach; i < d; i += 32 * kEach) {
                const Pack<T, kEach> one = load<T, kEach>(mine + i);
                SDC_UNROLL
                for (int part = 0; part < kEach; part += 4) {
                    if (i + part >= d) {
                        continue;  // behind the row: what lies there is no number
                    }
                    SDC_UNROLL
                    for (int r = 0; r < ROWS; ++r) {
                        // Rows that are not there are the last one once more, which nobody writes.
                        const float* const at = top + (r < here ? r : here - 1) * d + i + part;
                        Pack<float, 4> two;
                        if (WHOLE) {
                            two = load<float, 4>(at);
                        } else {
                            SDC_UNROLL
                            for (int v = 0; v < 4; ++v) {
                                two.v[v] = i + part + v < d ? at[v] : 0.0f;
                            }
                        }
                        SDC_UNROLL
                        for (int v = 0; v < 4; ++v) {
                            sum[r] = fmaf(two.v[v], widened(one.v[part + v]), sum[r]);
                        }
                    }
                }
            }
            float total = warp_sums<ROWS>(sum, lane);
            const int row = lane / (32 / ROWS);
            if (lane % (32 / ROWS) == 0 && row < here) {
                const Index to = static_cast<Index>(first + row) * outputs + o;
                total += bias != nullptr ? bias[o] : 0.0f;
                total += add != nullptr ? add[to] : 0.0f;
                y[to] = total;
            }
        }
    }
}
