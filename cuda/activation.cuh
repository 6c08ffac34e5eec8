// Activations as template arguments of kernels that end in one.

#pragma once
#include "common.cuh"

struct Plain {  // none
    static DEVICE float apply(float x) { return x; }
};

struct Silu {
    // exp overflows to inf where the result is 0.
    static DEVICE float apply(float x) { return __fdividef(x, 1.0f + __expf(-x)); }
};

struct GeluTanh {
    // The tanh approximation of GELU (Hendrycks and Gimpel 2016), x/2 * (1 + tanh(u)) with u = √(2/π)(x + 0.044715x³),
    // written as x / (1 + exp(-2u)).
    static DEVICE float apply(float x) {
        constexpr float TWICE_SQRT_2_OVER_PI = 1.5957691216057308f;
        return __fdividef(x, 1.0f + __expf(-TWICE_SQRT_2_OVER_PI * (x + 0.044715f * x * x * x)));
    }
};

// Whether weights are a gate's rows and then as many of its partner's, and a result is ACTIVATION(gate) * partner.
template <typename ACTIVATION> constexpr bool IS_GATED = true;
template <> constexpr bool IS_GATED<Plain> = false;
