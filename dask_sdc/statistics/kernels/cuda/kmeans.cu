// A round of k-means. Distances are plain IEEE operations in the order of the CPU kernel, never fused: a label is the
// same on every device and on the CPU, so that an audit of one by the other compares equal counts.
#include "block.cuh"

// Centres whose distances a thread has in registers.
static constexpr int kGroup = 8;

// Label and squared distance of each row. A block takes a tile of blockDim.x rows at a time, `chunk` features of which
// lie in shared memory, in rows of an odd stride: threads that read the same feature of their rows meet in no bank.
// Shared memory: kGroup * chunk float64, then blockDim.x * (chunk | 1) elements.
template <typename T>
__global__ void __launch_bounds__(128)
    kmeans_assign(const T* x, Index n, int d, const double* centres, int k, int chunk, int* label, double* distance) {
    SDC_SHARED(double, some_centres);
    T* const tile = reinterpret_cast<T*>(some_centres + kGroup * chunk);
    const int stride = chunk | 1, mine = static_cast<int>(threadIdx.x), size = static_cast<int>(blockDim.x);
    const Index tiles = (n + size - 1) / size;
    for (Index t = blockIdx.x; t < tiles; t += gridDim.x) {
        const Index first = t * size;
        const int rows = static_cast<int>(n - first < size ? n - first : size);
        double best = 0.0;
        int nearest = 0;
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
                    some_centres[j * kGroup + c] = centres[static_cast<Index>(group + c) * d + from + j];
                }
                // A tile of all features is fetched once.
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
                                const double z = __dsub_rn(v, some_centres[j * kGroup + c]);
                                sum[c] = __dadd_rn(sum[c], __dmul_rn(z, z));
                            }
                        }
                    }
                }
            }
            SDC_UNROLL
            for (int c = 0; c < kGroup; ++c) {
                if (c < here) {
                    // A tie stays with the lower index, NaN of the first centre stays.
                    const bool closer = group + c == 0 || sum[c] < best;
                    best = closer ? sum[c] : best;
                    nearest = closer ? group + c : nearest;
                }
            }
        }
        if (mine < rows) {
            label[first + mine] = nearest;
            distance[first + mine] = best;
        }
    }
}

// Columns of a partial result before those of the features: weight, inertia, farthest distance, its row.
enum { WEIGHT, INERTIA, FAR, FAR_ROW, FEATURES };

// Sums of each part by label: partial is (parts, k, FEATURES + d). A thread owns a column, and of it the sums of all
// clusters for the rows of its group (threadIdx.y), so that nobody else ever adds to them. Grid (any, columns / blockDim.x).
// Shared memory: blockDim.y * k * (blockDim.x + 1) float64.
template <typename T>
__global__ void __launch_bounds__(256)
    kmeans_sums(const T* x, const double* weights, const int* label, const double* distance, Index n, int d,
                const double* centres, int k, Index rows, Index parts, double* partial) {
    SDC_SHARED(double, shared);
    const int wide = static_cast<int>(blockDim.x), tall = static_cast<int>(blockDim.y);
    const int column = static_cast<int>(blockIdx.y) * wide + static_cast<int>(threadIdx.x);
    const int columns = FEATURES + d;
    double* const own = shared + static_cast<int>(threadIdx.y) * k * wide + static_cast<int>(threadIdx.x);
    double* const far = shared + tall * k * wide + static_cast<int>(threadIdx.y) * k;
    for (Index part = blockIdx.x; part < parts; part += gridDim.x) {
        const Index first = part * rows, last = n - first < rows ? n : first + rows;
        for (int c = 0; c < k; ++c) {
            own[c * wide] = column == FAR ? -1.0 : 0.0;
            if (column == FAR) {
                far[c] = 0.0;
            }
        }
        for (Index row = first + threadIdx.y; row < last; row += tall) {
            const int c = label[row];
            const double w = weights != nullptr ? weights[row] : 1.0;
            if (column == WEIGHT) {
                own[c * wide] += w;
            } else if (column == INERTIA) {
                own[c * wide] += w * distance[row];
            } else if (column == FAR) {
                const double apart = distance[row];
                if (apart > own[c * wide] && w > 0.0) {
                    own[c * wide] = apart;
                    far[c] = static_cast<double>(row);
                }
            } else if (column >= FEATURES && column < columns) {
                const int j = column - FEATURES;
                const double z = static_cast<double>(x[row * d + j]) - centres[static_cast<Index>(c) * d + j];
                own[c * wide] += w * z;
            }
        }
        __syncthreads();
        // Groups are added in their order; of equally far rows the first one stays.
        double* const out = partial + part * k * columns;
        const double* const all_far = shared + tall * k * wide;
        for (int c = static_cast<int>(threadIdx.y); c < k && column < columns; c += tall) {
            if (column == FAR_ROW) {
                continue;
            }
            double total = shared[c * wide + static_cast<int>(threadIdx.x)];
            double at = column == FAR ? all_far[c] : 0.0;
            for (int g = 1; g < tall; ++g) {
                const double next = shared[(g * k + c) * wide + static_cast<int>(threadIdx.x)];
                if (column != FAR) {
                    total += next;
                } else if (next > total || (next == total && all_far[g * k + c] < at)) {
                    total = next;
                    at = all_far[g * k + c];
                }
            }
            out[static_cast<Index>(c) * columns + column] = total;
            if (column == FAR) {
                out[static_cast<Index>(c) * columns + FAR_ROW] = at;
            }
        }
        __syncthreads();
    }
}

// Fold parts: out is (2, k * (FEATURES + d)), sums and what rounding left over. Shared memory: 2 float64 per thread.
__global__ void __launch_bounds__(256) kmeans_fold(const double* partial, Index parts, Index cells, double* out) {
    SDC_SHARED(double, shared);
    fold_cells(partial, parts, cells, out, shared);
}

// The farthest row of each cluster over all parts, one block per cluster: out is (k, 2). Shared memory: 2 float64 per
// thread.
__global__ void __launch_bounds__(256) kmeans_far(const double* partial, Index parts, int k, int d, double* out) {
    SDC_SHARED(double, shared);
    const int mine = static_cast<int>(threadIdx.x), size = static_cast<int>(blockDim.x);
    const Index c = blockIdx.x, columns = FEATURES + d;
    double apart = -1.0, at = 0.0;
    for (Index part = mine; part < parts; part += size) {
        const double* const one = partial + (part * k + c) * columns;
        if (one[FAR] > apart) {  // parts of a thread rise, and with them the rows
            apart = one[FAR];
            at = one[FAR_ROW];
        }
    }
    for (int have = size; have > 1;) {
        const int half = (have + 1) / 2;
        shared[mine] = apart;
        shared[size + mine] = at;
        __syncthreads();
        if (mine + half < have) {
            const double next = shared[mine + half], row = shared[size + mine + half];
            if (next > apart || (next == apart && row < at)) {
                apart = next;
                at = row;
            }
        }
        __syncthreads();
        have = half;
    }
    if (mine == 0) {
        out[2 * c] = apart;
        out[2 * c + 1] = at;
    }
}
