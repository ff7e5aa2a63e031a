// Attention over the KV cache. q is (B * T, H, W), turned and scaled; caches are (B, KV, slots, W) float32, W a multiple
// of 16. A row at position p sees the positions p - window + 1 .. p and the sinks before them; position s lies in slot s
// if it is a sink, else in slot s - base.
#include "block.cuh"

// Positions of a split. Splits begin at multiples of it, whatever the row, its chunk or its batch: so a row has the same
// bits in all of them.
static constexpr int kSplit = 128;
// Threads of a block, and those that share a key: eight of them read 128 contiguous bytes at a time.
static constexpr int kThreads = 128;
static constexpr int kPerKey = 8;
// Queries of a group that are taken together: keys and values are read once for all of them.
static constexpr int kQueries = 8;

static constexpr float kNothing = -3.0e38f;  // less than every score

// Where a position lies that a row sees; those of its own chunk where its branch does.
SDC_DEVICE Index slot_of(Index position, Index length, Index base, int sinks, const Index* branch) {
    if (branch != nullptr && position >= length) {
        return length - base + branch[1 + position - length];
    }
    return position < sinks ? position : position - base;
}

// Decode: partial (R, H, splits, W + 2) with the weighted sum of values, the largest score and the sum of weights of
// each split of each row. Grid (splits, KV * ceil(H / KV / kQueries), R), kThreads threads: keys and values are read once
// for up to eight queries of a group. Rows of a tree of drafts see, from position `length` on, the slots of their branch:
// tree is (T, depth), per row how many and then which, counted from slot length - base; null where every row follows the
// one before it. The rows begin `skipped` positions behind the first of the chunk. Where `where` is not null,
// `length` is read there: in a captured step it is another in every replay. Splits behind the last position are empty.
//
// Shared memory: queries * (W + kSplit + 4 * kThreads), of queries = min(H / KV, kQueries), and 2 * kQueries float32.
__global__ void __launch_bounds__(128)
    attention_splits(const float* q, const float* k_cache, const float* v_cache, const Index* tree, int depth, int steps,
                     int heads, int kv_heads, int width, Index slots, Index given, const Index* where, Index skipped,
                     Index base, Index window, int sinks, float* partial) {
    SDC_SHARED(float, shared);
    const Index length = where != nullptr ? *where : given;
    const int group = heads / kv_heads, passes = (group + kQueries - 1) / kQueries;
    const int kv = static_cast<int>(blockIdx.y) / passes, from = (static_cast<int>(blockIdx.y) - kv * passes) * kQueries;
    const int here = group - from < kQueries ? group - from : kQueries;
    const int split = static_cast<int>(blockIdx.x), splits = static_cast<int>(gridDim.x);
    const int mine = static_cast<int>(threadIdx.x);
    const Index row = blockIdx.z, b = row / steps, t = row - b * steps, head = kv * group + from;
    const Index* const branch = tree != nullptr ? tree + t * depth : nullptr;
    const Index position = branch != nullptr ? length + branch[0] - 1 : length + skipped + t;
    const Index oldest = position - window + 1 > 0 ? position - window + 1 : 0;
    const Index first = static_cast<Index>(split) * kSplit;
    float* const out = partial + ((row * heads + head) * splits + split) * (width + 2);
    const Index pitch = static_cast<Index>(splits) * (width + 2);  // from head to head
    if (first > position || (first + kSplit <= oldest && first >= sinks)) {
        if (mine < here) {  // nothing of this split is visible
            out[mine * pitch + width] = kNothing;
            out[mine * pitch + width + 1] = 0.0f;
        }
        return;  // the whole block does
    }
    float* const most = shared;                        // (kQueries)
    float* const sums = most + kQueries;               // (kQueries)
    float* const queries = sums + kQueries;            // (here, W)
    float* const scores = queries + here * width;      // (here, kSplit)
    float* const values = scores + here * kSplit;      // (subsets, here, W)
    const float* const keys_of = k_cache + (b * kv_heads + kv) * slots * width;
    const float* const values_of = v_cache + (b * kv_heads + kv) * slots * width;
    for (int i = mine; i < here * width; i += kThreads) {
        queries[i] = q[(row * heads + head) * width + i];
    }
    __syncthreads();
    // Scores: eight threads a key, 16 bytes each at a time, partial products folded by shuffles.
    const int part = mine % kPerKey;
    for (int key = mine / kPerKey; key < kSplit; key += kThreads / kPerKey) {
        const Index s = first + key;
        const bool seen = s <= position && (s >= oldest || s < sinks);
        const float* const at = keys_of + (seen ? slot_of(s, length, base, sinks, branch) : 0) * width;
        float dot[kQueries];
        SDC_UNROLL
        for (int g = 0; g < kQueries; ++g) {
            dot[g] = 0.0f;
        }
        for (int i = part * 4; seen && i < width; i += 4 * kPerKey) {
            const Pack<float, 4> one = load<float, 4>(at + i);
            SDC_UNROLL
            for (int g = 0; g < kQueries; ++g) {
                if (g < here) {
                    const Pack<float, 4> two = load<float, 4>(queries + g * width + i);
                    dot[g] += one.v[0] * two.v[0] + one.v[1] * two.v[1] + one.v[2] * two.v[2] + one.v[3] * two.v[3];
                }
            }
        }
        SDC_UNROLL
        for (int g = 0; g < kQueries; ++g) {
            if (g < here) {
                for (int apart = kPerKey / 2; apart > 0; apart /= 2) {
                    dot[g] += __shfl_xor_sync(0xffffffffu, dot[g], apart);
                }
                if (part == 0) {
                    scores[g * kSplit + key] = seen ? dot[g] : kNothing;
                }
            }
        }
    }
    __syncthreads();
    // Softmax within the split, a warp per query.
    for (int g = mine / 32; g < here; g += kThreads / 32) {
        float largest = kNothing;
        for (int key = mine % 32; key < kSplit; key += 32) {
            largest = scores[g * kSplit + key] > largest ? scores[g * kSplit + key] : largest;
        }
        largest = warp_max(largest);
        float sum = 0.0f;
        for (int key = mine % 32; key < kSplit; key += 32) {
            const float score = scores[g * kSplit + key];
            const float weight = score == kNothing ? 0.0f : expf(score - largest);  // NaN stays
            scores[g * kSplit + key] = weight;
            sum += weight;
        }
        sum = warp_sum(sum);
        if (mine % 32 == 0) {
            most[g] = largest;
            sums[g] = sum;
        }
    }
    __syncthreads();
    // Values: a thread has four columns of every `subsets`-th key.
    const int across = width / 4, subsets = kThreads / across;
    const int column = mine % across * 4, subset = mine / across;
    const int last = static_cast<int>(position - first < kSplit - 1 ? position - first : kSplit - 1);
    if (subset < subsets) {
        float sum[kQueries][4];
        SDC_UNROLL
        for (int g = 0; g < kQueries; ++g) {
            sum[g][0] = sum[g][1] = sum[g][2] = sum[g][3] = 0.0f;
        }
        for (int key = subset; key <= last; key += subsets) {
            const Index s = first + key;
            if (s < oldest && s >= sinks) {
                continue;
            }
            const Pack<float, 4> one =
                load<float, 4>(values_of + slot_of(s, length, base, sinks, branch) * width + column);
            SDC_UNROLL
            for (int g = 0; g < kQueries; ++g) {
                if (g < here) {
                    const float weight = scores[g * kSplit + key];
                    SDC_UNROLL
                    for (int v = 0; v < 4; ++v) {
                        sum[g][v] += weight * one.v[v];
                    }
                }
            }
        }
        SDC_UNROLL
        for (int g = 0; g < kQueries; ++g) {
            if (g < here) {
                SDC_UNROLL
                for (int v = 0; v < 4; ++v) {
                    values[(subset * here + g) * width + column + v] = sum[g][v];
                }
            }
        }
    }
    __syncthreads();
    for (int i = mine; i < here * width; i += kThreads) {
        float total = values[i];
        for (int u = 1; u < subsets; ++u) {
            total += values[u * here * width + i];
        }
        const int g = i / width;
        out[g * pitch + i - g * width] = total;
    }
    if (mine < here) {
        out[mine * pitch + width] = most[mine];
        out[mine * pitch + width + 1] = sums[mine];
    }
}

// Combine the splits of each row and head, in their order: out is (R, H, W). Grid (H, R).
__global__ void __launch_bounds__(128)
    attention_combine(const float* partial, int heads, int width, int splits, float* out) {
    const Index at = static_cast<Index>(blockIdx.y) * heads + blockIdx.x;
    const float* const mine = partial + at * splits * (width + 2);
    float largest = kNothing;
    for (int s = 0; s < splits; ++s) {
        const float most = mine[static_cast<Index>(s) * (width + 2) + width];
        largest = most > largest ? most : largest;
    }
    for (int i = static_cast<int>(threadIdx.x); i < width; i += static_cast<int>(blockDim.x)) {
        float total = 0.0f, weight = 0.0f;
        for (int s = 0; s < splits; ++s) {
            const float* const split = mine + static_cast<Index>(s) * (width + 2);
            if (split[width] == kNothing) {
                continue;  // saw nothing: its values were never written
            }
            const float scale = expf(split[width] - largest);
            total += scale * split[i];
            weight += scale * split[width + 1];
        }
        out[at * width + i] = total / weight;
    }
}

// Prefill: rows and keys of a tile, and threads: a thread has kRowsEach rows and every 16th key or column.
static constexpr int kTile = 64;
static constexpr int kKeys = 64;
static constexpr int kRowsEach = 4;

// Attend the rows of a chunk, out (B * T, H, W). Grid (tiles of rows, H, B), 256 threads = 16 rows of 16. Keys are taken
// in tiles at multiples of kKeys with a running maximum; a tile that a row does not see changes none of its bits.
// COLUMNS is what a thread has of a row of values, at least W / 16. Shared memory: (kTile + kKeys) * (W + 1) + kTile *
// (kKeys + 1) float32.
template <int COLUMNS>
__global__ void __launch_bounds__(256)
    attention_chunk(const float* q, const float* k_cache, const float* v_cache, int steps, int heads, int kv_heads,
                    int width, Index slots, Index length, Index base, Index window, int sinks, float* out) {
    SDC_SHARED(float, shared);
    const int pad = width + 1;  // odd strides: rows lie in banks of their own
    float* const queries = shared;
    float* const keys = queries + kTile * pad;  // then the values in their place
    float* const weights = keys + kKeys * pad;
    const int head = static_cast<int>(blockIdx.y), group = heads / kv_heads, kv = head / group;
    const Index b = blockIdx.z;
    const int begin = static_cast<int>(blockIdx.x) * kTile, rows = steps - begin < kTile ? steps - begin : kTile;
    const int mine = static_cast<int>(threadIdx.x), x = mine % 16, y = mine / 16;
    const float* const keys_of = k_cache + (b * kv_heads + kv) * slots * width;
    const float* const values_of = v_cache + (b * kv_heads + kv) * slots * width;
    for (int i = mine; i < kTile * width; i += 256) {
        const int r = i / width, j = i - r * width;
        queries[r * pad + j] = r < rows ? q[((b * steps + begin + r) * heads + head) * width + j] : 0.0f;
    }
    const Index low = length + begin, high = length + begin + rows - 1;  // positions of the rows
    const Index oldest = low - window + 1 > 0 ? low - window + 1 : 0;
    float most[kRowsEach], sum[kRowsEach], total[kRowsEach][COLUMNS];
    SDC_UNROLL
    for (int r = 0; r < kRowsEach; ++r) {
        most[r] = kNothing;
        sum[r] = 0.0f;
        SDC_UNROLL
        for (int c = 0; c < COLUMNS; ++c) {
            total[r][c] = 0.0f;
        }
    }
    for (Index first = 0; first <= high; first += kKeys) {
        if (first >= sinks && first + kKeys <= oldest) {
            first = oldest / kKeys * kKeys;  // nobody here sees what lies between
        }
        const int here = static_cast<int>(high - first + 1 < kKeys ? high - first + 1 : kKeys);
        __syncthreads();
        for (int i = mine; i < kKeys * width; i += 256) {
            const int r = i / width, j = i - r * width;
            const Index s = first + r;
            const bool kept = r < here && (s < sinks || s >= oldest);
            keys[r * pad + j] = kept ? keys_of[(s < sinks ? s : s - base) * width + j] : 0.0f;
        }
        __syncthreads();
        float score[kRowsEach][kKeys / 16];
        SDC_UNROLL
        for (int r = 0; r < kRowsEach; ++r) {
            SDC_UNROLL
            for (int c = 0; c < kKeys / 16; ++c) {
                score[r][c] = 0.0f;
            }
        }
        for (int j = 0; j < width; ++j) {
            float a[kRowsEach], k[kKeys / 16];
            SDC_UNROLL
            for (int r = 0; r < kRowsEach; ++r) {
                a[r] = queries[(y * kRowsEach + r) * pad + j];
            }
            SDC_UNROLL
            for (int c = 0; c < kKeys / 16; ++c) {
                k[c] = keys[(c * 16 + x) * pad + j];
            }
            SDC_UNROLL
            for (int r = 0; r < kRowsEach; ++r) {
                SDC_UNROLL
                for (int c = 0; c < kKeys / 16; ++c) {
                    score[r][c] += a[r] * k[c];
                }
            }
        }
        // Softmax over the 16 threads of a row, which are half of a warp.
        SDC_UNROLL
        for (int r = 0; r < kRowsEach; ++r) {
            const Index position = low + y * kRowsEach + r;
            float largest = most[r];
            SDC_UNROLL
            for (int c = 0; c < kKeys / 16; ++c) {
                const Index s = first + c * 16 + x;
                const bool seen = s <= position && s <= high && (s > position - window || s < sinks);
                score[r][c] = seen ? score[r][c] : kNothing;
                largest = score[r][c] > largest ? score[r][c] : largest;
            }
            for (int apart = 8; apart > 0; apart /= 2) {
                const float other = __shfl_xor_sync(0xffffffffu, largest, apart);
                largest = other > largest ? other : largest;
            }
            float more = 0.0f;
            SDC_UNROLL
            for (int c = 0; c < kKeys / 16; ++c) {
                const float weight = score[r][c] == kNothing ? 0.0f : expf(score[r][c] - largest);
                weights[(y * kRowsEach + r) * (kKeys + 1) + c * 16 + x] = weight;
                more += weight;
            }
            for (int apart = 8; apart > 0; apart /= 2) {
                more += __shfl_xor_sync(0xffffffffu, more, apart);
            }
            const float scale = most[r] == kNothing ? 0.0f : expf(most[r] - largest);
            sum[r] = sum[r] * scale + more;
            most[r] = largest;
            SDC_UNROLL
            for (int c = 0; c < COLUMNS; ++c) {
                total[r][c] *= scale;
            }
        }
        __syncthreads();  // keys are read, values take their place
        for (int i = mine; i < kKeys * width; i += 256) {
            const int r = i / width, j = i - r * width;
            const Index s = first + r;
            const bool kept = r < here && (s < sinks || s >= oldest);
            keys[r * pad + j] = kept ? values_of[(s < sinks ? s : s - base) * width + j] : 0.0f;
        }
        __syncthreads();
        for (int key = 0; key < here; ++key) {
            float w[kRowsEach];
            SDC_UNROLL
            for (int r = 0; r < kRowsEach; ++r) {
                w[r] = weights[(y * kRowsEach + r) * (kKeys + 1) + key];
            }
            SDC_UNROLL
            for (int c = 0; c < COLUMNS; ++c) {
                if (c * 16 < width) {
                    const float v = keys[key * pad + c * 16 + x];
                    SDC_UNROLL
                    for (int r = 0; r < kRowsEach; ++r) {
                        total[r][c] += w[r] * v;
                    }
                }
            }
        }
    }
    SDC_UNROLL
    for (int r = 0; r < kRowsEach; ++r) {
        const int row = y * kRowsEach + r;
        if (row < rows) {
            float* const to = out + ((b * steps + begin + row) * heads + head) * width;
            SDC_UNROLL
            for (int c = 0; c < COLUMNS; ++c) {
                if (c * 16 < width) {
                    to[c * 16 + x] = total[r][c] / sum[r];
                }
            }
        }
    }
}
