// What every kernel of the CPU device shares: the form of a kernel, vectors, element types.
//
// A kernel is one function over a struct of arguments and the number of a task. Tasks of a launch run in any order on any
// thread, write disjoint outputs and sum in an order that does not depend on who runs them: results are the same for any
// number of threads. GNU C vectors become AVX-512, AVX2 or NEON code; only what has no such form uses intrinsics, behind
// the compiler's own feature macros, and always beside plain code.

#ifndef LEAN_COMMON_H
#define LEAN_COMMON_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

#define LANES 16  // float32 elements of a vector, whatever the machine's registers hold

typedef float f32x16 __attribute__((vector_size(64)));
typedef float f32x16u __attribute__((vector_size(64), aligned(4), may_alias));  // at any address
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint16_t u16x16u __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint16_t bf16;  // bit patterns
typedef uint16_t f16;

// How a launch is run: `count` tasks, or as many as count_of says when the launch's turn comes (it may read arrays that
// earlier launches or the step's inputs have filled).
typedef void (*kernel_fn)(const void *args, int64_t task);
typedef int64_t (*count_fn)(const void *args);

typedef struct {
    kernel_fn run;
    count_fn count_of;  // NULL: count
    const void *args;
    int64_t count;
} launch;

// Lets Python compare its own declaration of NAME_args with the compiler's, when the library is loaded.
#define ARGS_SIZE(name) \
    EXPORT int64_t sizeof_##name##_args(void) { return sizeof(name##_args); }

INLINE f32x16 load16(const float *p) { return *(const f32x16u *)p; }
INLINE void store16(float *p, f32x16 v) { *(f32x16u *)p = v; }
INLINE f32x16 broadcast16(float x) { return x - (f32x16){0}; }

// Sum over lanes in a fixed order: halves onto each other.
INLINE float sum16(f32x16 v) {
    float lanes[LANES];
    memcpy(lanes, &v, sizeof lanes);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

// Vectors of the machine's own width, and what is built on them in vector_math.h. Where registers are narrower than 64
// bytes, compilers keep the 16-lane types above in memory and compare them lane by lane: inner loops use these.
#if defined(__AVX512F__)
#define WIDTH 16  // float32 elements
#elif defined(__AVX__)
#define WIDTH 8
#else
#define WIDTH 4  // SSE2, NEON
#endif

typedef float vecf __attribute__((vector_size(4 * WIDTH)));
typedef int32_t veci __attribute__((vector_size(4 * WIDTH)));
typedef float vecf_anywhere __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

INLINE vecf vload(const float *p) { return *(const vecf_anywhere *)p; }
INLINE void vstore(float *p, vecf v) { *(vecf_anywhere *)p = v; }
INLINE vecf vbroadcast(float x) { return x - (vecf){0}; }  // x - 0 costs nothing, 0 + x is not x for -0

#if defined(__clang__)
#define PERMUTED(v, ...) __builtin_shufflevector(v, v, __VA_ARGS__)
#else
#define PERMUTED(v, ...) __builtin_shuffle(v, (veci){__VA_ARGS__})
#endif

// Sum over lanes in a fixed order: halves onto each other.
INLINE float vsum(vecf v) {
#if WIDTH == 16
    v += PERMUTED(v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    v += PERMUTED(v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    v += PERMUTED(v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
#elif WIDTH == 8
    v += PERMUTED(v, 4, 5, 6, 7, 0, 1, 2, 3);
    v += PERMUTED(v, 2, 3, 0, 1, 6, 7, 4, 5);
#else
    v += PERMUTED(v, 2, 3, 0, 1);
#endif
    return v[0] + v[1];
}

INLINE float bf16_to_f32(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// Round to nearest even; a NaN stays one.
INLINE bf16 f32_to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (bf16)((bits >> 16) | 0x40u);
    return (bf16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

INLINE f32x16 load16_bf16(const bf16 *p) {
    return (f32x16)(__builtin_convertvector(*(const u16x16u *)p, u32x16) << 16);
}

#endif
