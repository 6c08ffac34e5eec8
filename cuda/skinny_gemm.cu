// gemm for few rows: out = epilogue(x · weightᵀ), x [T, depth], weight [O, depth] as checkpoints have it.
//
// The epilogue adds bias and residual where they are given; with an activation, weight is [2 * O, depth], the gate's
// rows and then its partner's, and out = ACTIVATION(gate) * partner. Sums are in float; out is T or float (logits).
// Arrays begin at 16-byte boundaries. See gemm.cuh for how each kernel works.
#include "gemm.cuh"

// Any T, ROWS rows a block; N elements an access, a divisor of the depth. Grid (columns, rows); block (threads along
// the depth, groups of columns).
template <typename T, typename OUT, int N, int ROWS, typename ACTIVATION>
__global__ void __launch_bounds__(128, 3)
few_rows_gemm(OUT* out, const T* x, const T* weight, const T* bias, const T* residual, i32 num_rows, i32 num_out,
              i32 depth) {
    const Epilogue<T, OUT, ACTIVATION> epilogue = {out, bias, residual, num_rows, num_out};
    const i32 first_row = blockIdx.y * ROWS;
    few_rows_part<T, N, ROWS, ACTIVATION>(
        [=](i32 r) { return x + i64(min(first_row + r, num_rows - 1)) * depth; }, weight, num_out, depth,
        [=](i32 r, i32 column, float sum, float partner) { epilogue.store(first_row + r, column, sum, partner); });
}

// Any T, TOKENS rows a block; depth a multiple of 8. Grid (columns, rows).
template <typename T, typename OUT, int WEIGHTS, int TOKENS, typename ACTIVATION>
__global__ void __launch_bounds__(128)
skinny_gemm(OUT* out, const T* x, const T* weight, const T* bias, const T* residual, i32 num_rows, i32 num_out,
            i32 depth) {
    extern __shared__ __align__(16) u8 memory[];
    const Epilogue<T, OUT, ACTIVATION> epilogue = {out, bias, residual, num_rows, num_out};
    const i32 first_row = blockIdx.y * TOKENS;
    tensor_part<T, WEIGHTS, TOKENS, ACTIVATION>(
        memory, [=](i32 r) { return x + i64(first_row + r) * depth; }, min(TOKENS, num_rows - first_row), weight,
        num_out, depth,
        [=](i32 r, i32 column, float sum, float partner) { epilogue.store(first_row + r, column, sum, partner); });
}
