// paged_attention with bfloat16 products on AMX tiles: queries, keys, values and weights are rounded to bfloat16; scores,
// exponentials and sums are float32. It follows the same plan as attention.c, with larger tiles.
//
// For each stretch a tile puts the keys and values that its rows see into the form of a right operand, once; its rows
// then pass, GROUP_ROWS at a time: scores, weights, weighted sums of values. A tile of few rows makes the queries the
// right operand and takes keys as they lie, which gives the same scores turned. A row's weights are relative to the
// stretch's own maximum, and what they sum to is the sum of the rounded ones.
//
// All requests take this way, whatever their number of rows: here too a row's result depends on its own query, keys and
// values only, to the last bit. Keys that no row of a tile sees are never read.

#include "tiles.h"

#if defined(HAS_TILES)

#include "attention_keys.h"
#include "vector_math.h"

#define GROUP_ROWS 32
#define FEW 16             // rows
#define TILES_OF_ROWS 0x13 // 0 and 1: sums; 4: rows
#define UNIT 32            // elements of a sum that a tile holds
#define UNIT_ELEMENTS 512  // of 16 rows or columns
#define NUM_UNITS (STRETCH / UNIT)
#define AHEAD 4            // strips

// Scratch of a task. `padded` is head_dim up to whole units.
typedef struct {
    _Alignas(64) bf16 q[BF16_TILE_ELEMENTS];               // [row][padded]; of few rows: [padded / 2][16 rows][2]
    _Alignas(64) bf16 keys[STRETCH * MAX_HEAD_DIM];        // [strip][padded / 2][16 keys][2]
    _Alignas(64) bf16 values[STRETCH * MAX_HEAD_DIM];      // [padded / 16][NUM_UNITS][16 pairs][16 dims][2]
    _Alignas(64) float scores[GROUP_ROWS * STRETCH];       // [row][key]; weights [key] take the place of a row
    _Alignas(64) float sums[GROUP_ROWS * MAX_HEAD_DIM];    // [row][padded]
    _Alignas(64) char spare[WIDTH * MAX_HEAD_DIM * 4];     // a strip of the cache
    _Alignas(64) bf16 rounded[WIDTH * MAX_HEAD_DIM];       // a strip of keys, or few queries: [16][padded]
    _Alignas(64) float turned[WIDTH * FEW];                // scores of a strip: [key][row]
    int64_t positions[BF16_TILE], offsets[BF16_TILE];      // of each row, offsets in q and out
    mass masses[BF16_TILE], parts[GROUP_ROWS];
} scratch;

typedef struct {
    tile t;
    int64_t padded, few;
    scratch *s;
} job;

// ---- operands

INLINE __m512i round_32(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }
INLINE __mmask16 lanes_below(int64_t count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : (1 << count) - 1; }

// Elements i … i + 15 of a row, zeros behind its end.
INLINE __m512 load_16(const char *row, int64_t i, int64_t dim, int type) {
    if (type == FLOAT32) return _mm512_maskz_loadu_ps(lanes_below(dim - i), (const float *)row + i);
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes_below(dim - i), (const f16 *)row + i));
}

// 16 elements of a row, and 16 of the same or another one, as bfloat16.
INLINE __m512i load_32(const char *row, int64_t i, const char *other, int64_t j, int64_t dim, int type) {
    if (type != BFLOAT16) return round_32(load_16(row, i, dim, type), load_16(other, j, dim, type));
    const __m256i low = _mm256_maskz_loadu_epi16(lanes_below(dim - i), (const bf16 *)row + i);
    const __m256i high = _mm256_maskz_loadu_epi16(lanes_below(dim - j), (const bf16 *)other + j);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

INLINE void round_row(const char *row, int64_t dim, int64_t padded, int type, bf16 *to) {
    for (int64_t d = 0; d < padded; d += UNIT) _mm512_store_si512(to + d, load_32(row, d, row, d + 16, dim, type));
}

// 16 rows, their pairs of elements side by side.
INLINE void turn_pairs(const bf16 *rows, int64_t stride, int64_t padded, bf16 *to) {
    __m512i x[4];
    for (int64_t d = 0; d < padded; d += 8, to += 8 * WIDTH) {
        turn_16_bytes((const char *)(rows + d), stride * (int64_t)sizeof *rows, x);
        UNROLL for (int i = 0; i < 4; i++) _mm512_store_si512(to + i * 2 * WIDTH, x[i]);
    }
}

static void load_queries(const job *j) {
    const paged_attention_args *a = j->t.a;
    scratch *s = j->s;
    bf16 *to = j->few ? s->rounded : s->q;
    for (int64_t r = 0; r < j->t.item->num_rows; r++, to += j->padded)
        round_row((const char *)(a->q + s->offsets[r]), a->head_dim, j->padded, FLOAT32, to);
    if (!j->few) return;
    memset(to, 0, (FEW - j->t.item->num_rows) * j->padded * sizeof *to);
    turn_pairs(s->rounded, j->padded, j->padded, s->q);
}

// Neighbouring keys' values side by side. Meanwhile ask for the strips at next_keys and next_values: a step asks for as
// many bytes of each as it reads.
INLINE void pair_values(const char *rows, const char *next_keys, const char *next_values, int64_t dim, int64_t padded,
                        int type, bf16 *to) {
    const int64_t bytes = dim * kv_bytes(type), step = UNIT * kv_bytes(type);
    const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    for (int64_t d = 0; d < padded; d += 16, to += NUM_UNITS * UNIT_ELEMENTS)
        UNROLL for (int i = 0; i < WIDTH / 2; i++) {
            const char *row = rows + 2 * i * bytes;
            for (int64_t line = 0; line < step; line += 64) {
                __builtin_prefetch(next_keys + line, 0, 2);
                __builtin_prefetch(next_values + line, 0, 2);
            }
            next_keys += step, next_values += step;
            const __m512i x = load_32(row, d, row + bytes, d, dim, type);
            _mm512_store_si512(to + i * 2 * WIDTH, _mm512_permutexvar_epi16(pairs, x));
        }
}

// A strip of keys as bfloat16, `*stride` elements from one to the next: as they lie in the cache, or rounded.
INLINE const bf16 *keys_of(const char *rows, int64_t dim, int64_t padded, int type, bf16 *rounded, int64_t *stride) {
    *stride = padded;
    if (type == BFLOAT16 && dim == padded) return (const bf16 *)rows;
    for (int64_t i = 0; i < WIDTH; i++)
        round_row(rows + i * dim * kv_bytes(type), dim, padded, type, rounded + i * padded);
    return rounded;
}

// Scores of few rows for a strip of keys.
INLINE void few_scores(const job *j, const bf16 *keys, int64_t stride, float *scores) {
    scratch *s = j->s;
    __m512i x[4];
    _tile_zero(2);
    for (int64_t d = 0; d < j->padded; d += UNIT) {
        _tile_loadd(3, keys + d, stride * sizeof *keys);
        _tile_loadd(5, s->q + d * WIDTH, 64);
        _tile_dpbf16ps(2, 3, 5);
    }
    _tile_stored(2, s->turned, 64);
    for (int64_t r = 0; r < j->t.item->num_rows; r += 4) {
        turn_16_bytes((const char *)(s->turned + r), 64, x);
        UNROLL for (int i = 0; i < 4; i++) _mm512_store_si512(scores + (r + i) * STRETCH, x[i]);
    }
}

INLINE void load_strip(const job *j, int64_t k, const char *keys, const char *values, int64_t next, int type) {
    const int64_t dim = j->t.a->head_dim, padded = j->padded;
    scratch *s = j->s;
    int64_t stride;
    if (keys) {
        const bf16 *rows = keys_of(keys, dim, padded, type, s->rounded, &stride);
        if (j->few) few_scores(j, rows, stride, s->scores + k);
        else turn_pairs(rows, stride, padded, s->keys + k * padded);
    }
    if (!values) return;
    pair_values(values, (const char *)j->t.a->k_cache + next, (const char *)j->t.a->v_cache + next, dim, padded, type,
                s->values + k / UNIT * UNIT_ELEMENTS + k % UNIT * WIDTH);
}

#define LOAD(TYPE) \
    if (j->t.a->cache_type == TYPE) load_strip(j, k, keys, values, next, TYPE)
static __attribute__((noinline)) void load_strip_of_type(const job *j, int64_t k, const char *keys,
                                                         const char *values, int64_t next) {
    LOAD(FLOAT32);
    LOAD(BFLOAT16);
    LOAD(FLOAT16);
}

// Keys and values begin … end, whole units, of the stretch that starts at key `base`.
static void load_stretch(const job *j, int64_t base, int64_t begin, int64_t end) {
    const char *k_cache = j->t.a->k_cache, *v_cache = j->t.a->v_cache;
    char *spare = j->s->spare;
    strips where;
    find_strips(&j->t, base, begin, end, &where);
    for (int64_t k = begin; k < end; k += WIDTH) {
        const int64_t at = where.at[k / WIDTH], next = larger(where.at[k / WIDTH + AHEAD], 0);
        if (at != APART) {
            load_strip_of_type(j, k, k_cache + at, v_cache + at, next);
            continue;
        }
        copy_strip(&j->t, k_cache, base + k, spare);
        load_strip_of_type(j, k, spare, NULL, next);
        copy_strip(&j->t, v_cache, base + k, spare);
        load_strip_of_type(j, k, NULL, spare, next);
    }
}

// ---- products: one or two blocks of rows times two right operands

// out [rows][32] = the rows of x, which are x_stride elements long, times `units` tiles of each operand.
INLINE void multiply_two(const bf16 *x, int64_t x_stride, const bf16 *first, const bf16 *second, int64_t units,
                         float *out, int64_t out_stride, int two) {
    const int64_t x_bytes = x_stride * (int64_t)sizeof *x, out_bytes = out_stride * (int64_t)sizeof *out;
    const bf16 *low = x + 16 * x_stride;
    float *low_out = out + 16 * out_stride;
    _tile_zero(0);
    _tile_zero(1);
    if (two) _tile_zero(2);
    if (two) _tile_zero(3);
    for (int64_t u = 0; u < units; u++) {
        _tile_loadd(6, first + u * UNIT_ELEMENTS, 64);
        _tile_loadd(4, x + u * UNIT, x_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, second + u * UNIT_ELEMENTS, 64);
        _tile_dpbf16ps(1, 4, 7);
        if (two) {
            _tile_loadd(5, low + u * UNIT, x_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, out, out_bytes);
    _tile_stored(1, out + 16, out_bytes);
    if (two) _tile_stored(2, low_out, out_bytes);
    if (two) _tile_stored(3, low_out + 16, out_bytes);
}

INLINE void group_scores(const bf16 *q, int64_t padded, int64_t begin, int64_t end, scratch *s, int two) {
    for (int64_t k = begin; k < end; k += UNIT) {
        const bf16 *keys = s->keys + k * padded;
        multiply_two(q, padded, keys, keys + 16 * padded, padded / UNIT, s->scores + k, STRETCH, two);
    }
}

INLINE void group_sums(int64_t padded, int64_t begin, int64_t end, scratch *s, int two) {
    const int64_t panel = NUM_UNITS * UNIT_ELEMENTS, skip = begin / UNIT * UNIT_ELEMENTS;
    for (int64_t d = 0; d < padded; d += UNIT) {
        const bf16 *values = s->values + d / 16 * panel + skip;
        multiply_two((const bf16 *)s->scores + begin, 2 * STRETCH, values, values + panel, (end - begin) / UNIT,
                     s->sums + d, padded, two);
    }
}

// ---- weights

// 2^(x·scale - shift), within 2^-13 of itself: a minimax polynomial of 2^r, 0 <= r < 1, times a whole power.
INLINE __m512 power(__m512 x, __m512 scale, __m512 shift) {
    x = _mm512_fmsub_ps(x, scale, shift);
    const __m512 r = _mm512_reduce_ps(x, 1);  // x - floor(x)
    __m512 p = _mm512_fmadd_ps(r, _mm512_set1_ps(0.0780245371f), _mm512_set1_ps(0.226067199f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.695833489f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.999925228f));
    return _mm512_scalef_ps(p, x);
}

// Write `value` from begin to end, which are in one unit.
INLINE void fill(float *scores, int64_t begin, int64_t end, float value) {
    for (int64_t i = begin; i < end; i++) scores[i] = value;
}

INLINE void clear(bf16 *weights, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += UNIT) _mm512_store_si512(weights + i, _mm512_setzero_si512());
}

// Scores of a row → weights in their place, 0 where it does not see a key between begin and end.
INLINE mass weigh(float *scores, int64_t first, int64_t last, int64_t begin, int64_t end, float scale, float cap) {
    const int64_t low = first / UNIT * UNIT, high = ceil_div(last, UNIT) * UNIT;
    bf16 *weights = (bf16 *)scores;
    if (first >= last) {
        clear(weights, begin, end);
        return (mass){-INFINITY, 0};
    }
    if (cap != 0) {
        for (int64_t i = low; i < high; i += WIDTH) vstore(scores + i, cap * vtanh(vload(scores + i) * scale));
        scale = 1;
    }
    fill(scores, low, first, -INFINITY);
    fill(scores, last, high, -INFINITY);
    __m512 most = _mm512_set1_ps(-INFINITY), other = most;
    for (int64_t i = low; i < high; i += UNIT) {
        most = _mm512_max_ps(_mm512_load_ps(scores + i), most);
        other = _mm512_max_ps(_mm512_load_ps(scores + i + 16), other);
    }
    const float maximum = _mm512_reduce_max_ps(_mm512_max_ps(most, other)) * scale;
    const __m512 factor = _mm512_set1_ps(scale), shift = _mm512_set1_ps(maximum);
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    __m512 total = _mm512_setzero_ps();
    for (int64_t i = low; i < high; i += UNIT) {
        const __m512i x = round_32(power(_mm512_load_ps(scores + i), factor, shift),
                                   power(_mm512_load_ps(scores + i + 16), factor, shift));
        total = _mm512_dpbf16_ps(total, (__m512bh)x, ones);
        _mm512_store_si512(weights + i, x);
    }
    clear(weights, begin, low);
    clear(weights, high, end);
    return (mass){maximum, vsum((vecf)total)};
}

// ---- tasks

// What the rows from first_row on, a group, see of keys begin … end of a stretch: s->parts and s->sums.
INLINE void group_parts(const job *j, int64_t base, int64_t begin, int64_t end, int64_t first_row, int64_t rows) {
    const paged_attention_args *a = j->t.a;
    const int64_t padded = j->padded, *positions = j->s->positions + first_row;
    scratch *s = j->s;
    const int64_t low = larger(begin, (first_key(positions[0], a->window) - base) / UNIT * UNIT);
    const int64_t high = smaller(end, ceil_div(positions[rows - 1] + 1 - base, UNIT) * UNIT);
    const bf16 *q = s->q + first_row * padded;
    if (low >= high) {
        for (int64_t r = 0; r < rows; r++) s->parts[r] = (mass){-INFINITY, 0};
        return;
    }
    if (rows > 16) group_scores(q, padded, low, high, s, 1);
    else if (!j->few) group_scores(q, padded, low, high, s, 0);
    for (int64_t r = 0; r < rows; r++) {
        const int64_t first = larger(low, first_key(positions[r], a->window) - base);
        const int64_t last = smaller(high, positions[r] + 1 - base);
        s->parts[r] = weigh(s->scores + r * STRETCH, first, last, low, high, a->scale, a->cap);
    }
    if (rows > 16) group_sums(padded, low, high, s, 1);
    else group_sums(padded, low, high, s, 0);
}

// Add the group's parts to its results, or leave them for merge_attention.
INLINE void add_parts(const job *j, int64_t first_row, int64_t rows) {
    const paged_attention_args *a = j->t.a;
    const attention_item *item = j->t.item;
    scratch *s = j->s;
    for (int64_t r = 0; r < rows; r++) {
        const float *values = s->sums + r * j->padded;
        if (item->partial < 0) {
            merge(s->masses + first_row + r, a->out + s->offsets[first_row + r], s->parts[r], values, a->head_dim);
            continue;
        }
        float *partial = a->partials + (item->partial + first_row + r) * (a->head_dim + 2);
        memcpy(partial, s->parts + r, sizeof *s->parts);
        memcpy(partial + 2, values, a->head_dim * sizeof *values);
    }
}

EXPORT void paged_attention_bf16(const void *args, int64_t task) {
    const paged_attention_args *a = args;
    const attention_item *item = a->items + task;
    if (item->request < 0) {
        zero_padding(a, item);
        return;
    }
    scratch s;
    const job j = {tile_of(a, item), ceil_div(a->head_dim, UNIT) * UNIT, item->num_rows <= FEW, &s};
    for (int64_t r = 0; r < item->num_rows; r++) {
        s.positions[r] = position_of(&j.t, r);
        s.offsets[r] = offset_of(&j.t, r);
        s.masses[r] = (mass){-INFINITY, 0};
    }
    configure_tiles(item->num_rows, TILES_OF_ROWS);
    load_queries(&j);
    for (int64_t stretch = item->stretch; stretch < item->stretch + item->num_stretches; stretch++) {
        const int64_t base = stretch * STRETCH;
        const int64_t begin = larger(0, j.t.low - base) / UNIT * UNIT;
        const int64_t end = ceil_div(smaller(STRETCH, j.t.high - base), UNIT) * UNIT;
        load_stretch(&j, base, begin, end);
        for (int64_t r = 0; r < item->num_rows; r += GROUP_ROWS) {
            group_parts(&j, base, begin, end, r, smaller(GROUP_ROWS, item->num_rows - r));
            add_parts(&j, r, smaller(GROUP_ROWS, item->num_rows - r));
        }
    }
    _tile_release();
    if (item->partial >= 0) return;
    for (int64_t r = 0; r < item->num_rows; r++) divide(a->out + s.offsets[r], s.masses[r].sum, a->head_dim);
}

EXPORT int64_t has_attention_bf16(void) { return has_tiles(); }

#else

EXPORT void paged_attention_bf16(const void *args, int64_t task) { (void)args, (void)task; }
EXPORT int64_t has_attention_bf16(void) { return 0; }

#endif
