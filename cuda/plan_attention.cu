// The work of paged_attention.cu in one step, listed in device memory once for all layers of one window.
//
// Row tiles stand in the order of the requests, each with the number of key tiles before it, counted exactly: a chunk's
// later rows see more keys than its earlier ones, and a window hides the first.
#include "attention.cuh"

struct Request {
    i32 token, num_tokens, length;  // first token in q, tokens in q, keys

    DEVICE i32 position() const { return length - num_tokens; }
};

// The rows behind the last request's count as one more request, of length 0.
DEVICE Request request_at(const i32* cu_seqlens_q, const i32* seq_lens, i32 b, i32 num_requests, i32 num_tokens) {
    const i32 token = cu_seqlens_q[b], end = b < num_requests ? cu_seqlens_q[b + 1] : num_tokens;
    return {token, max(0, end - token), b < num_requests ? seq_lens[b] : 0};
}

// The sum over the lanes before this one, and over all.
DEVICE i32 sum_before(i32 v, i32& total) {
    const i32 lane = threadIdx.x % 32;
    i32 sum = v;
#pragma unroll
    for (i32 offset = 1; offset < 32; offset <<= 1) {
        const i32 other = __shfl_up_sync(FULL_WARP, sum, offset);
        if (lane >= offset) sum += other;
    }
    total = __shfl_sync(FULL_WARP, sum, 31);
    return sum - v;
}

// The sum over the threads before this one, and over all; blockDim.x is 256.
DEVICE i32 block_sum_before(i32 v, i32& total) {
    __shared__ i32 warp_sums[8];
    const i32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i32 warp_sum;
    const i32 before = sum_before(v, warp_sum);
    if (lane == 0) warp_sums[warp] = warp_sum;
    __syncthreads();
    const i32 before_warp = sum_before(lane < 8 ? warp_sums[lane] : 0, total);
    __syncthreads();  // before the next call writes
    return before + __shfl_sync(FULL_WARP, before_warp, warp);
}

// The last index whose start is at most x; starts grow, and starts[0] ≤ x.
DEVICE i32 last_start(const i32* starts, i32 count, i32 x) {
    i32 low = 0, high = count;
    while (high - low > 1) {
        const i32 middle = (low + high) / 2;
        (starts[middle] <= x ? low : high) = middle;
    }
    return low;
}

struct PlannedTile {
    RowTile tile;
    i32 num_key_tiles;  // at least 1, so that a unit without keys is somebody's too
};

DEVICE PlannedTile plan_tile(const Request& r, i32 request, i32 row, i32 rows, i32 keys, i32 group, i32 window) {
    const i32 num_rows = min(rows, r.num_tokens * group - row);
    const i32 first = r.position() + row / group, last = r.position() + (row + num_rows - 1) / group;
    const i32 key_begin = max(0, first - window + 1), key_end = max(0, last + 1);
    const i32 num_key_tiles = max(1, (key_end + keys - 1) / keys - key_begin / keys);
    return {{0, request, row, num_rows, r.token, r.position(), key_begin, key_end}, num_key_tiles};
}

// Lists row tiles in the order of the requests. Block 0 makes the narrow list, block 1, if there is one, the wide:
// requests of at most max_narrow_rows packed rows are narrow. 256 threads.
// Dynamic shared memory: B + 2 words.
__global__ void __launch_bounds__(256)
plan_attention(i32* narrow, i32* wide, const i32* cu_seqlens_q, const i32* seq_lens, i32 window, i32 max_narrow_rows,
               i32 narrow_keys, i32 wide_keys, i32 group, i32 num_requests, i32 num_tokens) {
    extern __shared__ __align__(16) u8 memory[];
    i32* const first_tiles = reinterpret_cast<i32*>(memory);  // of each request
    const bool is_wide = blockIdx.x == 1;
    const i32 rows = is_wide ? 64 : 16, keys = is_wide ? wide_keys : narrow_keys, thread = threadIdx.x;
    PlanHeader* const header = reinterpret_cast<PlanHeader*>(is_wide ? wide : narrow);
    RowTile* const tiles = reinterpret_cast<RowTile*>(header + 1);

    i32 num_row_tiles = 0;
    for (i32 base = 0; base <= num_requests; base += 256) {
        i32 count = 0, sum;
        if (base + thread <= num_requests) {
            const Request r = request_at(cu_seqlens_q, seq_lens, base + thread, num_requests, num_tokens);
            const i32 num_rows = r.num_tokens * group;
            if ((num_rows > max_narrow_rows) == is_wide) count = (num_rows + rows - 1) / rows;
        }
        const i32 before = block_sum_before(count, sum);
        if (base + thread <= num_requests) first_tiles[base + thread] = num_row_tiles + before;
        num_row_tiles += sum;
    }
    __syncthreads();

    i32 num_key_tiles = 0;
    for (i32 base = 0; base < num_row_tiles; base += 256) {
        PlannedTile planned = {};
        if (base + thread < num_row_tiles) {
            const i32 request = last_start(first_tiles, num_requests + 1, base + thread);
            const Request r = request_at(cu_seqlens_q, seq_lens, request, num_requests, num_tokens);
            const i32 row = (base + thread - first_tiles[request]) * rows;
            planned = plan_tile(r, request, row, rows, keys, group, window);
        }
        i32 sum;
        planned.tile.start = num_key_tiles + block_sum_before(planned.num_key_tiles, sum);
        if (base + thread < num_row_tiles) tiles[base + thread] = planned.tile;
        num_key_tiles += sum;
    }
    if (thread == 0) {
        tiles[num_row_tiles].start = num_key_tiles;
        header->num_row_tiles = num_row_tiles;
        header->num_key_tiles = num_key_tiles;
    }
}
