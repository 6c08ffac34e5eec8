// Up to four rows of x, exact: weights become float32 in registers, each is read once and in order.
//
// Several panels at a time, so that one sum need not wait for the one before; sums run over k in the chains that
// multiply_many has, so that a row's result is the same whoever computes it.

#include "gemm.h"

#define GROUP (WIDTH / 4)   // panels at once
#define MAX_ROWS 4
#define BLOCK_UNITS (DEPTH_BLOCK / UNIT)

// x of one unit for each row: in place, or from a copy that zeros fill up to the unit's end.
INLINE void unit_rows(int R, const float *const *x, float tails[][UNIT], int64_t u, int64_t depth, const float **at) {
    int64_t left = depth - u * UNIT;
    for (int r = 0; r < R; r++) {
        at[r] = x[r] + u * UNIT;
        if (left < UNIT) {
            memset(tails[r], 0, sizeof tails[r]);
            memcpy(tails[r], at[r], left * sizeof(float));
            at[r] = tails[r];
        }
    }
}

// Where the unit lies, from unit u's place in its panel, that is asked for while u is computed: some units ahead, in
// the next group of panels where this one ends. Panels are short, hardware would find each group's beginning too late.
INLINE int64_t ahead(int format, const matrix *w, int64_t u, int64_t units, int64_t unit_bytes) {
    const int64_t next = u + (format == FLOAT32 ? 1 : 1536 / weight_bytes(format));
    return next < units ? next * unit_bytes : (next - units) * unit_bytes + GROUP * w->panel_bytes;
}

// Quads from 4 * half on, `count` of them, of GROUP panels.
INLINE void add_quads(int format, int R, const panel *p, int64_t u, int half, int count, const float *const *x,
        int64_t next, vecf sums[MAX_ROWS][GROUP][VECS]) {
    const int64_t bytes = weight_bytes(format) / QUADS;
    scales s[GROUP];
    for (int q = 0; q < GROUP; q++) s[q] = load_scales(format, &p[q], u, half);
#pragma GCC unroll 1
    for (int i = 0; i < count; i++) {
#pragma GCC unroll 4
        for (int q = 0; q < GROUP; q++) {
            const uint8_t *far = p[q].weights + next + (4 * half + i) * bytes;
            for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(far + at);
            vecf w[4][VECS];
            load_quad(format, &p[q], u, half, i, &s[q], w);
            for (int j = 0; j < 4; j++)
                for (int r = 0; r < R; r++)
                    for (int v = 0; v < VECS; v++) sums[r][q][v] += w[j][v] * vbroadcast(x[r][16 * half + 4 * i + j]);
        }
    }
}

INLINE void add_unit(int format, int R, const panel *p, int64_t u, const float *const *x, int64_t next,
        int64_t next_scales, vecf sums[MAX_ROWS][GROUP][VECS]) {
    if (has_scale(format))
        for (int q = 0; q < GROUP; q++) __builtin_prefetch(p[q].scales + next_scales);
    if (format < Q4_0) {
        add_quads(format, R, p, u, 0, QUADS, x, next, sums);
    } else {  // nibbles: the low ones, then the high ones
        add_quads(format, R, p, u, 0, QUADS / 2, x, next, sums);
        add_quads(format, R, p, u, 1, QUADS / 2, x, next, sums);
    }
}

// `count` of GROUP panels and `rows` of R rows; those that are missing repeat the last and are not stored.
INLINE void few(int format, int R, const matrix *w, int64_t first, int64_t count, int64_t rows, const float *const *x,
        const rows_out *out) {
    float tails[MAX_ROWS][UNIT];
    vecf totals[MAX_ROWS][GROUP][VECS] = {0};
    panel p[GROUP];
    for (int q = 0; q < GROUP; q++) p[q] = panel_at(format, w, first + (q < count ? q : count - 1));
    const int64_t units = num_units(w->depth);
    for (int64_t block = 0; block < units; block += BLOCK_UNITS) {
        vecf sums[MAX_ROWS][GROUP][VECS] = {0};
        for (int64_t u = block; u < units && u < block + BLOCK_UNITS; u++) {
            const float *at[MAX_ROWS];
            unit_rows(R, x, tails, u, w->depth, at);
            const int64_t next = ahead(format, w, u, units, weight_bytes(format));
            add_unit(format, R, p, u, at, next, ahead(format, w, u, units, scale_bytes(format)), sums);
        }
        for (int r = 0; r < R; r++)
            for (int q = 0; q < GROUP; q++)
                for (int v = 0; v < VECS; v++) totals[r][q][v] += sums[r][q][v];
    }
    for (int r = 0; r < rows; r++)
        for (int q = 0; q < count; q++) finish(w, first + q, (const float *)totals[r][q], out, r);
}

typedef void few_fn(const matrix *w, int64_t first, int64_t count, int64_t rows, const float *const *x,
        const rows_out *out);

#define KERNEL(format, R) \
    static void few_##format##_##R(const matrix *w, int64_t first, int64_t count, int64_t rows, \
            const float *const *x, const rows_out *out) { \
        few(format, R, w, first, count, rows, x, out); \
    }
#define KERNELS(format) KERNEL(format, 1) KERNEL(format, 4)
#define NAMES(format) [format] = {few_##format##_1, few_##format##_4}

KERNELS(FLOAT32)
KERNELS(BFLOAT16)
KERNELS(FLOAT16)
KERNELS(INT8)
KERNELS(Q8_0)
KERNELS(Q4_0)
KERNELS(Q4_1)
KERNELS(Q4_K)
KERNELS(Q6_K)

static few_fn *const table[NUM_FORMATS][2] = {
    NAMES(FLOAT32), NAMES(BFLOAT16), NAMES(FLOAT16), NAMES(INT8), NAMES(Q8_0),
    NAMES(Q4_0),    NAMES(Q4_1),     NAMES(Q4_K),    NAMES(Q6_K),
};

void multiply_few(const matrix *w, int64_t first_panel, int64_t count, const rows_in *x, const rows_out *out) {
    for (int64_t start = 0; start < x->count; start += MAX_ROWS) {
        const int rows = x->count - start < MAX_ROWS ? (int)(x->count - start) : MAX_ROWS;
        const float *at[MAX_ROWS];
        for (int r = 0; r < MAX_ROWS; r++) at[r] = row_of(x, start + (r < rows ? r : rows - 1));
        const rows_out part = {out->base + start * out->stride, out->stride, out->bias};
        for (int64_t done = 0; done < count; done += GROUP) {
            const int64_t panels = count - done < GROUP ? count - done : GROUP;
            table[w->format][rows > 1](w, first_panel + done, panels, rows, at, &part);
        }
    }
}
