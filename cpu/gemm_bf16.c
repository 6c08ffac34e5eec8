// x and weights as bfloat16, sums in float32: AMX tiles where the processor has them and the system grants them, else
// AVX-512's pairwise products; elsewhere such products are exact ones (gemm.c).
//
// x is rounded once, by a launch of its own (round_rows), into blocks [T/16][C/32][16][32]: one of the inner two is an
// A tile, and a unit of a bfloat16 panel is the B tile for it. Weights in other formats are rounded to such units, two
// panels at a time, for all rows of the task. Sums run over k in order, whatever the number of rows.

#include "gemm_blocks.h"

typedef struct {
    const float *x;  // [num_rows, depth]
    bf16 *out;       // [num_rows / 16, depth / 32, 16, 32], both rounded up, zeros where x has nothing
    int64_t num_rows, depth, stride;
} round_rows_args;
ARGS_SIZE(round_rows)

#if defined(HAS_BF16)

INLINE __m512i round_32(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

void round_block(const rows_in *x, int64_t depth, bf16 *out) {
    const int64_t units = num_units(depth);
    if (x->count < BLOCK_ROWS) memset(out, 0, units * TILE_BYTES);
    for (int64_t r = 0; r < x->count; r++) {
        const float *row = row_of(x, r);
        for (int64_t u = 0; u < units; u++, row += UNIT) {
            const int64_t left = depth - u * UNIT;
            const __mmask16 low = left >= 16 ? 0xffff : (1 << left) - 1;
            const __mmask16 high = left >= 32 ? 0xffff : left > 16 ? (1 << (left - 16)) - 1 : 0;
            const __m512i rounded = round_32(_mm512_maskz_loadu_ps(low, row), _mm512_maskz_loadu_ps(high, row + 16));
            _mm512_storeu_si512(out + (u * BLOCK_ROWS + r) * UNIT, rounded);
        }
    }
}

// A task is a block of rows.
EXPORT void round_rows(const void *args, int64_t task) {
    const round_rows_args *a = args;
    const int64_t first = task * BLOCK_ROWS, left = a->num_rows - first;
    const rows_in rows = {a->x + first * a->stride, a->stride, NULL, left < BLOCK_ROWS ? left : BLOCK_ROWS};
    round_block(&rows, a->depth, a->out + task * num_units(a->depth) * BLOCK_ROWS * UNIT);
}

// Units of a panel as bfloat16 pairs, the form of a bfloat16 panel.
INLINE void round_units(int format, const matrix *w, int64_t index, int64_t first, int64_t count, bf16 *out) {
    const panel p = panel_at(format, w, index);
    const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
            21, 5,
                                           20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    for (int64_t u = first; u < first + count; u++) {
        const uint8_t *next = p.weights + u * weight_bytes(format) + 2 * w->panel_bytes;
        for (int64_t line = 0; line < weight_bytes(format); line += 64) __builtin_prefetch(next + line);
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const scales s = load_scales(format, &p, u, half);
#pragma GCC unroll 1
            for (int i = 0; i < QUADS / 2; i++, out += 4 * PANEL) {
                vecf k[4][VECS];
                load_quad(format, &p, u, half, i, &s, k);
                for (int j = 0; j < 4; j += 2) {
                    const __m512i rounded = round_32((__m512)k[j][0], (__m512)k[j + 1][0]);
                    _mm512_store_si512(out + j * PANEL, _mm512_permutexvar_epi16(pairs, rounded));
                }
            }
        }
    }
}

#define CASE(format) \
    case format: round_units(format, w, index, first, count, out); break;

static void round_panel(const matrix *w, int64_t index, int64_t first, int64_t count, bf16 *out) {
    switch (w->format) {
        CASE(FLOAT32) CASE(FLOAT16) CASE(INT8) CASE(Q8_0) CASE(Q4_0) CASE(Q4_1) CASE(Q4_K) CASE(Q6_K)
    }
}

// R rows of a block at once, two panels.
INLINE void pair_rows(int R, const product *t, int block, int row) {
    __m512 sums[8][2], zero = _mm512_setzero_ps();
    float *place = t->sums + block * t->block_step + row * t->row_step;
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
        for (int p = 0; p < 2; p++)
            sums[r][p] = t->is_first ? zero : _mm512_loadu_ps(place + p * t->panel_step + r * t->row_step);
    const bf16 *x = (const bf16 *)t->x[block] + row * UNIT;
    const bf16 *w0 = (const bf16 *)t->w[0], *w1 = (const bf16 *)t->w[1];
    for (int64_t u = 0; u < t->units; u++, x += BLOCK_ROWS * UNIT) {
#pragma GCC unroll 1
        for (int i = 0; i < UNIT; i += 2, w0 += 2 * PANEL, w1 += 2 * PANEL) {
            const __m512bh k0 = (__m512bh)_mm512_loadu_si512(w0), k1 = (__m512bh)_mm512_loadu_si512(w1);
            __builtin_prefetch((const char *)w0 + t->ahead);
            __builtin_prefetch((const char *)w1 + t->ahead);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                int32_t pair;
                memcpy(&pair, x + r * UNIT + i, sizeof pair);
                const __m512bh value = (__m512bh)_mm512_set1_epi32(pair);
                sums[r][0] = _mm512_dpbf16_ps(sums[r][0], k0, value);
                sums[r][1] = _mm512_dpbf16_ps(sums[r][1], k1, value);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
        for (int p = 0; p < 2; p++) _mm512_storeu_ps(place + p * t->panel_step + r * t->row_step, sums[r][p]);
}

static void multiply_pairs(const product *t) {
    for (int block = 0; block < t->num_blocks; block++) {
        const int rows = block == t->num_blocks - 1 ? t->rows : BLOCK_ROWS;
        if (rows == 1) pair_rows(1, t, block, 0);
        else if (rows == 2) pair_rows(2, t, block, 0);
        else if (rows <= 4) pair_rows(4, t, block, 0);
        else for (int row = 0; row < rows; row += 8) pair_rows(8, t, block, row);
    }
}

#if defined(HAS_TILES)
static void multiply_rounded(const product *t) { multiply_tiles(1, 1, t, NULL); }
#endif

int has_bf16(void) {
#if defined(HAS_TILES)
    if (has_tiles()) return 2;
#endif
    return 1;
}

void multiply_bf16(const matrix *w, int64_t first_panel, int64_t count, const bf16 *x, int64_t rows,
        const rows_out *out) {
    const int64_t units = num_units(w->depth);
    operands o = {.x_row = UNIT * sizeof(bf16), .x_unit = TILE_BYTES, .x_block = units * TILE_BYTES,
                  .w_unit = TILE_BYTES, .piece = units, .chain = units, .run = multiply_pairs};
    if (w->format != BFLOAT16) o.prepare = round_panel, o.piece = PREPARED_BYTES / TILE_BYTES;
#if defined(HAS_TILES)
    if (has_tiles()) {
        o.run = multiply_rounded;
        configure_tiles(rows, TILES_OF_ROWS);
    }
#endif
    multiply_blocks(&o, w, first_panel, count, x, rows, out);
#if defined(HAS_TILES)
    if (o.run == multiply_rounded) _tile_release();
#endif
}

#else

EXPORT void round_rows(const void *args, int64_t task) { (void)args, (void)task; }

void round_block(const rows_in *x, int64_t depth, bf16 *out) { (void)x, (void)depth, (void)out; }

int has_bf16(void) { return 0; }

void multiply_bf16(const matrix *w, int64_t first_panel, int64_t count, const bf16 *x, int64_t rows,
        const rows_out *out) {
    (void)w, (void)first_panel, (void)count, (void)x, (void)rows, (void)out;
}

#endif
