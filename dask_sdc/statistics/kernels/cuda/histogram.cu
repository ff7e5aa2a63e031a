// Exact counts of samples in bins, and sums of their weights in fixed point.
//
// Sums of integers do not depend on their order, so atomic additions give the same bits from run to run, for every grid
// and device. A sample is compared with edges of its own type (rounded up, which changes no comparison), few of them:
// equal cells, of the value or of its rank among all floats, say how many edges are surely below it.
#include "block.cuh"

// What is known of an axis: `plan` holds these integers, `place` origin and cells per unit.
enum { EDGES_AT, TABLE_AT, RANKED, STEPS, STRIDE, TOP, PLAN };

// The rank of a float among all floats, as a float: a piecewise linear logarithm on both sides of zero.
SDC_DEVICE float rank_of(float v) {
    const int bits = __float_as_int(v);
    return static_cast<float>(bits >= 0 ? bits : static_cast<int>(0x80000000u - static_cast<unsigned>(bits)));
}

SDC_DEVICE double rank_of(double v) {
    const long long bits = __double_as_longlong(v);
    const unsigned long long negative = 0x8000000000000000ull - static_cast<unsigned long long>(bits);
    return static_cast<double>(bits >= 0 ? bits : static_cast<long long>(negative));
}

// The slot of a value: 0 below, the bins, n + 1 above, n + 2 NaN. `edges` begins with -inf and ends with NaN.
template <typename T>
SDC_DEVICE unsigned slot_of(T v, const T* edges, const unsigned* table, const Index* plan, const T* place) {
    const T point = plan[RANKED] != 0 ? rank_of(v) : v;
    const T top = static_cast<T>(plan[TOP]);
    T cell = (point - place[0]) * place[1];
    cell = cell > T(0) ? cell : T(0);
    cell = cell < top ? cell : top;
    // The place behind the last cell holds the slot of NaN.
    unsigned slot = table[v != v ? static_cast<unsigned>(plan[TOP]) + 1u : static_cast<unsigned>(cell)];
    for (unsigned half = (1u << plan[STEPS]) >> 1; half > 0; half /= 2) {
        slot += v >= edges[slot + half] ? half : 0u;
    }
    return slot;
}

// Bring the tables of the axes into shared memory behind the counters.
template <typename T>
SDC_DEVICE void fetch(T* edges_to, const T* edges, int edge_count, unsigned* table_to, const unsigned* table,
                      int table_count) {
    for (int i = static_cast<int>(threadIdx.x); i < edge_count; i += static_cast<int>(blockDim.x)) {
        edges_to[i] = edges[i];
    }
    for (int i = static_cast<int>(threadIdx.x); i < table_count; i += static_cast<int>(blockDim.x)) {
        table_to[i] = table[i];
    }
}

// Count the elements of a flat block in the bins of one axis whose counters fit in shared memory.
//
// Each counter has `copies` (a power of two, at most 32), and a lane counts in the copy of its number: with 32 copies no
// two lanes of a warp meet in a counter or in a bank, however the samples are distributed. Shared memory: edges, then
// table, then slots * copies counters.
template <typename T, int V>
__global__ void __launch_bounds__(256)
    histogram_line(const T* x, Index n, const T* edges, int edge_count, const unsigned* table, int table_count,
                   const Index* plan, const T* place, int slots, int copies, unsigned long long* counts) {
    SDC_SHARED(T, near_edges);
    unsigned* const near_table = reinterpret_cast<unsigned*>(near_edges + edge_count);
    unsigned* const counters = near_table + table_count;
    const int mine = static_cast<int>(threadIdx.x), step = static_cast<int>(blockDim.x);
    fetch(near_edges, edges, edge_count, near_table, table, table_count);
    for (int i = mine; i < slots * copies; i += step) {
        counters[i] = 0u;
    }
    const Index axis[PLAN] = {plan[EDGES_AT], plan[TABLE_AT], plan[RANKED], plan[STEPS], plan[STRIDE], plan[TOP]};
    const T cells[2] = {place[0], place[1]};
    __syncthreads();
    unsigned* const own = counters + (mine & (copies - 1));
    const Index threads = static_cast<Index>(gridDim.x) * blockDim.x;
    const Index whole = n / V;
    Index i = static_cast<Index>(blockIdx.x) * blockDim.x + threadIdx.x;
    for (; i + threads < whole; i += 2 * threads) {  // two loads on their way
        const Pack<T, V> one = load<T, V>(x + i * V);
        const Pack<T, V> two = load<T, V>(x + (i + threads) * V);
        SDC_UNROLL
        for (int v = 0; v < V; ++v) {
            atomicAdd(own + slot_of(one.v[v], near_edges, near_table, axis, cells) * copies, 1u);
        }
        SDC_UNROLL
        for (int v = 0; v < V; ++v) {
            atomicAdd(own + slot_of(two.v[v], near_edges, near_table, axis, cells) * copies, 1u);
        }
    }
    for (; i < whole; i += threads) {
        const Pack<T, V> one = load<T, V>(x + i * V);
        SDC_UNROLL
        for (int v = 0; v < V; ++v) {
            atomicAdd(own + slot_of(one.v[v], near_edges, near_table, axis, cells) * copies, 1u);
        }
    }
    if (blockIdx.x == 0 && whole * V + mine < n) {
        atomicAdd(own + slot_of(x[whole * V + mine], near_edges, near_table, axis, cells) * copies, 1u);
    }
    __syncthreads();
    for (int slot = mine; slot < slots; slot += step) {
        unsigned long long total = 0ull;
        for (int c = 0; c < copies; ++c) {
            // Rotated, so that threads start in banks of their own.
            total += counters[slot * copies + ((c + slot) & (copies - 1))];
        }
        if (total > 0ull) {
            atomicAdd(counts + slot, total);
        }
    }
}

// Count samples of `dims` coordinates in global counters, with or without weights.
//
// Weights are added up as integers, multiples of 1 / high_scale and, of what that leaves, of 1 / low_scale; the caller
// chooses both so that no sum overflows. sums is (2, slots).
template <typename T>
__global__ void __launch_bounds__(256)
    histogram_joint(const T* x, Index n, int dims, const T* edges, const unsigned* table, const Index* plan,
                    const T* place, Index slots, const double* weights, double high_scale,
                    double low_scale, unsigned long long* counts, unsigned long long* sums) {
    const Index threads = static_cast<Index>(gridDim.x) * blockDim.x;
    for (Index i = static_cast<Index>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += threads) {
        Index slot = 0;
        for (int d = 0; d < dims; ++d) {
            const Index* const axis = plan + d * PLAN;
            slot += axis[STRIDE] * slot_of(x[i * dims + d], edges + axis[EDGES_AT], table + axis[TABLE_AT], axis,
                                           place + 2 * d);
        }
        atomicAdd(counts + slot, 1ull);
        if (weights != nullptr) {
            const double w = weights[i] * high_scale;
            const double whole = floor(w);
            atomicAdd(sums + slot, static_cast<unsigned long long>(whole));
            atomicAdd(sums + slots + slot, static_cast<unsigned long long>(rint((w - whole) * low_scale)));
        }
    }
}
