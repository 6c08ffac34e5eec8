// Kernels that copy: rows by index (embedding, gather_rows), columns (slice_columns).
//
// Grid (rows, parts of a row); each thread moves N neighbouring elements of one row. An index out of range takes the
// nearest row there is: the rows that pad a step may hold anything, and a wild read would end the process.
#include "common.cuh"

// out[t] = table[ids[t]] * scale
template <typename T, int N>
__global__ void __launch_bounds__(128)
embedding(T* out, const i32* ids, const T* table, float scale, i32 num_columns, i32 num_table_rows) {
    const i32 column = (blockIdx.y * blockDim.x + threadIdx.x) * N;
    if (column >= num_columns) return;
    const i64 id = clamp(ids[blockIdx.x], 0, num_table_rows - 1);
    float x[N];
    load(table + id * num_columns + column, x);
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] *= scale;
    store(out + i64(blockIdx.x) * num_columns + column, x);
}

// out[r] = x[rows[r]]
template <typename T, int N>
__global__ void __launch_bounds__(128)
gather_rows(T* out, const T* x, const i32* rows, i32 num_columns, i32 num_rows) {
    const i32 column = (blockIdx.y * blockDim.x + threadIdx.x) * N;
    if (column >= num_columns) return;
    const i64 row = clamp(rows[blockIdx.x], 0, num_rows - 1);
    Elements<T, N> e;
    e.load(x + row * num_columns + column);
    e.store(out + i64(blockIdx.x) * num_columns + column);
}

// out[t, c] = x[t, start + c]
template <typename T, int N>
__global__ void __launch_bounds__(128)
slice_columns(T* out, const T* x, i32 start, i32 num_columns, i32 num_out_columns) {
    const i32 column = (blockIdx.y * blockDim.x + threadIdx.x) * N;
    if (column >= num_out_columns) return;
    Elements<T, N> e;
    e.load(x + i64(blockIdx.x) * num_columns + start + column);
    e.store(out + i64(blockIdx.x) * num_out_columns + column);
}
