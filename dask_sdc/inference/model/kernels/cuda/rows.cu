// What a layer does to single rows between its matrix products: norms, activations, and the turn of queries and keys on
// their way into the cache. A row has the same bits whatever the other rows of its launch.
#include "block.cuh"

// h = norm(x) * gain + shift: RMSNorm, or LayerNorm where there is a shift. x and h are (R, D) float32, one block of
// whole warps per row. Squares are added up in float64: the sum is as good as if it had been rounded once. Shared
// memory: a float64 per warp.
template <int V>
__global__ void __launch_bounds__(256)
    row_norm(const float* x, const float* gain, const float* shift, int d, double eps, float* h) {
    SDC_SHARED(double, shared);
    const float* const row = x + static_cast<Index>(blockIdx.x) * d;
    float* const out = h + static_cast<Index>(blockIdx.x) * d;
    const int mine = static_cast<int>(threadIdx.x) * V, step = static_cast<int>(blockDim.x) * V;
    double mean = 0.0;
    if (shift != nullptr) {
        for (int i = mine; i < d; i += step) {
            const Pack<float, V> p = load<float, V>(row + i);
            SDC_UNROLL
            for (int v = 0; v < V; ++v) {
                mean += static_cast<double>(p.v[v]);
            }
        }
        mean = block_sum(mean, shared) / d;
    }
    double squares = 0.0;
    for (int i = mine; i < d; i += step) {
        const Pack<float, V> p = load<float, V>(row + i);
        SDC_UNROLL
        for (int v = 0; v < V; ++v) {
            const double z = static_cast<double>(p.v[v]) - mean;
            squares += z * z;
        }
    }
    const double scale = 1.0 / sqrt(block_sum(squares, shared) / d + eps);
    for (int i = mine; i < d; i += step) {  // the row is in the first-level cache by now
        const Pack<float, V> p = load<float, V>(row + i);
        Pack<float, V> to;
        SDC_UNROLL
        for (int v = 0; v < V; ++v) {
            to.v[v] = static_cast<float>((static_cast<double>(p.v[v]) - mean) * scale) * gain[i + v];
            to.v[v] += shift != nullptr ? shift[i + v] : 0.0f;
        }
        *reinterpret_cast<Pack<float, V>*>(out + i) = to;
    }
}

SDC_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-(x > -87.0f ? x : -87.0f))); }

// out (R, I) = silu(y[:, :I] + bias) * (y[:, I:] + bias) where GATED, else gelu(y + bias) by its tanh form. bias may be
// null. Grid (any, any): columns, rows.
template <int V, bool GATED>
__global__ void __launch_bounds__(256)
    row_activation(const float* y, const float* bias, int rows, int size, float* out) {
    const int step = static_cast<int>(gridDim.x * blockDim.x) * V;
    const Index pitch = GATED ? 2 * static_cast<Index>(size) : size;
    for (int row = static_cast<int>(blockIdx.y); row < rows; row += static_cast<int>(gridDim.y)) {
        for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) * V; i < size; i += step) {
            const Pack<float, V> a = load<float, V>(y + row * pitch + i);
            const Pack<float, V> b = load<float, V>(y + row * pitch + (GATED ? size : 0) + i);
            Pack<float, V> to;
            SDC_UNROLL
            for (int v = 0; v < V; ++v) {
                const float gate = a.v[v] + (bias != nullptr ? bias[i + v] : 0.0f);
                if (GATED) {
                    const float up = b.v[v] + (bias != nullptr ? bias[size + i + v] : 0.0f);
                    to.v[v] = gate * sigmoid(gate) * up;
                } else {
                    // 0.5 (1 + tanh u) = sigmoid(2 u)
                    to.v[v] = gate * sigmoid(1.5957691216057308f * (gate + 0.044715f * gate * gate * gate));
                }
            }
            *reinterpret_cast<Pack<float, V>*>(out + row * static_cast<Index>(size) + i) = to;
        }
    }
}

// Turn queries and keys by their positions (RoPE, halves), scale queries, append keys and values to the cache.
//
// qkv is (B * T, H + 2 KV, W) without its bias, which may be null; q is (B * T, H, W); caches are (B, KV, slots, W), the
// chunk goes to the slots from `length - base` on; where `where` is not null, `length` is read there. cosine and sine are
// (T, half), half 0 turns nothing. One block per row, blockDim.y heads at a time.
__global__ void __launch_bounds__(256)
    row_turn(const float* qkv, const float* bias, const float* cosine, const float* sine, int steps, int heads,
             int kv_heads, int width, int half, float scale, Index slots, Index length, const Index* where, Index base,
             float* q, float* k_cache, float* v_cache) {
    const Index slot = (where != nullptr ? *where : length) - base;
    const Index row = blockIdx.x, b = row / steps, t = row - b * steps;
    const int all = heads + 2 * kv_heads;
    for (int head = static_cast<int>(threadIdx.y); head < all; head += static_cast<int>(blockDim.y)) {
        const float* const from = qkv + (row * all + head) * width;
        const float* const add = bias != nullptr ? bias + static_cast<Index>(head) * width : nullptr;
        const bool query = head < heads, value = head >= heads + kv_heads;
        const int kv = head - heads - (value ? kv_heads : 0);
        float* const to = query ? q + (row * heads + head) * width
                                : (value ? v_cache : k_cache) + ((b * kv_heads + kv) * slots + slot + t) * width;
        for (int i = static_cast<int>(threadIdx.x); i < width; i += static_cast<int>(blockDim.x)) {
            float mine = from[i] + (add != nullptr ? add[i] : 0.0f);
            if (!value && i < 2 * half) {
                const int pair = i < half ? i + half : i - half, turn = i < half ? i : i - half;
                const float other = from[pair] + (add != nullptr ? add[pair] : 0.0f);
                const float c = cosine[t * half + turn], s = sine[t * half + turn];
                mine = i < half ? mine * c - other * s : mine * c + other * s;
            }
            to[i] = query ? mine * scale : mine;
        }
    }
}
