// What every kernel of lean-engine shares. Nothing from the toolkit's headers is included: NVRTC compiles these sources
// with no include path, and a C++ compiler can read them on a machine without CUDA.
//
// Letters in shape comments are the README's: T tokens, B requests, H hidden, Q query heads, K KV heads, D head_dim,
// N blocks, S block_size, M blocks per request.
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
