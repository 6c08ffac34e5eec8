// Kernels between the QKV projection and attention: head norms, RoPE, and K and V into their cache slots.
//
// A task is some tokens. Elements i and i + E/2 of a head are a pair, turned by the angle of the token's position; a row
// of the table [P, E] holds the cosines and then the sines. Slot -1 writes nowhere. No output lies over an input.

#include "kv_types.h"

#define MAX_HEAD_DIM 1024

INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }

// out [dim] = x with its first 2 * half elements turned.
INLINE void turn_head(const float *restrict x, const float *restrict table, int64_t half, int64_t dim,
                      float *restrict out) {
    const float *cosines = table, *sines = table + half;
    for (int64_t i = 0; i < half; i++) {
        out[i] = x[i] * cosines[i] - x[half + i] * sines[i];
        out[half + i] = x[half + i] * cosines[i] + x[i] * sines[i];
    }
    for (int64_t i = 2 * half; i < dim; i++) out[i] = x[i];
}

// out = x / √(mean(x²) + eps) · (weight + offset)
INLINE void norm_head(const float *restrict x, const float *restrict weight, int64_t dim, float eps, float offset,
                      float *restrict out) {
    vecf squares = {0};
    int64_t i = 0;
    for (; i + WIDTH <= dim; i += WIDTH) squares += vload(x + i) * vload(x + i);
    float sum = vsum(squares);
    for (; i < dim; i++) sum += x[i] * x[i];
    float scale = 1.0f / sqrtf(sum / (float)dim + eps);
    for (i = 0; i < dim; i++) out[i] = x[i] * scale * (weight[i] + offset);
}

INLINE const float *table_row(const float *table, int64_t width, int64_t max_positions, int64_t position) {
    position = position < 0 ? 0 : min_of(position, max_positions - 1);  // of padded rows
    return table + position * width;
}

// The caches of a layer, [N, K, S, D] both.
typedef struct {
    char *k_cache, *v_cache;
    int64_t num_kv_heads, block_size, head_dim, cache_type;
} kv_cache;

INLINE int64_t place_of(const kv_cache *c, int64_t slot, int64_t head) {
    int64_t block = slot / c->block_size, token = slot % c->block_size;
    return ((block * c->num_kv_heads + head) * c->block_size + token) * c->head_dim * kv_bytes(c->cache_type);
}

// ---- kernels

typedef struct {
    const float *x;  // [T, heads * D]
    const int32_t *positions;
    const float *table;  // [P, E]
    float *out;
    int64_t num_tokens, num_heads, head_dim, table_width, max_positions, tokens_per_task;
} rope_args;
ARGS_SIZE(rope)

EXPORT void rope(const void *args, int64_t task) {
    const rope_args *a = args;
    int64_t stop = min_of(a->num_tokens, (task + 1) * a->tokens_per_task);
    for (int64_t t = task * a->tokens_per_task; t < stop; t++) {
        const float *row = table_row(a->table, a->table_width, a->max_positions, a->positions[t]);
        for (int64_t head = 0; head < a->num_heads; head++) {
            int64_t start = (t * a->num_heads + head) * a->head_dim;
            turn_head(a->x + start, row, a->table_width / 2, a->head_dim, a->out + start);
        }
    }
}

typedef struct {
    const float *k, *v;  // [T, K * D]
    const int32_t *slots;
    char *k_cache, *v_cache;
    int64_t num_tokens, num_kv_heads, block_size, head_dim, cache_type, tokens_per_task;
} write_kv_args;
ARGS_SIZE(write_kv)

EXPORT void write_kv(const void *args, int64_t task) {
    const write_kv_args *a = args;
    kv_cache cache = {a->k_cache, a->v_cache, a->num_kv_heads, a->block_size, a->head_dim, a->cache_type};
    int64_t stop = min_of(a->num_tokens, (task + 1) * a->tokens_per_task);
    for (int64_t t = task * a->tokens_per_task; t < stop; t++) {
        if (a->slots[t] < 0) continue;
        for (int64_t head = 0; head < a->num_kv_heads; head++) {
            int64_t start = (t * a->num_kv_heads + head) * a->head_dim, at = place_of(&cache, a->slots[t], head);
            store_kv(a->k_cache + at, a->k + start, a->head_dim, a->cache_type);
            store_kv(a->v_cache + at, a->v + start, a->head_dim, a->cache_type);
        }
    }
}

typedef struct {
    const float *qkv;  // [T, (Q + 2 * K) * D]
    const int32_t *positions, *slots;
    const float *table;            // [P, E]
    const float *q_norm, *k_norm;  // [D], NULL: none
    float *q;                      // [T, Q * D]
    char *k_cache, *v_cache;
    int64_t num_tokens, num_q_heads, num_kv_heads, head_dim, block_size, cache_type;
    int64_t table_width, max_positions, tokens_per_task;
    float eps, offset;
} qk_norm_rope_write_kv_args;
ARGS_SIZE(qk_norm_rope_write_kv)

// One head of q or k: its norm, if it has one, and its turn.
INLINE void place_head(const qk_norm_rope_write_kv_args *a, const float *x, const float *norm, const float *row,
                       float *out) {
    float normed[MAX_HEAD_DIM];
    if (norm) {
        norm_head(x, norm, a->head_dim, a->eps, a->offset, normed);
        x = normed;
    }
    turn_head(x, row, a->table_width / 2, a->head_dim, out);
}

EXPORT void qk_norm_rope_write_kv(const void *args, int64_t task) {
    const qk_norm_rope_write_kv_args *a = args;
    kv_cache cache = {a->k_cache, a->v_cache, a->num_kv_heads, a->block_size, a->head_dim, a->cache_type};
    int64_t dim = a->head_dim, stop = min_of(a->num_tokens, (task + 1) * a->tokens_per_task);
    for (int64_t t = task * a->tokens_per_task; t < stop; t++) {
        const float *row = table_row(a->table, a->table_width, a->max_positions, a->positions[t]);
        const float *q = a->qkv + t * (a->num_q_heads + 2 * a->num_kv_heads) * dim;
        const float *k = q + a->num_q_heads * dim, *v = k + a->num_kv_heads * dim;
        for (int64_t head = 0; head < a->num_q_heads; head++)
            place_head(a, q + head * dim, a->q_norm, row, a->q + (t * a->num_q_heads + head) * dim);
        if (a->slots[t] < 0) continue;
        for (int64_t head = 0; head < a->num_kv_heads; head++) {
            int64_t at = place_of(&cache, a->slots[t], head);
            float turned[MAX_HEAD_DIM];
            place_head(a, k + head * dim, a->k_norm, row, turned);
            store_kv(a->k_cache + at, turned, dim, a->cache_type);
            store_kv(a->v_cache + at, v + head * dim, dim, a->cache_type);
        }
    }
}
