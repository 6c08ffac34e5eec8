// Inner loops of attention: keys turned so that a vector holds one dimension of WIDTH keys, and tiles of rows whose sums
// stay in registers.

#ifndef LEAN_ATTENTION_TILE_H
#define LEAN_ATTENTION_TILE_H

#include "attention_keys.h"

#if defined(__AVX512F__)
#define TILE_VECTORS 4  // GROUP * TILE_VECTORS sums fit in the registers, beside what they are made of
#elif defined(__AVX__) || defined(__aarch64__)
#define TILE_VECTORS 2
#else
#define TILE_VECTORS 1
#endif
#define GROUP 6  // rows of a tile whose sums are in registers at once

// ---- keys turned into panels [count / WIDTH][D][WIDTH]

#if WIDTH == 16
// Turn dimensions 0 … of a strip, as many as come in 16 bytes, and return their number. Meanwhile ask for the strips
// at next_keys and next_values: a step asks for as many bytes of each as it reads.
INLINE int64_t turn_quickly(const char *rows, const char *next_keys, const char *next_values, int64_t dim, int type,
                            float *panel) {
    int64_t step = type == FLOAT32 ? 4 : 8, stride = dim * kv_bytes(type), done = 0;
    __m512i x[4];
    for (; done + step <= dim; done += step, rows += 16, next_keys += 256, next_values += 256) {
        turn_16_bytes(rows, stride, x);
        UNROLL for (int i = 0; i < 4; i++) {
            __builtin_prefetch(next_keys + i * 64, 0, 2);
            __builtin_prefetch(next_values + i * 64, 0, 2);
            float *to = panel + (done + i * (step / 4)) * 16;
            if (type == FLOAT32) _mm512_store_si512(to, x[i]);
            if (type == BFLOAT16) {
                _mm512_store_si512(to, _mm512_slli_epi32(x[i], 16));
                _mm512_store_si512(to + 16, _mm512_and_si512(x[i], _mm512_set1_epi32((int)0xffff0000)));
            }
            if (type == FLOAT16) {
                _mm512_store_ps(to, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(x[i])));
                _mm512_store_ps(to + 16, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(x[i], 16))));
            }
        }
    }
    return done;
}
#elif defined(__SSE2__)
INLINE __m128 load_4(const char *row, int64_t i, int type) {
    if (type == FLOAT32) return _mm_loadu_ps((const float *)row + i);
    __m128i half = _mm_loadl_epi64((const __m128i *)((const uint16_t *)row + i));
#if defined(__F16C__)
    if (type == FLOAT16) return _mm_cvtph_ps(half);
#endif
    return _mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(), half));
}

INLINE int64_t turn_quickly(const char *rows, const char *next_keys, const char *next_values, int64_t dim, int type,
                            float *panel) {
    int64_t stride = dim * kv_bytes(type), done = 0;
#if !defined(__F16C__)
    if (type == FLOAT16) return 0;
#endif
    for (int64_t i = 0; i < WIDTH * stride; i += 64) {
        __builtin_prefetch(next_keys + i, 0, 2);
        __builtin_prefetch(next_values + i, 0, 2);
    }
    for (; done + 4 <= dim; done += 4)
        for (int i = 0; i < WIDTH; i += 4) {
            __m128 x[4];
            for (int j = 0; j < 4; j++) x[j] = load_4(rows + (i + j) * stride, done, type);
            _MM_TRANSPOSE4_PS(x[0], x[1], x[2], x[3]);
            for (int j = 0; j < 4; j++) _mm_storeu_ps(panel + (done + j) * WIDTH + i, x[j]);
        }
    return done;
}
#else
INLINE int64_t turn_quickly(const char *rows, const char *next_keys, const char *next_values, int64_t dim, int type,
                            float *panel) {
    (void)rows, (void)next_keys, (void)next_values, (void)dim, (void)type, (void)panel;
    return 0;
}
#endif

// Dimensions done … dim, one by one.
static __attribute__((noinline)) void turn_plainly(const char *rows, int64_t done, int64_t dim, int type,
                                                   float *panel) {
    for (int64_t i = 0; i < WIDTH; i++)
        for (int64_t d = done; d < dim; d++) panel[d * WIDTH + i] = load_kv(rows + i * dim * kv_bytes(type), d, type);
}

INLINE void turn_strip_of(const char *rows, const char *next_keys, const char *next_values, int64_t dim, int type,
                          float *panel) {
    int64_t done = turn_quickly(rows, next_keys, next_values, dim, type, panel);
    if (done < dim) turn_plainly(rows, done, dim, type, panel);
}

#define TURN(TYPE, DIM) \
    if (type == TYPE && dim == DIM) return turn_strip_of(rows, next_keys, next_values, DIM, TYPE, panel)
static __attribute__((noinline)) void turn_strip(const char *rows, const char *next_keys, const char *next_values,
                                                 int64_t dim, int type, float *panel) {
    TURN(FLOAT32, 64);
    TURN(FLOAT32, 128);
    TURN(BFLOAT16, 64);
    TURN(BFLOAT16, 128);
    TURN(FLOAT16, 64);
    TURN(FLOAT16, 128);
    if (type == FLOAT32) turn_strip_of(rows, next_keys, next_values, dim, FLOAT32, panel);
    if (type == BFLOAT16) turn_strip_of(rows, next_keys, next_values, dim, BFLOAT16, panel);
    if (type == FLOAT16) turn_strip_of(rows, next_keys, next_values, dim, FLOAT16, panel);
}

// ---- scores: rows of q times a block of panels

INLINE void scores_of(const float *const *q, const float *panels, int64_t dim, float scale, float *scores,
                      const int num_rows, const int num_panels) {
    vecf sums[GROUP][TILE_VECTORS];
    const float *rows[GROUP];
    UNROLL for (int r = 0; r < num_rows; r++) rows[r] = q[r];
    UNROLL for (int r = 0; r < num_rows; r++)
        UNROLL for (int c = 0; c < num_panels; c++) sums[r][c] = (vecf){0};
    for (int64_t d = 0; d < dim; d++) {
        vecf keys[TILE_VECTORS];
        UNROLL for (int c = 0; c < num_panels; c++) keys[c] = vload(panels + (c * dim + d) * WIDTH);
        UNROLL for (int r = 0; r < num_rows; r++) {
            float x = rows[r][d];
            UNROLL for (int c = 0; c < num_panels; c++) sums[r][c] += x * keys[c];
        }
    }
    UNROLL for (int r = 0; r < num_rows; r++)
        UNROLL for (int c = 0; c < num_panels; c++) vstore(scores + r * STRETCH + c * WIDTH, sums[r][c] * scale);
}

// ---- weighted sums of values: the exponentials of rows times the keys' values, TILE_VECTORS vectors of D at a time

// values: where the keys' rows lie, strip by strip. weights [num_rows][STRETCH], sums [num_rows][stride].
INLINE void sums_of(const float *const *values, int64_t num_strips, const float *weights, float *sums, int64_t stride,
                    const int num_rows, const int num_vectors) {
    vecf total[GROUP][TILE_VECTORS];
    UNROLL for (int r = 0; r < num_rows; r++)
        UNROLL for (int c = 0; c < num_vectors; c++) total[r][c] = vload(sums + r * stride + c * WIDTH);
    for (int64_t i = 0; i < num_strips; i++) {
        const float *row = values[i];
        for (int64_t k = 0; k < WIDTH; k++, row += stride, weights++) {
            vecf value[TILE_VECTORS];
            UNROLL for (int c = 0; c < num_vectors; c++) value[c] = vload(row + c * WIDTH);
            UNROLL for (int r = 0; r < num_rows; r++)
                UNROLL for (int c = 0; c < num_vectors; c++) total[r][c] += weights[r * STRETCH] * value[c];
        }
    }
    UNROLL for (int r = 0; r < num_rows; r++)
        UNROLL for (int c = 0; c < num_vectors; c++) vstore(sums + r * stride + c * WIDTH, total[r][c]);
}

// ---- one function for each size of a register tile

#if TILE_VECTORS == 4
#define FOR_VECTORS(X, R) X(R, 1) X(R, 2) X(R, 3) X(R, 4)
#define BY_VECTORS(NAME, R) {NAME##_##R##_1, NAME##_##R##_2, NAME##_##R##_3, NAME##_##R##_4}
#elif TILE_VECTORS == 2
#define FOR_VECTORS(X, R) X(R, 1) X(R, 2)
#define BY_VECTORS(NAME, R) {NAME##_##R##_1, NAME##_##R##_2}
#else
#define FOR_VECTORS(X, R) X(R, 1)
#define BY_VECTORS(NAME, R) {NAME##_##R##_1}
#endif
#define FOR_SIZES(X) \
    FOR_VECTORS(X, 1) FOR_VECTORS(X, 2) FOR_VECTORS(X, 3) FOR_VECTORS(X, 4) FOR_VECTORS(X, 5) FOR_VECTORS(X, 6)
#define BY_SIZES(NAME)                                                                                               \
    {BY_VECTORS(NAME, 1), BY_VECTORS(NAME, 2), BY_VECTORS(NAME, 3), BY_VECTORS(NAME, 4), BY_VECTORS(NAME, 5),        \
     BY_VECTORS(NAME, 6)}

#define SCORES(R, C)                                                                                                 \
    static void scores_##R##_##C(const float *const *q, const float *panels, int64_t dim, float scale, float *out) { \
        scores_of(q, panels, dim, scale, out, R, C);                                                                 \
    }
#define SUMS(R, C)                                                                                                   \
    static void sums_##R##_##C(const float *const *values, int64_t num_strips, const float *weights, float *sums,    \
                               int64_t stride) {                                                                     \
        sums_of(values, num_strips, weights, sums, stride, R, C);                                                    \
    }
FOR_SIZES(SCORES)
FOR_SIZES(SUMS)

static void (*const SCORES_BY_SIZE[GROUP][TILE_VECTORS])(const float *const *, const float *, int64_t, float,
                                                         float *) = BY_SIZES(scores);
static void (*const SUMS_BY_SIZE[GROUP][TILE_VECTORS])(const float *const *, int64_t, const float *, float *,
                                                       int64_t) = BY_SIZES(sums);

#endif
