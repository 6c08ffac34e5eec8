// exp and tanh of a vector of floats, within 2 units in the last place over the whole range. NaN goes in and comes out.
//
// exp: x = n·ln 2 + r with |r| <= ln 2 / 2; exp(r) by a polynomial; 2^n in two multiplications, so that results that are
// subnormal or overflow come out right. tanh: from exp where |x| is large, a polynomial in x² where it is small. The
// polynomials are minimax fits of the relative error (Lawson's weighted least squares).

#ifndef LEAN_VECTOR_MATH_H
#define LEAN_VECTOR_MATH_H

#include "common.h"

// Lanes of a where the mask is -1, of b where it is 0.
INLINE vecf vselect(veci mask, vecf a, vecf b) { return (vecf)(((veci)a & mask) | ((veci)b & ~mask)); }

// b where one of the two is NaN.
INLINE vecf vmax(vecf a, vecf b) { return vselect(a > b, a, b); }
INLINE vecf vmin(vecf a, vecf b) { return vselect(a < b, a, b); }

INLINE vecf power_of_two(veci n) { return (vecf)((n + 127) << 23); }  // -126 <= n <= 127

INLINE vecf vexp(vecf x) {
    x = vmin(vbroadcast(89.0f), vmax(vbroadcast(-105.0f), x));  // beyond them the result is inf or 0 all the same
    const float shift = 12582912.0f;  // 1.5 · 2^23: a sum with it holds the nearest integer in its low bits
    vecf shifted = x * 1.44269504f + shift;
    veci n = (veci)shifted - 0x4b400000;
    vecf whole = shifted - shift;
    vecf r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;  // ln 2 in two parts: the first product is exact
    vecf q = r * 0.00138144672f + 0.00836878084f;
    q = q * r + 0.0416683927f;
    q = q * r + 0.166665196f;
    q = q * r + 0.49999994f;
    vecf y = (q * (r * r) + r) + 1.0f;
    veci half = n >> 1;
    return y * power_of_two(half) * power_of_two(n - half);
}

INLINE vecf vtanh(vecf x) {
    vecf size = (vecf)((veci)x & 0x7fffffff);
    vecf large = 1.0f - 2.0f / (vexp(size + size) + 1.0f);
    vecf u = size * size;
    vecf q = u * -0.00571704516f + 0.020650588f;
    q = q * u - 0.0537434965f;
    q = q * u + 0.133314908f;
    q = q * u - 0.333332837f;
    vecf result = vselect(size < 0.625f, size + size * (u * q), large);
    return (vecf)((veci)result | ((veci)x & (int32_t)0x80000000));
}

INLINE vecf vsilu(vecf x) { return x / (1.0f + vexp(-x)); }

INLINE vecf vgelu_tanh(vecf x) {
    vecf inner = (x * x * 0.044715f + 1.0f) * x * 0.797884561f;  // √(2/π) · (x + 0.044715 x³)
    return (1.0f + vtanh(inner)) * 0.5f * x;
}

#endif
