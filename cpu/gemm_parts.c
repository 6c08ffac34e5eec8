// Exact products with weights that are floats on AMX tiles: both operands are split into bfloat16 parts (parts.h).
//
// A FLOAT16 weight takes two parts, cut off and not rounded (a part is then an upper half); BFLOAT16 is one. x is split
// once, by a launch of its own (split_rows), row after row, so that any 16 neighbours can be loaded as a tile; weights are
// split for all rows of a task, or read in place. A FLOAT32 weight takes three parts and six products, which only many
// rows repay: few are left to multiply-adds (native/gemm.py decides).
//
// A sum is made of chains of units, added in order: the same for any number of rows, by any of the three ways below. A
// long chain would cost precision.

#include "gemm_blocks.h"

#define PARTS_OF(format) ((format) == FLOAT32 ? 3 : (format) == FLOAT16 ? 2 : 1)
#define MAX_CHAIN(format) (PREPARED_BYTES / TILE_BYTES / PARTS_OF(format))  // units

typedef struct {
    const float *x;        // [num_rows, depth], rows `stride` apart
    const int32_t *index;  // [num_rows]: which of x's rows; NULL: in order
    char *out;             // [num_rows, parts_row_bytes]: units of [3][32] bf16, zeros where x has nothing
    int64_t num_rows, depth, stride, rows_per_task;
} split_rows_args;
ARGS_SIZE(split_rows)

#if defined(HAS_TILES)

int has_parts(void) { return has_tiles(); }

// Units of each chain of so many: as equal as they can be.
INLINE int64_t chain_units(int format, int64_t units) {
    const int64_t chains = (units + MAX_CHAIN(format) - 1) / MAX_CHAIN(format);
    return (units + chains - 1) / chains;
}

EXPORT void split_rows(const void *args, int64_t task) {
    const split_rows_args *a = args;
    const int64_t row_bytes = parts_row_bytes(a->depth), end = (task + 1) * a->rows_per_task;
    for (int64_t r = task * a->rows_per_task; r < end && r < a->num_rows; r++) {
        const float *x = a->x + (a->index ? a->index[r] : r) * a->stride;
        bf16 *out = (bf16 *)(a->out + r * row_bytes);
        for (int64_t left = a->depth; left > 0; left -= UNIT, x += UNIT, out += MAX_PARTS * UNIT) {
            const __mmask16 low = lanes_below(left), high = lanes_below(left - 16);
            __m512i parts[MAX_PARTS];
            split_32(MAX_PARTS, _mm512_maskz_loadu_ps(low, x), _mm512_maskz_loadu_ps(high, x + 16), parts);
            for (int i = 0; i < MAX_PARTS; i++) _mm512_storeu_si512(out + i * UNIT, parts[i]);
        }
    }
}

// The upper halves of 32-bit elements side by side, even's below.
INLINE __m512i pair_upper_halves(vecf even, vecf odd) {
    const __m512i bytes = _mm512_set4_epi32(0x0f0e0f0e, 0x0b0a0b0a, 0x07060706, 0x03020302);
    return _mm512_mask_shuffle_epi8((__m512i)odd, 0x3333333333333333, (__m512i)even, bytes);
}

// Weights k and k + 1 of a panel's outputs.
INLINE void load_pair(int format, const char *pair, vecf *even, vecf *odd) {
    if (format == FLOAT32) {
        *even = vload((const float *)pair);
        *odd = vload((const float *)pair + PANEL);
    } else if (format == FLOAT16) {
        *even = load_f16((const f16 *)pair);
        *odd = load_f16((const f16 *)pair + PANEL);
    } else {
        const vu both = *(const vu *)pair;
        *even = (vecf)(both << 16);
        *odd = (vecf)(both & 0xffff0000);
    }
}

// Some k of a unit of a panel as planes of pairs, the form of a bfloat16 panel, one for each part.
INLINE void split_weights(int format, const char *unit, int count, bf16 *out) {
#pragma GCC unroll 4
    for (int k = 0; k < count; k += 2, out += 2 * PANEL, unit += weight_bytes(format) / (UNIT / 2)) {
        vecf even, odd;
        load_pair(format, unit, &even, &odd);
        for (int i = 0; i < PARTS_OF(format); i++) {
            _mm512_store_si512(out + i * UNIT * PANEL, pair_upper_halves(even, odd));
            even = lower_half(even), odd = lower_half(odd);
        }
    }
}

// ---- up to 16 rows

#define GROUP 4  // panels at once

// Asks for quarter q of the next unit of each of GROUP panels: read evenly they come faster than one after the other.
INLINE void ask_for(const char *units, int64_t panel_bytes, int64_t bytes, int q) {
    for (int64_t line = q * bytes / GROUP; line < (q + 1) * bytes / GROUP; line += 64)
        for (int i = 0; i < GROUP; i++) __builtin_prefetch(units + i * panel_bytes + line);
}

// Tiles 0 to 3 hold sums of a panel each, 4 to 6 parts of x, 7 a part of weights.
#define TILES_OF_ROWS_OF_FEW 0x7f

// Panel q of a group: what the tiles will read of its next unit, and its products.
#define PREPARE(q) \
    if (q < count) { \
        weights[q] = unit + q * w->panel_bytes; \
        ask_for(unit + ahead, w->panel_bytes, bytes, q); \
        if (PARTS_OF(format) > 1) { \
            split_weights(format, weights[q], UNIT, planes[q]); \
            weights[q] = (const char *)planes[q]; \
        } \
    }

#define MULTIPLY(q) \
    if (q < count) { \
        if (PARTS_OF(format) > 1) { \
            tile_load(7, weights[q] + TILE_BYTES, 64); \
            tile_multiply_bf16(q, 4, 7); \
            tile_multiply_bf16(q, 5, 7); \
        } \
        tile_load(7, weights[q], 64); \
        tile_multiply_bf16(q, 5, 7); \
        tile_multiply_bf16(q, 6, 7); \
        tile_multiply_bf16(q, 4, 7); \
    }

// Adds what tile q has summed, or begins with it.
#define ADD_SUMS(q) \
    if (q < count) { \
        tile_store(q, first ? own : sums[q], PANEL * sizeof(float)); \
        for (int64_t i = 0; first && i < rows * PANEL; i += PANEL) \
            vstore(sums[q] + i, vload(sums[q] + i) + vload(own + i)); \
    }

// `count` panels of a group. The order of each sum is that of multiply_tiles. While a panel is prepared the tiles are
// at the one before: they could not load at once what has just been stored.
INLINE void few(int format, const matrix *w, int64_t index, int64_t count, const char *x, int64_t rows,
        const rows_out *out) {
    bf16 planes[GROUP][2 * UNIT * PANEL] __attribute__((aligned(64)));
    float sums[GROUP][SUMS] __attribute__((aligned(64))), own[SUMS] __attribute__((aligned(64)));
    const int64_t row_bytes = parts_row_bytes(w->depth), units = num_units(w->depth), bytes = weight_bytes(format);
    const int64_t chain = chain_units(format, units);
    const char *unit = (const char *)w->panels + index * w->panel_bytes, *weights[GROUP];
    for (int64_t first = 0; first < units; first += chain) {
        const int64_t end = units - first < chain ? units : first + chain;
        tile_zero(0);
        tile_zero(1);
        tile_zero(2);
        tile_zero(3);
        for (int64_t u = first; u < end; u++, unit += bytes, x += MAX_PARTS * 64) {
            const int64_t ahead = ahead_of(w, GROUP, (u + 1) * bytes, units * bytes);
            PREPARE(0)
            if (u > first) { MULTIPLY(3) }  // of the unit before
            tile_load(4, x, row_bytes);
            tile_load(5, x + 64, row_bytes);
            tile_load(6, x + 128, row_bytes);
            PREPARE(1)
            MULTIPLY(0)
            PREPARE(2)
            MULTIPLY(1)
            PREPARE(3)
            MULTIPLY(2)
        }
        MULTIPLY(3)
        ADD_SUMS(0)
        ADD_SUMS(1)
        ADD_SUMS(2)
        ADD_SUMS(3)
    }
    for (int64_t q = 0; q < count; q++)
        for (int64_t r = 0; r < rows; r++) finish(w, index + q, sums[q] + r * PANEL, out, r);
}

static void multiply_few_rows(const matrix *w, int64_t first_panel, int64_t count, const char *x, int64_t rows,
        const rows_out *out) {
    configure_tiles(rows, TILES_OF_ROWS_OF_FEW);
    for (int64_t p = 0; p < count; p += GROUP) {
        const int64_t index = first_panel + p, some = count - p < GROUP ? count - p : GROUP;
        if (w->format == FLOAT16) few(FLOAT16, w, index, some, x, rows, out);
        else few(BFLOAT16, w, index, some, x, rows, out);
    }
}

// ---- one row

// To sums [P] what the tiles' products of a unit of P panels and a row add, in their order: each is the sum over even k
// and that over odd k, by fused multiply-adds from zero. Asks for the same place `ahead` bytes on.
INLINE void add_unit(int format, int P, const char *unit, int64_t panel_bytes, int64_t ahead,
        const float (*x)[UNIT], vecf *sums) {
    vecf even[4][2][MAX_PARTS] = {0}, odd[4][2][MAX_PARTS] = {0};  // [panel][part of w][part of x]
    const int W = PARTS_OF(format);
    const int64_t bytes = weight_bytes(format) / (UNIT / 2);
#pragma GCC unroll 1
    for (int k = 0; k < UNIT; k += 2, unit += bytes) {
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) {
            vecf low, high;
            load_pair(format, unit + p * panel_bytes, &low, &high);
            for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(unit + p * panel_bytes + ahead + line);
#pragma GCC unroll 2
            for (int j = 0; j < W; j++) {
                const vecf low_part = j == W - 1 ? low : (vecf)((vu)low & 0xffff0000);
                const vecf high_part = j == W - 1 ? high : (vecf)((vu)high & 0xffff0000);
#pragma GCC unroll 3
                for (int i = 0; i < MAX_PARTS - j; i++) {
                    even[p][j][i] = _mm512_fmadd_ps(low_part, _mm512_set1_ps(x[i][k]), even[p][j][i]);
                    odd[p][j][i] = _mm512_fmadd_ps(high_part, _mm512_set1_ps(x[i][k + 1]), odd[p][j][i]);
                }
                low -= low_part, high -= high_part;
            }
        }
    }
#pragma GCC unroll 4
    for (int p = 0; p < P; p++)
#pragma GCC unroll 5
        for (int n = MAX_PAIRS - num_pairs(MAX_PARTS, W); n < MAX_PAIRS; n++)
            sums[p] += even[p][PAIRS[n].right][PAIRS[n].left] + odd[p][PAIRS[n].right][PAIRS[n].left];
}

// `count` panels of P by multiply-adds, which keep up with memory: a tile takes as long for one row as for 16. The bits
// are the tiles'.
INLINE void single(int format, int P, const matrix *w, int64_t index, int64_t count, const char *x,
        const rows_out *out) {
    const int64_t units = num_units(w->depth), bytes = weight_bytes(format), chain = chain_units(format, units);
    const char *unit = (const char *)w->panels + index * w->panel_bytes;
    vecf totals[4] = {0};
    for (int64_t first = 0; first < units; first += chain) {
        vecf sums[4] = {0};
        const int64_t end = units - first < chain ? units : first + chain;
        for (int64_t u = first; u < end; u++, unit += bytes, x += MAX_PARTS * 64) {
            float parts[MAX_PARTS][UNIT] __attribute__((aligned(64)));
            for (int i = 0; i < 2 * MAX_PARTS; i++) {
                const __m256i half = _mm256_loadu_si256((const __m256i *)x + i);
                vstore(parts[0] + 16 * i, (vecf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
            }
            const int64_t ahead = ahead_of(w, P, (u + 1) * bytes, units * bytes);
            const float(*rows)[UNIT] = (const float(*)[UNIT])parts;
            if (count == P) {
                add_unit(format, P, unit, w->panel_bytes, ahead, rows, sums);
            } else {
                for (int64_t p = 0; p < count; p++)
                    add_unit(format, 1, unit + p * w->panel_bytes, 0, ahead, rows, sums + p);
            }
        }
        for (int p = 0; p < P; p++) totals[p] = first ? totals[p] + sums[p] : sums[p];
    }
    for (int64_t p = 0; p < count; p++) finish(w, index + p, (const float *)&totals[p], out, 0);
}

static void multiply_single_row(const matrix *w, int64_t first_panel, int64_t count, const char *x, const rows_out *out) {
    const int64_t group = w->format == BFLOAT16 ? 4 : 2;
    for (int64_t p = 0; p < count; p += group) {
        const int64_t index = first_panel + p, some = count - p < group ? count - p : group;
        if (w->format == FLOAT16) single(FLOAT16, 2, w, index, some, x, out);
        else single(BFLOAT16, 4, w, index, some, x, out);
    }
}

// ---- more rows

INLINE void split_quarter(int format, const product *t, int panel, int64_t u, int quarter) {
    const int64_t bytes = weight_bytes(format), part = bytes / 4, start = u * bytes + quarter * part;
    const int64_t ahead = start + 2 * AHEAD, next = ahead < t->stored_left ? ahead : ahead + t->skip;
    for (int64_t line = 0; line < part; line += 64) __builtin_prefetch(t->stored[panel] + next + line);
    bf16 *out = (bf16 *)(t->w[panel] + u * t->w_unit) + quarter * UNIT / 4 * PANEL;
    split_weights(format, t->stored[panel] + start, UNIT / 4, out);
}

static inline void split_float32(const product *t, int panel, int64_t u, int quarter) {
    split_quarter(FLOAT32, t, panel, u, quarter);
}

static inline void split_float16(const product *t, int panel, int64_t u, int quarter) {
    split_quarter(FLOAT16, t, panel, u, quarter);
}

static void multiply_float32(const product *t) { multiply_tiles(MAX_PARTS, 3, t, split_float32); }
static void multiply_float16(const product *t) { multiply_tiles(MAX_PARTS, 2, t, split_float16); }
static void multiply_bfloat16(const product *t) { multiply_tiles(MAX_PARTS, 1, t, NULL); }

static void (*const runs[])(const product *t) = {
    [FLOAT32] = multiply_float32, [BFLOAT16] = multiply_bfloat16, [FLOAT16] = multiply_float16};

void multiply_parts(const matrix *w, int64_t first_panel, int64_t count, const void *x, int64_t rows,
        const rows_out *out) {
    const unsigned control = flush_denormals();
    if (w->format != FLOAT32 && rows == 1) {
        multiply_single_row(w, first_panel, count, x, out);
    } else if (w->format != FLOAT32 && rows <= BLOCK_ROWS) {
        multiply_few_rows(w, first_panel, count, x, rows, out);
        _tile_release();
    } else {
        const int64_t row_bytes = parts_row_bytes(w->depth);
        const int64_t chain = chain_units((int)w->format, num_units(w->depth));
        const operands o = {.x_row = row_bytes, .x_unit = MAX_PARTS * 64, .x_block = BLOCK_ROWS * row_bytes,
                            .w_unit = PARTS_OF(w->format) * TILE_BYTES, .piece = chain, .chain = chain,
                            .run = runs[w->format], .splits = PARTS_OF(w->format) > 1};
        configure_tiles(BLOCK_ROWS, TILES_OF_ROWS);
        multiply_blocks(&o, w, first_panel, count, x, rows, out);
        _tile_release();
    }
    restore_denormals(control);
}

#else

int has_parts(void) { return 0; }

EXPORT void split_rows(const void *args, int64_t task) { (void)args, (void)task; }

void multiply_parts(const matrix *w, int64_t first_panel, int64_t count, const void *x, int64_t rows,
        const rows_out *out) {
    (void)w, (void)first_panel, (void)count, (void)x, (void)rows, (void)out;
}

#endif
