// Packed weight matrices of the CPU device: what a panel holds, and how its weights become float32.
//
// W [O, C] is cut into panels of 16 outputs, O padded with zeros; within a panel weights go along C in units of 32, C
// padded with zeros, so that a vector holds 16 outputs of one k. Within a unit four neighbouring k are a quad. A panel
// is its weights of all units, then, for GGUF's types, the scales of all units, then those of all blocks of 256:
//
//   float32   [32][16] f32                     int8  [8][16][4] i8, one scale per output apart
//   float16   [32][16] f16                     Q8_0  [8][16][4] i8; scale [16] f16
//   bfloat16  [16][16][2] bf16, k in pairs     Q4_0  [4][16][4] nibbles; scale [16] f16
//                                              Q4_1  [4][16][4] nibbles; scale, minimum [2][16] f16
//   Q4_K  [4][16][4] nibbles; scale, minimum [2][16] u8; their factors per 256 [2][16] f16
//   Q6_K  [4][16][4] nibbles, [2][16][4] upper bits; scale of each half [2][16] i8; its factor per 256 [16] f16
//
// A low nibble belongs to k < 16 of its unit, the high one to k + 16. Quad i of Q6_K has its upper two bits in vector i
// / 4 at bit 2 * (i % 4). Sizes are those of GGUF but for Q4_K, whose scales take bytes instead of 6 bits: 2.8 % more.

#ifndef LEAN_MATRIX_H
#define LEAN_MATRIX_H

#include "common.h"

enum { FLOAT32, BFLOAT16, FLOAT16, INT8, Q8_0, Q4_0, Q4_1, Q4_K, Q6_K, NUM_FORMATS };

#define PANEL 16
#define UNIT 32
#define QUADS 8  // of a unit

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define HAS_AVX512 1
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define HAS_AVX2 1
#endif
#define VECS (PANEL / WIDTH)  // vectors of a panel's k

typedef int32_t viu __attribute__((vector_size(4 * WIDTH), aligned(1), may_alias));
typedef uint32_t vu __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t vh __attribute__((vector_size(2 * WIDTH)));
typedef uint16_t vhu __attribute__((vector_size(2 * WIDTH), aligned(2), may_alias));
typedef uint8_t vbu __attribute__((vector_size(WIDTH), aligned(1), may_alias));
typedef int8_t vcu __attribute__((vector_size(WIDTH), aligned(1), may_alias));

typedef struct {
    const uint8_t *panels;
    const float *scales;  // int8: [panels, 16], times 2^-24; else NULL
    int64_t format, num_outputs, depth, panel_bytes;
} matrix;

// Where the three parts of a panel begin.
typedef struct {
    const uint8_t *weights, *scales, *supers;
} panel;

INLINE int64_t num_units(int64_t depth) { return (depth + UNIT - 1) / UNIT; }
INLINE int64_t num_panels(int64_t num_outputs) { return (num_outputs + PANEL - 1) / PANEL; }

// Units of a panel: an even number of int8's, which products take by 64 k.
INLINE int64_t units_of(int format, int64_t depth) {
    const int64_t units = num_units(depth);
    return format == INT8 ? (units + 1) / 2 * 2 : units;
}

INLINE int64_t weight_bytes(int format) {  // of a unit
    switch (format) {
        case FLOAT32: return 2048;
        case BFLOAT16: case FLOAT16: return 1024;
        case INT8: case Q8_0: return 512;
        case Q6_K: return 384;
        default: return 256;
    }
}

INLINE int64_t scale_bytes(int format) {  // of a unit
    switch (format) {
        case Q8_0: case Q4_0: case Q4_K: case Q6_K: return 32;
        case Q4_1: return 64;
        default: return 0;
    }
}

INLINE int64_t super_bytes(int format) { return format == Q4_K ? 64 : format == Q6_K ? 32 : 0; }

INLINE int64_t bytes_of_panel(int format, int64_t depth) {
    int64_t units = units_of(format, depth);
    int64_t bytes = units * (weight_bytes(format) + scale_bytes(format)) + (units + 7) / 8 * super_bytes(format);
    return (bytes + 63) / 64 * 64;
}

INLINE panel panel_at(int format, const matrix *w, int64_t index) {
    int64_t units = units_of(format, w->depth);
    const uint8_t *start = w->panels + index * w->panel_bytes;
    const uint8_t *scales = start + units * weight_bytes(format);
    return (panel){start, scales, scales + units * scale_bytes(format)};
}

INLINE vecf load_f16(const f16 *p) {
#if defined(HAS_AVX512)
    return (vecf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(HAS_AVX2)
    return (vecf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    vu bits = __builtin_convertvector(*(const vhu *)p, vu);
    vecf magnitude = (vecf)((bits & 0x7fff) << 13) * 0x1p112f;
    vu special = (vu)((bits & 0x7c00) == 0x7c00) & 0x7f800000;
    return (vecf)((vu)magnitude | special | (bits & 0x8000) << 16);
#endif
}

INLINE vecf load_u8(const uint8_t *p) {
#if defined(HAS_AVX512)
    return (vecf)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif defined(HAS_AVX2)
    return (vecf)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadu_si64(p)));
#else
    return __builtin_convertvector(__builtin_convertvector(*(const vbu *)p, veci), vecf);
#endif
}

INLINE vecf load_i8(const uint8_t *p) {
#if defined(HAS_AVX512)
    return (vecf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif defined(HAS_AVX2)
    return (vecf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadu_si64(p)));
#else
    return __builtin_convertvector(__builtin_convertvector(*(const vcu *)p, veci), vecf);
#endif
}

// Byte j of each 32-bit element, signed, as float times 2^24: the byte is moved to the top, the rest is zero.
INLINE vecf top_byte(veci quad, int j) {
#if defined(HAS_AVX512) || defined(HAS_AVX2)
    int element = (int)0x00808080 | j << 24;  // control bytes of a shuffle: three zeros, byte j
    veci control = element + (veci){0};
    control += (veci)((vu)(veci){0, 4, 8, 12, 0, 4, 8, 12
#if WIDTH == 16
                             , 0, 4, 8, 12, 0, 4, 8, 12
#endif
                    } << 24);
#if WIDTH == 16
    veci moved = (veci)_mm512_shuffle_epi8((__m512i)quad, (__m512i)control);
#else
    veci moved = (veci)_mm256_shuffle_epi8((__m256i)quad, (__m256i)control);
#endif
    return __builtin_convertvector(moved, vecf);
#else
    return __builtin_convertvector((veci)((vu)quad << (24 - 8 * j) & 0xff000000), vecf);
#endif
}

INLINE int is_quantised(int format) { return format >= INT8; }
INLINE int has_scale(int format) { return format >= Q8_0; }
INLINE int has_minimum(int format) { return format >= Q4_0; }

// Quad 4 * half + i of a unit as bytes, before scale and minimum: int8 and Q8_0 signed, the others from 0.
INLINE veci quad_bytes(int format, const uint8_t *unit, int half, int i, int v) {
    const int at = 4 * WIDTH * v;
    if (format == INT8 || format == Q8_0) return *(const viu *)(unit + 256 * half + 64 * i + at);
    vu both = (vu) * (const viu *)(unit + 64 * i + at);
    vu low = (half ? both >> 4 : both) & 0x0f0f0f0f;
    if (format == Q6_K) {
        vu high = (vu) * (const viu *)(unit + 256 + 64 * half + at);
        low |= (high >> (2 * i) & 0x03030303) << 4;
    }
    return (veci)low;
}

// scale and minimum of half a unit: weight = byte * scale + minimum, exactly as the gguf package rounds it.
INLINE void half_scales(int format, const panel *p, int64_t u, int half, int v, vecf *scale, vecf *minimum) {
    const int at = WIDTH * v;
    *scale = *minimum = (vecf){0};
    if (format == Q8_0 || format == Q4_0) *scale = load_f16((const f16 *)(p->scales + 32 * u) + at);
    if (format == Q4_0) *minimum = *scale * -8.0f;
    if (format == Q4_1) {
        *scale = load_f16((const f16 *)(p->scales + 64 * u) + at);
        *minimum = load_f16((const f16 *)(p->scales + 64 * u + 32) + at);
    }
    if (format == Q4_K) {
        const f16 *factors = (const f16 *)(p->supers + u / 8 * 64);
        *scale = load_f16(factors + at) * load_u8(p->scales + 32 * u + at);
        *minimum = -(load_f16(factors + 16 + at) * load_u8(p->scales + 32 * u + 16 + at));
    }
    if (format == Q6_K) {
        const f16 *factors = (const f16 *)(p->supers + u / 8 * 32);
        *scale = load_f16(factors + at) * load_i8(p->scales + 32 * u + 16 * half + at);
        *minimum = *scale * -32.0f;
    }
}

// Scales of a unit as load_quad wants them.
typedef struct {
    vecf scale[VECS], minimum[VECS];
} scales;

INLINE scales load_scales(int format, const panel *p, int64_t u, int half) {
    scales s;
    for (int v = 0; v < VECS; v++) {
        half_scales(format, p, u, half, v, &s.scale[v], &s.minimum[v]);
        s.scale[v] *= 0x1p-24f;
    }
    return s;
}

// The four k of quad 4 * half + i of unit u as float32, w[4][VECS]; int8 without its scale and times 2^24.
INLINE void load_quad(int format, const panel *p, int64_t u, int half, int i, const scales *s, vecf w[4][VECS]) {
    const uint8_t *unit = p->weights + u * weight_bytes(format);
    const int quad = 4 * half + i;
    for (int v = 0; v < VECS; v++) {
        if (format == FLOAT32) {
            for (int j = 0; j < 4; j++) w[j][v] = vload((const float *)unit + PANEL * (4 * quad + j) + WIDTH * v);
        } else if (format == FLOAT16) {
            for (int j = 0; j < 4; j++) w[j][v] = load_f16((const f16 *)unit + PANEL * (4 * quad + j) + WIDTH * v);
        } else if (format == BFLOAT16) {
            for (int j = 0; j < 4; j += 2) {
                vu pair = (vu) * (const viu *)(unit + 64 * (2 * quad + j / 2) + 4 * WIDTH * v);
                w[j][v] = (vecf)(pair << 16);
                w[j + 1][v] = (vecf)(pair & 0xffff0000);
            }
        } else {
            veci bytes = quad_bytes(format, unit, half, i, v);
            for (int j = 0; j < 4; j++) {
                w[j][v] = top_byte(bytes, j);
                if (has_minimum(format)) w[j][v] = w[j][v] * s->scale[v] + s->minimum[v];
                else if (has_scale(format)) w[j][v] *= s->scale[v];
            }
        }
    }
}

#endif
