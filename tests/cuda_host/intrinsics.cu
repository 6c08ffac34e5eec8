// One kernel per intrinsic or error that the emulator's tests look at.
#include "tensor_core.cuh"

__global__ void narrow(bfloat16* b, half* h, u32* b2, u32* h2, const float* x, i32 count) {
    const i32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    round_to(b[i], x[i]);
    round_to(h[i], x[i]);
    b2[i] = pack_bfloat162(x[i], x[count - 1 - i]);
    h2[i] = pack_half2(x[i], x[count - 1 - i]);
}

__global__ void widen(float* from_b, float* from_h, const bfloat16* b, const half* h) {
    const i32 i = blockIdx.x * blockDim.x + threadIdx.x;
    from_b[i] = to_float(b[i]);
    from_h[i] = to_float(h[i]);
}

__global__ void lanes(i32* out) {  // [8, 32]
    const i32 l = threadIdx.x, v = l * l;
    out[0 * 32 + l] = __shfl_sync(FULL_WARP, v, 5);
    out[1 * 32 + l] = __shfl_sync(FULL_WARP, v, l + 1, 8);
    out[2 * 32 + l] = __shfl_up_sync(FULL_WARP, v, 3);
    out[3 * 32 + l] = __shfl_down_sync(FULL_WARP, v, 3, 16);
    out[4 * 32 + l] = __shfl_xor_sync(FULL_WARP, v, 9);
    out[5 * 32 + l] = __ballot_sync(FULL_WARP, l % 3 == 0);
    out[6 * 32 + l] = __any_sync(FULL_WARP, l == 31) * 2 + __all_sync(FULL_WARP, l < 32);
    out[7 * 32 + l] = l < 16 ? __shfl_sync(0x0000ffffu, v, 15) : __shfl_sync(0xffff0000u, v, 31);
}

__global__ void early_exit(i32* out, i32 count) {  // threads that have returned need not take part
    if (i32(threadIdx.x) >= count) return;
    out[threadIdx.x] = __popc(__ballot_sync(FULL_WARP, 1));
    __syncthreads();
    atomicAdd(out + 64, 1);
}

__global__ void count_threads(i32* total, float* sum, i32* odd, i32* any_all) {
    atomicAdd(total, 1);
    atomicAdd(sum, 0.5f);
    const i32 n = __syncthreads_count(threadIdx.x % 2);
    const i32 any = __syncthreads_or(threadIdx.x == 3), all = __syncthreads_and(threadIdx.x < 3);
    if (threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0) {
        atomicMax(odd, n);
        atomicMax(any_all, 2 * any + all);
    }
}

__global__ void reversed_in_shared(float* out) {
    extern __shared__ float buffer[];
    buffer[threadIdx.x] = threadIdx.x;
    __syncthreads();
    const i32 block = blockIdx.y * gridDim.x + blockIdx.x;
    out[block * blockDim.x + threadIdx.x] = buffer[blockDim.x - 1 - threadIdx.x];
}

__global__ void matrices(u32* out, u32* out_trans, const u16* x) {  // x [32, 8] → fragments [32, 4]
    __shared__ __align__(16) u16 tile[32 * 8];
    for (i32 i = 0; i < 8; ++i) tile[threadIdx.x * 8 + i] = x[threadIdx.x * 8 + i];
    __syncwarp();
    u32 r[4], t[4];
    ldmatrix_x4(r, tile + threadIdx.x * 8);
    ldmatrix_x4_trans(t, tile + threadIdx.x * 8);
    for (i32 i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = r[i], out_trans[threadIdx.x * 4 + i] = t[i];
}

__global__ void integers(u32* out, u32 a, u32 b) {
    out[0] = __umulhi(a, b), out[1] = __popc(a), out[2] = __clz(a), out[3] = __ffs(a), out[4] = __brev(a);
    out[5] = atomicCAS(out + 6, b, a);
}

// ---- errors

__global__ void stuck(i32* out) {
    if (threadIdx.x < 40) __syncwarp();
    __syncthreads();
    out[0] = 1;
}
__global__ void shuffles_from_outside(i32* out) { out[threadIdx.x] = __shfl_sync(0x0000ffffu, 1, 20); }
__global__ void meets_elsewhere(i32* out) {
    if (threadIdx.x < 32) {
        __syncthreads();
    } else {
        __syncthreads();
    }
    out[threadIdx.x] = 1;
}
__global__ void indexes_past_an_array(i32* out, i32 i) {
    i32 values[4] = {1, 2, 3, 4};
    out[0] = values[i & 7];
}
__global__ void traps(i32* out) {
    if (out[0] != 0) __trap();
}
__global__ void plus(float* y, const float* x, float a, i32 count) {
    const i32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) y[i] = x[i] + a;
}
__global__ void reads_unwritten(float* out) {
    __shared__ float values[64];
    if (threadIdx.x > 0) values[threadIdx.x] = 1.0f;
    __syncthreads();
    out[threadIdx.x] = values[threadIdx.x];
}
__global__ void mixes_atomic_and_plain(i32* out) {
    __shared__ i32 n;
    if (threadIdx.x == 0) n = 0;
    __syncthreads();
    atomicAdd(&n, 1);
    out[threadIdx.x] = n;
}
__global__ void writes_its_neighbours_place(float* out) {  // in one block, and across blocks
    const i32 i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = 1.0f;
    out[i + 1] = 2.0f;
}
