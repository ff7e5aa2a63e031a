// Central moments of the columns of a block in one pass over memory.
//
// A block of threads has a row of lanes, each thread as many neighbouring ones as one load of 16 bytes fills. A row of
// lanes is `per_step` whole samples of a narrow block, or a strip of columns of a wide one, so that a lane stays in its
// column and its sums in registers. Rows are divided into parts by the shape of the block alone: which values meet in
// which order depends neither on the grid nor on the device.
#include "block.cuh"

// Fields of a partial result, and of the result.
enum { SUM, LOW, P2, P3, P4, LEAST, GREATEST, COUNT, MASS, PARTIAL };

// Loads that are on their way together: with two blocks of 256 threads on a multiprocessor 32 KiB, what it takes to
// cover the latency of HBM.
static constexpr int kAhead = 4;

SDC_DEVICE bool is_finite(double v) { return fabs(v) <= kHuge; }

// Write the mean of the finite values of a few rows spread over the block, per column; exact for constant columns.
template <typename T>
__global__ void moments_pilot(const T* x, Index n, Index p, int rows, double* pilot) {
    const Index column = static_cast<Index>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (column >= p) {
        return;
    }
    const double v0 = static_cast<double>(x[column]);
    const double base = is_finite(v0) ? v0 : 0.0;
    double total = 0.0, count = 0.0;
    for (int i = 0; i < rows; ++i) {
        const Index row = rows > 1 ? i * (n - 1) / (rows - 1) : 0;
        const double v = static_cast<double>(x[row * p + column]);
        total += is_finite(v) ? v - base : 0.0;
        count += is_finite(v) ? 1.0 : 0.0;
    }
    const double value = base + total / (count > 0.0 ? count : 1.0);
    pilot[column] = is_finite(value) ? value : 0.0;
}

// Sums of one lane. GENERAL: weights or NaN to skip. HIGH: third and fourth powers too.
template <typename T, bool GENERAL, bool HIGH>
struct Lane {
    double sum, low, p2, p3, p4, count, mass;
    T least, greatest;

    SDC_DEVICE_MEMBER void reset() {
        sum = low = p2 = p3 = p4 = count = mass = 0.0;
        least = static_cast<T>(__longlong_as_double(0x7ff0000000000000LL));
        greatest = -least;
    }

    SDC_DEVICE_MEMBER void add(T v, double pilot, double w, bool skipna) {
        // NaN compares with nothing: it stays out of the extremes.
        least = v < least ? v : least;
        greatest = v > greatest ? v : greatest;
        double d = static_cast<double>(v) - pilot;
        double wd = d;
        if (GENERAL) {
            const bool here = !skipna || v == v;
            d = here ? d : 0.0;
            w = here ? w : 0.0;
            count += here ? 1.0 : 0.0;
            mass += w;
            wd = __dmul_rn(w, d);
        }
        if (sizeof(T) == 4) {
            // Of 24 bits: the few thousand terms of a lane lose nothing that float64 pairs would keep.
            sum += wd;
        } else {
            add_exact(sum, low, wd);
        }
        const double w2 = wd * d;
        p2 += w2;
        if (HIGH) {
            const double d2 = d * d;
            p3 += w2 * d;
            p4 += w2 * d2;
        }
    }
};

// What two lanes of a column become.
enum Merge { PLUS, PLUS_PAIR, SMALLER, LARGER };

// Fold lanes to columns: sample s of the upper half joins sample s - half until one is left. `low` belongs to pairs.
// A function of its own: it runs once per part and field, and would be most of the code of every kernel.
SDC_NOINLINE void fold_lanes(double* at, double* low, int per_step, int columns, Merge merge) {
    for (int have = per_step; have > 1;) {
        const int half = (have + 1) / 2;
        for (int i = static_cast<int>(threadIdx.x); i < (have - half) * columns; i += static_cast<int>(blockDim.x)) {
            const int j = i + half * columns;
            if (merge == PLUS) {
                at[i] += at[j];
            } else if (merge == PLUS_PAIR) {
                add_exact(at[i], low[i], at[j]);
                low[i] += low[j];
            } else {
                at[i] = (merge == SMALLER ? at[j] < at[i] : at[j] > at[i]) ? at[j] : at[i];
            }
        }
        __syncthreads();
        have = half;
    }
}

// Sums of each part: partial is (parts, PARTIAL, p). Grid (any, strips); shared memory 2 * width float64.
//
//   width     lanes in use: per_step * p, or the columns of a strip (then per_step is 1)
//   rows      samples of a part, a multiple of per_step
//   skipna    whether NaN is no sample; weights may be null. Neither is looked at unless GENERAL.
template <typename T, int V, bool GENERAL, bool HIGH>
__global__ void __launch_bounds__(256, 2)
    moments_lanes(const T* x, const double* weights, const double* pilot, Index n, Index p, int width, int per_step,
                  Index rows, Index parts, int skipna, double* partial) {
    SDC_SHARED(double, shared);
    const Index strip = static_cast<Index>(blockIdx.y) * width;
    const int columns = per_step > 1 ? static_cast<int>(p) : static_cast<int>(p - strip < width ? p - strip : width);
    const int used = per_step * columns;
    const int lane = static_cast<int>(threadIdx.x) * V;
    const Index stride = p * per_step;
    double centre[V];
    int sample[V];
    for (int v = 0; v < V; ++v) {
        const bool mine = lane + v < used;
        centre[v] = mine ? pilot[strip + (lane + v) % columns] : 0.0;
        sample[v] = mine ? (lane + v) / columns : 0;
    }
    for (Index part = blockIdx.x; part < parts; part += gridDim.x) {
        const Index first = part * rows, last = n - first < rows ? n : first + rows;
        const Index steps = (last - first) / per_step;
        const T* const at = x + first * p + strip + lane;
        Lane<T, GENERAL, HIGH> lanes[V];
        SDC_UNROLL
        for (int v = 0; v < V; ++v) {
            lanes[v].reset();
        }
        if (lane < used) {
            Index g = 0;
            for (; g + kAhead <= steps; g += kAhead) {
                Pack<T, V> ahead[kAhead];
                SDC_UNROLL
                for (int u = 0; u < kAhead; ++u) {
                    ahead[u] = load<T, V>(at + (g + u) * stride);
                }
                SDC_UNROLL
                for (int u = 0; u < kAhead; ++u) {
                    SDC_UNROLL
                    for (int v = 0; v < V; ++v) {
                        const double w =
                            GENERAL && weights != nullptr ? weights[first + (g + u) * per_step + sample[v]] : 1.0;
                        lanes[v].add(ahead[u].v[v], centre[v], w, skipna != 0);
                    }
                }
            }
            for (; g < steps; ++g) {
                const Pack<T, V> one = load<T, V>(at + g * stride);
                SDC_UNROLL
                for (int v = 0; v < V; ++v) {
                    const double w = GENERAL && weights != nullptr ? weights[first + g * per_step + sample[v]] : 1.0;
                    lanes[v].add(one.v[v], centre[v], w, skipna != 0);
                }
            }
            // The last samples of the block may fill a part of a row of lanes.
            const int rest = static_cast<int>(last - first - steps * per_step) * columns;
            SDC_UNROLL
            for (int v = 0; v < V; ++v) {
                if (lane + v < rest) {
                    const double w =
                        GENERAL && weights != nullptr ? weights[first + steps * per_step + sample[v]] : 1.0;
                    lanes[v].add(at[steps * stride + v], centre[v], w, skipna != 0);
                }
            }
        }
        double* const out = partial + part * PARTIAL * p + strip;
        double* const low = shared + width;
        SDC_UNROLL
        for (int f = SUM; f < PARTIAL; ++f) {
            if (f == LOW || (!HIGH && (f == P3 || f == P4)) || (!GENERAL && (f == COUNT || f == MASS))) {
                continue;
            }
            __syncthreads();  // the field before may still be read
            SDC_UNROLL
            for (int v = 0; v < V; ++v) {
                if (lane + v < used) {
                    shared[lane + v] = f == SUM        ? lanes[v].sum
                                       : f == P2       ? lanes[v].p2
                                       : f == P3       ? lanes[v].p3
                                       : f == P4       ? lanes[v].p4
                                       : f == LEAST    ? static_cast<double>(lanes[v].least)
                                       : f == GREATEST ? static_cast<double>(lanes[v].greatest)
                                       : f == COUNT    ? lanes[v].count
                                                       : lanes[v].mass;
                    if (f == SUM) {
                        low[lane + v] = lanes[v].low;
                    }
                }
            }
            __syncthreads();
            const Merge merge = f == SUM ? PLUS_PAIR : f == LEAST ? SMALLER : f == GREATEST ? LARGER : PLUS;
            fold_lanes(shared, low, per_step, columns, merge);
            for (int j = static_cast<int>(threadIdx.x); j < columns; j += static_cast<int>(blockDim.x)) {
                out[f * p + j] = shared[j];
                if (f == SUM) {
                    out[LOW * p + j] = low[j];
                }
            }
        }
        __syncthreads();
    }
}

// Sums of a column over parts; powers and weights compensated.
struct Column {
    double sum, low, p2, p2_low, p3, p3_low, p4, p4_low, mass, mass_low, count, least, greatest;

    SDC_DEVICE_MEMBER void merge(const Column& other) {
        add_exact(sum, low, other.sum);
        low += other.low;
        add_exact(p2, p2_low, other.p2);
        p2_low += other.p2_low;
        add_exact(p3, p3_low, other.p3);
        p3_low += other.p3_low;
        add_exact(p4, p4_low, other.p4);
        p4_low += other.p4_low;
        add_exact(mass, mass_low, other.mass);
        mass_low += other.mass_low;
        count += other.count;
        least = other.least < least ? other.least : least;
        greatest = other.greatest > greatest ? other.greatest : greatest;
    }
};

// Fold parts and turn power sums about the pilot into central moments (Pebay 2008, SAND2008-6212).
//
// out is (10, p): count, weight, sum, low, M2, M3, M4, min, max, and whether the pilot was so far from the mean that
// power sums have lost digits. pilot then becomes the mean, and the pass is to be done again. Shared memory: a Column
// per thread.
template <bool GENERAL, bool HIGH>
__global__ void __launch_bounds__(256)
    moments_fold(const double* partial, Index parts, Index p, Index n, double* pilot, double* out) {
    SDC_SHARED(Column, shared);
    const Index column = static_cast<Index>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int wide = static_cast<int>(blockDim.x), tall = static_cast<int>(blockDim.y);
    const int x = static_cast<int>(threadIdx.x), y = static_cast<int>(threadIdx.y);
    Column mine = {};
    mine.least = kHuge;
    mine.greatest = -kHuge;
    if (column < p) {
        for (Index part = y; part < parts; part += tall) {
            const double* const at = partial + part * PARTIAL * p + column;
            Column next = {};
            next.sum = at[SUM * p];
            next.low = at[LOW * p];
            next.p2 = at[P2 * p];
            next.p3 = HIGH ? at[P3 * p] : 0.0;
            next.p4 = HIGH ? at[P4 * p] : 0.0;
            next.least = at[LEAST * p];
            next.greatest = at[GREATEST * p];
            next.count = GENERAL ? at[COUNT * p] : 0.0;
            next.mass = GENERAL ? at[MASS * p] : 0.0;
            mine.merge(next);
        }
    }
    for (int have = tall; have > 1;) {
        const int half = (have + 1) / 2;
        shared[y * wide + x] = mine;
        __syncthreads();
        if (y + half < have) {
            mine.merge(shared[(y + half) * wide + x]);
        }
        __syncthreads();
        have = half;
    }
    if (y > 0 || column >= p) {
        return;
    }
    const double count = GENERAL ? mine.count : static_cast<double>(n);
    const double weight = GENERAL ? mine.mass + mine.mass_low : count;
    const double d_sum = mine.sum + mine.low;
    const double at_pilot = pilot[column];
    // weight * pilot + the sum of deviations, as a pair
    double total = __dmul_rn(weight, at_pilot), rest = fma(weight, at_pilot, -total);
    add_exact(total, rest, mine.sum);
    rest = rest + mine.low;
    const double sum = total + rest;
    const double p2 = mine.p2 + mine.p2_low, p3 = mine.p3 + mine.p3_low, p4 = mine.p4 + mine.p4_low;
    const double d = weight > 0.0 ? d_sum / weight : 0.0;
    const bool far = d * d * weight > 0.5 * p2 && is_finite(at_pilot + d);
    if (far) {
        pilot[column] = at_pilot + d;
    }
    const double m2 = p2 - d * d * weight;
    const double m4 = p4 - 4.0 * d * p3 + 6.0 * d * d * p2 - 3.0 * d * d * d * d * weight;
    out[column] = count;
    out[p + column] = weight;
    out[2 * p + column] = sum;
    out[3 * p + column] = rest - (sum - total);
    out[4 * p + column] = m2 < 0.0 ? 0.0 : m2;  // NaN stays
    out[5 * p + column] = p3 - 3.0 * d * p2 + 2.0 * d * d * d * weight;
    out[6 * p + column] = m4 < 0.0 ? 0.0 : m4;
    out[7 * p + column] = mine.least;
    out[8 * p + column] = mine.greatest;
    out[9 * p + column] = far ? 1.0 : 0.0;
}
