// Kernels that the emulator's tests run and break: what the engine's kernels do, in its smallest form.
#include "tensor_core.cuh"

// ---- tensor cores behind double-buffered asynchronous copies

constexpr i32 TILE = 64, DEPTH = 32, STRIDE = DEPTH + 8;  // 16 bytes more a row: ldmatrix without bank conflicts

// out [M, N] float = a [M, K] * b [N, K] transposed. Grid (M / TILE, N / TILE) rounded up, 128 threads; DEPTH divides K.
// Dynamic shared memory: 4 tiles of [TILE, STRIDE].
template <typename T>
__global__ void __launch_bounds__(128)
tile_product(float* out, const T* a, const T* b, i32 num_rows, i32 num_columns, i32 depth) {
    extern __shared__ __align__(16) u8 memory[];
    T* const tiles = reinterpret_cast<T*>(memory);
    const i32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i32 first_row = blockIdx.x * TILE, first_column = blockIdx.y * TILE;
    auto a_tile = [=](i32 buffer) { return tiles + buffer * TILE * STRIDE; };
    auto b_tile = [=](i32 buffer) { return tiles + (2 + buffer) * TILE * STRIDE; };
    auto fetch = [=](i32 k, i32 buffer) {
        for (i32 i = threadIdx.x; i < TILE * DEPTH / 8; i += 128) {
            const i32 row = i / (DEPTH / 8), column = i % (DEPTH / 8) * 8;
            const i32 a_row = min(first_row + row, num_rows - 1), b_row = min(first_column + row, num_columns - 1);
            cp_async16(a_tile(buffer) + row * STRIDE + column, a + i64(a_row) * depth + k + column, true);
            cp_async16(b_tile(buffer) + row * STRIDE + column, b + i64(b_row) * depth + k + column, true);
        }
        cp_async_commit();
    };

    float sums[TILE / 8][4] = {};
    fetch(0, 0);
    for (i32 k = 0, buffer = 0; k < depth; k += DEPTH, buffer ^= 1) {
        if (k + DEPTH < depth) {
            fetch(k + DEPTH, buffer ^ 1);
            cp_async_wait<1>();
        } else {
            cp_async_wait<0>();
        }
        __syncthreads();  // the copies of all threads are there
#pragma unroll
        for (i32 step = 0; step < DEPTH; step += 16) {
            u32 left[4];
            ldmatrix_x4(left, a_tile(buffer) + (warp * 16 + lane % 16) * STRIDE + step + lane / 16 * 8);
#pragma unroll
            for (i32 n = 0; n < TILE / 16; ++n) {
                u32 r[4];
                ldmatrix_x4(r, b_tile(buffer) + (n * 16 + lane / 16 * 8 + lane % 8) * STRIDE + step + lane / 8 % 2 * 8);
                const u32 low[2] = {r[0], r[1]}, high[2] = {r[2], r[3]};
                mma_16816<T>(sums[2 * n], left, low);
                mma_16816<T>(sums[2 * n + 1], left, high);
            }
        }
        __syncthreads();  // before the next fetch overwrites this buffer
    }

    float* const rows = reinterpret_cast<float*>(memory) + warp * 16 * TILE;  // a warp's own, then 4-byte stores in order
#pragma unroll
    for (i32 n = 0; n < TILE / 8; ++n)
#pragma unroll
        for (i32 i = 0; i < 4; ++i) rows[(lane / 4 + i / 2 * 8) * TILE + n * 8 + lane % 4 * 2 + i % 2] = sums[n][i];
    __syncwarp();
    for (i32 i = lane; i < 16 * TILE; i += 32) {
        const i32 row = first_row + warp * 16 + i / TILE, column = first_column + i % TILE;
        if (row < num_rows && column < num_columns) out[i64(row) * num_columns + column] = rows[i];
    }
}

// ---- a reduction over the blocks of a grid: the last to arrive adds the parts, in order

// total = the sum of x [count]. parts [blocks] and counter (0 before and after) in global memory; 128 threads.
__global__ void split_sum(float* total, float* parts, u32* counter, const float* x, i32 count) {
    __shared__ float warp_sums[4];
    __shared__ bool is_last;
    float sum = 0.0f;
    for (i32 i = blockIdx.x * 128 + threadIdx.x; i < count; i += gridDim.x * 128) sum += x[i];
    sum = lanes_sum<32>(sum);
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        parts[blockIdx.x] = warp_sums[0] + warp_sums[1] + warp_sums[2] + warp_sums[3];
        __threadfence();
        is_last = atomicInc(counter, gridDim.x - 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (!is_last || threadIdx.x != 0) return;
    sum = 0.0f;
    for (u32 b = 0; b < gridDim.x; ++b) sum += parts[b];
    *total = sum;
}

// ---- shared atomics

// counts [16] of x [count]; one block.
__global__ void histogram(i32* counts, const i32* x, i32 count) {
    __shared__ i32 bins[16];
    if (threadIdx.x < 16) bins[threadIdx.x] = 0;
    __syncthreads();
    for (i32 i = threadIdx.x; i < count; i += blockDim.x) atomicAdd(bins + x[i], 1);
    __syncthreads();
    if (threadIdx.x < 16) counts[threadIdx.x] = bins[threadIdx.x];
}

// out[i] = x[count - 1 - i]
__global__ void reverse(float* out, const float* x, i32 count) {
    const i32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i] = x[count - 1 - i];
}
