// Kernels whose every output element depends on one element of each input, or on a gate and its partner.
//
// Arrays begin at 16-byte boundaries; out may lie over the first input.
#include "activation.cuh"

// ---- a gate and its partner

// gate_up [T, 2*I] with the gate at the left → out [T, I]: ACTIVATION(gate) * up. Grid (T, parts of a row).
template <typename T, int N, typename ACTIVATION>
__global__ void __launch_bounds__(128)
act_and_mul(T* out, const T* gate_up, i32 num_columns) {
    const i32 column = (blockIdx.y * blockDim.x + threadIdx.x) * N;
    if (column >= num_columns) return;
    const T* const row = gate_up + 2 * i64(blockIdx.x) * num_columns;
    float gate[N], up[N];
    load(row + column, gate);
    load(row + num_columns + column, up);
#pragma unroll
    for (int i = 0; i < N; ++i) gate[i] = ACTIVATION::apply(gate[i]) * up[i];
    store(out + i64(blockIdx.x) * num_columns + column, gate);
}

// ---- whole arrays: VECTOR<T> elements a thread; the last thread takes the elements that fill no vector

template <int N, typename T, typename F> DEVICE void map_at(i64 at, F f, T* out, const T* a) {
    float x[N];
    load(a + at, x);
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = f(x[i]);
    store(out + at, x);
}
template <int N, typename T, typename F> DEVICE void map_at(i64 at, F f, T* out, const T* a, const T* b) {
    float x[N], y[N];
    load(a + at, x);
    load(b + at, y);
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = f(x[i], y[i]);
    store(out + at, x);
}

// out = f(inputs...) for this thread's elements.
template <typename T, typename F, typename... Inputs>
DEVICE void map(i64 count, F f, T* out, Inputs... inputs) {
    constexpr int N = VECTOR<T>;
    const i64 start = (i64(blockIdx.x) * blockDim.x + threadIdx.x) * N;
    if (start + N <= count) {
        map_at<N>(start, f, out, inputs...);
    } else {
        for (i64 at = start; at < count; ++at) map_at<1>(at, f, out, inputs...);
    }
}

template <typename T> __global__ void __launch_bounds__(128) silu(T* out, const T* x, i64 count) {
    map(count, [](float v) { return Silu::apply(v); }, out, x);
}
template <typename T> __global__ void __launch_bounds__(128) gelu_tanh(T* out, const T* x, i64 count) {
    map(count, [](float v) { return GeluTanh::apply(v); }, out, x);
}
template <typename T> __global__ void __launch_bounds__(128) softcap(T* out, const T* x, float cap, i64 count) {
    map(count, [cap](float v) { return cap * tanhf(v / cap); }, out, x);
}
template <typename T> __global__ void __launch_bounds__(128) add(T* out, const T* a, const T* b, i64 count) {
    map(count, [](float x, float y) { return x + y; }, out, a, b);
}
template <typename T> __global__ void __launch_bounds__(128) mul(T* out, const T* a, const T* b, i64 count) {
    map(count, [](float x, float y) { return x * y; }, out, a, b);
}
