// How a step's attention is cut into tasks: once per step, for all layers of a geometry.

#include "attention.h"

typedef struct {
    const int32_t *cu_seqlens_q;  // [B + 1]
    const int32_t *seq_lens;      // [B]
    int64_t *counts;              // [2]: items, merges
    attention_item *items;
    attention_item *merges;       // [FEW_TILES]
    int64_t num_tokens, num_requests, num_kv_heads, group, head_dim, window;  // window 0: all
    int64_t few_rows;   // requests of so many rows or fewer are cut as paged_attention has them
    int64_t tile_rows;  // of the others, at most
} plan_attention_args;
ARGS_SIZE(plan_attention)

// What a request's rows are cut into.
typedef struct {
    int64_t num_rows, num_tiles, tile_rows;
} cut;

INLINE cut cut_of(const plan_attention_args *a, int64_t b) {
    int64_t rows = a->seq_lens[b] ? rows_of(a->cu_seqlens_q, b, a->group) : 0;
    int64_t tile_rows = a->tile_rows;
    if (rows <= a->few_rows) tile_rows = smaller(TILE, TILE_FLOATS / (ceil_div(a->head_dim, WIDTH) * WIDTH));
    int64_t tiles = ceil_div(rows, tile_rows);
    return (cut){rows, tiles, tiles ? ceil_div(rows, tiles) : 0};
}

// Add a tile's item, or, where tiles are split, one per stretch and the merge.
static void add_tile(const plan_attention_args *a, int64_t b, int64_t head, int64_t first, int64_t rows, int is_split,
                     int64_t *num_partials) {
    int64_t first_token = a->cu_seqlens_q[b];
    int64_t start = a->seq_lens[b] - (a->cu_seqlens_q[b + 1] - first_token);
    int64_t low = first_key(start + first / a->group, a->window) / STRETCH;
    int64_t high = (start + (first + rows - 1) / a->group) / STRETCH + 1;
    attention_item item = {b, head, first, rows, low, high - low, -1, high - low};
    if (!is_split || high - low == 1) {
        a->items[a->counts[0]++] = item;
        return;
    }
    item.partial = *num_partials;
    a->merges[a->counts[1]++] = item;
    item.num_stretches = 1;
    for (; item.stretch < high; item.stretch++) {
        a->items[a->counts[0]++] = item;
        item.partial += rows;
    }
    *num_partials = item.partial;
}

static void add_padding(const plan_attention_args *a, int64_t first, int64_t last) {
    if (first < last) a->items[a->counts[0]++] = (attention_item){-1, 0, first, last - first, 0, 0, -1, 0};
}

// Items: chunks of several tiles first, then requests of one tile, head by head, so that blocks that requests share are
// read while they are in the cache.
EXPORT void plan_attention(const void *args, int64_t task) {
    (void)task;
    const plan_attention_args *a = args;
    int64_t tiles = 0, rows = 0, num_partials = 0;
    a->counts[0] = a->counts[1] = 0;
    for (int64_t b = 0; b < a->num_requests; b++) {
        cut c = cut_of(a, b);
        tiles += c.num_tiles * a->num_kv_heads, rows += c.num_rows * a->num_kv_heads;
        if (!a->seq_lens[b]) add_padding(a, a->cu_seqlens_q[b], a->cu_seqlens_q[b + 1]);
        if (c.num_tiles < 2) continue;
        for (int64_t head = 0; head < a->num_kv_heads; head++)
            for (int64_t first = 0; first < c.num_rows; first += c.tile_rows)
                add_tile(a, b, head, first, smaller(c.tile_rows, c.num_rows - first), 0, &num_partials);
    }
    add_padding(a, a->cu_seqlens_q[a->num_requests], a->num_tokens);
    int is_split = tiles < FEW_TILES && rows <= FEW_ROWS;
    for (int64_t head = 0; head < a->num_kv_heads; head++)
        for (int64_t b = 0; b < a->num_requests; b++) {
            cut c = cut_of(a, b);
            if (c.num_tiles == 1) add_tile(a, b, head, 0, c.num_rows, is_split, &num_partials);
        }
}
