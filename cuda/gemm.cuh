// A block's part of x · weightᵀ for few rows x, over weights [num_out, depth] as checkpoints have them (gated:
// [2 * num_out, depth], a gate's rows and then its partner's). Two ways:
//
// - few_rows_part: every thread multiplies and adds in float, for up to 8 rows; weights stream straight into registers,
//   and no barrier is needed before the end;
// - tensor_part: tensor-core products for up to 64 rows; weights and x go through stages in shared memory.
//
// In both the depth is split within the block alone, and the parts are added in one order: results are the same in
// every run. Callers say where rows of x are and what becomes of a result:
//     rows(r)                        pointer to row r of x; for r behind the last row any row that may be read
//     store(r, column, sum, partner) sum: the row times weight row `column`; partner: times row num_out + column
#pragma once
#include "activation.cuh"
#include "tensor_core.cuh"

// ---- weights: read once, so they should not push x out of the L1 cache

#ifdef CUDA_HOST
DEVICE uint4 load_once(const uint4* p) { return *p; }
#else
DEVICE uint4 load_once(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}
#endif

template <typename T, int N> DEVICE void load_weights(Elements<T, N>& e, const T* p) {
    e.words = load_once(reinterpret_cast<const uint4*>(p));
}
template <typename T> DEVICE void load_weights(Elements<T, 1>& e, const T* p) { e.load_constant(p); }

// ---- results

// What gemm does with its sums: bias and residual are added where they are given. float32 or T out.
template <typename T, typename OUT, typename ACTIVATION> struct Epilogue {
    OUT* out;           // [rows, num_out]
    const T* bias;      // [num_out], gated [2 * num_out], or null
    const T* residual;  // [rows, num_out], or null
    i32 num_rows, num_out;

    DEVICE void store(i32 row, i32 column, float sum, float partner) const {
        if (row >= num_rows) return;
        if (bias != nullptr) sum += to_float(bias[column]);
        if constexpr (IS_GATED<ACTIVATION>) {
            if (bias != nullptr) partner += to_float(bias[num_out + column]);
            sum = ACTIVATION::apply(sum) * partner;
        }
        const i64 at = i64(row) * num_out + column;
        if (residual != nullptr) sum += to_float(residual[at]);
        round_to(out[at], sum);
    }
};

// ---- few rows

// Weight rows that a thread multiplies with each element of x that it loads.
template <int ROWS> constexpr int FEW_ROWS_OUTS = ROWS <= 2 ? 2 : 4;
constexpr int FEW_ROWS_WARPS = 4;  // of a block, at most

// COUNT sums over a warp, a power of two: lane i gets sum i / (32 / COUNT). Each step halves what is left to add.
template <int COUNT, int LANES = 32> DEVICE float scattered_sums(const float (&v)[COUNT]) {
    if constexpr (COUNT == 1) {
        return lanes_sum<LANES>(v[0]);
    } else {
        const bool is_upper = threadIdx.x & LANES / 2;
        float halved[COUNT / 2];
#pragma unroll
        for (int i = 0; i < COUNT / 2; ++i) {
            const float kept = is_upper ? v[COUNT / 2 + i] : v[i], given = is_upper ? v[i] : v[COUNT / 2 + i];
            halved[i] = kept + __shfl_xor_sync(FULL_WARP, given, LANES / 2);
        }
        return scattered_sums<COUNT / 2, LANES / 2>(halved);
    }
}

// AHEAD steps of a thread along the depth, with the loads of all of them in flight.
template <int AHEAD, typename T, int N, int ROWS, int OUTS>
DEVICE void multiply_rows(float (&sums)[ROWS * OUTS], const T* const (&x)[ROWS], const T* const (&weights)[OUTS],
                          i32 at, i32 step) {
    Elements<T, N> loaded[AHEAD][OUTS];
#pragma unroll
    for (int a = 0; a < AHEAD; ++a)
#pragma unroll
        for (int o = 0; o < OUTS; ++o) load_weights(loaded[a][o], weights[o] + at + a * step);
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
        float w[OUTS][N];
#pragma unroll
        for (int o = 0; o < OUTS; ++o) loaded[a][o].to_floats(w[o]);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            float values[N];
            load(x[r] + at + a * step, values);
#pragma unroll
            for (int o = 0; o < OUTS; ++o)
#pragma unroll
                for (int i = 0; i < N; ++i) sums[r * OUTS + o] += values[i] * w[o][i];
        }
    }
}

// A thread's way along the depth, which ends with fewer loads in flight where what is left asks for fewer.
template <int AHEAD, typename T, int N, int ROWS, int OUTS>
DEVICE void multiply_along(float (&sums)[ROWS * OUTS], const T* const (&x)[ROWS], const T* const (&weights)[OUTS],
                           i32 at, i32 depth) {
    const i32 step = blockDim.x * N;
    for (; at + (AHEAD - 1) * step < depth; at += AHEAD * step)
        multiply_rows<AHEAD, T, N, ROWS, OUTS>(sums, x, weights, at, step);
    if constexpr (AHEAD > 1) multiply_along<AHEAD / 2, T, N, ROWS, OUTS>(sums, x, weights, at, depth);
}

// ROWS rows, 1 to 8, times the weight rows of columns [blockIdx.x * blockDim.y * COLUMNS, …). blockDim.x threads, a
// multiple of 32, share the depth; blockDim.y groups of them have COLUMNS columns each. N elements an access.
template <typename T, int N, int ROWS, typename ACTIVATION, typename Rows, typename Store>
DEVICE void few_rows_part(Rows rows, const T* weight, i32 num_out, i32 depth, Store store) {
    constexpr int OUTS = FEW_ROWS_OUTS<ROWS>, COUNT = ROWS * OUTS;
    constexpr int COLUMNS = IS_GATED<ACTIVATION> ? OUTS / 2 : OUTS, AHEAD = 8 / OUTS;
    __shared__ float parts[FEW_ROWS_WARPS][COUNT];
    const i32 first_column = (blockIdx.x * blockDim.y + threadIdx.y) * COLUMNS;
    const T *x[ROWS], *weights[OUTS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) x[r] = rows(r);
#pragma unroll
    for (int o = 0; o < OUTS; ++o) {
        const i32 column = min(first_column + o % COLUMNS, num_out - 1);
        weights[o] = weight + i64(column + o / COLUMNS * num_out) * depth;
    }
    float sums[COUNT] = {};
    multiply_along<AHEAD, T, N, ROWS, OUTS>(sums, x, weights, threadIdx.x * N, depth);

    const float sum = scattered_sums(sums);
    const i32 num_warps = blockDim.x / 32, first_warp = threadIdx.y * num_warps, lane = threadIdx.x % 32;
    if (lane % (32 / COUNT) == 0) parts[first_warp + threadIdx.x / 32][lane / (32 / COUNT)] = sum;
    __syncthreads();
    auto joined = [&](i32 i) {
        float all = 0.0f;
        for (i32 w = 0; w < num_warps; ++w) all += parts[first_warp + w][i];
        return all;
    };
    const i32 row = threadIdx.x / COLUMNS, column = threadIdx.x % COLUMNS;
    if (row >= ROWS || first_column + column >= num_out) return;
    const float partner = IS_GATED<ACTIVATION> ? joined(row * OUTS + COLUMNS + column) : 0.0f;
    store(row, first_column + column, joined(row * OUTS + column), partner);
}

// ---- tensor cores, sm_80 and later

// TOKENS rows of x, a multiple of 8, times WEIGHTS weight rows, a multiple of 16. The weights are the left factor, so
// eight tokens waste nothing. Four warps: each has 16 weight rows, and warps of the same 16 share a stage's depth.
template <typename T, int WEIGHTS, int TOKENS, typename ACTIVATION> struct TensorPart {
    static constexpr i32 THREADS = 128, STAGES = 4;
    static constexpr i32 DEPTH = WEIGHTS + TOKENS <= 32 ? 256 : WEIGHTS + TOKENS <= 80 ? 128 : 64;  // of a stage
    static constexpr i32 STRIDE = DEPTH + 8;  // elements of a row in shared memory: ldmatrix without bank conflicts
    static constexpr i32 CHUNKS = DEPTH / 8, STAGE = (WEIGHTS + TOKENS) * STRIDE;
    static constexpr i32 ROW_GROUPS = WEIGHTS / 16, DEPTH_GROUPS = 4 / ROW_GROUPS;
    static constexpr i32 COLUMNS = IS_GATED<ACTIVATION> ? WEIGHTS / 2 : WEIGHTS;
    static constexpr i32 SUMS_STRIDE = WEIGHTS + 4;  // floats of a token's sums in shared memory
    static constexpr i32 TILES = TOKENS / 8;
    static constexpr i32 SHARED_BYTES = STAGES * STAGE * 2;
    static_assert(DEPTH_GROUPS * ROW_GROUPS == 4 && TOKENS % 8 == 0 && (TOKENS == 8 || TOKENS % 16 == 0), "tile");
    static_assert(WEIGHTS * CHUNKS % THREADS == 0 && TOKENS * CHUNKS % THREADS == 0, "threads copy alike");
    static_assert(SHARED_BYTES >= DEPTH_GROUPS * TOKENS * SUMS_STRIDE * 4, "sums take the stages' place");

    const i32 first_column, num_out, depth;
    const i32 warp, lane;
    float sums[TILES][4] = {};

    DEVICE TensorPart(i32 column, i32 outs, i32 size)
        : first_column(column), num_out(outs), depth(size), warp(threadIdx.x / 32), lane(threadIdx.x % 32) {}

    // Starts the copies of the stage that begins at depth `at`; what lies outside the arrays becomes zeros.
    template <typename Rows> DEVICE void copy(T* stage, Rows rows, i32 num_rows, const T* weight, i32 at) const {
        const i32 k = at + i32(threadIdx.x) % CHUNKS * 8, first = threadIdx.x / CHUNKS;
        T* const shared = stage + first * STRIDE + i32(threadIdx.x) % CHUNKS * 8;
#pragma unroll
        for (i32 row = 0; row < WEIGHTS; row += THREADS / CHUNKS) {
            const i32 column = first_column + (row + first) % COLUMNS;
            const i32 source = column + (row + first) / COLUMNS * num_out;
            const bool is_inside = k < depth && column < num_out;
            cp_async16(shared + row * STRIDE, is_inside ? weight + i64(source) * depth + k : weight, is_inside);
        }
#pragma unroll
        for (i32 row = 0; row < TOKENS; row += THREADS / CHUNKS) {
            const bool is_inside = k < depth && row + first < num_rows;
            cp_async16(shared + (WEIGHTS + row) * STRIDE, is_inside ? rows(row + first) + k : weight, is_inside);
        }
    }

    DEVICE void multiply(const T* stage) {
        const T* const weights = stage + (warp % ROW_GROUPS * 16 + lane % 16) * STRIDE + lane / 16 * 8;
        const T* const tokens = stage + (WEIGHTS + lane % 8) * STRIDE + lane / 8 % 2 * 8;
        const i32 upper = TOKENS == 8 ? 0 : lane / 16 * 8 * STRIDE;  // of 8 tokens a load of 16 has them twice
#pragma unroll
        for (i32 s = 0; s < DEPTH / 16 / DEPTH_GROUPS; ++s) {
            const i32 k = (s * DEPTH_GROUPS + warp / ROW_GROUPS) * 16;
            u32 left[4], r[4];
            ldmatrix_x4(left, weights + k);
#pragma unroll
            for (i32 n = 0; n < TILES; n += 2) {
                ldmatrix_x4(r, tokens + n * 8 * STRIDE + upper + k);
                const u32 low[2] = {r[0], r[1]}, high[2] = {r[2], r[3]};
                mma_16816<T>(sums[n], left, low);
                if constexpr (TOKENS > 8) mma_16816<T>(sums[n + 1], left, high);
            }
        }
    }

    template <typename Rows> DEVICE void run(T* stages, Rows rows, i32 num_rows, const T* weight) {
        const i32 num_stages = (depth + DEPTH - 1) / DEPTH;
        auto fetch = [&](i32 s, i32 buffer) {
            if (s < num_stages) copy(stages + buffer * STAGE, rows, num_rows, weight, s * DEPTH);
            cp_async_commit();
        };
#pragma unroll
        for (i32 s = 0; s < STAGES - 1; ++s) fetch(s, s);
        for (i32 s = 0; s < num_stages; ++s) {
            cp_async_wait<STAGES - 2>();
            __syncthreads();  // everyone's copies are there, and everyone is done with the buffer that is filled next
            fetch(s + STAGES - 1, (s + STAGES - 1) % STAGES);
            multiply(stages + s % STAGES * STAGE);
        }
        cp_async_wait<0>();
        __syncthreads();
    }

    // The sums to shared memory, [DEPTH_GROUPS, TOKENS, SUMS_STRIDE], and from there to `store`.
    template <typename Store> DEVICE void finish(float* shared, i32 num_rows, Store store) const {
        float* const own = shared + warp / ROW_GROUPS * TOKENS * SUMS_STRIDE + warp % ROW_GROUPS * 16 + lane / 4;
#pragma unroll
        for (i32 n = 0; n < TILES; ++n)
#pragma unroll
            for (i32 i = 0; i < 4; ++i)
                own[(n * 8 + lane % 4 * 2 + i % 2) * SUMS_STRIDE + i / 2 * 8] = sums[n][i];
        __syncthreads();
        auto joined = [&](i32 row, i32 weight) {
            float all = 0.0f;
#pragma unroll
            for (i32 g = 0; g < DEPTH_GROUPS; ++g) all += shared[(g * TOKENS + row) * SUMS_STRIDE + weight];
            return all;
        };
        for (i32 i = threadIdx.x; i < num_rows * COLUMNS; i += THREADS) {
            const i32 row = i / COLUMNS, column = i % COLUMNS;
            if (first_column + column >= num_out) continue;
            const float partner = IS_GATED<ACTIVATION> ? joined(row, COLUMNS + column) : 0.0f;
            store(row, first_column + column, joined(row, column), partner);
        }
    }
};

// Rows 0 … num_rows - 1, at most TOKENS, times the weight rows of columns [blockIdx.x * COLUMNS, …). 128 threads; depth
// a multiple of 8. memory: TensorPart::SHARED_BYTES.
template <typename T, int WEIGHTS, int TOKENS, typename ACTIVATION, typename Rows, typename Store>
DEVICE void tensor_part(u8* memory, Rows rows, i32 num_rows, const T* weight, i32 num_out, i32 depth, Store store) {
    using P = TensorPart<T, WEIGHTS, TOKENS, ACTIVATION>;
    P part(blockIdx.x * P::COLUMNS, num_out, depth);
    part.run(reinterpret_cast<T*>(memory), rows, num_rows, weight);
    part.finish(reinterpret_cast<float*>(memory), num_rows, store);
}
