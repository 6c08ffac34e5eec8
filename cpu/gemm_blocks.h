// What products of bfloat16 numbers share (gemm_bf16.c, gemm_parts.c): up to two blocks of 16 rows times two panels at
// a time, and how AMX tiles multiply them.

#ifndef LEAN_GEMM_BLOCKS_H
#define LEAN_GEMM_BLOCKS_H

#include "gemm.h"
#include "parts.h"

#define BLOCK_ROWS 16
#define MAX_BLOCKS 16          // that share prepared weights
#define TILE_BYTES 1024        // of a unit of one block or panel
#define PREPARED_BYTES 24576   // of weights of one panel at a time
#define SUMS 256               // of a block and panel

#if defined(HAS_AVX512) && defined(__AVX512BF16__)
#define HAS_BF16 1
#endif

// What one call of `run` reads and writes. Sums of row r of block b and panel p are at sums + b * block_step + r *
// row_step + p * panel_step, and go to `out`, which has steps of its own.
typedef struct {
    const char *x[2], *w[2];
    const char *stored[2];          // NULL, or the weights that `run` has to split into w first
    int64_t stored_left, skip;      // bytes to the end of their panels; from there on those that come next lie `skip` away
    int64_t x_row, x_unit, w_unit;  // bytes from one to the next
    float *sums;
    int64_t block_step, row_step, panel_step;
    int64_t units, ahead;  // weights `ahead` bytes on are asked for; 0 = none
    int num_blocks, rows, is_first;  // rows: of the last block
} product;

// How a kind of product reads its operands.
typedef struct {
    int64_t x_row, x_unit, x_block;  // bytes from one to the next
    int64_t w_unit;                  // bytes of a unit of weights as `run` reads it
    int64_t piece;                   // units of a run; prepared ones take PREPARED_BYTES at most
    int64_t chain;                   // units that are summed in one chain; the chains' sums are then added, in order
    void (*prepare)(const matrix *w, int64_t index, int64_t first, int64_t count, bf16 *out);  // NULL: panels as stored
    void (*run)(const product *t);
    int splits;  // `run` does so with the first blocks' weights
} operands;

void multiply_blocks(const operands *o, const matrix *w, int64_t first_panel, int64_t count, const void *x,
        int64_t rows, const rows_out *out);

#if defined(HAS_TILES)

// Tiles 0..3 hold sums, 4 and 5 rows, 6 and 7 panels.
#define TILES_OF_ROWS 0x3f

INLINE void load_sums(const product *t, int two) {
    const float *s0 = t->sums, *s2 = s0 + t->block_step;
    const int64_t step = t->row_step * (int64_t)sizeof(float);
    tile_load(0, s0, step);
    tile_load(1, s0 + t->panel_step, step);
    if (two) tile_load(2, s2, step);
    if (two) tile_load(3, s2 + t->panel_step, step);
}

INLINE void store_sums(const product *t, int two) {
    float *s0 = t->sums, *s2 = s0 + t->block_step;
    const int64_t step = t->row_step * (int64_t)sizeof(float);
    tile_store(0, s0, step);
    tile_store(1, s0 + t->panel_step, step);
    if (two) tile_store(2, s2, step);
    if (two) tile_store(3, s2 + t->panel_step, step);
}

INLINE void prefetch_units(const char *w0, const char *w1) {
    for (int64_t line = 0; line < TILE_BYTES; line += 64) {
        __builtin_prefetch(w0 + line);
        __builtin_prefetch(w1 + line);
    }
}

// A quarter of a unit of a panel: of the unit's k.
typedef void split_fn(const product *t, int panel, int64_t unit, int quarter);

#define SPLITS 8       // of a unit, of two panels
#define SPLIT_AHEAD 2  // units: tiles cannot load at once what has just been stored

// x and weights are sums of X and W parts (parts.h), each smaller than the one before by a factor of 2^7 at least.
//
// Weights that are to be split are so by `split`, some units ahead of the tiles, which work meanwhile: a share beside
// the products of each pair of parts.
INLINE void multiply_tiles_of(int X, int W, int two, const product *t, split_fn *split) {
    tile_zero(0);
    tile_zero(1);
    if (two) tile_zero(2);
    if (two) tile_zero(3);
    if (!t->is_first) load_sums(t, two);
    const char *x0 = t->x[0], *x1 = t->x[1], *w0 = t->w[0], *w1 = t->w[1];
    const int splits = split && t->stored[0], first = MAX_PAIRS - num_pairs(X, W);
    for (int64_t u = 0; splits && u < SPLIT_AHEAD && u < t->units; u++)
        for (int s = 0; s < SPLITS; s++) split(t, s % 2, u, s / 2);
    for (int64_t u = 0; u < t->units; u++) {
        if (t->ahead) prefetch_units(w0 + t->ahead, w1 + t->ahead);
#pragma GCC unroll 6
        for (int n = first, s = 0; n < MAX_PAIRS; n++) {
            const int i = PAIRS[n].left, j = PAIRS[n].right;
            if (n == first || j != PAIRS[n - 1].right) {
                tile_load(6, w0 + j * TILE_BYTES, 64);
                tile_load(7, w1 + j * TILE_BYTES, 64);
            }
            if (n == first || i != PAIRS[n - 1].left) tile_load(4, x0 + i * 64, t->x_row);
            tile_multiply_bf16(0, 4, 6);
            tile_multiply_bf16(1, 4, 7);
            if (two) {
                if (n == first || i != PAIRS[n - 1].left) tile_load(5, x1 + i * 64, t->x_row);
                tile_multiply_bf16(2, 5, 6);
                tile_multiply_bf16(3, 5, 7);
            }
            for (; splits && u + SPLIT_AHEAD < t->units && s < SPLITS * (n + 1 - first) / (MAX_PAIRS - first); s++)
                split(t, s % 2, u + SPLIT_AHEAD, s / 2);
        }
        x0 += t->x_unit, x1 += t->x_unit, w0 += t->w_unit, w1 += t->w_unit;
    }
    store_sums(t, two);
}

INLINE void multiply_tiles(int X, int W, const product *t, split_fn *split) {
    if (t->num_blocks == 2) multiply_tiles_of(X, W, 1, t, split);
    else multiply_tiles_of(X, W, 0, t, split);
}

#endif
#endif
