// RMSNorm of rows, with a residual sum before it or without: out = x / sqrt(mean(x²) + eps) * (weight + offset).
//
// blockDim.x threads, a multiple of 32, share a row and keep it in registers, PER_THREAD times N elements each; it is
// read once. blockDim.y rows share a block where a row is one warp's. Sums and the sum of squares are in float: a
// residual stream's squares pass float16's range. The weight is loaded before the reduction, whose latency then hides
// its own.
#include "common.cuh"

// The sum over a row's threads, in each of them. partial: 32 floats of shared memory, used once.
DEVICE float row_sum(float v, float* partial) {
    v = lanes_sum<32>(v);
    if (blockDim.x == 32) return v;
    const i32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) partial[warp] = v;
    __syncthreads();
    return lanes_sum<32>(lane < i32(blockDim.x / 32) ? partial[lane] : 0.0f);
}

// Where `residual` is given, x + residual goes to `sum` and is normed. A thread writes only what it has read before, so
// out may lie over x, and sum over residual.
template <typename T, int N, int PER_THREAD>
DEVICE void norm_row(T* out, T* sum, const T* x, const T* residual, const T* weight, float eps, float offset,
                     i32 num_columns) {
    __shared__ float partial[32];
    Elements<T, N> weights[PER_THREAD];
    float values[PER_THREAD][N];
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        const i32 column = (i * blockDim.x + threadIdx.x) * N;
        if (column >= num_columns) break;
        weights[i].load_constant(weight + column);
        load(x + column, values[i]);
        if (residual != nullptr) {
            float other[N];
            load(residual + column, other);
#pragma unroll
            for (int j = 0; j < N; ++j) values[i][j] += other[j];
            store(sum + column, values[i]);
        }
#pragma unroll
        for (int j = 0; j < N; ++j) squares += values[i][j] * values[i][j];
    }
    const float scale = rsqrtf(row_sum(squares, partial) / float(num_columns) + eps);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        const i32 column = (i * blockDim.x + threadIdx.x) * N;
        if (column >= num_columns) break;
        float w[N];
        weights[i].to_floats(w);
#pragma unroll
        for (int j = 0; j < N; ++j) w[j] = values[i][j] * scale * (w[j] + offset);
        store(out + column, w);
    }
}

// x, out [rows, columns]; weight [columns]. Rows are tokens, or heads of tokens.
template <typename T, int N, int PER_THREAD>
__global__ void __launch_bounds__(1024)
rms_norm(T* out, const T* x, const T* weight, float eps, float offset, i32 num_rows, i32 num_columns) {
    const i64 row = i64(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= num_rows) return;
    const i64 start = row * num_columns;
    norm_row<T, N, PER_THREAD>(out + start, nullptr, x + start, nullptr, weight, eps, offset, num_columns);
}

template <typename T, int N, int PER_THREAD>
__global__ void __launch_bounds__(1024)
add_rms_norm(T* out, T* sum, const T* x, const T* residual, const T* weight, float eps, float offset, i32 num_rows,
             i32 num_columns) {
    const i64 row = i64(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= num_rows) return;
    const i64 start = row * num_columns;
    norm_row<T, N, PER_THREAD>(out + start, sum + start, x + start, residual + start, weight, eps, offset, num_columns);
}
