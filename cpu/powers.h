// Powers of 2 for sums of exponentials, where the greatest term is 1.

#ifndef LEAN_POWERS_H
#define LEAN_POWERS_H

#include "common.h"

// 2^r for |r| <= 1/2 by a minimax polynomial of the relative error (the Cephes library's, S. L. Moshier).
INLINE vecf vpower_of_fraction(vecf r) {
    vecf p = r * 1.535336188319500e-4f + 1.339887440266574e-3f;
    p = p * r + 9.618437357674640e-3f;
    p = p * r + 5.550332471162809e-2f;
    p = p * r + 2.402264791363012e-1f;
    p = p * r + 6.931472028550421e-1f;
    return p * r + 1.0f;
}

// 2^x for x <= 0, to about 1 unit in the last place, but never less than 2^-126. NaN stays NaN. 2^x = 2^n · 2^r with
// |r| <= 1/2.
INLINE vecf vpower_of_two(vecf x) {
#if WIDTH == 16
    x = (vecf)_mm512_max_ps(_mm512_set1_ps(-126), (__m512)x);
#elif WIDTH == 8
    x = (vecf)_mm256_max_ps(_mm256_set1_ps(-126), (__m256)x);
#else
    veci is_small = x < -126.0f;
    x = (vecf)(((veci)vbroadcast(-126.0f) & is_small) | ((veci)x & ~is_small));
#endif
    const float shift = 12582912.0f;  // 1.5 · 2^23: a sum with it holds the nearest integer in its low bits
    vecf shifted = x + shift;
    veci exponent = (veci)shifted << 23;  // that of 1.5 · 2^23 is shifted out
    vecf p = vpower_of_fraction(x - (shifted - shift));
    return (vecf)((veci)p + exponent);
}

// The greater of each pair of lanes; b where one is NaN.
INLINE vecf vgreater(vecf a, vecf b) {
#if WIDTH == 16
    return (vecf)_mm512_max_ps((__m512)a, (__m512)b);
#elif WIDTH == 8
    return (vecf)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
    return (vecf)_mm_max_ps((__m128)a, (__m128)b);
#else
    veci is_greater = a > b;
    return (vecf)(((veci)a & is_greater) | ((veci)b & ~is_greater));
#endif
}

INLINE float vgreatest(vecf v) {
    float lanes[WIDTH], greatest;
    vstore(lanes, v);
    greatest = lanes[0];
    for (int i = 1; i < WIDTH; i++) greatest = lanes[i] > greatest ? lanes[i] : greatest;
    return greatest;
}

#endif
