// Float32 numbers as sums of bfloat16 ones, which AMX tiles multiply exactly and add in float32.
//
// x = high + middle + low, each rounded to the nearest bfloat16, holds float32's 24 bits. Numbers that were float16's take
// two parts. Of the products of parts only those below 2^-22 of the whole, and below 2^-25 as a rule, are left out: low
// times low, and middle times low.

#ifndef LEAN_PARTS_H
#define LEAN_PARTS_H

#include "tiles.h"

#define MAX_PARTS 3
#define MAX_PAIRS 6

// Parts of a left and a right operand whose products count, 0 the greatest. Where these have fewer parts, the last
// num_pairs are those that there are. Each pair but one keeps a part of the pair before.
static const struct {
    int8_t left, right;
} PAIRS[MAX_PAIRS] = {{0, 2}, {0, 1}, {1, 1}, {1, 0}, {2, 0}, {0, 0}};

// Operands of 3 and 1 to 3 parts, or of 1 and 1.
INLINE int num_pairs(int left, int right) { return right * (2 * left + 1 - right) / 2; }

#if defined(HAS_TILES)

INLINE __mmask16 lanes_below(int64_t count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : (1 << count) - 1; }

// What bfloat16 can hold: a larger number's rest goes to the next part, and infinity to the last.
INLINE __m512 clamp(__m512 x) {
    const __m512 largest = _mm512_set1_ps(0x1.fep127f), least = _mm512_set1_ps(-0x1.fep127f);
    return _mm512_min_ps(largest, _mm512_max_ps(least, x));  // x is NaN: these are too
}

// 16 numbers and 16 others as so many parts. One part: they are rounded.
INLINE void split_32(int num_parts, __m512 low, __m512 high, __m512i *parts) {
#pragma GCC unroll 3
    for (int i = 0; i < num_parts; i++) {
        const int is_last = i == num_parts - 1;
        parts[i] = (__m512i)_mm512_cvtne2ps_pbh(is_last ? high : clamp(high), is_last ? low : clamp(low));
        if (is_last) return;
        low -= (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(parts[i])), 16);
        high -= (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(parts[i], 1)), 16);
    }
}

// What is left of numbers that are cut off after their upper halves, which are bfloat16 ones.
INLINE vecf lower_half(vecf x) {
    return x - (vecf)_mm512_and_si512((__m512i)x, _mm512_set1_epi32((int)0xffff0000));
}

// Without denormal numbers, whose parts would take long; returns what restore_denormals takes.
INLINE unsigned flush_denormals(void) {
    const unsigned control = _mm_getcsr();
    _mm_setcsr(control | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON);
    return control;
}

INLINE void restore_denormals(unsigned control) { _mm_setcsr(control); }

#endif
#endif
