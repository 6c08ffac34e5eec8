// Paged attention: flash attention over the KV cache by the block table, for decodes, verify steps and prompt chunks.
//
// One source, two tile shapes. Narrow (ROWS 16) is for few rows per request: the warps of a block share the rows, each
// has 16 keys of a tile to itself, and the main loop needs no block barrier. Wide (ROWS 64) is for prompt chunks: four
// warps have 16 rows each and share the keys.
//
// The grid is fixed. plan_attention lists a step's row tiles in device memory once, for all layers of one window; the
// blocks of paged_attention then share the key tiles of all units out evenly, in one order (row tile, KV head, key
// tile). So one CUDA graph serves every mix of requests that has the same padded number of tokens. A unit that is cut
// between blocks is summed in float parts; the block that comes last at the unit's counter joins the parts in the order
// of the keys. No block waits for another, and the result depends on the grid alone, not on which block was last.
//
// What no row may see is never read into a result, whatever the cache holds there: keys outside the row tile's
// [key_begin, key_end) are zeros in shared memory, V as well as K. Rows of requests of length 0, and those behind the
// last request's, become zeros.
#include "attention.cuh"

// ---- one unit

struct Unit {
    RowTile tile;
    i32 kv_head;
    i32 begin, end;  // its key tiles among those of all units
};

// The unit of a key tile at or behind those of row tile `index`, which moves there.
DEVICE Unit unit_at(const RowTile* tiles, i32& index, i32 at, i32 num_kv_heads) {
    while (at >= tiles[index + 1].start * num_kv_heads) ++index;
    const RowTile tile = tiles[index];
    const i32 num_key_tiles = tiles[index + 1].start - tile.start, place = at - tile.start * num_kv_heads;
    const i32 kv_head = place / num_key_tiles, begin = at - place % num_key_tiles;
    return {tile, kv_head, begin, begin + num_key_tiles};
}

struct Cache {
    i32 num_kv_heads, group, block_size, max_blocks;
};

// Where a row of a unit is in q and out, [T, Q, D].
DEVICE i64 row_offset(const Unit& unit, i32 row, const Cache& cache, i32 head_dim) {
    const i32 packed = unit.tile.row + row, token = unit.tile.token + packed / cache.group;
    const i32 head = unit.kv_head * cache.group + packed % cache.group;
    return (i64(token) * cache.num_kv_heads * cache.group + head) * head_dim;
}

// What a thread knows of the part of a unit that its block computes. Fragments are those of mma: with g = lane / 4 and
// t = lane % 4, a thread has of the warp's 16 rows g and g + 8, and of 8 columns 2t and 2t + 1.
template <typename T, int D, int ROWS, int TILE, int STAGES> struct Part {
    static constexpr bool IS_NARROW = ROWS == 16;
    static constexpr i32 WARPS = IS_NARROW ? TILE / 16 : 4;
    static constexpr i32 KEYS = IS_NARROW ? 16 : TILE;  // of a tile: what a warp multiplies
    static constexpr i32 COPIED = TILE / WARPS;         // of a tile: what a warp copies, always within one block
    static constexpr i32 STRIDE = D + 8;  // elements of a row in shared memory: ldmatrix without bank conflicts
    static constexpr i32 CHUNKS = D / 8;
    static constexpr bool KEEPS_QUERY = IS_ASYNC || D <= 128;  // in registers, of which there are 255
    static constexpr int COPY_UNROLL = IS_ASYNC && D <= 128 ? 32 : 4;
    static_assert(D % 16 == 0 && COPIED * CHUNKS % 32 == 0 && COPIED <= 16 && STAGES >= 2, "unsupported tile shape");

    const Unit unit;
    const i32 warp, lane;
    u32 query[D / 16][4];
    float values[D / 8][4];  // weighted sums, relative to top
    float top[2], sum[2];    // sum: of this thread's columns

    DEVICE explicit Part(const Unit& u) : unit(u), warp(threadIdx.x / 32), lane(threadIdx.x % 32) {
#pragma unroll
        for (i32 d = 0; d < D / 8; ++d)
#pragma unroll
            for (i32 i = 0; i < 4; ++i) values[d][i] = 0.0f;
        top[0] = top[1] = minus_infinity();
        sum[0] = sum[1] = 0.0f;
    }

    DEVICE i32 first_row() const { return IS_NARROW ? 0 : warp * 16; }

    DEVICE void load_query(const T* q, const Cache& cache) {
#pragma unroll
        for (i32 h = 0; h < 2; ++h) {
            const i32 row = first_row() + lane / 4 + 8 * h;
            const u32* const words = reinterpret_cast<const u32*>(q + row_offset(unit, row, cache, D));
#pragma unroll
            for (i32 s = 0; s < D / 16; ++s)
#pragma unroll
                for (i32 c = 0; c < 2; ++c)
                    query[s][h + 2 * c] = row < unit.tile.num_rows ? words[8 * s + 4 * c + lane % 4] : 0;
        }
    }

    // The block of the keys that this warp copies, first of them `key`.
    DEVICE i32 block_of(const i32* table, i32 key, i32 block_bits) const {
        const bool is_seen = key + COPIED > unit.tile.key_begin && key < unit.tile.key_end;
        return is_seen ? __ldg(table + (key >> block_bits)) : NULL_BLOCK;
    }

    // Starts this warp's share of the copies of a key tile; keys that no row sees become zeros.
    DEVICE void copy(T* buffer, const T* k_cache, const T* v_cache, i64 offset, i32 key) const {
        T* const shared = buffer + warp * COPIED * STRIDE;
#pragma unroll COPY_UNROLL
        for (i32 i = 0; i < COPIED * CHUNKS / 32; ++i) {
            const i32 chunk = i * 32 + lane, row = chunk / CHUNKS, to = row * STRIDE + chunk % CHUNKS * 8;
            const bool is_seen = key + row >= unit.tile.key_begin && key + row < unit.tile.key_end;
            copy16(shared + to, k_cache + offset + chunk * 8, is_seen);
            copy16(shared + TILE * STRIDE + to, v_cache + offset + chunk * 8, is_seen);
        }
    }

    DEVICE void score(float (&logits)[KEYS / 8][4], const T* keys) const {
#pragma unroll
        for (i32 n = 0; n < KEYS / 8; ++n)
#pragma unroll
            for (i32 i = 0; i < 4; ++i) logits[n][i] = 0.0f;
#pragma unroll
        for (i32 s = 0; s < D / 16; ++s)
#pragma unroll
            for (i32 n = 0; n < KEYS / 16; ++n) {
                u32 r[4];
                ldmatrix_x4(r, keys + (n * 16 + lane / 16 * 8 + lane % 8) * STRIDE + s * 16 + lane / 8 % 2 * 8);
                const u32 low[2] = {r[0], r[1]}, high[2] = {r[2], r[3]};
                multiply<T>(logits[2 * n], query[s], low);
                multiply<T>(logits[2 * n + 1], query[s], high);
            }
    }

    // To base 2, capped; first: the warp's first key.
    DEVICE void scale_and_mask(float (&logits)[KEYS / 8][4], i32 first, float scale, float softcap, i32 window,
                               i32 group) const {
        if (softcap > 0.0f) {
            const float inverse = scale / softcap;
#pragma unroll
            for (i32 n = 0; n < KEYS / 8; ++n)
#pragma unroll
                for (i32 i = 0; i < 4; ++i) logits[n][i] = softcap * LOG2_E * tanh_approx(logits[n][i] * inverse);
        } else {
#pragma unroll
            for (i32 n = 0; n < KEYS / 8; ++n)
#pragma unroll
                for (i32 i = 0; i < 4; ++i) logits[n][i] *= scale * LOG2_E;
        }
        const i32 lowest = unit.tile.position + (unit.tile.row + first_row()) / group;
        if (first + KEYS - 1 <= lowest && first > unit.tile.key_end - 1 - window) return;  // all rows see all keys
#pragma unroll
        for (i32 h = 0; h < 2; ++h) {
            const i32 position = unit.tile.position + (unit.tile.row + first_row() + lane / 4 + 8 * h) / group;
#pragma unroll
            for (i32 n = 0; n < KEYS / 8; ++n)
#pragma unroll
                for (i32 i = 0; i < 2; ++i) {
                    const i32 key = first + n * 8 + lane % 4 * 2 + i;
                    if (key > position || key <= position - window) logits[n][2 * h + i] = minus_infinity();
                }
        }
    }

    // Logits → weights relative to the new top; what was summed before is brought to it.
    DEVICE void update_softmax(float (&logits)[KEYS / 8][4]) {
#pragma unroll
        for (i32 h = 0; h < 2; ++h) {
            float new_top = top[h];
#pragma unroll
            for (i32 n = 0; n < KEYS / 8; ++n) new_top = fmaxf(new_top, fmaxf(logits[n][2 * h], logits[n][2 * h + 1]));
            new_top = fmaxf(new_top, __shfl_xor_sync(FULL_WARP, new_top, 1));
            new_top = fmaxf(new_top, __shfl_xor_sync(FULL_WARP, new_top, 2));
            const float kept = exp2_below(top[h], new_top);
            top[h] = new_top;
            sum[h] *= kept;
#pragma unroll
            for (i32 d = 0; d < D / 8; ++d) {
                values[d][2 * h] *= kept;
                values[d][2 * h + 1] *= kept;
            }
#pragma unroll
            for (i32 n = 0; n < KEYS / 8; ++n)
#pragma unroll
                for (i32 i = 2 * h; i < 2 * h + 2; ++i) {
                    logits[n][i] = exp2_below(logits[n][i], new_top);
                    sum[h] += logits[n][i];
                }
        }
    }

    // The weights' fragments as sums are the fragments of a left factor.
    DEVICE void add_values(const float (&weights)[KEYS / 8][4], const T* v) {
#pragma unroll
        for (i32 s = 0; s < KEYS / 16; ++s) {
            u32 left[4];
#pragma unroll
            for (i32 i = 0; i < 4; ++i) {
                const float(&pair)[4] = weights[2 * s + i / 2];
                left[i] = pack_pair(pair[i % 2 * 2], pair[i % 2 * 2 + 1], T{});
            }
#pragma unroll
            for (i32 d = 0; d < D / 16; ++d) {
                u32 r[4];
                ldmatrix_x4_trans(r, v + (s * 16 + lane % 16) * STRIDE + d * 16 + lane / 16 * 8);
                const u32 low[2] = {r[0], r[1]}, high[2] = {r[2], r[3]};
                multiply<T>(values[2 * d], left, low);
                multiply<T>(values[2 * d + 1], left, high);
            }
        }
    }

    // Key tiles [begin, end) of the unit, STAGES - 1 of them on their way. buffers: STAGES times K and V.
    DEVICE void run(T* buffers, const T* q, const T* k_cache, const T* v_cache, const i32* block_tables, i32 begin,
                    i32 end, float scale, float softcap, i32 window, const Cache& cache) {
        constexpr i32 BUFFER = 2 * TILE * STRIDE;
        if (unit.tile.key_end == 0) return;
        const i32* const table = block_tables + i64(unit.tile.request) * cache.max_blocks;
        const i32 block_bits = 31 - __clz(cache.block_size);
        const i32 tile_key = unit.tile.key_begin / TILE * TILE, own_key = tile_key + warp * COPIED;
        i32 block = block_of(table, own_key + begin * TILE, block_bits);
        auto fetch = [&](i32 t, i32 buffer) {
            if (t < end) {
                const i32 key = own_key + t * TILE;
                const i64 row = (i64(block) * cache.num_kv_heads + unit.kv_head) * cache.block_size;
                copy(buffers + buffer * BUFFER, k_cache, v_cache, (row + (key & (cache.block_size - 1))) * D, key);
                if (t + 1 < end) block = block_of(table, key + TILE, block_bits);  // a tile early: its latency hides
            }
            commit_copies();
        };
        if constexpr (KEEPS_QUERY) load_query(q, cache);
#pragma unroll
        for (i32 s = 0; s < STAGES - 1; ++s) fetch(begin + s, s);
        i32 buffer = 0, free_buffer = STAGES - 1;
        for (i32 t = begin; t < end; ++t) {
            wait_for_copies<STAGES - 2>();
            if constexpr (IS_NARROW) __syncwarp();  // the warp's own copies are there, and its last buffer is free
            else __syncthreads();
            fetch(t + STAGES - 1, free_buffer);
            if (IS_NARROW || first_row() < unit.tile.num_rows) {
                const i32 own = IS_NARROW ? warp * 16 : 0;
                const T* const keys = buffers + buffer * BUFFER + own * STRIDE;
                float logits[KEYS / 8][4];
                if constexpr (!KEEPS_QUERY) load_query(q, cache);
                score(logits, keys);
                scale_and_mask(logits, tile_key + t * TILE + own, scale, softcap, window, cache.group);
                update_softmax(logits);
                add_values(logits, keys + TILE * STRIDE);
            }
            free_buffer = buffer;
            buffer = buffer + 1 == STAGES ? 0 : buffer + 1;
        }
        wait_for_copies<0>();
    }

    // values and softmax to shared memory, [WARPS * 16, D + 8] and [WARPS * 16].
    DEVICE void stage(float* rows, Softmax* states) {
#pragma unroll
        for (i32 h = 0; h < 2; ++h) {
            sum[h] += __shfl_xor_sync(FULL_WARP, sum[h], 1);
            sum[h] += __shfl_xor_sync(FULL_WARP, sum[h], 2);
            const i32 row = warp * 16 + lane / 4 + 8 * h;
            if (lane % 4 == 0) states[row] = {top[h], sum[h]};
#pragma unroll
            for (i32 d = 0; d < D / 8; ++d)
                *reinterpret_cast<float2*>(rows + row * STRIDE + d * 8 + lane % 4 * 2) =
                    make_float2(values[d][2 * h], values[d][2 * h + 1]);
        }
    }
};

// ---- results

// Parts of units that are cut, in global memory: two slots per block, for the unit that it begins in the middle of and
// for the one that it begins and does not finish.
template <int D, int ROWS> struct Slots {
    float* values;    // [2 * blocks, ROWS, D]
    float2* softmax;  // [2 * blocks, ROWS]

    DEVICE explicit Slots(float* parts)
        : values(parts), softmax(reinterpret_cast<float2*>(parts + i64(2) * gridDim.x * ROWS * D)) {}

    DEVICE i64 at(i32 slot, i32 row) const { return i64(slot) * ROWS + row; }
    DEVICE void store(i32 slot, i32 row, i32 column, float4 x, Softmax s) const {
        *reinterpret_cast<float4*>(values + at(slot, row) * D + column) = x;
        if (column == 0) softmax[at(slot, row)] = make_float2(s.top, s.sum);
    }
    // What other blocks stored in this launch: past the L1 cache.
    DEVICE float4 load(i32 slot, i32 row, i32 column) const {
        return __ldcg(reinterpret_cast<const float4*>(values + at(slot, row) * D + column));
    }
    DEVICE Softmax state(i32 slot, i32 row) const {
        const float2 s = __ldcg(softmax + at(slot, row));
        return {s.x, s.y};
    }
};

// Whether this block is the last of num_parts at a counter, which is 0 again then. What the others wrote before they
// came is visible to the last.
DEVICE bool arrives_last(u32* counter, i32 num_parts) {
    __shared__ bool is_last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicInc(counter, num_parts - 1) == u32(num_parts - 1);
    __syncthreads();
    if (is_last) __threadfence();
    return is_last;
}

// From what the warps staged to out, or to a slot. The rows of a wide tile are one warp's each, those of a narrow one
// every warp's.
template <typename P, typename T, int D, int ROWS>
DEVICE void join_warps(T* out, const Slots<D, ROWS>& slots, i32 slot, const float* rows, const Softmax* states,
                       const Unit& unit, const Cache& cache) {
    constexpr i32 NUM_PARTS = P::IS_NARROW ? P::WARPS : 1, VECTORS = D / 4;
    for (i32 i = threadIdx.x; i < unit.tile.num_rows * VECTORS; i += P::WARPS * 32) {
        const i32 row = i / VECTORS, column = i % VECTORS * 4;
        auto staged = [=](i32 p) { return p * 16 + row; };
        float4 x;
        const Softmax s = join_parts(
            NUM_PARTS, [=](i32 p) { return states[staged(p)]; },
            [=](i32 p) { return *reinterpret_cast<const float4*>(rows + staged(p) * P::STRIDE + column); }, x);
        if (slot < 0) store_divided(out + row_offset(unit, row, cache, D) + column, x, s.sum);
        else slots.store(slot, row, column, x, s);
    }
}

// From the slots of neighbouring blocks to out.
template <typename P, typename T, int D, int ROWS>
DEVICE void join_blocks(T* out, const Slots<D, ROWS>& slots, i32 first_block, i32 num_parts, const Unit& unit,
                        const Cache& cache) {
    constexpr i32 VECTORS = D / 4;
    auto slot = [=](i32 p) { return 2 * (first_block + p) + (p == 0); };
    for (i32 i = threadIdx.x; i < unit.tile.num_rows * VECTORS; i += P::WARPS * 32) {
        const i32 row = i / VECTORS, column = i % VECTORS * 4;
        float4 x;
        const Softmax s = join_parts(
            num_parts, [=](i32 p) { return slots.state(slot(p), row); },
            [=](i32 p) { return slots.load(slot(p), row, column); }, x);
        store_divided(out + row_offset(unit, row, cache, D) + column, x, s.sum);
    }
}

// ---- the kernel

// q, out [T, Q*D]; k_cache, v_cache [N, K, S, D], S a power of two and at least 16; block_tables [B, M]; plan: the list
// of these tiles. scale: of the logits; softcap 0 and window 2^30 for none. parts: Slots; counters [blocks], zero before
// and after. A grid of any size, of WARPS * 32 threads.
// Dynamic shared memory: the larger of STAGES * 2 * TILE * (D + 8) elements and WARPS * 16 * (D + 8) floats.
template <typename T, int D, int ROWS, int TILE, int STAGES>
__global__ void __launch_bounds__(128, 2)
paged_attention(T* out, float* parts, u32* counters, const T* q, const T* k_cache, const T* v_cache,
                const i32* block_tables, const i32* plan, float scale, float softcap, i32 window, i32 num_kv_heads,
                i32 group, i32 block_size, i32 max_blocks) {
    using P = Part<T, D, ROWS, TILE, STAGES>;
    extern __shared__ __align__(16) u8 memory[];
    __shared__ Softmax states[P::WARPS * 16];
    float* const rows = reinterpret_cast<float*>(memory);
    const Slots<D, ROWS> slots(parts);
    const Cache cache = {num_kv_heads, group, block_size, max_blocks};

    const PlanHeader* const header = reinterpret_cast<const PlanHeader*>(plan);
    const RowTile* const tiles = reinterpret_cast<const RowTile*>(header + 1);
    const Shares shares(header->num_key_tiles * num_kv_heads, gridDim.x);
    const i32 block = blockIdx.x;
    if (block >= shares.count) return;
    const i32 end = shares.begin(block + 1);
    i32 index = find_row_tile(tiles, header->num_row_tiles, shares.begin(block) / num_kv_heads);

    for (i32 at = shares.begin(block), stop; at < end; at = stop) {
        const Unit unit = unit_at(tiles, index, at, num_kv_heads);
        stop = min(unit.end, end);
        P part(unit);
        part.run(reinterpret_cast<T*>(memory), q, k_cache, v_cache, block_tables, at - unit.begin, stop - unit.begin,
                 scale, softcap, window, cache);
        __syncthreads();  // all warps are done with the buffers
        part.stage(rows, states);
        __syncthreads();
        const bool is_whole = at == unit.begin && stop == unit.end;
        const i32 slot = is_whole ? -1 : 2 * block + (at == unit.begin);
        join_warps<P>(out, slots, slot, rows, states, unit, cache);
        if (!is_whole) {
            const i32 first_block = shares.owner(unit.begin);
            const i32 num_parts = shares.owner(unit.end - 1) - first_block + 1;
            if (arrives_last(counters + first_block, num_parts))
                join_blocks<P>(out, slots, first_block, num_parts, unit, cache);
        }
        __syncthreads();  // before the next unit's copies
    }
}
