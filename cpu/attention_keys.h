// Where the rows, keys and values of a tile lie, and what a row keeps of the stretches it has seen: for the kernels that
// follow a plan, in float32 (attention.c) and in bfloat16 tiles (attention_bf16.c).

#ifndef LEAN_ATTENTION_KEYS_H
#define LEAN_ATTENTION_KEYS_H

#include "attention.h"

#define MAX_HEAD_DIM 256
#define MAX_BLOCK 64       // keys that are turned, or values that are widened, at once
#define BLOCK_FLOATS 8192  // of a block of keys, turned, or of values, widened

typedef struct {
    const float *q;       // [T, Q*D]
    const void *k_cache;  // [N, K, S, D]
    const void *v_cache;
    const int32_t *block_tables;  // [B, M]
    const int32_t *cu_seqlens_q;
    const int32_t *seq_lens;
    const int64_t *counts;
    const attention_item *items;
    const attention_item *merges;
    float *partials;  // per row: maximum, sum, weighted values [D]
    float *out;       // [T, Q*D]
    int64_t num_kv_heads, group, head_dim, block_size, max_blocks, window, cache_type;
    int64_t few_rows;  // of a request, that paged_attention_parts leaves to multiply-adds
    float scale, cap;  // weights are 2^(q·k · scale), or 2^(cap · tanh(q·k · scale)) unless cap is 0
} paged_attention_args;

void paged_attention(const void *args, int64_t task);

// ---- rows and keys of a tile

typedef struct {
    const paged_attention_args *a;
    const attention_item *item;
    int64_t start;        // position of the request's first query token
    int64_t first_token;  // its row in q
    int64_t low, high;    // keys that some row of the tile sees
    int64_t padded_dim;   // head_dim up to whole vectors
    int64_t block;        // keys per block
} tile;

INLINE tile tile_of(const paged_attention_args *a, const attention_item *item) {
    tile t = {.a = a, .item = item, .first_token = a->cu_seqlens_q[item->request]};
    t.start = a->seq_lens[item->request] - (a->cu_seqlens_q[item->request + 1] - t.first_token);
    t.low = first_key(t.start + item->first_row / a->group, a->window);
    t.high = t.start + (item->first_row + item->num_rows - 1) / a->group + 1;
    t.padded_dim = ceil_div(a->head_dim, WIDTH) * WIDTH;
    t.block = smaller(MAX_BLOCK, BLOCK_FLOATS / t.padded_dim / WIDTH * WIDTH);
    return t;
}

INLINE int64_t position_of(const tile *t, int64_t row) { return t->start + (t->item->first_row + row) / t->a->group; }

// Where a row of the tile lies in q and out.
INLINE int64_t offset_of(const tile *t, int64_t row) {
    const paged_attention_args *a = t->a;
    int64_t flat = t->item->first_row + row, token = flat / a->group, head = flat % a->group;
    int64_t all_heads = a->num_kv_heads * a->group;
    return ((t->first_token + token) * all_heads + t->item->head * a->group + head) * a->head_dim;
}

// The keys of a stretch in strips of WIDTH. at[i]: byte offset in a cache of strip i where its rows lie one behind the
// other and the tile may read all of them; else APART.
typedef struct {
    int64_t at[(STRETCH + MAX_BLOCK) / WIDTH];  // of the stretch, and of a block of the next one
} strips;

#define APART (-1)

INLINE int64_t row_bytes_of(const paged_attention_args *a) { return a->head_dim * kv_bytes(a->cache_type); }

// Byte offset of a key's row in a cache.
INLINE int64_t row_at(const tile *t, int64_t key) {
    const paged_attention_args *a = t->a;
    int64_t block = a->block_tables[t->item->request * a->max_blocks + key / a->block_size];
    return ((block * a->num_kv_heads + t->item->head) * a->block_size + key % a->block_size) * row_bytes_of(a);
}

INLINE void find_strips(const tile *t, int64_t base, int64_t begin, int64_t end, strips *s) {
    for (int64_t i = begin / WIDTH; i < (end + MAX_BLOCK) / WIDTH; i++) {
        int64_t key = base + i * WIDTH;
        int is_whole = key >= t->low && key + WIDTH <= t->high && key % t->a->block_size + WIDTH <= t->a->block_size;
        s->at[i] = is_whole ? row_at(t, key) : APART;
    }
}

// Copy a strip's rows; those outside the tile's range become zeros.
static __attribute__((noinline)) void copy_strip(const tile *t, const char *cache, int64_t first_key, char *to) {
    int64_t bytes = row_bytes_of(t->a);
    for (int64_t key = first_key; key < first_key + WIDTH; key++, to += bytes) {
        if (key < t->low || key >= t->high)
            memset(to, 0, bytes);
        else
            memcpy(to, cache + row_at(t, key), bytes);
    }
}

#define UNROLL _Pragma("GCC unroll 16")

#if WIDTH == 16
// 16 bytes of each of 16 rows, turned: out[i] holds the i-th 4 bytes of all rows.
INLINE void turn_16_bytes(const char *row, int64_t stride, __m512i out[4]) {
    __m512i x[4];
    UNROLL for (int i = 0; i < 4; i++, row += stride) {
        x[i] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)row));
        x[i] = _mm512_inserti32x4(x[i], _mm_loadu_si128((const __m128i *)(row + 4 * stride)), 1);
        x[i] = _mm512_inserti32x4(x[i], _mm_loadu_si128((const __m128i *)(row + 8 * stride)), 2);
        x[i] = _mm512_inserti32x4(x[i], _mm_loadu_si128((const __m128i *)(row + 12 * stride)), 3);
    }
    __m512i a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpackhi_epi32(x[0], x[1]);
    __m512i c = _mm512_unpacklo_epi32(x[2], x[3]), d = _mm512_unpackhi_epi32(x[2], x[3]);
    out[0] = _mm512_unpacklo_epi64(a, c), out[1] = _mm512_unpackhi_epi64(a, c);
    out[2] = _mm512_unpacklo_epi64(b, d), out[3] = _mm512_unpackhi_epi64(b, d);
}
#endif

// ---- a row's result from its stretches

typedef struct {
    float maximum, sum;  // -inf, 0: of nothing
} mass;

// Add a stretch to what a row has of the stretches before it.
void merge(mass *m, float *values, mass other, const float *other_values, int64_t dim);

INLINE void divide(float *values, float sum, int64_t dim) {
    for (int64_t d = 0; d < dim; d++) values[d] /= sum;
}

INLINE void zero_padding(const paged_attention_args *a, const attention_item *item) {
    int64_t columns = a->num_kv_heads * a->group * a->head_dim;
    memset(a->out + item->first_row * columns, 0, item->num_rows * columns * sizeof(float));
}

#endif
