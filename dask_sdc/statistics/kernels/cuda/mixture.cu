// The expectation step of a Gaussian mixture around the matrix products of cuBLAS: log densities, the fused
// log-sum-exp that makes responsibilities of them, and weighted sums.
#include "block.cuh"

// Components whose distances a thread has in registers.
static constexpr int kGroup = 8;

// joint[k][i] = constants[k] - |(x_i - means[k]) * scales[k]|^2 / 2; scales may be null for ones. Tiles as in
// kmeans_assign. Shared memory: 2 * kGroup * chunk float64, then blockDim.x * (chunk | 1) elements.
template <typename T>
__global__ void __launch_bounds__(128)
    mixture_joint(const T* x, Index n, int d, const double* means, const double* scales, const double* constants, int k,
                  int chunk, Index pitch, double* joint) {
    SDC_SHARED(double, mean);
    double* const scale = mean + kGroup * chunk;
    T* const tile = reinterpret_cast<T*>(scale + kGroup * chunk);
    const int stride = chunk | 1, mine = static_cast<int>(threadIdx.x), size = static_cast<int>(blockDim.x);
    const Index tiles = (n + size - 1) / size;
    for (Index t = blockIdx.x; t < tiles; t += gridDim.x) {
        const Index first = t * size;
        const int rows = static_cast<int>(n - first < size ? n - first : size);
        for (int group = 0; group < k; group += kGroup) {
            const int here = k - group < kGroup ? k - group : kGroup;
            double sum[kGroup];
            SDC_UNROLL
            for (int c = 0; c < kGroup; ++c) {
                sum[c] = 0.0;
            }
            for (int from = 0; from < d; from += chunk) {
                const int width = d - from < chunk ? d - from : chunk;
                __syncthreads();
                for (int i = mine; i < here * width; i += size) {
                    const int c = i / width, j = i - c * width;
                    const Index at = static_cast<Index>(group + c) * d + from + j;
                    mean[j * kGroup + c] = means[at];
                    scale[j * kGroup + c] = scales != nullptr ? scales[at] : 1.0;
                }
                if (group == 0 || d > chunk) {
                    load_tile(x, first, rows, d, from, width, stride, tile);
                }
                __syncthreads();
                if (mine < rows) {
                    for (int j = 0; j < width; ++j) {
                        const double v = static_cast<double>(tile[mine * stride + j]);
                        SDC_UNROLL
                        for (int c = 0; c < kGroup; ++c) {
                            if (c < here) {
                                const double y = (v - mean[j * kGroup + c]) * scale[j * kGroup + c];
                                sum[c] += y * y;
                            }
                        }
                    }
                }
            }
            if (mine < rows) {
                SDC_UNROLL
                for (int c = 0; c < kGroup; ++c) {
                    if (c < here) {
                        joint[(group + c) * pitch + first + mine] = constants[group + c] - 0.5 * sum[c];
                    }
                }
            }
        }
    }
}

// Totals of a part: sum of w log p, of w |log p|, and the largest |log p|.
enum { LOG_DENSITY, CONDITION, LARGEST, TOTALS };

// Turn joint (k, pitch) into w * responsibility in place, `size` into |log p|; totals of each part are (parts, TOTALS).
// Responsibilities are taken relative to the largest component: not exp(joint - log p), as the rounding of a large log p
// would be an error of each of them. Shared memory: a float64 per warp.
__global__ void __launch_bounds__(256)
    mixture_normalise(double* joint, const double* weights, Index n, int k, Index pitch, Index rows, Index parts,
                      double* size, double* partial) {
    SDC_SHARED(double, shared);
    for (Index part = blockIdx.x; part < parts; part += gridDim.x) {
        const Index first = part * rows, last = n - first < rows ? n : first + rows;
        double total = 0.0, condition = 0.0, largest = 0.0;
        for (Index row = first + threadIdx.x; row < last; row += blockDim.x) {
            // Comparisons let NaN of the first component stay; a row with NaN has it in all of them.
            double most = joint[row];
            for (int c = 1; c < k; ++c) {
                const double next = joint[c * pitch + row];
                most = next > most ? next : most;
            }
            double sum = 0.0;
            for (int c = 0; c < k; ++c) {
                const double e = exp(joint[c * pitch + row] - most);
                joint[c * pitch + row] = e;
                sum += e;
            }
            const double w = weights != nullptr ? weights[row] : 1.0;
            const double log_p = most + log(sum), scale = w / sum;
            for (int c = 0; c < k; ++c) {
                joint[c * pitch + row] *= scale;
            }
            const double much = fabs(log_p);
            size[row] = much;
            total += w * log_p;
            condition += w * much;
            largest = much > largest ? much : largest;
        }
        total = block_sum(total, shared);
        condition = block_sum(condition, shared);
        largest = block_max(largest, shared);
        if (threadIdx.x == 0) {
            partial[part * TOTALS + LOG_DENSITY] = total;
            partial[part * TOTALS + CONDITION] = condition;
            partial[part * TOTALS + LARGEST] = largest;
        }
    }
}

// Rows that a thread takes one after the other: their loads are on their way together.
static constexpr int kRun = 4;

// Weighted sums of each part, of w * r from mixture_normalise: partial is (parts, k, 2 + 2 d) with the sums of r, of
// r |log p|, of r z and of r z^2, z = x - mean. A thread owns a pair of a component and one of the d + 2 columns; pairs
// are blockDim.x wide and go on in blockIdx.y, threadIdx.y is the group of rows. Neighbouring threads read neighbouring
// features. Shared memory: 2 float64 per thread.
template <typename T>
__global__ void __launch_bounds__(256)
    mixture_sums(const T* x, const double* joint, const double* size, const double* means, Index n, int d, int k,
                 Index pitch, Index rows, Index parts, double* partial) {
    SDC_SHARED(double, shared);
    const int wide = static_cast<int>(blockDim.x), tall = static_cast<int>(blockDim.y);
    const Index pair = static_cast<Index>(blockIdx.y) * wide + threadIdx.x;
    const int columns = d + 2;
    const bool mine = pair < static_cast<Index>(k) * columns;
    const int c = mine ? static_cast<int>(pair / columns) : 0;
    const int column = mine ? static_cast<int>(pair - static_cast<Index>(c) * columns) : 0;
    const int j = column - 2;
    const double mean = j >= 0 ? means[static_cast<Index>(c) * d + j] : 0.0;
    const double* const r = joint + c * pitch;
    for (Index part = blockIdx.x; part < parts; part += gridDim.x) {
        const Index first = part * rows, last = n - first < rows ? n : first + rows;
        double one = 0.0, two = 0.0;
        for (Index run = first + static_cast<Index>(threadIdx.y) * kRun; mine && run < last; run += tall * kRun) {
            const int here = static_cast<int>(last - run < kRun ? last - run : kRun);
            double share[kRun], value[kRun];
            SDC_UNROLL
            for (int u = 0; u < kRun; ++u) {
                share[u] = u < here ? r[run + u] : 0.0;
                value[u] = u >= here     ? 0.0
                           : j >= 0      ? static_cast<double>(x[(run + u) * d + j]) - mean
                           : column == 0 ? 1.0
                                         : size[run + u];
            }
            SDC_UNROLL
            for (int u = 0; u < kRun; ++u) {
                const double weighed = share[u] * value[u];
                one += weighed;
                two += weighed * value[u];
            }
        }
        const int at = static_cast<int>(threadIdx.y) * wide + static_cast<int>(threadIdx.x);
        for (int have = tall; have > 1;) {
            const int half = (have + 1) / 2;
            shared[at] = one;
            shared[wide * tall + at] = two;
            __syncthreads();
            if (static_cast<int>(threadIdx.y) + half < have) {
                one += shared[at + half * wide];
                two += shared[wide * tall + at + half * wide];
            }
            __syncthreads();
            have = half;
        }
        if (mine && threadIdx.y == 0) {
            double* const out = partial + (part * k + c) * (2 + 2 * static_cast<Index>(d));
            out[column] = one;
            if (j >= 0) {
                out[2 + d + j] = two;
            }
        }
    }
}

// Fold parts: out is (2, cells), sums and what rounding left over. Shared memory: 2 float64 per thread.
__global__ void __launch_bounds__(256) mixture_fold(const double* partial, Index parts, Index cells, double* out) {
    SDC_SHARED(double, shared);
    fold_cells(partial, parts, cells, out, shared);
}
