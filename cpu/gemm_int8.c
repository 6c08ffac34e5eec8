// x as int8, with a scale per 32, times quantised weights: AVX-512's products of bytes, summed exactly in int32 over a
// unit, then scaled into float32 sums; elsewhere such products are exact ones (gemm.c).
//
// A launch of its own (quantise_rows) makes x's units, row by row. Bytes of weights must not be negative for the
// instruction: signed ones are moved up by 128, and what that adds to a sum is taken off at its beginning, as are the
// zero points 8 of Q4_0 and 32 of Q6_K.

#include "gemm.h"

typedef struct {
    int8_t values[UNIT];
    float scale;
    int32_t sums[3];  // of the first 16 values, the last 16, all
} x_unit;

typedef struct {
    const float *x;  // [num_rows, depth]
    x_unit *out;     // [num_rows, units]
    int64_t num_rows, depth, stride, rows_per_task;
} quantise_rows_args;
ARGS_SIZE(quantise_rows)

static void quantise_unit(const float *x, int64_t count, x_unit *out) {
    float values[UNIT] = {0}, largest = 0.0f;
    memcpy(values, x, count * sizeof(float));
    for (int i = 0; i < UNIT; i++) {
        const float magnitude = fabsf(values[i]);
        largest = magnitude > largest || magnitude != magnitude ? magnitude : largest;
    }
    const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    out->scale = largest / 127.0f;  // NaN where x has one, inf or NaN where x is infinite
    int32_t sums[2] = {0};
    for (int i = 0; i < UNIT; i++) {
        const float scaled = values[i] * inverse;
        out->values[i] = (int8_t)(scaled > -127.0f ? scaled < 127.0f ? rintf(scaled) : 127 : -127);
        sums[i / 16] += out->values[i];
    }
    out->sums[0] = sums[0], out->sums[1] = sums[1], out->sums[2] = sums[0] + sums[1];
}

EXPORT void quantise_rows(const void *args, int64_t task) {
    const quantise_rows_args *a = args;
    const int64_t units = num_units(a->depth), end = (task + 1) * a->rows_per_task;
    for (int64_t row = task * a->rows_per_task; row < end && row < a->num_rows; row++)
        for (int64_t u = 0; u < units; u++) {
            const int64_t left = a->depth - u * UNIT;
            quantise_unit(a->x + row * a->stride + u * UNIT, left < UNIT ? left : UNIT, a->out + row * units + u);
        }
}

#if defined(HAS_AVX512) && defined(__AVX512VNNI__)

#define GROUP 4     // panels at once
#define MAX_ROWS 4

INLINE int zero_point(int format) {
    return format == INT8 || format == Q8_0 ? 128 : format == Q4_0 ? 8 : format == Q6_K ? 32 : 0;
}

INLINE int adds_minimum(int format) { return format == Q4_1 || format == Q4_K; }

// Quad of a unit as bytes from 0.
INLINE __m512i unsigned_quad(int format, const uint8_t *unit, int half, int i) {
    __m512i bytes = (__m512i)quad_bytes(format, unit, half, i, 0);
    if (zero_point(format) == 128) bytes = _mm512_xor_si512(bytes, _mm512_set1_epi8((char)0x80));
    return bytes;
}

// totals += scale * x's scale * (sum of bytes * x) + minimum * (x's scale * sum of x), over `count` quads.
INLINE void add_quads(int format, int R, const panel *p, int64_t u, int first, int count, const x_unit *const *x,
        int part, vecf totals[MAX_ROWS][GROUP]) {
    for (int q = 0; q < GROUP; q++) {
        const uint8_t *unit = p[q].weights + u * weight_bytes(format);
        __m512i sums[MAX_ROWS];
        for (int r = 0; r < R; r++) sums[r] = _mm512_set1_epi32(-zero_point(format) * x[r]->sums[part]);
#pragma GCC unroll 8
        for (int i = first; i < first + count; i++) {
            const __m512i bytes = unsigned_quad(format, unit, i / 4, i % 4);
            for (int r = 0; r < R; r++) {
                int32_t four;
                memcpy(&four, x[r]->values + 4 * i, sizeof four);
                sums[r] = _mm512_dpbusd_epi32(sums[r], bytes, _mm512_set1_epi32(four));
            }
        }
        vecf scale, minimum;
        half_scales(format, &p[q], u, first / 4, 0, &scale, &minimum);
        for (int r = 0; r < R; r++) {
            const vecf sum = (vecf)_mm512_cvtepi32_ps(sums[r]);
            const float factor = format == INT8 ? x[r]->scale * 0x1p24f : x[r]->scale;
            totals[r][q] += format == INT8 ? sum * vbroadcast(factor) : sum * (scale * vbroadcast(factor));
            if (adds_minimum(format)) totals[r][q] += minimum * vbroadcast(factor * (float)x[r]->sums[part]);
        }
    }
}

INLINE int64_t ahead(int format, const matrix *w, int64_t u, int64_t units, int64_t unit_bytes) {
    const int64_t next = u + 1536 / weight_bytes(format);
    return next < units ? next * unit_bytes : (next - units) * unit_bytes + GROUP * w->panel_bytes;
}

// `count` of GROUP panels and `rows` of R rows; those that are missing repeat the last and are not stored.
INLINE void group(int format, int R, const matrix *w, int64_t first, int64_t count, int64_t rows,
        const x_unit *const *rows_of_x,
                  const rows_out *out) {
    const int64_t units = num_units(w->depth);
    vecf totals[MAX_ROWS][GROUP] = {{{0}}};
    panel p[GROUP];
    for (int q = 0; q < GROUP; q++) p[q] = panel_at(format, w, first + (q < count ? q : count - 1));
    for (int64_t u = 0; u < units; u++) {
        const x_unit *x[MAX_ROWS];
        for (int r = 0; r < R; r++) x[r] = rows_of_x[r] + u;
        const int64_t next = ahead(format, w, u, units, weight_bytes(format));
        const int64_t next_scales = ahead(format, w, u, units, scale_bytes(format));
        for (int q = 0; q < GROUP; q++) {
            for (int64_t line = 0; line < weight_bytes(format); line += 64)
                __builtin_prefetch(p[q].weights + next + line);
            if (has_scale(format)) __builtin_prefetch(p[q].scales + next_scales);
        }
        if (format == Q6_K) {
            add_quads(format, R, p, u, 0, QUADS / 2, x, 0, totals);
            add_quads(format, R, p, u, QUADS / 2, QUADS / 2, x, 1, totals);
        } else {
            add_quads(format, R, p, u, 0, QUADS, x, 2, totals);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int q = 0; q < count; q++) finish(w, first + q, (const float *)&totals[r][q], out, r);
}

typedef void group_fn(const matrix *w, int64_t first, int64_t count, int64_t rows, const x_unit *const *x,
        const rows_out *out);

#define KERNEL(format, R) \
    static void group_##format##_##R(const matrix *w, int64_t first, int64_t count, int64_t rows, \
            const x_unit *const *x, const rows_out *out) { \
        group(format, R, w, first, count, rows, x, out); \
    }
#define KERNELS(format) KERNEL(format, 1) KERNEL(format, 4)
#define NAMES(format) [format] = {group_##format##_1, group_##format##_4}

KERNELS(INT8)
KERNELS(Q8_0)
KERNELS(Q4_0)
KERNELS(Q4_1)
KERNELS(Q4_K)
KERNELS(Q6_K)

static group_fn *const table[NUM_FORMATS][2] = {
    NAMES(INT8), NAMES(Q8_0), NAMES(Q4_0), NAMES(Q4_1), NAMES(Q4_K), NAMES(Q6_K),
};

int has_int8(void) { return 1; }

void multiply_int8(const matrix *w, int64_t first_panel, int64_t count, const void *x, int64_t rows,
        const rows_out *out) {
    const int64_t units = num_units(w->depth);
    for (int64_t p = 0; p < count; p += GROUP)
        for (int64_t row = 0; row < rows; row += MAX_ROWS) {
            const int64_t some = rows - row < MAX_ROWS ? rows - row : MAX_ROWS;
            const x_unit *at[MAX_ROWS];
            for (int64_t r = 0; r < MAX_ROWS; r++)
                at[r] = (const x_unit *)x + (row + (r < some ? r : some - 1)) * units;
            const rows_out place = {out->base + row * out->stride, out->stride, out->bias};
            table[w->format][some > 1](w, first_panel + p, count - p < GROUP ? count - p : GROUP, some, at, &place);
        }
}

#else

int has_int8(void) { return 0; }

void multiply_int8(const matrix *w, int64_t first_panel, int64_t count, const void *x, int64_t rows,
        const rows_out *out) {
    (void)w, (void)first_panel, (void)count, (void)x, (void)rows, (void)out;
}

#endif
