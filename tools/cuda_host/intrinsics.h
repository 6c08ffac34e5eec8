// Atomics, and the scalar functions that CUDA knows without a header. Included by cuda_host.h.
#pragma once

// ---- atomics: one thread runs at a time, so plain reads and writes are atomic

#define CUDA_HOST_ATOMIC(NAME, EXPRESSION)                                                             \
    template <class T> CUDA_HOST_UNCHECKED T NAME(T* p, std::common_type_t<T> v) {                     \
        cuda_host::check_access(p, sizeof(T), cuda_host::Access::Atomic, __builtin_return_address(0)); \
        T old = *p;                                                                                    \
        *p = EXPRESSION;                                                                               \
        return old;                                                                                    \
    }
CUDA_HOST_ATOMIC(atomicAdd, T(old + v))
CUDA_HOST_ATOMIC(atomicSub, T(old - v))
CUDA_HOST_ATOMIC(atomicMax, (old < v ? v : old))
CUDA_HOST_ATOMIC(atomicMin, (v < old ? v : old))
CUDA_HOST_ATOMIC(atomicAnd, T(old & v))
CUDA_HOST_ATOMIC(atomicOr, T(old | v))
CUDA_HOST_ATOMIC(atomicXor, T(old ^ v))
CUDA_HOST_ATOMIC(atomicExch, v)
CUDA_HOST_ATOMIC(atomicInc, T(old >= v ? 0 : old + 1))
template <class T>
CUDA_HOST_UNCHECKED T atomicCAS(T* p, std::common_type_t<T> expected, std::common_type_t<T> v) {
    cuda_host::check_access(p, sizeof(T), cuda_host::Access::Atomic, __builtin_return_address(0));
    T old = *p;
    if (old == expected) *p = v;
    return old;
}

// ---- scalars

#define CUDA_HOST_MIN_MAX(T)                        \
    inline T min(T a, T b) { return b < a ? b : a; } \
    inline T max(T a, T b) { return a < b ? b : a; }
CUDA_HOST_MIN_MAX(int)
CUDA_HOST_MIN_MAX(unsigned)
CUDA_HOST_MIN_MAX(long long)
CUDA_HOST_MIN_MAX(unsigned long long)
CUDA_HOST_MIN_MAX(float)

namespace cuda_host {
template <class To, class From> To bits_as(From v) {
    static_assert(sizeof(To) == sizeof(From));
    To r;
    std::memcpy(&r, &v, sizeof r);
    return r;
}
}  // namespace cuda_host

inline float __int_as_float(int v) { return cuda_host::bits_as<float>(v); }
inline float __uint_as_float(unsigned v) { return cuda_host::bits_as<float>(v); }
inline int __float_as_int(float v) { return cuda_host::bits_as<int>(v); }
inline unsigned __float_as_uint(float v) { return cuda_host::bits_as<unsigned>(v); }

// The GPU's versions of these are approximate; here they are as exact as the C library's.
inline float rsqrtf(float v) { return 1.0f / std::sqrt(v); }
inline float __expf(float v) { return std::exp(v); }
inline float __logf(float v) { return std::log(v); }
inline float __fdividef(float a, float b) {  // 0 where the divisor is beyond 2^126, as documented
    return std::fabs(b) > 0x1p126f && std::isfinite(b) ? a * 0.0f : a / b;
}
inline float __saturatef(float v) { return v > 0 ? std::fmin(v, 1.0f) : 0.0f; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __frcp_rn(float v) { return 1.0f / v; }

inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __clz(int v) { return v ? __builtin_clz(unsigned(v)) : 32; }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline unsigned __brev(unsigned v) {
    unsigned r = 0;
    for (int i = 0; i < 32; ++i) r |= (v >> i & 1) << (31 - i);
    return r;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((uint64_t(a) * b) >> 32); }

// Loads and stores with a cache hint are loads and stores.
template <class T> inline T __ldg(const T* p) { return *p; }
template <class T> inline T __ldcs(const T* p) { return *p; }
template <class T> inline T __ldcg(const T* p) { return *p; }
template <class T> inline void __stcs(T* p, T v) { *p = v; }
template <class T> inline void __stcg(T* p, T v) { *p = v; }

inline void __trap(CUDA_HOST_CALLER) { cuda_host::fail(CUDA_HOST_WHERE, "__trap()"); }
