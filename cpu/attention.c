// paged_attention: decode rows, prompt chunks and both mixed, over keys and values found through block tables.
//
// The query heads of one KV head and all query tokens of a request are flattened to rows (row = token * group + head of
// the group). A task is a tile of up to TILE rows and one KV head: it walks over the context in stretches of STRETCH
// keys counted from position 0. Within a stretch it computes all scores, then their exponentials against the stretch's
// own maximum, then the weighted sum of values; stretches are merged in order by their maxima and sums (Milakov and
// Gimelshein 2018, "Online normalizer calculation for softmax"). Few rows with a long context are split: one task per
// stretch leaves its part in memory and merge_attention adds the parts in the same order by the same code.
//
// A row's result therefore depends on its own query, keys and values only: not on its batch, the tile it fell into, how
// its prompt was cut into chunks, or the number of threads, to the last bit.
//
// Keys that no row of a tile sees are never read: they count as zero vectors, whatever the cache holds there.

#include "attention_tile.h"
#include "powers.h"
#include "vector_math.h"

ARGS_SIZE(paged_attention)

EXPORT int64_t count_attention(const void *args) { return ((const paged_attention_args *)args)->counts[0]; }
EXPORT int64_t count_attention_merges(const void *args) { return ((const paged_attention_args *)args)->counts[1]; }

// How many of `left` vectors to take: as many as fit, but a single one is not left over.
INLINE int64_t take_vectors(int64_t left) {
    return left <= TILE_VECTORS ? left : left == TILE_VECTORS + 1 && TILE_VECTORS > 2 ? TILE_VECTORS - 1 : TILE_VECTORS;
}

// ---- a stretch

// Scores [STRETCH] of a row → 2^(score - maximum) for keys first … last, 0 for the others from begin to end, which are
// whole vectors.
static __attribute__((noinline)) void exponentials(float *scores, int64_t first, int64_t last, int64_t begin,
                                                   int64_t end, float cap, float *maximum, float *sum) {
    veci lane;
    for (int i = 0; i < WIDTH; i++) lane[i] = i;
    int64_t low = first / WIDTH * WIDTH, high = ceil_div(last, WIDTH) * WIDTH;
    vecf most = (vecf){0} - INFINITY, total = {0};
    if (first >= last) low = high = end;
    for (int64_t i = begin; i < low; i += WIDTH) vstore(scores + i, (vecf){0});
    for (int64_t i = high; i < end; i += WIDTH) vstore(scores + i, (vecf){0});
    for (int64_t i = low; i < high; i += WIDTH) {
        vecf x = vload(scores + i);
        if (cap != 0) x = cap * vtanh(x);
        if (i < first || i + WIDTH > last) {
            veci place = lane + (int32_t)i;
            x = vselect((place >= (int32_t)first) & (place < (int32_t)last), x, (vecf){0} - INFINITY);
        }
        most = vgreater(x, most);
        vstore(scores + i, x);
    }
    *maximum = vgreatest(most);
    for (int64_t i = low; i < high; i += WIDTH) {
        vecf x = vpower_of_two(vload(scores + i) - *maximum);
        if (i < first || i + WIDTH > last) {
            veci place = lane + (int32_t)i;
            x = (vecf)((veci)x & (place >= (int32_t)first) & (place < (int32_t)last));
        }
        total += x;
        vstore(scores + i, x);
    }
    *sum = vsum(total);
}

// How many rows of a tile are computed at once: evenly cut.
INLINE int64_t group_rows(int64_t num_rows) { return ceil_div(num_rows, ceil_div(num_rows, GROUP)); }

// Scores of the tile's rows for keys begin … end of the stretch that starts at key `base`.
INLINE void stretch_scores(const tile *t, int64_t base, int64_t begin, int64_t end, const strips *s, float *panels,
                           char *spare, float *scores) {
    const paged_attention_args *a = t->a;
    const char *k_cache = a->k_cache, *v_cache = a->v_cache;
    int64_t dim = a->head_dim, num_rows = t->item->num_rows, size = group_rows(num_rows);
    const float *q[TILE];
    for (int64_t r = 0; r < num_rows; r++) q[r] = a->q + offset_of(t, r);
    for (int64_t k = begin; k < end; k += t->block) {
        int64_t count = smaller(t->block, end - k);
        for (int64_t i = 0; i < count; i += WIDTH) {
            int64_t at = s->at[(k + i) / WIDTH], next = s->at[(k + i + t->block) / WIDTH];
            if (at == APART) copy_strip(t, k_cache, base + k + i, spare);
            turn_strip(at == APART ? spare : k_cache + at, k_cache + larger(next, 0), v_cache + larger(at, 0), dim,
                       a->cache_type, panels + i * dim);
        }
        for (int64_t r = 0; r < num_rows; r += size) {
            int64_t rows = smaller(size, num_rows - r);
            if (position_of(t, r + rows - 1) < base + k) continue;
            for (int64_t i = 0, take; i < count; i += take * WIDTH) {
                take = take_vectors((count - i) / WIDTH);
                float *to = scores + r * STRETCH + k + i;
                SCORES_BY_SIZE[rows - 1][take - 1](q + r, panels + i * dim, dim, a->scale, to);
            }
        }
    }
}

// A strip of values as float32 [WIDTH][padded].
INLINE void widen(const char *rows, int64_t dim, int64_t padded, int type, float *to) {
    for (int64_t i = 0; i < WIDTH; i++, rows += dim * kv_bytes(type), to += padded) {
        int64_t d = 0;
        for (; d + WIDTH <= dim; d += WIDTH) vstore(to + d, vload_kv(rows, d, type));
        for (; d < padded; d++) to[d] = d < dim ? load_kv(rows, d, type) : 0;
    }
}

// Where a strip's values lie as float32 rows of whole vectors: in the cache or, widened, in `to`.
INLINE const float *values_of(const tile *t, int64_t first_key, int64_t at, char *spare, float *to) {
    const paged_attention_args *a = t->a;
    const char *rows = (const char *)a->v_cache + at;
    int64_t dim = a->head_dim, padded = t->padded_dim;
    if (at != APART && a->cache_type == FLOAT32 && padded == dim) return (const float *)rows;
    if (at == APART) copy_strip(t, a->v_cache, first_key, spare), rows = spare;
    if (a->cache_type == FLOAT32) widen(rows, dim, padded, FLOAT32, to);
    if (a->cache_type == BFLOAT16) widen(rows, dim, padded, BFLOAT16, to);
    if (a->cache_type == FLOAT16) widen(rows, dim, padded, FLOAT16, to);
    return to;
}

// sums [TILE][padded_dim] = the exponentials of keys begin … end times their values.
INLINE void stretch_sums(const tile *t, int64_t base, int64_t begin, int64_t end, const strips *s, const float *weights,
                         float *wide, char *spare, float *sums) {
    int64_t padded = t->padded_dim, num_rows = t->item->num_rows, size = group_rows(num_rows);
    const float *values[MAX_BLOCK / WIDTH], *columns[MAX_BLOCK / WIDTH];
    memset(sums, 0, num_rows * padded * sizeof *sums);
    for (int64_t k = begin; k < end; k += t->block) {
        int64_t num_strips = smaller(t->block, end - k) / WIDTH;
        for (int64_t i = 0; i < num_strips; i++)
            values[i] = values_of(t, base + k + i * WIDTH, s->at[k / WIDTH + i], spare, wide + i * WIDTH * padded);
        for (int64_t c = 0, take; c < padded; c += take * WIDTH) {
            take = take_vectors((padded - c) / WIDTH);
            for (int64_t i = 0; i < num_strips; i++) columns[i] = values[i] + c;
            for (int64_t r = 0; r < num_rows; r += size) {
                int64_t rows = smaller(size, num_rows - r);
                if (position_of(t, r + rows - 1) < base + k) continue;
                SUMS_BY_SIZE[rows - 1][take - 1](columns, num_strips, weights + r * STRETCH + k, sums + r * padded + c,
                                                 padded);
            }
        }
    }
}

// ---- a row's result from its stretches

__attribute__((noinline)) void merge(mass *m, float *values, mass other, const float *other_values, int64_t dim) {
    if (other.sum == 0) return;  // the row sees no key of the stretch
    if (m->sum == 0) {
        *m = other;
        memcpy(values, other_values, dim * sizeof *values);
        return;
    }
    float maximum = m->maximum > other.maximum ? m->maximum : other.maximum;
    vecf powers = {m->maximum - maximum, other.maximum - maximum};
    powers = vpower_of_two(powers);
    float scale = powers[0], other_scale = powers[1];
    for (int64_t d = 0; d < dim; d++) values[d] = values[d] * scale + other_values[d] * other_scale;
    *m = (mass){maximum, m->sum * scale + other.sum * other_scale};
}

// ---- tasks

EXPORT void paged_attention(const void *args, int64_t task) {
    const paged_attention_args *a = args;
    const attention_item *item = a->items + task;
    if (item->request < 0) {
        zero_padding(a, item);
        return;
    }
    tile t = tile_of(a, item);
    _Alignas(64) float scores[TILE * STRETCH];
    _Alignas(64) float block[BLOCK_FLOATS];
    _Alignas(64) float sums[TILE_FLOATS];
    _Alignas(64) char spare[WIDTH * MAX_HEAD_DIM * 4];
    mass masses[TILE];
    for (int64_t r = 0; r < item->num_rows; r++) masses[r] = (mass){-INFINITY, 0};
    for (int64_t stretch = item->stretch; stretch < item->stretch + item->num_stretches; stretch++) {
        int64_t base = stretch * STRETCH;
        int64_t begin = larger(0, t.low - base) / WIDTH * WIDTH;
        int64_t end = ceil_div(smaller(STRETCH, t.high - base), WIDTH) * WIDTH;
        mass parts[TILE];
        strips s;
        find_strips(&t, base, begin, end, &s);
        stretch_scores(&t, base, begin, end, &s, block, spare, scores);
        for (int64_t r = 0; r < item->num_rows; r++) {
            int64_t position = position_of(&t, r);
            int64_t first = larger(begin, first_key(position, a->window) - base);
            int64_t last = smaller(end, position + 1 - base);
            exponentials(scores + r * STRETCH, first, last, begin, end, a->cap, &parts[r].maximum, &parts[r].sum);
        }
        stretch_sums(&t, base, begin, end, &s, scores, block, spare, sums);
        for (int64_t r = 0; r < item->num_rows; r++) {
            const float *values = sums + r * t.padded_dim;
            if (item->partial < 0) {
                merge(masses + r, a->out + offset_of(&t, r), parts[r], values, a->head_dim);
                continue;
            }
            float *partial = a->partials + (item->partial + r) * (a->head_dim + 2);
            memcpy(partial, parts + r, sizeof *parts);
            memcpy(partial + 2, values, a->head_dim * sizeof *values);
        }
    }
    if (item->partial >= 0) return;
    for (int64_t r = 0; r < item->num_rows; r++) divide(a->out + offset_of(&t, r), masses[r].sum, a->head_dim);
}

EXPORT void merge_attention(const void *args, int64_t task) {
    const paged_attention_args *a = args;
    const attention_item *item = a->merges + task;
    tile t = tile_of(a, item);
    for (int64_t r = 0; r < item->num_rows; r++) {
        mass total = {-INFINITY, 0}, part;
        float *out = a->out + offset_of(&t, r);
        for (int64_t i = 0; i < item->num_parts; i++) {
            const float *partial = a->partials + (item->partial + i * item->num_rows + r) * (a->head_dim + 2);
            memcpy(&part, partial, sizeof part);
            merge(&total, out, part, partial + 2, a->head_dim);
        }
        divide(out, total.sum, a->head_dim);
    }
}
