// More rows of x, exact: weights become float32 tiles in the first-level cache, which a register-tiled product reads.
//
// A block of at most 64 rows times 8 panels: for each 128 k, x is copied together, each pair of panels is expanded (or
// read in place where it is float32), and groups of rows are multiplied with it, their sums in registers.

#include "gemm.h"

#if defined(HAS_AVX512)
#define TILE_ROWS 14   // of a register tile: 28 sums of 32 registers
#define TILE_PANELS 2
#elif defined(HAS_AVX2)
#define TILE_ROWS 6
#define TILE_PANELS 1
#else
#define TILE_ROWS 3
#define TILE_PANELS 1
#endif
#define BLOCK_ROWS 64
#define BLOCK_PANELS 8

// Packed weights that come next: while products run they are asked for, evenly.
typedef struct {
    const uint8_t *panels[TILE_PANELS];
    int64_t step;  // bytes per k of the running product
} coming;

// sums[r, panel] (+)= x[r, :depth] . w[panel]; x rows lie DEPTH_BLOCK apart, sums' rows BLOCK_PANELS panels.
INLINE void tile(int R, int P, const float *x, const float *const *w, float *sums, int64_t depth, int is_first,
        const coming *next) {
    vecf total[TILE_ROWS][TILE_PANELS][VECS];
#pragma GCC unroll 14
    for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++)
            for (int v = 0; v < VECS; v++) total[r][p][v] = (vecf){0};
    const float *w0 = w[0], *w1 = w[P - 1];
    const uint8_t *next0 = next->panels[0], *next1 = next->panels[P - 1];
    const int64_t step = next->step;
    for (int64_t k = 0; k < depth; k++) {
        vecf now[TILE_PANELS][VECS];
        __builtin_prefetch(next0 + k * step);
        if (P == 2) __builtin_prefetch(next1 + k * step);
        for (int v = 0; v < VECS; v++) {
            now[0][v] = vload(w0 + PANEL * k + WIDTH * v);
            if (P == 2) now[P - 1][v] = vload(w1 + PANEL * k + WIDTH * v);
        }
#pragma GCC unroll 14
        for (int r = 0; r < R; r++) {
            vecf value = vbroadcast(x[r * DEPTH_BLOCK + k]);
            for (int p = 0; p < P; p++)
                for (int v = 0; v < VECS; v++) total[r][p][v] += now[p][v] * value;
        }
    }
#pragma GCC unroll 14
    for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++)
            for (int v = 0; v < VECS; v++) {
                float *place = sums + (r * BLOCK_PANELS + p) * PANEL + WIDTH * v;
                vstore(place, is_first ? total[r][p][v] : vload(place) + total[r][p][v]);
            }
}

typedef void tile_fn(const float *x, const float *const *w, float *sums, int64_t depth, int is_first,
        const coming *next);

#define TILE(R, P) \
    static void tile_##R##_##P(const float *x, const float *const *w, float *sums, int64_t depth, int is_first, \
            const coming *next) { \
        tile(R, P, x, w, sums, depth, is_first, next); \
    }
#if TILE_PANELS == 2
#define TILES(R) TILE(R, 1) TILE(R, 2)
#define NAMES(R) {tile_##R##_1, tile_##R##_2}
#else
#define TILES(R) TILE(R, 1)
#define NAMES(R) {tile_##R##_1}
#endif

TILES(1) TILES(2) TILES(3)
#if TILE_ROWS > 3
TILES(4) TILES(5) TILES(6)
#endif
#if TILE_ROWS > 6
TILES(7) TILES(8) TILES(9) TILES(10) TILES(11) TILES(12) TILES(13) TILES(14)
#endif

static tile_fn *const tiles[TILE_ROWS][TILE_PANELS] = {
    NAMES(1), NAMES(2), NAMES(3),
#if TILE_ROWS > 3
    NAMES(4), NAMES(5), NAMES(6),
#endif
#if TILE_ROWS > 6
    NAMES(7), NAMES(8), NAMES(9), NAMES(10), NAMES(11), NAMES(12), NAMES(13), NAMES(14),
#endif
};

INLINE void expand(int format, const matrix *w, int64_t index, int64_t first_unit, int64_t count, float *tile) {
    const panel p = panel_at(format, w, index);
    for (int64_t u = first_unit; u < first_unit + count; u++) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const scales s = load_scales(format, &p, u, half);
#pragma GCC unroll 1
            for (int i = 0; i < QUADS / 2; i++) {
                vecf quad[4][VECS];
                load_quad(format, &p, u, half, i, &s, quad);
                for (int j = 0; j < 4; j++)
                    for (int v = 0; v < VECS; v++) vstore(tile + PANEL * j + WIDTH * v, quad[j][v]);
                tile += 4 * PANEL;
            }
        }
    }
}

#define CASE(format) \
    case format: expand(format, w, index, first_unit, count, tile); break;

void expand_panel(const matrix *w, int64_t index, int64_t first_unit, int64_t count, float *tile) {
    switch (w->format) {
        CASE(FLOAT32) CASE(BFLOAT16) CASE(FLOAT16) CASE(INT8)
        CASE(Q8_0) CASE(Q4_0) CASE(Q4_1) CASE(Q4_K) CASE(Q6_K)
    }
}

// x[:, k : k + depth] of a block of rows, together, with zeros where the matrix is padded.
static void copy_rows(const rows_in *x, int64_t k, int64_t depth, int64_t padded, float *copy) {
    for (int64_t r = 0; r < x->count; r++) {
        float *place = copy + r * DEPTH_BLOCK;
        memcpy(place, row_of(x, r) + k, depth * sizeof(float));
        memset(place + depth, 0, (padded - depth) * sizeof(float));
    }
}

// Rows of each register tile: as equal as they can be.
static int64_t group_rows(int64_t rows) {
    int64_t groups = (rows + TILE_ROWS - 1) / TILE_ROWS;
    return (rows + groups - 1) / groups;
}

// A block of rows times a block of panels, at k.
typedef struct {
    const matrix *w;
    int64_t first;       // panel
    int64_t rows;
    int64_t k, depth;    // of the depth block: whole units
    float *copy, *sums;  // [rows, DEPTH_BLOCK], [rows, BLOCK_PANELS, 16]
} block;

// Panels [p, p + P) of a block. `ahead` bytes on lie the weights that come next.
static void multiply_panels(const block *b, int64_t p, int P, int64_t ahead) {
    float expanded[TILE_PANELS][DEPTH_BLOCK * PANEL] __attribute__((aligned(64)));
    const float *weights[TILE_PANELS];
    const int format = (int)b->w->format;
    const int64_t unit = b->k / UNIT, units = b->depth / UNIT;
    const int64_t group = group_rows(b->rows), num_groups = (b->rows + group - 1) / group;
    coming next = {.step = (weight_bytes(format) / UNIT + num_groups - 1) / num_groups};
    for (int i = 0; i < P; i++) {
        const panel at = panel_at(format, b->w, b->first + p + i);
        const uint8_t *packed = at.weights + unit * weight_bytes(format);
        next.panels[i] = packed + ahead;
        weights[i] = (const float *)packed;
        if (format == FLOAT32) continue;
        for (int64_t line = 0; line < units * scale_bytes(format); line += 64)
            __builtin_prefetch(at.scales + unit * scale_bytes(format) + line + ahead);
        expand_panel(b->w, b->first + p + i, unit, units, expanded[i]);
        weights[i] = expanded[i];
    }
    for (int64_t r = 0; r < b->rows; r += group) {
        const int64_t count = b->rows - r < group ? b->rows - r : group;
        float *sums = b->sums + (r * BLOCK_PANELS + p) * PANEL;
        tiles[count - 1][P - 1](b->copy + r * DEPTH_BLOCK, weights, sums, b->depth, b->k == 0, &next);
        for (int i = 0; i < P; i++) next.panels[i] += b->depth * next.step;
    }
}

static void multiply_block(const matrix *w, int64_t first, int64_t count, const rows_in *x, const rows_out *out) {
    float copy[BLOCK_ROWS * DEPTH_BLOCK] __attribute__((aligned(64)));
    float sums[BLOCK_ROWS * BLOCK_PANELS * PANEL] __attribute__((aligned(64)));
    const int64_t step = DEPTH_BLOCK / UNIT * weight_bytes((int)w->format);
    for (int64_t k = 0; k < w->depth; k += DEPTH_BLOCK) {
        const int64_t depth = w->depth - k < DEPTH_BLOCK ? w->depth - k : DEPTH_BLOCK;
        const block b = {w, first, x->count, k, num_units(depth) * UNIT, copy, sums};
        copy_rows(x, k, depth, b.depth, copy);
        for (int64_t p = 0; p < count; p += TILE_PANELS) {
            const int P = count - p < TILE_PANELS ? 1 : TILE_PANELS;
            multiply_panels(&b, p, P, p + P < count ? P * w->panel_bytes : step - p * w->panel_bytes);
        }
    }
    for (int64_t r = 0; r < x->count; r++)
        for (int64_t p = 0; p < count; p++) finish(w, first + p, sums + (r * BLOCK_PANELS + p) * PANEL, out, r);
}

void multiply_many(const matrix *w, int64_t first_panel, int64_t count, const rows_in *x, const rows_out *out) {
    for (int64_t r = 0; r < x->count; r += BLOCK_ROWS) {
        const rows_in rows = rows_from(x, r, x->count - r < BLOCK_ROWS ? x->count - r : BLOCK_ROWS);
        const rows_out place = {out->base + r * out->stride, out->stride, out->bias};
        for (int64_t p = 0; p < count; p += BLOCK_PANELS)
            multiply_block(w, first_panel + p, count - p < BLOCK_PANELS ? count - p : BLOCK_PANELS, &rows, &place);
    }
}
