// Between the QKV projection and attention: norms of q's and k's heads, RoPE by table, K and V into their cache slots.
//
// RoPE turns the first E columns of a head (rotary_dim, at most D): column i pairs with i + E/2. table [P, E] holds, per
// position, the cosines of the E/2 angles and then their sines. A thread owns pairs of N neighbouring columns, so that
// no value is passed between threads: pair p is columns pN and E/2 + pN where it is turned, two neighbouring vectors of
// the rest of the head where it is not. N divides E/2, and 2N divides D - E.
//
// Caches are [N, K, S, D]. A token whose slot is negative is a padded row: its K and V go nowhere.
#include "common.cuh"

struct Pair {
    i32 left, right;  // columns of a head
    bool is_turned;
};

template <int N> DEVICE Pair pair_of(i32 index, i32 rotary_dim) {
    const i32 half_dim = rotary_dim / 2, num_turned = half_dim / N;
    if (index < num_turned) return {index * N, half_dim + index * N, true};
    const i32 left = rotary_dim + (index - num_turned) * 2 * N;
    return {left, left + N, false};
}

// N floats of the table; 16-byte loads where there are that many.
template <int N> DEVICE void load_table(const float* p, float (&x)[N]) {
    if constexpr (N == 1) {
        x[0] = __ldg(p);
    } else {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            const float4 v = __ldg(reinterpret_cast<const float4*>(p + i));
            x[i] = v.x, x[i + 1] = v.y, x[i + 2] = v.z, x[i + 3] = v.w;
        }
    }
}

// row: the table's, of the token's position.
template <int N> DEVICE void turn(float (&left)[N], float (&right)[N], const float* row, i32 column, i32 half_dim) {
    float cosine[N], sine[N];
    load_table(row + column, cosine);
    load_table(row + half_dim + column, sine);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const float l = left[i], r = right[i];
        left[i] = l * cosine[i] - r * sine[i];
        right[i] = r * cosine[i] + l * sine[i];
    }
}

// Where a token's head begins in a cache.
DEVICE i64 cache_offset(i32 slot, i32 head, i32 num_kv_heads, i32 block_size, i32 head_dim) {
    const i32 block = slot / block_size, place = slot % block_size;
    return ((i64(block) * num_kv_heads + head) * block_size + place) * head_dim;
}

// x, out [T, C], C = heads * D. Grid (T, parts of a row), a pair per thread.
template <typename T, int N>
__global__ void __launch_bounds__(128)
rope(T* out, const T* x, const i32* positions, const float* table, i32 num_columns, i32 head_dim, i32 rotary_dim,
     i32 num_positions) {
    const i32 index = blockIdx.y * blockDim.x + threadIdx.x, pairs_per_head = head_dim / (2 * N);
    if (index >= num_columns / (2 * N)) return;
    const Pair pair = pair_of<N>(index % pairs_per_head, rotary_dim);
    const i64 start = i64(blockIdx.x) * num_columns + index / pairs_per_head * head_dim;
    float left[N], right[N];
    load(x + start + pair.left, left);
    load(x + start + pair.right, right);
    if (pair.is_turned) {
        const i64 position = clamp(positions[blockIdx.x], 0, num_positions - 1);
        turn(left, right, table + position * rotary_dim, pair.left, rotary_dim / 2);
    }
    store(out + start + pair.left, left);
    store(out + start + pair.right, right);
}

// k, v [T, K*D]. Grid (T, parts of a row); each thread moves N elements of k and of v.
template <typename T, int N>
__global__ void __launch_bounds__(128)
write_kv(T* k_cache, T* v_cache, const T* k, const T* v, const i32* slots, i32 num_kv_heads, i32 head_dim,
         i32 block_size) {
    const i32 column = (blockIdx.y * blockDim.x + threadIdx.x) * N, num_columns = num_kv_heads * head_dim;
    const i32 slot = slots[blockIdx.x];
    if (column >= num_columns || slot < 0) return;
    const i64 from = i64(blockIdx.x) * num_columns + column;
    const i64 to = cache_offset(slot, column / head_dim, num_kv_heads, block_size, head_dim) + column % head_dim;
    Elements<T, N> e;
    e.load(k + from);
    e.store(k_cache + to);
    e.load(v + from);
    e.store(v_cache + to);
}

// qkv [T, (Q + 2K)*D] → q [T, Q*D] and the caches. q_norm, k_norm [D], or null for none.
// Grid (T, parts of the heads); LANES threads share a head, each with at most STEPS pairs.
template <typename T, int N, int LANES>
__global__ void __launch_bounds__(128)
qk_norm_rope_write_kv(T* q, T* k_cache, T* v_cache, const T* qkv, const i32* positions, const i32* slots,
                      const float* table, const T* q_norm, const T* k_norm, float eps, float offset, i32 num_q_heads,
                      i32 num_kv_heads, i32 head_dim, i32 rotary_dim, i32 num_positions, i32 block_size) {
    constexpr int STEPS = N == 1 ? 4 : 1;
    const i32 num_heads = num_q_heads + 2 * num_kv_heads, num_pairs = head_dim / (2 * N);
    const i32 lane = threadIdx.x % LANES, head = blockIdx.y * (blockDim.x / LANES) + threadIdx.x / LANES;
    const bool is_q = head < num_q_heads, is_v = head >= num_q_heads + num_kv_heads, is_past = head >= num_heads;
    const i32 slot = slots[blockIdx.x];
    const T* const x = qkv + (i64(blockIdx.x) * num_heads + (is_past ? 0 : head)) * head_dim;

    const bool has_norm = q_norm != nullptr && !is_v;
    const T* const weight = is_q ? q_norm : k_norm;

    Elements<T, N> left_weight[STEPS], right_weight[STEPS];  // loaded early: the reduction's latency hides theirs
    float left[STEPS][N], right[STEPS][N];
    float squares = 0.0f;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        const i32 index = s * LANES + lane;
        if (index >= num_pairs) break;
        const Pair pair = pair_of<N>(index, rotary_dim);
        load(x + pair.left, left[s]);
        load(x + pair.right, right[s]);
        if (has_norm) {
            left_weight[s].load_constant(weight + pair.left);
            right_weight[s].load_constant(weight + pair.right);
        }
#pragma unroll
        for (int i = 0; i < N; ++i) squares += left[s][i] * left[s][i] + right[s][i] * right[s][i];
    }
    const float scale = q_norm ? rsqrtf(lanes_sum<LANES>(squares) / float(head_dim) + eps) : 1.0f;
    if (is_past || (!is_q && slot < 0)) return;

    const i64 position = clamp(positions[blockIdx.x], 0, num_positions - 1);
    T* out = q + (i64(blockIdx.x) * num_q_heads + head) * head_dim;
    if (!is_q) {
        const i32 kv_head = (head - num_q_heads) % num_kv_heads;
        out = (is_v ? v_cache : k_cache) + cache_offset(slot, kv_head, num_kv_heads, block_size, head_dim);
    }
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        const i32 index = s * LANES + lane;
        if (index >= num_pairs) break;
        const Pair pair = pair_of<N>(index, rotary_dim);
        if (has_norm) {
            float w[N];
            left_weight[s].to_floats(w);
#pragma unroll
            for (int i = 0; i < N; ++i) left[s][i] *= scale * (w[i] + offset);
            right_weight[s].to_floats(w);
#pragma unroll
            for (int i = 0; i < N; ++i) right[s][i] *= scale * (w[i] + offset);
        }
        if (!is_v && pair.is_turned) turn(left[s], right[s], table + position * rotary_dim, pair.left, rotary_dim / 2);
        store(out + pair.left, left[s]);
        store(out + pair.right, right[s]);
    }
}
