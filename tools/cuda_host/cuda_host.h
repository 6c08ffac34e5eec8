// CUDA's device language for g++: lets an unchanged .cu file run on the CPU.
//
// It is force-included before the source (build.py). Every CUDA thread is a fiber. The runtime (fibers.cpp) runs the
// blocks of a grid one after another, and the threads of a block in an order that the launch picks. A thread runs until
// it must wait: at a block barrier, or at a warp collective, whose last arriving lane computes the result for all lanes.
#pragma once
#define CUDA_HOST 1

#include <cfloat>
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

// ---- qualifiers

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
// One block runs at a time, so one copy per OS thread is one copy per block. thread_local is the one storage class that
// fits both `__shared__ T x[n];` and `extern __shared__ T x[];`, and it puts all shared memory of a module into one ELF
// segment (PT_TLS), whose bounds the checks look up.
#define __shared__ thread_local

// For the emulator's own code: the checks must not take its accesses for the kernel's.
#define CUDA_HOST_LAMBDA __attribute__((no_sanitize("thread"), no_sanitize("undefined")))
#define CUDA_HOST_UNCHECKED CUDA_HOST_LAMBDA __attribute__((noinline))

// ---- vector types

#define CUDA_HOST_VECTOR2(T, NAME, ALIGNMENT)      \
    struct __align__(ALIGNMENT) NAME##2 { T x, y; }; \
    inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }
#define CUDA_HOST_VECTOR4(T, NAME, ALIGNMENT)            \
    struct __align__(ALIGNMENT) NAME##4 { T x, y, z, w; }; \
    inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }
CUDA_HOST_VECTOR2(float, float, 8)
CUDA_HOST_VECTOR4(float, float, 16)
CUDA_HOST_VECTOR2(int, int, 8)
CUDA_HOST_VECTOR4(int, int, 16)
CUDA_HOST_VECTOR2(unsigned, uint, 8)
CUDA_HOST_VECTOR4(unsigned, uint, 16)
CUDA_HOST_VECTOR2(unsigned short, ushort, 4)
CUDA_HOST_VECTOR4(unsigned short, ushort, 8)
struct uint3 { unsigned x, y, z; };
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// ---- what the runtime offers

namespace cuda_host {

struct Where { const char* file; int line; };  // a place in the kernel's source
// Trailing parameters that take the caller's place; CUDA_HOST_WHERE gathers them.
#define CUDA_HOST_CALLER const char* host_file = __builtin_FILE(), int host_line = __builtin_LINE()
#define CUDA_HOST_WHERE (cuda_host::Where{host_file, host_line})

struct Thread { uint3 thread_idx; int linear, lane, warp; };
extern Thread* self;  // the thread that runs now; null between threads
extern uint3 block_idx;
extern dim3 block_dim, grid_dim;

// Waits for all threads of the block that have not returned; gives the sum of their values.
int block_barrier(int value, Where where);

// Waits until every live lane in `mask` has come here with the same `op` and mask. The last one runs
// op(args, live_mask), where args[lane] is that lane's `arg`. orders_memory: as __syncwarp does, and a shuffle does not.
using WarpOp = void (*)(void** args, unsigned live_mask);
void warp_collective(unsigned mask, WarpOp op, void* arg, bool orders_memory, Where where);

void memory_fence();

enum class Access : uint8_t { Read, Write, Atomic };
void check_access(const void* p, size_t bytes, Access access, const void* pc);  // does nothing unless checked

[[noreturn]] __attribute__((format(printf, 2, 3))) void fail(Where where, const char* format, ...);

}  // namespace cuda_host

#define threadIdx (cuda_host::self->thread_idx)
#define blockIdx (cuda_host::block_idx)
#define blockDim (cuda_host::block_dim)
#define gridDim (cuda_host::grid_dim)
constexpr int warpSize = 32;

// ---- barriers and fences

inline void __syncthreads(CUDA_HOST_CALLER) { cuda_host::block_barrier(0, CUDA_HOST_WHERE); }
inline int __syncthreads_count(int p, CUDA_HOST_CALLER) { return cuda_host::block_barrier(p != 0, CUDA_HOST_WHERE); }
inline int __syncthreads_or(int p, CUDA_HOST_CALLER) { return cuda_host::block_barrier(p != 0, CUDA_HOST_WHERE) != 0; }
inline int __syncthreads_and(int p, CUDA_HOST_CALLER) { return cuda_host::block_barrier(p == 0, CUDA_HOST_WHERE) == 0; }
inline void __threadfence() { cuda_host::memory_fence(); }
inline void __threadfence_block() {}

inline void __syncwarp(unsigned mask = ~0u, CUDA_HOST_CALLER) {
    cuda_host::warp_collective(mask, [](void**, unsigned) {}, nullptr, true, CUDA_HOST_WHERE);
}

// ---- warp collectives

namespace cuda_host {

template <class T> struct ShuffleArg { T in, out; int source; Where where; };

template <class T> CUDA_HOST_UNCHECKED T shuffle(unsigned mask, T value, int source, Where where) {
    ShuffleArg<T> arg{value, value, source, where};
    warp_collective(mask, [](void** args, unsigned live) CUDA_HOST_LAMBDA {
        for (int lane = 0; lane < 32; ++lane) {
            if (!(live >> lane & 1)) continue;
            auto* mine = static_cast<ShuffleArg<T>*>(args[lane]);
            if (!(live >> mine->source & 1))
                fail(mine->where, "lane %d shuffles from lane %d, which takes no part", lane, mine->source);
            mine->out = static_cast<ShuffleArg<T>*>(args[mine->source])->in;
        }
    }, &arg, false, where);
    return arg.out;
}

struct VoteArg { unsigned in, ballot, live; };

CUDA_HOST_UNCHECKED inline VoteArg vote(unsigned mask, bool predicate, Where where) {
    VoteArg arg{predicate, 0, 0};
    warp_collective(mask, [](void** args, unsigned live) CUDA_HOST_LAMBDA {
        unsigned ballot = 0;
        for (int lane = 0; lane < 32; ++lane)
            if (live >> lane & 1) ballot |= static_cast<VoteArg*>(args[lane])->in << lane;
        for (int lane = 0; lane < 32; ++lane)
            if (live >> lane & 1) {
                static_cast<VoteArg*>(args[lane])->ballot = ballot;
                static_cast<VoteArg*>(args[lane])->live = live;
            }
    }, &arg, false, where);
    return arg;
}

}  // namespace cuda_host

// `width` divides the warp into segments; a lane that would read beyond its segment keeps its own value.
template <class T> T __shfl_sync(unsigned mask, T v, int source, int width = 32, CUDA_HOST_CALLER) {
    const int first = cuda_host::self->lane & ~(width - 1);
    return cuda_host::shuffle(mask, v, first | (source & (width - 1)), CUDA_HOST_WHERE);
}
template <class T> T __shfl_xor_sync(unsigned mask, T v, int bits, int width = 32, CUDA_HOST_CALLER) {
    const int lane = cuda_host::self->lane, last = lane | (width - 1), source = lane ^ bits;
    return cuda_host::shuffle(mask, v, source <= last ? source : lane, CUDA_HOST_WHERE);
}
template <class T> T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32, CUDA_HOST_CALLER) {
    const int lane = cuda_host::self->lane, last = lane | (width - 1), source = lane + int(delta);
    return cuda_host::shuffle(mask, v, source <= last ? source : lane, CUDA_HOST_WHERE);
}
template <class T> T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32, CUDA_HOST_CALLER) {
    const int lane = cuda_host::self->lane, first = lane & ~(width - 1), source = lane - int(delta);
    return cuda_host::shuffle(mask, v, source >= first ? source : lane, CUDA_HOST_WHERE);
}
inline unsigned __ballot_sync(unsigned mask, int p, CUDA_HOST_CALLER) {
    return cuda_host::vote(mask, p != 0, CUDA_HOST_WHERE).ballot;
}
inline int __any_sync(unsigned mask, int p, CUDA_HOST_CALLER) {
    return cuda_host::vote(mask, p != 0, CUDA_HOST_WHERE).ballot != 0;
}
inline int __all_sync(unsigned mask, int p, CUDA_HOST_CALLER) {
    const auto v = cuda_host::vote(mask, p != 0, CUDA_HOST_WHERE);
    return v.ballot == v.live;
}

#include "intrinsics.h"
#include "ptx.h"
#include "launch.h"
