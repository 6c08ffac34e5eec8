// What every kernel of lean-engine shares: types, 16-byte accesses, reductions. Nothing from the toolkit's headers is
// included: NVRTC compiles these sources with no include path, and tools/cuda_host compiles them for the CPU, with
// models of the instructions that stand behind #ifdef CUDA_HOST.
//
// Letters in shape comments are the README's: T tokens, B requests, H hidden, Q query heads, K KV heads, D head_dim,
// N blocks, S block_size, M blocks per request. A kernel's parameters are outputs, inputs, scalars, sizes, in this order.
//
// Padding contract: a padded row has slot NO_SLOT and length 0; a kernel skips it, its outputs stay finite, and block
// NULL_BLOCK is never granted, written or read into a result.

#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

static_assert(sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8, "the kernels assume these widths");

constexpr i32 NO_SLOT = -1;
constexpr i32 NULL_BLOCK = 0;
constexpr u32 FULL_WARP = 0xffffffffu;

#define DEVICE __device__ __forceinline__

// ---- 16-bit floats: storage only, arithmetic is in float

struct half {
    u16 bits;
};
struct bfloat16 {
    u16 bits;
};

#ifdef CUDA_HOST

DEVICE float to_float(half v) { return cuda_host::f16_to_float(v.bits); }
DEVICE void round_to(half& v, float x) { v.bits = cuda_host::float_to_f16(x); }
DEVICE void round_to(bfloat16& v, float x) { v.bits = cuda_host::float_to_bf16(x); }
DEVICE u32 pack_half2(float low, float high) {
    return cuda_host::float_to_f16(low) | u32(cuda_host::float_to_f16(high)) << 16;
}
DEVICE u32 pack_bfloat162(float low, float high) {
    return cuda_host::float_to_bf16(low) | u32(cuda_host::float_to_bf16(high)) << 16;
}

#else

DEVICE float to_float(half v) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(v.bits));
    return x;
}
DEVICE void round_to(half& v, float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(v.bits) : "f"(x)); }
DEVICE void round_to(bfloat16& v, float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(v.bits) : "f"(x)); }
DEVICE u32 pack_half2(float low, float high) {
    u32 pair;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
    half a, b;
    round_to(a, low);
    round_to(b, high);
    pair = a.bits | u32(b.bits) << 16;
#endif
    return pair;
}
DEVICE u32 pack_bfloat162(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

#endif

DEVICE float to_float(bfloat16 v) { return __uint_as_float(u32(v.bits) << 16); }
DEVICE float to_float(float v) { return v; }
DEVICE void round_to(float& v, float x) { v = x; }

// Four words of 16 bytes as floats, and back; the first element is in the low bits.
DEVICE void unpack(const u32 (&words)[4], float (&x)[4], float) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = __uint_as_float(words[i]);
}
DEVICE void unpack(const u32 (&words)[4], float (&x)[8], half) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        x[2 * i] = to_float(half{u16(words[i])});
        x[2 * i + 1] = to_float(half{u16(words[i] >> 16)});
    }
}
DEVICE void unpack(const u32 (&words)[4], float (&x)[8], bfloat16) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        x[2 * i] = __uint_as_float(words[i] << 16);
        x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
}
DEVICE void pack(u32 (&words)[4], const float (&x)[4], float) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = __float_as_uint(x[i]);
}
DEVICE void pack(u32 (&words)[4], const float (&x)[8], half) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = pack_half2(x[2 * i], x[2 * i + 1]);
}
DEVICE void pack(u32 (&words)[4], const float (&x)[8], bfloat16) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = pack_bfloat162(x[2 * i], x[2 * i + 1]);
}

// ---- vectors: neighbouring elements, moved at once

template <typename T> constexpr int VECTOR = 16 / int(sizeof(T));  // elements of the widest access

// N elements of T as they lie in memory: VECTOR<T> of them at a 16-byte boundary, or a single one anywhere.
template <typename T, int N> struct Elements {
    static_assert(N == VECTOR<T>, "one element or 16 bytes");
    uint4 words;

    DEVICE void load(const T* p) { words = *reinterpret_cast<const uint4*>(p); }
    DEVICE void load_constant(const T* p) { words = __ldg(reinterpret_cast<const uint4*>(p)); }
    DEVICE void store(T* p) const { *reinterpret_cast<uint4*>(p) = words; }
    DEVICE void to_floats(float (&x)[N]) const {
        const u32 w[4] = {words.x, words.y, words.z, words.w};
        unpack(w, x, T{});
    }
    DEVICE void round_from(const float (&x)[N]) {
        u32 w[4];
        pack(w, x, T{});
        words = make_uint4(w[0], w[1], w[2], w[3]);
    }
};

template <typename T> struct Elements<T, 1> {
    T value;

    DEVICE void load(const T* p) { value = *p; }
    DEVICE void load_constant(const T* p) { value = *p; }
    DEVICE void store(T* p) const { *p = value; }
    DEVICE void to_floats(float (&x)[1]) const { x[0] = to_float(value); }
    DEVICE void round_from(const float (&x)[1]) { round_to(value, x[0]); }
};

template <typename T, int N> DEVICE void load(const T* p, float (&x)[N]) {
    Elements<T, N> e;
    e.load(p);
    e.to_floats(x);
}
template <typename T, int N> DEVICE void store(T* p, const float (&x)[N]) {
    Elements<T, N> e;
    e.round_from(x);
    e.store(p);
}

// ---- reductions

// The sum over groups of LANES neighbouring lanes, in each of them. All 32 lanes must call it.
template <int LANES> DEVICE float lanes_sum(float v) {
#pragma unroll
    for (int offset = LANES / 2; offset; offset >>= 1) v += __shfl_xor_sync(FULL_WARP, v, offset);
    return v;
}

DEVICE i32 clamp(i32 v, i32 low, i32 high) { return min(max(v, low), high); }
