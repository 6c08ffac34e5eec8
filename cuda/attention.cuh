// What paged attention is made of: the lists of its work, copies and products on every architecture, softmax in base 2.
//
// Packed rows: the query heads of one KV head are rows of one matrix; packed row p of a request is its token p / group
// and query head p % group. A row tile is up to ROWS packed rows of a request, a key tile TILE keys of a KV head, and a
// unit one row tile with one KV head: all key tiles that any of its rows sees.

#pragma once
#include "tensor_core.cuh"

constexpr float LOG2_E = 1.4426950408889634f;
DEVICE float minus_infinity() { return __uint_as_float(0xff800000u); }

// ---- the plan of a step: for each tile shape a header, row tiles in order, and one more whose start is the sum

struct PlanHeader {
    i32 num_row_tiles, num_key_tiles, unused[6];  // key tiles of one KV head
};

struct __align__(16) RowTile {
    i32 start;      // key tiles of all row tiles before it
    i32 request;    // row of the block table
    i32 row;        // its first packed row
    i32 num_rows;   // 1 … ROWS
    i32 token;      // the request's first in q
    i32 position;   // of that token; negative in a request of length 0
    i32 key_begin;  // keys that some row sees: key_begin ≤ key < key_end
    i32 key_end;
};
static_assert(sizeof(PlanHeader) == 32 && sizeof(RowTile) == 32, "the launcher allocates 8 words for each");

// ---- sharing out

constexpr i32 MIN_SHARE = 2;  // key tiles: what is less is not worth a part of its own

// Key tiles of all units, cut into ranges whose sizes differ by one at most, the larger ones first.
struct Shares {
    i32 count, size, num_larger;

    DEVICE Shares(i32 total, i32 num_blocks) {
        count = max(1, min(num_blocks, total / MIN_SHARE));
        size = total / count;
        num_larger = total % count;
    }
    DEVICE i32 begin(i32 block) const { return block * size + min(block, num_larger); }
    DEVICE i32 owner(i32 tile) const {
        const i32 in_larger = num_larger * (size + 1);
        return tile < in_larger ? tile / (size + 1) : num_larger + (tile - in_larger) / size;
    }
};

// The row tile that holds a key tile of one KV head: 32 probes at a time.
DEVICE i32 find_row_tile(const RowTile* tiles, i32 num_row_tiles, i32 key_tile) {
    i32 low = 0, high = num_row_tiles;
    while (high - low > 1) {
        const i32 step = (high - low + 31) / 32, probe = low + i32(threadIdx.x % 32) * step;
        const bool is_before = probe < high && tiles[probe].start <= key_tile;
        low += (__popc(__ballot_sync(FULL_WARP, is_before)) - 1) * step;
        high = min(high, low + step);
    }
    return low;
}

// ---- sm_75 has neither asynchronous copies nor products as deep; EMULATE_SM_75 is for the emulator's tests

#if defined(EMULATE_SM_75) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800)

constexpr bool IS_ASYNC = false;

DEVICE void copy16(void* shared, const void* global, bool is_valid) {
    uint4 words = make_uint4(0, 0, 0, 0);
    if (is_valid) words = *static_cast<const uint4*>(global);
    *static_cast<uint4*>(shared) = words;
}
DEVICE void commit_copies() {}
template <int PENDING> DEVICE void wait_for_copies() {}

DEVICE void mma_1688(float (&d)[4], u32 a0, u32 a1, u32 b) {
#ifdef CUDA_HOST
    const u32 a[4] = {a0, a1, 0, 0}, low[2] = {b, 0};
    mma_16816<half>(d, a, low);
#else
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a0), "r"(a1), "r"(b));
#endif
}
template <typename T> DEVICE void multiply(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    mma_1688(d, a[0], a[1], b[0]);
    mma_1688(d, a[2], a[3], b[1]);
}

#else

constexpr bool IS_ASYNC = true;

DEVICE void copy16(void* shared, const void* global, bool is_valid) { cp_async16(shared, global, is_valid); }
DEVICE void commit_copies() { cp_async_commit(); }
template <int PENDING> DEVICE void wait_for_copies() { cp_async_wait<PENDING>(); }
template <typename T> DEVICE void multiply(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    mma_16816<T>(d, a, b);
}

#endif

// ---- scalars

#ifdef CUDA_HOST
DEVICE float exp2_approx(float x) { return std::exp2(x); }
#else
DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif

// 2^(x - top), and 0 for x = -∞ even where nothing was seen and top is -∞ too.
DEVICE float exp2_below(float x, float top) { return exp2_approx(x - (top == minus_infinity() ? 0.0f : top)); }

DEVICE float tanh_approx(float x) { return 1.0f - __fdividef(2.0f, 1.0f + exp2_approx(2.0f * LOG2_E * x)); }

DEVICE u32 pack_pair(float low, float high, half) { return pack_half2(low, high); }
DEVICE u32 pack_pair(float low, float high, bfloat16) { return pack_bfloat162(low, high); }

// ---- softmax of parts: the sum of parts whose weights are relative to maxima of their own

struct Softmax {
    float top, sum;  // the greatest logit, in base 2, and the sum of 2^(logit - top)
};

// Adds part after part, so that the result depends on their order alone. state(p) gives a Softmax, values(p) the
// weighted sums of four columns, relative to its top.
template <typename State, typename Values>
DEVICE Softmax join_parts(i32 num_parts, State state, Values values, float4& joined) {
    Softmax all = {minus_infinity(), 0.0f};
    joined = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4  // several loads in flight
    for (i32 p = 0; p < num_parts; ++p) all.top = fmaxf(all.top, state(p).top);
#pragma unroll 4
    for (i32 p = 0; p < num_parts; ++p) {
        const Softmax part = state(p);
        const float4 x = values(p);
        const float weight = exp2_below(part.top, all.top);
        all.sum += weight * part.sum;
        joined.x += weight * x.x, joined.y += weight * x.y, joined.z += weight * x.z, joined.w += weight * x.w;
    }
    return all;
}

template <typename T> DEVICE void store_divided(T* out, float4 x, float sum) {
    const float inverse = sum > 0.0f ? __fdividef(1.0f, sum) : 0.0f;
    const u32 low = pack_pair(x.x * inverse, x.y * inverse, T{}), high = pack_pair(x.z * inverse, x.w * inverse, T{});
    *reinterpret_cast<uint2*>(out) = make_uint2(low, high);
}
