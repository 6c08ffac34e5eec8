// Element types of a KV cache: float32, bfloat16, float16; read into float32 vectors, written by round to nearest even.

#ifndef LEAN_KV_TYPES_H
#define LEAN_KV_TYPES_H

#include "common.h"

enum { FLOAT32, BFLOAT16, FLOAT16 };

typedef uint16_t vec16 __attribute__((vector_size(2 * WIDTH)));
typedef uint16_t vec16_anywhere __attribute__((vector_size(2 * WIDTH), aligned(2), may_alias));
typedef uint32_t vecu __attribute__((vector_size(4 * WIDTH)));

INLINE float kv_f16_to_f32(f16 x) {
#if defined(__F16C__)
    return _cvtsh_ss(x);
#else
    uint32_t sign = (uint32_t)(x & 0x8000u) << 16, bits = (uint32_t)(x & 0x7fffu) << 13;
    float value;
    if (bits >= 0x0f800000u) {
        bits |= 0x70000000u;  // infinite or NaN
    } else {  // the exponent by a multiplication, which brings subnormal numbers in order too
        memcpy(&value, &bits, sizeof value);
        value *= 0x1p112f;
        memcpy(&bits, &value, sizeof bits);
    }
    bits |= sign;
    memcpy(&value, &bits, sizeof value);
    return value;
#endif
}

// A NaN stays one.
INLINE f16 kv_f32_to_f16(float x) {
#if defined(__F16C__)
    return (f16)_cvtss_sh(x, 0);
#else
    uint32_t bits, sign;
    float size;
    memcpy(&bits, &x, sizeof bits);
    sign = (bits >> 16) & 0x8000u;
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return (f16)(sign | 0x7e00u);
    if (bits >= 0x477ff000u) return (f16)(sign | 0x7c00u);  // 65,520 and more
    if (bits < 0x38800000u) {                               // subnormal: units of 2^-24, rounded by a sum with 1/2
        memcpy(&size, &bits, sizeof size);
        size += 0.5f;
        memcpy(&bits, &size, sizeof bits);
        return (f16)(sign | (bits - 0x3f000000u));
    }
    return (f16)(sign | ((bits - 0x38000000u + 0xfffu + ((bits >> 13) & 1u)) >> 13));
#endif
}

INLINE vecf vload_bf16(const bf16 *p) {
    return (vecf)(__builtin_convertvector(*(const vec16_anywhere *)p, vecu) << 16);
}

INLINE vecf vload_f16(const f16 *p) {
#if WIDTH == 16
    return (vecf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif WIDTH == 8 && defined(__F16C__)
    return (vecf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    float lanes[WIDTH];
    for (int i = 0; i < WIDTH; i++) lanes[i] = kv_f16_to_f32(p[i]);
    return vload(lanes);
#endif
}

// WIDTH elements of a row, from element i on; `type` is a constant wherever speed matters.
INLINE vecf vload_kv(const void *row, int64_t i, int type) {
    if (type == FLOAT32) return vload((const float *)row + i);
    return type == BFLOAT16 ? vload_bf16((const bf16 *)row + i) : vload_f16((const f16 *)row + i);
}

INLINE float load_kv(const void *row, int64_t i, int type) {
    if (type == FLOAT32) return ((const float *)row)[i];
    return type == BFLOAT16 ? bf16_to_f32(((const bf16 *)row)[i]) : kv_f16_to_f32(((const f16 *)row)[i]);
}

INLINE int64_t kv_bytes(int type) { return type == FLOAT32 ? 4 : 2; }

// Write `count` floats to a row of the cache.
INLINE void store_kv(void *row, const float *x, int64_t count, int type) {
    if (type == FLOAT32) memcpy(row, x, count * sizeof *x);
    if (type == BFLOAT16)
        for (int64_t i = 0; i < count; i++) ((bf16 *)row)[i] = f32_to_bf16(x[i]);
    if (type == FLOAT16)
        for (int64_t i = 0; i < count; i++) ((f16 *)row)[i] = kv_f32_to_f16(x[i]);
}

#endif
