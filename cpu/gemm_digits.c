// Exact products with quantised weights: x as 24-bit integers with a scale per 256, cut into three digits of 8 bits, which
// processors multiply as bytes. Products of a digit are summed exactly in int32 over a segment, as far as one scale of
// the weights reaches, then scaled into float32 sums, segment by segment. Sums of integers have no order: a row's bits are
// the same for any number of rows, by AVX-512's products of bytes (VNNI) or by AMX tiles.
//
//   x = scale * (65536 high + 256 middle + low), digits from -128 to 127, scale a power of two
//
// An element is off by at most 2^-23 of the largest of its 256; nothing else is rounded but the sums.
//
// A launch of its own (digit_rows) makes x's digits, row by row. VNNI wants bytes of weights that are not negative: signed
// ones are moved up by 128, and what that adds to a sum is taken off at its beginning, as are the zero points 8 of Q4_0
// and 32 of Q6_K.

#include "gemm.h"
#include "tiles.h"

#define NUM_DIGITS 3
#define GROUP 256  // elements of x under one scale
#define STEP 64    // that tiles take at once

typedef struct {
    int8_t digits[NUM_DIGITS][GROUP];
    int32_t sums[NUM_DIGITS][GROUP / 16];  // of 16 digits each
    float scale;
    float totals[GROUP / UNIT];  // of 32 elements each
    float unused[7];
} x_group;

typedef struct {
    const float *x;        // [num_rows, depth], rows `stride` apart
    const int32_t *index;  // [num_rows]: which of x's rows; NULL: in order
    char *out;             // [num_rows, digits_row_bytes]: groups
    int64_t num_rows, depth, stride, rows_per_task;
} digit_rows_args;
ARGS_SIZE(digit_rows)

#if defined(HAS_AVX512) && defined(__AVX512VNNI__)

#define VECTORS (GROUP / 16)

INLINE __m512 power_of_two(int32_t exponent) { return (__m512)_mm512_set1_epi32((exponent + 127) << 23); }

#define NOT_FINITE 129

// The exponent of a power of two that no element reaches, with room for digits that are rounded up.
INLINE int32_t exponent_of(const __m512 *x) {
    __m512i largest = _mm512_setzero_si512();
    for (int i = 0; i < VECTORS; i++)
        largest = _mm512_max_epi32(largest, _mm512_and_epi32((__m512i)x[i], _mm512_set1_epi32(0x7fffffff)));
    const int32_t bits = _mm512_reduce_max_epi32(largest);
    if (bits >= 0x7f800000) return NOT_FINITE;
    const int32_t exponent = (int32_t)((uint32_t)(bits + 0x20000) >> 23) - 127;
    return exponent < -104 ? -104 : exponent;  // below, the scale would be denormal
}

// The digits of a group, and its scale.
INLINE float digits_of(const __m512 *x, int8_t digits[NUM_DIGITS][GROUP]) {
    const int32_t exponent = exponent_of(x);
    if (exponent == NOT_FINITE) return memset(digits, 0, NUM_DIGITS * GROUP), NAN;
    for (int i = 0; i < VECTORS; i++) {
        __m512i number = _mm512_cvtps_epi32(x[i] * power_of_two(22 - exponent));
        for (int d = NUM_DIGITS - 1; d >= 0; d--) {
            _mm_storeu_si128((__m128i *)(digits[d] + 16 * i), _mm512_cvtepi32_epi8(number));
            number = _mm512_srai_epi32(_mm512_add_epi32(number, _mm512_set1_epi32(128)), 8);
        }
    }
    return _mm512_cvtss_f32(power_of_two(exponent - 22));
}

INLINE void sum_digits(x_group *g) {
    for (int d = 0; d < NUM_DIGITS; d++)
        for (int i = 0; i < GROUP / 64; i++) {
            const __m512i digits = _mm512_loadu_si512(g->digits[d] + 64 * i);
            __m512i sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), digits);
            sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32(sums, _MM_PERM_BADC));
            sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32(sums, _MM_PERM_CDAB));
            const __m512i each = _mm512_maskz_compress_epi32(0x1111, sums);
            _mm_storeu_si128((__m128i *)(g->sums[d] + 4 * i), _mm512_castsi512_si128(each));
        }
    for (int i = 0; i < GROUP / UNIT; i++) {
        int32_t total = 0;
        for (int d = 0; d < NUM_DIGITS; d++) total = total * 256 + g->sums[d][2 * i] + g->sums[d][2 * i + 1];
        g->totals[i] = (float)total * g->scale;
    }
}

EXPORT void digit_rows(const void *args, int64_t task) {
    const digit_rows_args *a = args;
    const int64_t row_bytes = digits_row_bytes(a->depth), end = (task + 1) * a->rows_per_task;
    for (int64_t r = task * a->rows_per_task; r < end && r < a->num_rows; r++) {
        const float *x = a->x + (a->index ? a->index[r] : r) * a->stride;
        x_group *out = (x_group *)(a->out + r * row_bytes);
        for (int64_t left = a->depth; left > 0; left -= GROUP, x += GROUP, out++) {
            __m512 values[VECTORS];
            for (int i = 0; i < VECTORS; i++) {
                const int64_t here = left - 16 * i;
                values[i] = _mm512_maskz_loadu_ps(here >= 16 ? 0xffff : here > 0 ? (1 << here) - 1 : 0, x + 16 * i);
            }
            out->scale = digits_of(values, out->digits);
            sum_digits(out);
        }
    }
}

// ---- what both ways share

INLINE int segment_of(int format) {  // elements
    return format == INT8 ? GROUP : format == Q6_K ? 16 : 32;
}
INLINE int64_t num_segments(int format, int64_t depth) {
    return (units_of(format, depth) * UNIT + segment_of(format) - 1) / segment_of(format);
}

INLINE int adds_minimum(int format) { return format == Q4_1 || format == Q4_K; }
INLINE int zero_point(int format) { return format == Q4_0 ? 8 : format == Q6_K ? 32 : 0; }
INLINE int is_signed(int format) { return format == INT8 || format == Q8_0; }

INLINE void segment_scales(int format, const panel *p, int64_t segment, vecf *scale, vecf *minimum) {
    *scale = vbroadcast(0x1p24f), *minimum = (vecf){0};  // of int8: the rest is the matrix's own
    if (format == Q6_K) half_scales(format, p, segment / 2, (int)(segment % 2), 0, scale, minimum);
    else if (format != INT8) half_scales(format, p, segment, 0, 0, scale, minimum);
}

// A segment's sums of digits, at 65536, 256 and 1, into a float32 sum. at: which segment of x's group.
INLINE vecf add_segment(int format, vecf total, const __m512i sums[NUM_DIGITS], const x_group *x, int at, vecf scale,
        vecf minimum) {
    const __m512 upper = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(sums[0], 8), sums[1]));
    const __m512 sum = _mm512_fmadd_ps(upper, _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(sums[2]));
    total = _mm512_fmadd_ps(sum, scale * vbroadcast(x->scale), total);
    if (adds_minimum(format)) total = _mm512_fmadd_ps(minimum, vbroadcast(x->totals[at]), total);
    return total;
}

// ---- few rows

#define MAX_ROWS 4
#define PANELS 4    // at once: read evenly they come faster than one after the other

// The four neighbours of `quad` of a segment as bytes from 0.
INLINE __m512i unsigned_quad(int format, const uint8_t *segment, int quad) {
    const uint8_t *unit = segment + quad / QUADS * weight_bytes(format);
    const __m512i bytes = (__m512i)quad_bytes(format, unit, quad % QUADS / 4, quad % 4, 0);
    return is_signed(format) ? _mm512_xor_si512(bytes, _mm512_set1_epi8((char)0x80)) : bytes;
}

// totals += quads [first, first + count) of what begins at a segment's first unit, times R rows; `sixteens` of x's group
// come before them. Asks for the same place `ahead` bytes on.
INLINE void add_products(int format, int R, const panel *p, int64_t segment, int first, int count, int64_t ahead,
        const x_group *const *x, int sixteens, vecf *totals) {
    const int offset = is_signed(format) ? 128 : zero_point(format);
    const int per_step = segment_of(format) < STEP ? segment_of(format) / 4 : STEP / 4;
    const int64_t packed = count * 4 * weight_bytes(format) / UNIT;  // bytes
    const uint8_t *weights = p->weights + segment * segment_of(format) / UNIT * weight_bytes(format);
    __m512i sums[MAX_ROWS][NUM_DIGITS];
    for (int r = 0; r < R; r++)
        for (int d = 0; d < NUM_DIGITS; d++) {
            int32_t total = 0;
            for (int i = 0; offset && i < count / 4; i++) total += x[r]->sums[d][sixteens + i];
            sums[r][d] = _mm512_set1_epi32(-offset * total);
        }
#pragma GCC unroll 1
    for (int step = 0; step < count; step += per_step)
#pragma GCC unroll 16
        for (int i = 0; i < per_step; i++) {
            const __m512i bytes = unsigned_quad(format, weights, first + step + i);
            if (64 * (step + i) < packed) __builtin_prefetch(weights + ahead + 64 * (first + step + i));
            for (int r = 0; r < R; r++)
                for (int d = 0; d < NUM_DIGITS; d++) {
                    int32_t four;
                    memcpy(&four, x[r]->digits[d] + 16 * sixteens + 4 * (step + i), sizeof four);
                    sums[r][d] = _mm512_dpbusd_epi32(sums[r][d], bytes, _mm512_set1_epi32(four));
                }
        }
    vecf scale, minimum;
    segment_scales(format, p, segment, &scale, &minimum);
    for (int r = 0; r < R; r++)
        totals[r] = add_segment(format, totals[r], sums[r], x[r], sixteens / 2, scale, minimum);
}

// `count` of PANELS panels and `rows` of R rows; those that are missing repeat the last and are not stored.
INLINE void few(int format, int R, const matrix *w, int64_t index, int64_t count, int64_t rows,
        const x_group *const *x, const rows_out *out) {
    const int length = segment_of(format), per_group = GROUP / length;
    const int64_t segments = num_segments(format, w->depth), quads = units_of(format, w->depth) * QUADS;
    const int64_t bytes = quads / QUADS * weight_bytes(format);
    vecf totals[PANELS][MAX_ROWS] = {{{0}}};
    panel p[PANELS];
    for (int q = 0; q < PANELS; q++) p[q] = panel_at(format, w, index + (q < count ? q : count - 1));
    for (int64_t s = 0; s < segments; s++) {
        const x_group *at[MAX_ROWS];
        for (int r = 0; r < R; r++) at[r] = x[r] + s / per_group;
        const int64_t left = quads - s * length / 4;
        const int some = (int)(left < length / 4 ? left : length / 4), within = (int)(s % per_group);
        const int64_t ahead = ahead_of(w, PANELS, (s + 1) * length / UNIT * weight_bytes(format), bytes);
        for (int q = 0; q < PANELS; q++) {
            if (length == GROUP) add_products(format, R, &p[q], s, 0, some, ahead, at, 0, totals[q]);
            else if (length == UNIT) add_products(format, R, &p[q], s, 0, QUADS, ahead, at, 2 * within, totals[q]);
            else add_products(format, R, &p[q], s, (int)(s % 2) * 4, 4, ahead, at, within, totals[q]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int q = 0; q < count; q++) finish(w, index + q, (const float *)&totals[q][r], out, r);
}

typedef void few_fn(const matrix *w, int64_t index, int64_t count, int64_t rows, const x_group *const *x,
        const rows_out *out);

#define FEW(format, R) \
    static void few_##format##_##R(const matrix *w, int64_t index, int64_t count, int64_t rows, \
            const x_group *const *x, const rows_out *out) { \
        few(format, R, w, index, count, rows, x, out); \
    }
#define FEWS(format) FEW(format, 1) FEW(format, 2) FEW(format, 4)
#define NAMES(format) [format] = {few_##format##_1, few_##format##_2, few_##format##_4}

FEWS(INT8)
FEWS(Q8_0)
FEWS(Q4_0)
FEWS(Q4_1)
FEWS(Q4_K)
FEWS(Q6_K)

static few_fn *const few_rows[NUM_FORMATS][3] = {
    NAMES(INT8), NAMES(Q8_0), NAMES(Q4_0), NAMES(Q4_1), NAMES(Q4_K), NAMES(Q6_K),
};

static void multiply_few_rows(const matrix *w, int64_t first_panel, int64_t count, const char *x, int64_t rows,
        const rows_out *out) {
    const int64_t row_bytes = digits_row_bytes(w->depth);
    for (int64_t p = 0; p < count; p += PANELS)
        for (int64_t row = 0; row < rows; row += MAX_ROWS) {
            const int64_t some = rows - row < MAX_ROWS ? rows - row : MAX_ROWS;
            const x_group *at[MAX_ROWS];
            for (int64_t r = 0; r < MAX_ROWS; r++)
                at[r] = (const x_group *)(x + (row + (r < some ? r : some - 1)) * row_bytes);
            const rows_out place = {out->base + row * out->stride, out->stride, out->bias};
            few_fn *run = few_rows[w->format][some == 1 ? 0 : some == 2 ? 1 : 2];
            run(w, first_panel + p, count - p < PANELS ? count - p : PANELS, some, at, &place);
        }
}

// ---- many rows

#if defined(HAS_TILES) && defined(__AMX_INT8__)

#define CHUNK 1024        // elements of a panel that are prepared at a time
#define MAX_SEGMENTS (CHUNK / 16)
#define BLOCK 16          // rows
#define MAX_BLOCKS 16     // that share a prepared panel

// A chunk of a panel as tiles read it.
typedef struct {
    const uint8_t *weights;  // segments of [length / 4][16][4] signed bytes
    int64_t count, length;   // segments, elements
    float scales[MAX_SEGMENTS][PANEL], minimums[MAX_SEGMENTS][PANEL];
    uint8_t bytes[CHUNK * PANEL];  // where weights are unpacked to
} chunk;

INLINE void prepare(int format, const matrix *w, const panel *p, int64_t k, chunk *c) {
    const int length = segment_of(format);
    const int64_t left = units_of(format, w->depth) * UNIT - k, first = k / length;
    c->length = left < CHUNK ? left : CHUNK;
    c->count = (c->length + length - 1) / length;
    c->weights = p->weights + k / UNIT * weight_bytes(format);
    for (int64_t s = 0; s < c->count; s++) {
        vecf scale, minimum;
        segment_scales(format, p, first + s, &scale, &minimum);
        vstore(c->scales[s], scale);
        if (adds_minimum(format)) vstore(c->minimums[s], minimum);
    }
    if (is_signed(format)) return;
    for (int64_t u = 0; u < c->length / UNIT; u++)
#pragma GCC unroll 8
        for (int i = 0; i < QUADS; i++) {
            const __m512i bytes = (__m512i)quad_bytes(format, c->weights + u * weight_bytes(format), i / 4, i % 4, 0);
            const __m512i zero = _mm512_set1_epi8((char)zero_point(format));
            _mm512_store_si512(c->bytes + u * UNIT * PANEL + 64 * i, _mm512_sub_epi8(bytes, zero));
        }
    c->weights = c->bytes;
}

// Tiles 0 to 2 hold sums, 3 to 5 digits of x, 6 weights, of up to STEP elements.
static void configure(int step) {
    const uint16_t x = (uint16_t)step, row_bytes[8] = {64, 64, 64, x, x, x, 64, 64};
    const uint8_t rows[8] = {BLOCK, BLOCK, BLOCK, BLOCK, BLOCK, BLOCK, (uint8_t)(step / 4), BLOCK};
    set_tile_shapes(row_bytes, rows);
}

typedef struct {
    int32_t of[NUM_DIGITS][BLOCK][PANEL] __attribute__((aligned(64)));
} sums_of_tiles;

// One segment: `steps` of them.
INLINE void multiply_tiles(const uint8_t *weights, const char *x, int64_t row_bytes, int64_t steps,
        sums_of_tiles *sums) {
    tile_zero(0);
    tile_zero(1);
    tile_zero(2);
    for (int64_t i = 0; i < steps; i++, x += STEP, weights += STEP * PANEL) {
        tile_load(6, weights, 64);
        tile_load(3, x, row_bytes);
        tile_multiply_bytes(0, 3, 6);
        tile_load(4, x + GROUP, row_bytes);
        tile_multiply_bytes(1, 4, 6);
        tile_load(5, x + 2 * GROUP, row_bytes);
        tile_multiply_bytes(2, 5, 6);
    }
    tile_store(0, sums->of[0], 64);
    tile_store(1, sums->of[1], 64);
    tile_store(2, sums->of[2], 64);
}

// A block of rows times a chunk of a panel: totals [16][16]. Sums of a segment are taken up while tiles are at the next.
INLINE void multiply_chunk(int format, const chunk *c, const char *x, int64_t row_bytes, int is_first, float *totals) {
    const int length = segment_of(format), per_group = GROUP / length;
    sums_of_tiles sums[2];
    vecf total[BLOCK];
#pragma GCC unroll 16
    for (int r = 0; r < BLOCK; r++) total[r] = is_first ? (vecf){0} : vload(totals + r * PANEL);
    for (int64_t s = 0; s <= c->count; s++) {
        if (s < c->count) {
            const char *place = x + s / per_group * sizeof(x_group) + s % per_group * length;
            const int64_t left = c->length - s * length;
            const int64_t steps = length < STEP ? 1 : left < length ? left / STEP : length / STEP;
            multiply_tiles(c->weights + s * length * PANEL, place, row_bytes, steps, &sums[s % 2]);
        }
        if (s == 0) continue;
        const int64_t before = s - 1;
        const char *group = x + before / per_group * sizeof(x_group);
        const vecf scale = vload(c->scales[before]), minimum = vload(c->minimums[before]);
        const sums_of_tiles *own = &sums[before % 2];
#pragma GCC unroll 16
        for (int r = 0; r < BLOCK; r++) {
            const __m512i digits[NUM_DIGITS] = {*(const __m512i *)own->of[0][r], *(const __m512i *)own->of[1][r],
                                                *(const __m512i *)own->of[2][r]};
            const x_group *row = (const x_group *)(group + r * row_bytes);
            const int at = (int)(before % per_group) * length / UNIT;
            total[r] = add_segment(format, total[r], digits, row, at, scale, minimum);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < BLOCK; r++) vstore(totals + r * PANEL, total[r]);
}

// At most MAX_BLOCKS * BLOCK rows.
INLINE void many(int format, const matrix *w, int64_t index, const char *x, int64_t rows, const rows_out *out) {
    chunk c __attribute__((aligned(64)));
    float totals[MAX_BLOCKS][BLOCK * PANEL] __attribute__((aligned(64)));
    const int64_t depth = units_of(format, w->depth) * UNIT, row_bytes = digits_row_bytes(w->depth);
    const panel p = panel_at(format, w, index);
    for (int64_t k = 0; k < depth; k += CHUNK) {
        prepare(format, w, &p, k, &c);
        const char *start = x + k / GROUP * (int64_t)sizeof(x_group);
        for (int64_t b = 0; b * BLOCK < rows; b++)
            multiply_chunk(format, &c, start + b * BLOCK * row_bytes, row_bytes, k == 0, totals[b]);
    }
    for (int64_t r = 0; r < rows; r++) finish(w, index, totals[r / BLOCK] + r % BLOCK * PANEL, out, r);
}

typedef void many_fn(const matrix *w, int64_t index, const char *x, int64_t rows, const rows_out *out);

#define MANY(format) \
    static void many_##format(const matrix *w, int64_t index, const char *x, int64_t rows, const rows_out *out) { \
        many(format, w, index, x, rows, out); \
    }
#define NAME(format) [format] = many_##format

MANY(INT8)
MANY(Q8_0)
MANY(Q4_0)
MANY(Q4_1)
MANY(Q4_K)
MANY(Q6_K)

static many_fn *const many_rows[NUM_FORMATS] = {
    NAME(INT8), NAME(Q8_0), NAME(Q4_0), NAME(Q4_1), NAME(Q4_K), NAME(Q6_K),
};

// Long segments have few sums to be taken out of tiles.
static int in_tiles(int format, int64_t rows) { return rows > (segment_of(format) == GROUP ? 2 : 10) && has_tiles(); }

static void multiply_many_rows(const matrix *w, int64_t first_panel, int64_t count, const char *x, int64_t rows,
        const rows_out *out) {
    const int length = segment_of((int)w->format);
    configure(length < STEP ? length : STEP);
    for (int64_t r = 0; r < rows; r += MAX_BLOCKS * BLOCK) {
        const int64_t some = rows - r < MAX_BLOCKS * BLOCK ? rows - r : MAX_BLOCKS * BLOCK;
        const rows_out place = {out->base + r * out->stride, out->stride, out->bias};
        for (int64_t p = 0; p < count; p++)
            many_rows[w->format](w, first_panel + p, x + r * digits_row_bytes(w->depth), some, &place);
    }
    _tile_release();
}

int has_digits(void) { return has_tiles() ? 2 : 1; }

#else

int has_digits(void) { return 1; }
static int in_tiles(int format, int64_t rows) { return (void)format, (void)rows, 0; }
#define multiply_many_rows multiply_few_rows

#endif

void multiply_digits(const matrix *w, int64_t first_panel, int64_t count, const void *x, int64_t rows,
        const rows_out *out) {
    if (in_tiles((int)w->format, rows)) multiply_many_rows(w, first_panel, count, x, rows, out);
    else multiply_few_rows(w, first_panel, count, x, rows, out);
}

#else

int has_digits(void) { return 0; }

EXPORT void digit_rows(const void *args, int64_t task) { (void)args, (void)task; }

void multiply_digits(const matrix *w, int64_t first_panel, int64_t count, const void *x, int64_t rows,
        const rows_out *out) {
    (void)w, (void)first_panel, (void)count, (void)x, (void)rows, (void)out;
}

#endif
