// Products of rows of x with a range of panels, for kernels that bring their own tasks (gemm.c, the experts).

#ifndef LEAN_GEMM_H
#define LEAN_GEMM_H

#include "matrix.h"

#define DEPTH_BLOCK 128  // k summed in one chain; the chains' results are added in order, for any number of rows

// How x enters a product: as float32, rounded to bfloat16, as 24-bit integers in digits, as a sum of bfloat16 numbers.
enum { EXACT, BF16, DIGITS, PARTS };

// Matrices below each other, each in a format of its own: one begins at output `first` of all.
typedef struct {
    matrix w;
    int64_t first;
} gemm_part;

// Row r of x is base + (index ? index[r] : r) * stride, `depth` floats.
typedef struct {
    const float *base;
    int64_t stride;
    const int32_t *index;
    int64_t count;
} rows_in;

// Row r of out is base + r * stride; output o of the matrix is its element o.
typedef struct {
    float *base;
    int64_t stride;
    const float *bias;  // [num_outputs] or NULL
} rows_out;

INLINE const float *row_of(const rows_in *x, int64_t r) { return x->base + (x->index ? x->index[r] : r) * x->stride; }

INLINE rows_in rows_from(const rows_in *x, int64_t start, int64_t count) {
    rows_in part = *x;
    if (x->index) part.index += start;
    else part.base += start * x->stride;
    part.count = count;
    return part;
}

// out[:, panels] = x . W[panels]^T + bias, for any number of rows. Writes columns of the panels that the matrix has,
// and nothing else. Exact sums have the same order whatever the number of rows. Mode BF16 rounds x where that is faster
// and it fits the stack: more than 4 rows of at most 1024; all else is exact.
void multiply(const matrix *w, int64_t first_panel, int64_t count, const rows_in *x, const rows_out *out, int64_t mode);

// The exact ones: a row of a product is the same by either.
void multiply_few(const matrix *w, int64_t first_panel, int64_t count, const rows_in *x, const rows_out *out);
void multiply_many(const matrix *w, int64_t first_panel, int64_t count, const rows_in *x, const rows_out *out);

// The same product of x as round_rows has left it, from a row on that is a multiple of 16. Where has_... says 0 the build
// or the machine lacks the instructions; 2 are AMX tiles.
int has_bf16(void);
int has_digits(void);
int has_parts(void);
// Up to 16 rows as round_rows leaves them.
void round_block(const rows_in *x, int64_t depth, bf16 *out);

void multiply_bf16(const matrix *w, int64_t first_panel, int64_t count, const bf16 *x, int64_t rows,
        const rows_out *out);

// Bytes of a row as split_rows leaves it: an odd number of cache lines, so that neighbours do not share a cache set.
INLINE int64_t parts_row_bytes(int64_t depth) { return (3 * num_units(depth) | 1) * 64; }

// The exact product of x as split_rows has left it, from any row on, and weights that are floats. Rows beyond the last
// are read, up to a multiple of 16. Numbers and products below 2^-126 count as zero, and numbers below 2^-110
// lose precision, as their last part does. Infinite x or weights make their sums infinite or NaN.
void multiply_parts(const matrix *w, int64_t first_panel, int64_t count, const void *x, int64_t rows,
        const rows_out *out);

// Bytes of a row as digit_rows leaves it: an odd number of cache lines too.
INLINE int64_t digits_row_bytes(int64_t depth) { return ((depth + 255) / 256 * 16 | 1) * 64; }

// The exact product of x as digit_rows has left it, from any row on, and weights that are integers with scales. Rows
// beyond the last are read, up to a multiple of 16. An x that is not finite makes its row NaN.
void multiply_digits(const matrix *w, int64_t first_panel, int64_t count, const void *x, int64_t rows,
        const rows_out *out);

#define AHEAD 2048  // bytes of weights that are asked for before they are needed

// From a place up to `end` of `bytes` of weights of each of some panels: how far on those lie that come AHEAD bytes
// later, in the next panels where these end.
INLINE int64_t ahead_of(const matrix *w, int64_t panels, int64_t end, int64_t bytes) {
    return AHEAD + (end + AHEAD <= bytes ? 0 : (panels - 1) * w->panel_bytes);
}

// Weights of a panel as a float32 tile: units [first_unit, first_unit + count), [32 * count][16].
void expand_panel(const matrix *w, int64_t index, int64_t first_unit, int64_t count, float *tile);

// Sums of one row and panel, scaled, with bias, to their place.
INLINE void finish(const matrix *w, int64_t index, const float *sums, const rows_out *out, int64_t row) {
    const int64_t first = index * PANEL;
    const int64_t count = w->num_outputs - first < PANEL ? w->num_outputs - first : PANEL;
    float *place = out->base + row * out->stride + first;
    float partial[PANEL] = {0};
    const float *bias = partial;
    if (out->bias && count == PANEL) bias = out->bias + first;
    else if (out->bias) memcpy(partial, out->bias + first, count * sizeof(float));
    vecf values[VECS];
    for (int v = 0; v < VECS; v++) {
        vecf scale = w->scales ? vload(w->scales + first + WIDTH * v) : vbroadcast(1.0f);
        values[v] = vload(sums + WIDTH * v) * scale + vload(bias + WIDTH * v);
    }
    if (count == PANEL) {
        for (int v = 0; v < VECS; v++) vstore(place + WIDTH * v, values[v]);
    } else {
        memcpy(partial, values, sizeof partial);
        memcpy(place, partial, count * sizeof(float));
    }
}

#endif
