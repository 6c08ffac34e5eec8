// Log-probabilities under the raw logits, of the tokens that accept_tokens has taken and of the likeliest ones:
// rank_logprobs over the parts of a row, then merge_logprobs. A rank is 1 plus the number of greater logits; of equal
// tokens the lower id comes first.
#include "sampling.cuh"

constexpr i32 MAX_PARTS = 128;

struct __align__(16) PartRanks {
    u64 mass;         // of all tokens, relative to the greatest
    u64 num_greater;  // than the chosen token
    u64 top[MAX_TOP_LOGPROBS];  // candidates, descending
};
static_assert(sizeof(PartRanks) == 8 * 22, "as in sampling.py");

// The number of likeliest tokens that a row's request wants besides its chosen one; -1 where it wants nothing.
DEVICE i32 num_logprobs_of(const i32* results, const i32* row_slots, const i32* params, i32 row) {
    if (results[2 * row] < 0) return -1;
    return reinterpret_cast<const SlotParams*>(params)[row_slots[row]].num_logprobs;
}

// This thread's best candidate below `limit` of the part's tokens [first, end).
DEVICE u64 best_below(const float* logits, i32 first, i32 end, u64 limit) {
    u64 best = 0;
    for (i32 token = first + i32(threadIdx.x); token < end; token += blockDim.x) {
        const u64 c = candidate(logits[token], token);
        if (c < limit) best = max(best, c);
    }
    return best;
}

// Grid (P, R).
__global__ void __launch_bounds__(256)
rank_logprobs(u64* ranks, const float* logits, const u64* scan, const i32* results, const i32* row_slots,
              const i32* params, i32 vocab_size) {
    __shared__ u64 partial[32];
    const i32 num_top = num_logprobs_of(results, row_slots, params, blockIdx.y);
    if (num_top < 0) return;
    const float* const row = logits + i64(blockIdx.y) * vocab_size;
    const i32 first = blockIdx.x * PART_TOKENS, end = min(first + PART_TOKENS, vocab_size);
    const float peak = from_ordered(u32(merge_scan(scan, blockIdx.y, gridDim.x).raw_peak));
    const float chosen = row[results[2 * blockIdx.y]];
    u64 mass = 0, num_greater = 0, best = 0;
    for (i32 token = first + i32(threadIdx.x); token < end; token += blockDim.x) {
        const float x = row[token];
        mass += mass_of(expf(x - peak));
        num_greater += x > chosen;
        best = max(best, candidate(x, token));
    }
    mass = reduce_block<Sum>(mass, partial);
    num_greater = reduce_block<Sum>(num_greater, partial);
    PartRanks* const out = reinterpret_cast<PartRanks*>(ranks) + i64(blockIdx.y) * gridDim.x + blockIdx.x;
    if (threadIdx.x == 0) out->mass = mass, out->num_greater = num_greater;
    for (i32 i = 0; i < num_top; ++i) {
        const u64 winner = reduce_block<Max>(best, partial);
        if (threadIdx.x == 0) out->top[i] = winner;
        if (best == winner) best = best_below(row, first, end, winner);
    }
}

// The likeliest tokens of all parts, in order: one warp, whose lanes hold the heads of the parts' lists.
DEVICE void merge_top(u64* top, i32* heads, const PartRanks* parts, i32 num_parts, i32 num_top) {
    for (i32 part = threadIdx.x; part < num_parts; part += 32) heads[part] = 0;
    for (i32 i = 0; i < num_top; ++i) {
        u64 best = 0;
        i32 best_part = 0;
        for (i32 part = threadIdx.x; part < num_parts; part += 32) {
            const u64 c = parts[part].top[heads[part]];
            if (c > best) best = c, best_part = part;
        }
        const u64 winner = reduce_warp<Max>(best);
        if (winner && best == winner) ++heads[best_part];
        if (threadIdx.x == 0) top[i] = winner;
    }
    __syncwarp();
}

// Grid (R), 32 threads. Of each row [1 + MAX_TOP_LOGPROBS]: the chosen token, then the likeliest; id NO_TOKEN follows.
__global__ void __launch_bounds__(32)
merge_logprobs(i32* ids, float* values, i32* token_ranks, const u64* ranks, const float* logits, const u64* scan,
               const i32* results, const i32* row_slots, const i32* params, i32 vocab_size, i32 num_parts) {
    __shared__ u64 top[MAX_TOP_LOGPROBS];
    __shared__ i32 heads[MAX_PARTS];
    const i32 lane = threadIdx.x, row = blockIdx.x, num_top = num_logprobs_of(results, row_slots, params, row);
    const i64 out = i64(row) * (1 + MAX_TOP_LOGPROBS);
    if (lane <= MAX_TOP_LOGPROBS) ids[out + lane] = NO_TOKEN;
    if (num_top < 0) return;
    const PartRanks* const parts = reinterpret_cast<const PartRanks*>(ranks) + i64(row) * num_parts;
    u64 mass = 0, num_greater = 0;
    for (i32 part = lane; part < num_parts; part += 32) {
        mass += parts[part].mass;
        num_greater += parts[part].num_greater;
    }
    mass = reduce_warp<Sum>(mass);
    num_greater = reduce_warp<Sum>(num_greater);
    const float peak = from_ordered(u32(merge_scan(scan, row, num_parts).raw_peak));
    const double log_sum = double(peak) + log(double(mass) / double(1ll << MASS_BITS));
    merge_top(top, heads, parts, num_parts, num_top);
    if (lane > num_top) return;
    const i32 chosen = results[2 * row];
    const u64 own = lane ? top[lane - 1] : candidate(logits[i64(row) * vocab_size + chosen], chosen);
    if (!own) return;  // the vocabulary is smaller than num_top
    i32 rank = 1 + i32(num_greater);
    for (i32 i = 0; lane && i < lane; ++i) {  // the first of its equals
        if (top[i] >> 32 != own >> 32) continue;
        rank = 1 + i;
        break;
    }
    ids[out + lane] = token_of(own);
    values[out + lane] = float(double(value_of(own)) - log_sum);
    token_ranks[out + lane] = rank;
}
