// paged_attention on AMX tiles, in products of bfloat16 numbers; scores, exponentials and sums are float32. It follows the
// same plan as attention.c, with larger tiles.
//
// paged_attention_bf16 rounds queries, keys, values and weights. paged_attention_parts is exact: it takes each of them as
// the sum of as many bfloat16 numbers as hold it (parts.h), for requests of many rows, and leaves those of few to
// multiply-adds: which they are does not depend on other requests.
//
// For each stretch a tile puts the keys and values that its rows see into the form of a right operand, once; its rows
// then pass, GROUP_ROWS at a time: scores, weights, weighted sums of values. Where products are rounded, a tile of few
// rows makes the queries the right operand and takes keys as they lie, which gives the same scores turned. A row's weights
// are relative to the stretch's own maximum, and what rounded ones sum to is the sum of the rounded ones.
//
// Both give a row, among requests of its kind, a result that depends on its own query, keys and values only, to the last
// bit. Keys that no row of a tile sees are never read.
//
// X: parts of queries and weights; W: of keys and values.

#include "parts.h"

#if defined(HAS_TILES)

#include "attention_keys.h"
#include "powers.h"
#include "vector_math.h"

#define GROUP_ROWS 32
#define FEW 16             // rows
#define TILES_OF_ROWS 0x13 // 0 and 1: sums; 4: rows
#define UNIT 32            // elements of a sum that a tile holds
#define UNIT_ELEMENTS 512  // of a part of 16 rows or columns
#define NUM_UNITS (STRETCH / UNIT)
#define AHEAD 4            // strips
#define STAGES 3           // of a group: scores, weights, sums
#define SCORES_ROW(X) ((X) == 1 ? STRETCH : STRETCH * (X) / 2)  // floats

// Scratch of a task. `padded` is head_dim up to whole units. A row of scores ends where the weights that take its place
// do, or after them: a unit is read before it is overwritten.
typedef struct {
    // [row][unit][X][32]; of few rows: [padded / 2][16 rows][2]
    _Alignas(64) bf16 q[MAX_PARTS * LARGE_TILE_ELEMENTS];
    // [strip][unit][W][16 pairs of dims][16 keys][2]
    _Alignas(64) bf16 keys[MAX_PARTS * STRETCH * MAX_HEAD_DIM];
    // [padded / 16][unit][W][16 pairs of keys][16 dims][2]
    _Alignas(64) bf16 values[MAX_PARTS * STRETCH * MAX_HEAD_DIM];
    // [row][SCORES_ROW]; weights [row][unit][X][32]
    _Alignas(64) float scores[STAGES][GROUP_ROWS * SCORES_ROW(MAX_PARTS)];
    _Alignas(64) float sums[GROUP_ROWS * MAX_HEAD_DIM];           // [row][padded]
    _Alignas(64) char spare[WIDTH * MAX_HEAD_DIM * 4];            // a strip of the cache
    _Alignas(64) bf16 rounded[MAX_PARTS * WIDTH * MAX_HEAD_DIM];  // a strip of keys, or few queries: [16][unit][W][32]
    _Alignas(64) float turned[WIDTH * FEW];                       // scores of a strip: [key][row]
    int64_t positions[LARGE_TILE], offsets[LARGE_TILE];           // of each row, offsets in q and out
    mass masses[LARGE_TILE], parts[STAGES][GROUP_ROWS];
} scratch;

typedef struct {
    tile t;
    int64_t padded, few;
    scratch *s;
} job;

// ---- operands

// Elements i … i + 15 of a row, zeros behind its end.
INLINE __m512 load_16(const char *row, int64_t i, int64_t dim, int type) {
    if (type == FLOAT32) return _mm512_maskz_loadu_ps(lanes_below(dim - i), (const float *)row + i);
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes_below(dim - i), (const f16 *)row + i));
}

// 16 elements of a row, and 16 of the same or another one, as so many parts.
INLINE void load_32(int num_parts, const char *row, int64_t i, const char *other, int64_t j, int64_t dim, int type,
                    __m512i *parts) {
    if (type != BFLOAT16) {
        split_32(num_parts, load_16(row, i, dim, type), load_16(other, j, dim, type), parts);
        return;
    }
    const __m256i low = _mm256_maskz_loadu_epi16(lanes_below(dim - i), (const bf16 *)row + i);
    const __m256i high = _mm256_maskz_loadu_epi16(lanes_below(dim - j), (const bf16 *)other + j);
    parts[0] = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

// A row as units [num_parts][32].
INLINE void split_row(int num_parts, const char *row, int64_t dim, int64_t padded, int type, bf16 *to) {
    for (int64_t d = 0; d < padded; d += UNIT, to += num_parts * UNIT) {
        __m512i parts[MAX_PARTS];
        load_32(num_parts, row, d, row, d + 16, dim, type, parts);
        UNROLL for (int i = 0; i < num_parts; i++) _mm512_store_si512(to + i * UNIT, parts[i]);
    }
}

// 16 rows, their pairs of elements side by side.
INLINE void turn_pairs(const bf16 *rows, int64_t stride, int64_t length, bf16 *to) {
    __m512i x[4];
    for (int64_t d = 0; d < length; d += 8, to += 8 * WIDTH) {
        turn_16_bytes((const char *)(rows + d), stride * (int64_t)sizeof *rows, x);
        UNROLL for (int i = 0; i < 4; i++) _mm512_store_si512(to + i * 2 * WIDTH, x[i]);
    }
}

INLINE void load_queries(int X, const job *j) {
    const paged_attention_args *a = j->t.a;
    scratch *s = j->s;
    bf16 *to = j->few ? s->rounded : s->q;
    for (int64_t r = 0; r < j->t.item->num_rows; r++, to += X * j->padded)
        split_row(X, (const char *)(a->q + s->offsets[r]), a->head_dim, j->padded, FLOAT32, to);
    if (!j->few) return;
    memset(to, 0, (FEW - j->t.item->num_rows) * j->padded * sizeof *to);
    turn_pairs(s->rounded, j->padded, j->padded, s->q);
}

// Neighbouring keys' values side by side. Meanwhile ask for the strips at next_keys and next_values: a step asks for as
// many bytes of each as it reads.
INLINE void pair_values(int W, const char *rows, const char *next_keys, const char *next_values, int64_t dim,
                        int64_t padded, int type, bf16 *to) {
    const int64_t bytes = dim * kv_bytes(type), step = UNIT * kv_bytes(type);
    const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    for (int64_t d = 0; d < padded; d += 16, to += NUM_UNITS * W * UNIT_ELEMENTS)
        UNROLL for (int i = 0; i < WIDTH / 2; i++) {
            const char *row = rows + 2 * i * bytes;
            for (int64_t line = 0; line < step; line += 64) {
                __builtin_prefetch(next_keys + line, 0, 2);
                __builtin_prefetch(next_values + line, 0, 2);
            }
            next_keys += step, next_values += step;
            __m512i parts[MAX_PARTS];
            load_32(W, row, d, row + bytes, d, dim, type, parts);
            UNROLL for (int p = 0; p < W; p++)
                _mm512_store_si512(to + p * UNIT_ELEMENTS + i * 2 * WIDTH, _mm512_permutexvar_epi16(pairs, parts[p]));
        }
}

// A strip of keys as parts, `*stride` elements from one to the next: as they lie in the cache, or split.
INLINE const bf16 *keys_of(int W, const char *rows, int64_t dim, int64_t padded, int type, bf16 *split,
                           int64_t *stride) {
    *stride = W * padded;
    if (type == BFLOAT16 && dim == padded) return (const bf16 *)rows;
    for (int64_t i = 0; i < WIDTH; i++)
        split_row(W, rows + i * dim * kv_bytes(type), dim, padded, type, split + i * *stride);
    return split;
}

// Scores of few rows for a strip of keys.
INLINE void few_scores(const job *j, const bf16 *keys, int64_t stride, float *scores) {
    scratch *s = j->s;
    __m512i x[4];
    tile_zero(2);
    for (int64_t d = 0; d < j->padded; d += UNIT) {
        tile_load(3, keys + d, stride * sizeof *keys);
        tile_load(5, s->q + d * WIDTH, 64);
        tile_multiply_bf16(2, 3, 5);
    }
    tile_store(2, s->turned, 64);
    for (int64_t r = 0; r < j->t.item->num_rows; r += 4) {
        turn_16_bytes((const char *)(s->turned + r), 64, x);
        UNROLL for (int i = 0; i < 4; i++) _mm512_store_si512(scores + (r + i) * STRETCH, x[i]);
    }
}

INLINE void load_strip(int W, const job *j, int64_t k, const char *keys, const char *values, int64_t next, int type) {
    const int64_t dim = j->t.a->head_dim, padded = j->padded;
    scratch *s = j->s;
    int64_t stride;
    if (keys) {
        const bf16 *rows = keys_of(W, keys, dim, padded, type, s->rounded, &stride);
        if (j->few) few_scores(j, rows, stride, s->scores[0] + k);
        else turn_pairs(rows, stride, W * padded, s->keys + k * padded * W);
    }
    if (!values) return;
    pair_values(W, values, (const char *)j->t.a->k_cache + next, (const char *)j->t.a->v_cache + next, dim, padded,
                type, s->values + k / UNIT * W * UNIT_ELEMENTS + k % UNIT * WIDTH);
}

typedef void load_fn(const job *j, int64_t k, const char *keys, const char *values, int64_t next);
#define LOAD(NAME, W, TYPE)                                                                                      \
    static void NAME(const job *j, int64_t k, const char *keys, const char *values, int64_t next) {              \
        load_strip(W, j, k, keys, values, next, TYPE);                                                           \
    }
LOAD(load_bfloat16, 1, BFLOAT16)
LOAD(round_float32, 1, FLOAT32)
LOAD(round_float16, 1, FLOAT16)
LOAD(split_float32, 3, FLOAT32)
LOAD(split_float16, 2, FLOAT16)

// Keys and values begin … end, whole units, of the stretch that starts at key `base`.
static void load_stretch(load_fn *load, const job *j, int64_t base, int64_t begin, int64_t end) {
    const char *k_cache = j->t.a->k_cache, *v_cache = j->t.a->v_cache;
    char *spare = j->s->spare;
    strips where;
    find_strips(&j->t, base, begin, end, &where);
    for (int64_t k = begin; k < end; k += WIDTH) {
        const int64_t at = where.at[k / WIDTH], next = larger(where.at[k / WIDTH + AHEAD], 0);
        if (at != APART) {
            load(j, k, k_cache + at, v_cache + at, next);
            continue;
        }
        copy_strip(&j->t, k_cache, base + k, spare);
        load(j, k, spare, NULL, next);
        copy_strip(&j->t, v_cache, base + k, spare);
        load(j, k, NULL, spare, next);
    }
}

// ---- weights

// 2^(x·scale - shift), within 2^-13 of itself: a minimax polynomial of 2^r, 0 <= r < 1, times a whole power.
INLINE __m512 rough_power(__m512 x, __m512 scale, __m512 shift) {
    x = _mm512_fmsub_ps(x, scale, shift);
    const __m512 r = _mm512_reduce_ps(x, 1);  // x - floor(x)
    __m512 p = _mm512_fmadd_ps(r, _mm512_set1_ps(0.0780245371f), _mm512_set1_ps(0.226067199f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.695833489f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.999925228f));
    return _mm512_scalef_ps(p, x);
}

// 2^(x·scale - shift) to about 1 unit in the last place; 0 for -infinity.
INLINE vecf power(__m512 x, __m512 scale, __m512 shift) {
    x = _mm512_fmsub_ps(x, scale, shift);
    const __m512 r = _mm512_reduce_ps(x, 0);  // x - the nearest integer
    return (vecf)_mm512_scalef_ps((__m512)vpower_of_fraction((vecf)r), _mm512_sub_ps(x, r));
}

INLINE __m512i upper_halves(vecf low, vecf high) {
    const __m512i odd = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25,
                                         23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return _mm512_permutex2var_epi16((__m512i)low, odd, (__m512i)high);
}

// A unit's scores → its weights, rounded or cut into parts; what they sum to is added to `total`, lane by lane.
INLINE __m512 weigh_unit(int X, const float *scores, __m512 scale, __m512 shift, __m512 total, bf16 *weights) {
    const __m512 x = _mm512_load_ps(scores), y = _mm512_load_ps(scores + 16);
    if (X == 1) {
        const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
        const __m512bh rounded = _mm512_cvtne2ps_pbh(rough_power(y, scale, shift), rough_power(x, scale, shift));
        _mm512_store_si512(weights, (__m512i)rounded);
        return _mm512_dpbf16_ps(total, rounded, ones);
    }
    vecf low = power(x, scale, shift), high = power(y, scale, shift);
    total += low + high;
    UNROLL for (int i = 0; i < X; i++) {
        _mm512_store_si512(weights + i * UNIT, upper_halves(low, high));
        low = lower_half(low), high = lower_half(high);
    }
    return total;
}

// Write `value` from begin to end, which are in one unit.
INLINE void fill(float *scores, int64_t begin, int64_t end, float value) {
    for (int64_t i = begin; i < end; i++) scores[i] = value;
}

INLINE void clear(bf16 *weights, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += UNIT) _mm512_store_si512(weights + i, _mm512_setzero_si512());
}

// Neighbouring rows of a tile, what they see of a stretch, and how far their scores have become weights.
typedef struct {
    int64_t first_row, rows;
    int64_t base;       // the stretch's first key
    int64_t low, high;  // keys of it that some row sees, whole units
    float *scores;      // [rows][SCORES_ROW]
    float scale;        // of scores
    mass *parts;        // [rows]: maximum, where it is known; sum, where the row is weighed
    int64_t first[GROUP_ROWS], end[GROUP_ROWS];  // whole units of keys that each row sees
    int64_t begun, row;  // rows whose maximum is known; row that is weighed in turn
    int64_t next;        // its unit in turn
    __m512 total;        // of it
} group;

// The row's maximum among keys from first to last, which become whole units by keys that it does not see.
INLINE float maximum_of(float *scores, int64_t first, int64_t last, int64_t low, int64_t high) {
    fill(scores, low, first, -INFINITY);
    fill(scores, last, high, -INFINITY);
    __m512 most = _mm512_set1_ps(-INFINITY), other = most;
    for (int64_t i = low; i < high; i += UNIT) {
        most = _mm512_max_ps(_mm512_load_ps(scores + i), most);
        other = _mm512_max_ps(_mm512_load_ps(scores + i + 16), other);
    }
    return _mm512_reduce_max_ps(_mm512_max_ps(most, other));
}

// Find the units and the maximum of the next row.
INLINE void begin_row(int X, const job *j, group *g) {
    const int64_t r = g->begun++, position = j->s->positions[g->first_row + r];
    const int64_t first = larger(g->low, first_key(position, j->t.a->window) - g->base);
    const int64_t last = smaller(g->high, position + 1 - g->base), sees = first < last;
    float *scores = g->scores + (r + 1) * SCORES_ROW(X) - STRETCH;
    g->first[r] = sees ? first / UNIT * UNIT : g->low, g->end[r] = sees ? ceil_div(last, UNIT) * UNIT : g->low;
    g->parts[r].maximum = -INFINITY;
    if (!sees) return;
    if (j->t.a->cap != 0)
        for (int64_t i = g->first[r]; i < g->end[r]; i += WIDTH)
            vstore(scores + i, j->t.a->cap * vtanh(vload(scores + i) * j->t.a->scale));
    g->parts[r].maximum = maximum_of(scores, first, last, g->first[r], g->end[r]) * g->scale;
}

// Weigh a unit of a row.
INLINE __m512 weigh_next(int X, const group *g, int64_t r, int64_t next, __m512 total) {
    float *row = g->scores + r * SCORES_ROW(X);
    const __m512 scale = _mm512_set1_ps(g->scale), shift = _mm512_set1_ps(g->parts[r].maximum);
    return weigh_unit(X, row + SCORES_ROW(X) - STRETCH + next, scale, shift, total, (bf16 *)row + X * next);
}

// 0 for keys that the row does not see.
INLINE void end_row(int X, const group *g, int64_t r, __m512 total) {
    bf16 *weights = (bf16 *)(g->scores + r * SCORES_ROW(X));
    clear(weights, X * g->low, X * g->first[r]);
    clear(weights, X * g->end[r], X * g->high);
    g->parts[r].sum = _mm512_reduce_add_ps(total);
}

// Scores → weights in their place, row after row.
INLINE void weigh(int X, const job *j, group *g) {
    while (g->begun < g->rows) begin_row(X, j, g);
    for (int64_t r = 0; r < g->rows; r++) {
        __m512 total = _mm512_setzero_ps();
        for (int64_t next = g->first[r]; next < g->end[r]; next += UNIT) total = weigh_next(X, g, r, next, total);
        end_row(X, g, r, total);
    }
}

// The same, a row's maximum or a unit at a time: what exact products have beside them.
static __attribute__((noinline)) void weigh_some(const job *j, group *g) {
    const int64_t r = g->row;
    if (g->begun < g->rows) {
        begin_row(MAX_PARTS, j, g);
        g->next = g->first[0];
        return;
    }
    if (r == g->rows) return;
    if (g->next < g->end[r]) g->total = weigh_next(MAX_PARTS, g, r, g->next, g->total);
    g->next += UNIT;
    if (g->next < g->end[r]) return;
    end_row(MAX_PARTS, g, r, g->total);
    g->row++, g->next = g->first[smaller(g->row, GROUP_ROWS - 1)], g->total = _mm512_setzero_ps();
}

// ---- products: one or two blocks of rows times two right operands

// out [rows][32] = the rows of x, `x_stride` elements from one to the next, times `units` units of each operand. Between
// the products another group is weighed: tiles leave the vector units free, but only what stands close to them overlaps.
INLINE void multiply_two(int X, int W, const bf16 *x, int64_t x_stride, const bf16 *first, const bf16 *second,
                         int64_t units, float *out, int64_t out_stride, int two, const job *j, group *other) {
    const int64_t x_bytes = x_stride * (int64_t)sizeof *x, out_bytes = out_stride * (int64_t)sizeof *out;
    const int pairs = num_pairs(X, W);
    const bf16 *low = x + 16 * x_stride;
    float *low_out = out + 16 * out_stride;
    tile_zero(0);
    tile_zero(1);
    if (two) tile_zero(2);
    if (two) tile_zero(3);
    for (int64_t u = 0; u < units; u++) {
        UNROLL for (int n = MAX_PAIRS - pairs; n < MAX_PAIRS; n++) {
            const int l = PAIRS[n].left, r = PAIRS[n].right, is_first = n == MAX_PAIRS - pairs;
            if (is_first || l != PAIRS[n - 1].left) tile_load(4, x + l * UNIT, x_bytes);
            if (is_first || r != PAIRS[n - 1].right) tile_load(6, first + r * UNIT_ELEMENTS, 64);
            tile_multiply_bf16(0, 4, 6);
            if (is_first || r != PAIRS[n - 1].right) tile_load(7, second + r * UNIT_ELEMENTS, 64);
            tile_multiply_bf16(1, 4, 7);
            if (other) weigh_some(j, other);
            if (two) {
                if (is_first || l != PAIRS[n - 1].left) tile_load(5, low + l * UNIT, x_bytes);
                tile_multiply_bf16(2, 5, 6);
                tile_multiply_bf16(3, 5, 7);
            }
            if (other) weigh_some(j, other);
        }
        x += X * UNIT, low += X * UNIT, first += W * UNIT_ELEMENTS, second += W * UNIT_ELEMENTS;
    }
    tile_store(0, out, out_bytes);
    tile_store(1, out + 16, out_bytes);
    if (two) tile_store(2, low_out, out_bytes);
    if (two) tile_store(3, low_out + 16, out_bytes);
}

// Scores go to where the rows of `scores` end.
INLINE void scores_of(int X, int W, const job *j, const group *g, group *other, int two) {
    const bf16 *q = j->s->q + g->first_row * j->padded * X;
    const int64_t block = 16 * j->padded * W;
    float *out = g->scores + SCORES_ROW(X) - STRETCH;
    for (int64_t k = g->low; k < g->high; k += UNIT) {
        const bf16 *keys = j->s->keys + k / 16 * block;
        multiply_two(X, W, q, X * j->padded, keys, keys + block, j->padded / UNIT, out + k, SCORES_ROW(X), two, j,
                     other);
    }
}

INLINE void sums_of(int X, int W, const job *j, const group *g, group *other, int two) {
    const int64_t panel = NUM_UNITS * W * UNIT_ELEMENTS;
    const bf16 *weights = (const bf16 *)g->scores + g->low * X;
    for (int64_t d = 0; d < j->padded; d += UNIT) {
        const bf16 *values = j->s->values + d / 16 * panel + g->low / UNIT * W * UNIT_ELEMENTS;
        multiply_two(X, W, weights, 2 * SCORES_ROW(X), values, values + panel, (g->high - g->low) / UNIT,
                     j->s->sums + d, j->padded, two, j, other);
    }
}

INLINE void group_scores(int X, int W, const job *j, const group *g, group *other) {
    if (g->rows > 16) scores_of(X, W, j, g, other, 1);
    else if (!j->few) scores_of(X, W, j, g, other, 0);
}

INLINE void group_sums(int X, int W, const job *j, const group *g, group *other) {
    if (g->rows > 16) sums_of(X, W, j, g, other, 1);
    else sums_of(X, W, j, g, other, 0);
}

// ---- tasks

INLINE int64_t num_groups(const job *j) { return ceil_div(j->t.item->num_rows, GROUP_ROWS); }

INLINE group group_of(const job *j, int64_t base, int64_t begin, int64_t end, int64_t index, int64_t buffer) {
    const int64_t first_row = index * GROUP_ROWS, rows = smaller(GROUP_ROWS, j->t.item->num_rows - first_row);
    const int64_t *positions = j->s->positions + first_row;
    const int64_t low = larger(begin, (first_key(positions[0], j->t.a->window) - base) / UNIT * UNIT);
    const int64_t high = smaller(end, ceil_div(positions[rows - 1] + 1 - base, UNIT) * UNIT);
    return (group){.first_row = first_row, .rows = rows, .base = base, .low = low, .high = high,
                   .scale = j->t.a->cap == 0 ? j->t.a->scale : 1, .scores = j->s->scores[buffer],
                   .parts = j->s->parts[buffer]};
}

// Add a group's parts to its results, or leave them for merge_attention.
static void add_parts(const job *j, const group *g) {
    const paged_attention_args *a = j->t.a;
    const attention_item *item = j->t.item;
    scratch *s = j->s;
    for (int64_t i = 0, r = g->first_row; i < g->rows; i++, r++) {
        const float *values = s->sums + i * j->padded;
        if (item->partial < 0) {
            merge(s->masses + r, a->out + s->offsets[r], g->parts[i], values, a->head_dim);
            continue;
        }
        float *partial = a->partials + (item->partial + r) * (a->head_dim + 2);
        memcpy(partial, g->parts + i, sizeof *g->parts);
        memcpy(partial + 2, values, a->head_dim * sizeof *values);
    }
}

// Keys begin … end of a stretch, for all rows of the tile.
INLINE void attend_rounding(const job *j, int64_t base, int64_t begin, int64_t end) {
    for (int64_t i = 0; i < num_groups(j); i++) {
        group g = group_of(j, base, begin, end, i, 0);
        group_scores(1, 1, j, &g, NULL);
        weigh(1, j, &g);
        group_sums(1, 1, j, &g, NULL);
        add_parts(j, &g);
    }
}

// The same: while a group is weighed, tiles compute the scores of the next one and the sums of the one before.
INLINE void attend_exactly(int W, const job *j, int64_t base, int64_t begin, int64_t end) {
    group groups[STAGES] = {0};
    for (int64_t i = 0; i < num_groups(j) + 2; i++) {
        group *first = groups + (i + 1) % STAGES, *second = groups + (i + 2) % STAGES, *third = groups + i % STAGES;
        if (i < num_groups(j)) {
            *third = group_of(j, base, begin, end, i, i % STAGES);
            group_scores(MAX_PARTS, W, j, third, second);
        }
        if (i >= 2) {
            group_sums(MAX_PARTS, W, j, first, second);
            add_parts(j, first);
        }
        while (second->row < second->rows) weigh_some(j, second);
    }
}

INLINE void attend(int X, int W, load_fn *load, const paged_attention_args *a, const attention_item *item) {
    scratch s;
    const int few = X == 1 && item->num_rows <= FEW;
    const job j = {tile_of(a, item), ceil_div(a->head_dim, UNIT) * UNIT, few, &s};
    for (int64_t r = 0; r < item->num_rows; r++) {
        s.positions[r] = position_of(&j.t, r);
        s.offsets[r] = offset_of(&j.t, r);
        s.masses[r] = (mass){-INFINITY, 0};
    }
    configure_tiles(item->num_rows, TILES_OF_ROWS);
    load_queries(X, &j);
    for (int64_t stretch = item->stretch; stretch < item->stretch + item->num_stretches; stretch++) {
        const int64_t base = stretch * STRETCH;
        const int64_t begin = larger(0, j.t.low - base) / UNIT * UNIT;
        const int64_t end = ceil_div(smaller(STRETCH, j.t.high - base), UNIT) * UNIT;
        load_stretch(load, &j, base, begin, end);
        if (X == 1) attend_rounding(&j, base, begin, end);
        else attend_exactly(W, &j, base, begin, end);
    }
    _tile_release();
    if (item->partial >= 0) return;
    for (int64_t r = 0; r < item->num_rows; r++) divide(a->out + s.offsets[r], s.masses[r].sum, a->head_dim);
}

EXPORT void paged_attention_bf16(const void *args, int64_t task) {
    const paged_attention_args *a = args;
    const attention_item *item = a->items + task;
    load_fn *const loads[] = {[FLOAT32] = round_float32, [BFLOAT16] = load_bfloat16, [FLOAT16] = round_float16};
    if (item->request < 0) zero_padding(a, item);
    else attend(1, 1, loads[a->cache_type], a, item);
}

EXPORT void paged_attention_parts(const void *args, int64_t task) {
    const paged_attention_args *a = args;
    const attention_item *item = a->items + task;
    if (item->request < 0 || rows_of(a->cu_seqlens_q, item->request, a->group) <= a->few_rows) {
        paged_attention(args, task);
        return;
    }
    const unsigned control = flush_denormals();
    if (a->cache_type == FLOAT32) attend(3, 3, split_float32, a, item);
    if (a->cache_type == BFLOAT16) attend(3, 1, load_bfloat16, a, item);
    if (a->cache_type == FLOAT16) attend(3, 2, split_float16, a, item);
    restore_denormals(control);
}

EXPORT int64_t has_attention_tiles(void) { return has_tiles(); }

#else

EXPORT void paged_attention_bf16(const void *args, int64_t task) { (void)args, (void)task; }
EXPORT void paged_attention_parts(const void *args, int64_t task) { (void)args, (void)task; }
EXPORT int64_t has_attention_tiles(void) { return 0; }

#endif
