// Mixture of experts: routing, grouping of rows by expert, grouped products, the weighted sum.
//
// A pair is a token's choice: pair p is choice p % A of token p / A. Rows that choose no expert (id NO_EXPERT, which
// moe_route gives to padded rows) are in no group, read no weights, and become zeros. Grids do not depend on what was
// chosen: group_by_expert lists row tiles in device memory, as many as there can be, and those left over are empty.
// Everything is computed in one order, whoever runs first: results are the same in every run.
#include "gemm.cuh"

constexpr i32 NO_EXPERT = -1;

// ---- routing

// A number that grows with x (NaN above or below all), and of equal x with falling expert; never 0.
DEVICE u64 rank_of(float x, i32 expert) {
    const u32 bits = __float_as_uint(x + 0.0f);  // -0 equals 0
    const u32 ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return u64(ordered) << 32 | (0xffffffffu - u32(expert));
}
DEVICE i32 expert_of(u64 rank) { return i32(0xffffffffu - u32(rank)); }
DEVICE float logit_of(u64 rank) {
    const u32 ordered = u32(rank >> 32);
    return __uint_as_float(ordered & 0x80000000u ? ordered & 0x7fffffffu : ~ordered);
}
DEVICE u64 warp_max(u64 v) {
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) {
        const u64 other = __shfl_xor_sync(FULL_WARP, v, offset);
        if (other > v) v = other;
    }
    return v;
}

// logits [T, E] → weights, ids [T, top_k]: softmax over all experts, the top_k largest in falling order, of equal ones
// the lowest id first, rescaled to sum 1 if normalize. E at most 32 * PER_LANE, top_k at most 32 and E. slots [T] or
// null: rows with NO_SLOT choose nothing. A warp per row.
template <typename T, int PER_LANE>
__global__ void __launch_bounds__(128)
moe_route(float* weights, i32* ids, const T* logits, const i32* slots, bool normalize, i32 num_rows, i32 num_experts,
          i32 top_k) {
    const i32 row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= num_rows) return;
    const i64 place = i64(row) * top_k + lane;
    if (slots != nullptr && slots[row] == NO_SLOT) {
        if (lane < top_k) weights[place] = 0.0f, ids[place] = NO_EXPERT;
        return;
    }
    u64 ranks[PER_LANE], top = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        const i32 expert = i * 32 + lane;
        ranks[i] = expert < num_experts ? rank_of(to_float(logits[i64(row) * num_experts + expert]), expert) : 0;
        if (ranks[i] > top) top = ranks[i];
    }
    top = warp_max(top);
    const float greatest = logit_of(top);
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i)
        if (ranks[i]) total += __expf(logit_of(ranks[i]) - greatest);
    total = lanes_sum<32>(total);

    u64 chosen = 0;  // the lane's choice
    for (i32 a = 0; a < top_k; ++a) {
        if (a == lane) chosen = top;
        u64 next = 0;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i)
            if (ranks[i] < top && ranks[i] > next) next = ranks[i];
        top = warp_max(next);
    }
    const float weight = lane < top_k ? __expf(logit_of(chosen) - greatest) : 0.0f;
    const float chosen_total = lanes_sum<32>(weight);
    if (lane < top_k) {
        weights[place] = weight / (normalize ? chosen_total : total);
        ids[place] = expert_of(chosen);
    }
}

// ---- grouping

struct __align__(16) ExpertTile {
    i32 expert;
    i32 first;     // place of its first row among the grouped pairs
    i32 num_rows;  // 0: an empty tile
    i32 unused;
};
static_assert(sizeof(ExpertTile) == 16, "the launcher allocates 4 words for each");

// The sum of v over the block's threads, in each of them; 256 threads.
DEVICE i32 block_sum(i32 v) {
    __shared__ i32 sums[8];
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) v += __shfl_xor_sync(FULL_WARP, v, offset);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = v;
    __syncthreads();
    i32 all = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) all += sums[i];
    __syncthreads();  // before the next call writes
    return all;
}

// ids [num_pairs] → pairs: the pairs of expert 0 in their order, those of expert 1, …; tiles [num_tiles]: their tiles
// of at most tile_rows. Block e lists expert e, and every block counts for itself what all experts have, so that none
// waits for another; the last empties the tiles left over. Ids outside 0 … E - 1 are in no group. Grid E, 256 threads.
// Dynamic shared memory: E words.
__global__ void __launch_bounds__(256)
group_by_expert(i32* tiles, i32* pairs, const i32* ids, i32 num_pairs, i32 num_experts, i32 tile_rows, i32 num_tiles) {
    extern __shared__ __align__(16) u8 memory[];
    i32* const counts = reinterpret_cast<i32*>(memory);  // pairs of each expert
    __shared__ i32 warp_counts[8];
    const i32 expert = blockIdx.x, thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    for (i32 e = thread; e < num_experts; e += 256) counts[e] = 0;
    __syncthreads();
    const i32 share = (num_pairs + 255) / 256 * 32;  // pairs of a warp, a whole number of rounds
    const i32 begin = warp * share, end = min(begin + share, num_pairs);
    i32 own = 0;  // this expert's pairs in the warp's share
    for (i32 p = begin + lane; p - lane < end; p += 32) {
        const i32 id = p < end ? ids[p] : NO_EXPERT;
        if (id >= 0 && id < num_experts) atomicAdd(counts + id, 1);
        own += __popc(__ballot_sync(FULL_WARP, id == expert));
    }
    if (lane == 0) warp_counts[warp] = own;
    __syncthreads();

    i32 rows_before = 0, tiles_before = 0;
    for (i32 e = thread; e < expert; e += 256) {
        rows_before += counts[e];
        tiles_before += (counts[e] + tile_rows - 1) / tile_rows;
    }
    rows_before = block_sum(rows_before);
    tiles_before = block_sum(tiles_before);
    const i32 count = counts[expert], own_tiles = (count + tile_rows - 1) / tile_rows;
    const bool is_last = expert == num_experts - 1;
    for (i32 i = thread; i < (is_last ? num_tiles - tiles_before : own_tiles); i += 256) {
        const i32 row = min(i * tile_rows, count);
        const ExpertTile tile = {expert, rows_before + row, min(tile_rows, count - row), 0};
        reinterpret_cast<ExpertTile*>(tiles)[tiles_before + i] = tile;
    }
    for (i32 w = 0; w < warp; ++w) rows_before += warp_counts[w];
    for (i32 p = begin + lane; p - lane < end; p += 32) {
        const u32 same = __ballot_sync(FULL_WARP, p < end && ids[p] == expert);
        if (same >> lane & 1) pairs[rows_before + __popc(same & ((1u << lane) - 1))] = p;
        rows_before += __popc(same);
    }
}

// ---- grouped products
//
// Gated: x [T, depth] → out [pairs in groups, num_out], ACTIVATION(gate) * up. Plain: x [pairs in groups, depth] → out
// [num_pairs, num_out], each row at its pair's place. weight: an expert's [rows, depth] after the other's.
// Grid (columns, tiles).

template <typename T, typename OUT, typename ACTIVATION> struct Group {
    ExpertTile tile;
    const i32* pairs;    // of the tile's rows
    const T* weight;     // the expert's
    const T* x;
    OUT* out;
    i32 top_k, num_out, depth;

    DEVICE Group(OUT* results, const T* rows, const T* weights, const ExpertTile& t, const i32* all_pairs, i32 k,
                 i32 outs, i32 size)
        : tile(t), pairs(all_pairs + t.first), x(rows), out(results), top_k(k), num_out(outs), depth(size) {
        weight = weights + i64(tile.expert) * (IS_GATED<ACTIVATION> ? 2 : 1) * num_out * depth;
    }
    DEVICE const T* row(i32 r) const {
        return x + i64(IS_GATED<ACTIVATION> ? pairs[r] / top_k : tile.first + r) * depth;
    }
    DEVICE void store(i32 r, i32 column, float sum, float partner) const {
        if (r >= tile.num_rows) return;
        if constexpr (IS_GATED<ACTIVATION>) sum = ACTIVATION::apply(sum) * partner;
        round_to(out[i64(IS_GATED<ACTIVATION> ? tile.first + r : pairs[r]) * num_out + column], sum);
    }
};

template <typename T, typename OUT, int N, int ROWS, typename ACTIVATION>
__global__ void __launch_bounds__(128, 3)
few_rows_of_experts(OUT* out, const T* x, const T* weight, const i32* tiles, const i32* pairs, i32 top_k, i32 num_out,
                    i32 depth) {
    const ExpertTile tile = reinterpret_cast<const ExpertTile*>(tiles)[blockIdx.y];
    if (tile.num_rows == 0) return;
    const Group<T, OUT, ACTIVATION> group(out, x, weight, tile, pairs, top_k, num_out, depth);
    few_rows_part<T, N, ROWS, ACTIVATION>(
        [&](i32 r) { return group.row(min(r, tile.num_rows - 1)); }, group.weight, num_out, depth,
        [&](i32 r, i32 column, float sum, float partner) { group.store(r, column, sum, partner); });
}

template <typename T, typename OUT, int WEIGHTS, int TOKENS, typename ACTIVATION>
__global__ void __launch_bounds__(128)
rows_of_experts(OUT* out, const T* x, const T* weight, const i32* tiles, const i32* pairs, i32 top_k, i32 num_out,
                i32 depth) {
    extern __shared__ __align__(16) u8 memory[];
    const ExpertTile tile = reinterpret_cast<const ExpertTile*>(tiles)[blockIdx.y];
    if (tile.num_rows == 0) return;
    const Group<T, OUT, ACTIVATION> group(out, x, weight, tile, pairs, top_k, num_out, depth);
    tensor_part<T, WEIGHTS, TOKENS, ACTIVATION>(
        memory, [&](i32 r) { return group.row(r); }, tile.num_rows, group.weight, num_out, depth,
        [&](i32 r, i32 column, float sum, float partner) { group.store(r, column, sum, partner); });
}

// ---- the weighted sum

// out[t] = Σ weights[t, a] * results[t * A + a], in the order of a; choices of no expert are left out, and their
// results are not read. Grid (T, parts of a row); N elements a thread.
template <typename T, int N>
__global__ void __launch_bounds__(128)
moe_combine(T* out, const float* results, const float* weights, const i32* ids, i32 top_k, i32 num_experts,
            i32 num_columns) {
    constexpr int VECTORS = N == 1 ? 1 : 2, WIDTH = N / VECTORS;
    const i32 column = (blockIdx.y * blockDim.x + threadIdx.x) * N;
    if (column >= num_columns) return;
    float sum[N] = {};
    for (i32 a = 0; a < top_k; ++a) {
        const i64 pair = i64(blockIdx.x) * top_k + a;
        const float weight = weights[pair];
        if (ids[pair] < 0 || ids[pair] >= num_experts) continue;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            float x[WIDTH];
            load(results + pair * num_columns + column + v * WIDTH, x);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) sum[v * WIDTH + i] += weight * x[i];
        }
    }
    store(out + i64(blockIdx.x) * num_columns + column, sum);
}
