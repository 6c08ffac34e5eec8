// What a request's slot on the device goes through: start_requests when it is admitted, accept_tokens at the end of a
// step, write_decodes at the beginning of the next. A step can therefore be launched before the host has read the
// tokens of the one before: a request that has ended meanwhile is a padded row of it.
#include "sampling.cuh"

// ---- the end of a step

DEVICE bool is_listed(const i32* ids, i32 count, i32 token) {
    for (i32 i = 0; i < count; ++i)
        if (ids[i] == token) return true;
    return false;
}

// Whether a token, the num_tokens-th of prompt and output, ends its request: eos before stop token ids before length.
DEVICE i32 judge(const SlotParams& p, const i32* list, i32 token, i32 num_tokens) {
    const i32* const stops = list + p.first_stop;
    if (num_tokens - p.num_prompt >= p.min_tokens) {
        if (is_listed(stops, p.num_eos, token)) return ENDED_BY_EOS;
        if (is_listed(stops + p.num_eos, p.num_stop, token)) return ENDED_BY_STOP_ID;
    }
    return num_tokens >= p.max_total_tokens ? ENDED_BY_LENGTH : RUNNING;
}

// Grid (R), 32 threads. Takes the best candidate of each row's parts and notes it in the row's slot.
// results [R, 2]: the token, or NO_TOKEN, and the request's outcome; SKIPPED where nothing was to be sampled. drawn may
// be null where all rows are greedy.
__global__ void __launch_bounds__(32)
accept_tokens(i32* results, i32* states, u16* seen, const u64* scan, const u64* drawn, const i32* row_slots,
              const i32* params, const i32* lists, i32 vocab_size, i32 list_words, i32 num_parts) {
    const i32 lane = threadIdx.x, slot = running_slot(row_slots, states, blockIdx.x);
    i32* const result = results + 2 * blockIdx.x;
    if (slot < 0) {
        if (lane == 0) result[0] = NO_TOKEN, result[1] = SKIPPED;
        return;
    }
    SlotState* const state = reinterpret_cast<SlotState*>(states) + slot;
    const SlotParams& p = reinterpret_cast<const SlotParams*>(params)[slot];
    const PartScan whole = merge_scan(scan, blockIdx.x, num_parts);
    u64 best = whole.best;
    if (p.temperature != 0.0f) {
        best = 0;
        for (i32 part = lane; part < num_parts; part += 32) best = max(best, drawn[i64(blockIdx.x) * num_parts + part]);
        best = reduce_warp<Max>(best);
    }
    const i32 token = token_of(best), num_tokens = state->num_tokens + 1;
    const i32 later = lane + 1 < HISTORY_TOKENS ? state->history[lane + 1] : token;
    const i32 damage = damage_of(whole);
    __syncwarp();  // all has been read
    const i32 outcome = damage ? damage : judge(p, lists + i64(slot) * list_words, token, num_tokens);
    if (!damage) state->history[lane] = later;
    if (lane) return;
    result[0] = damage ? NO_TOKEN : token;
    result[1] = outcome;
    state->outcome = outcome;
    if (damage) return;
    state->num_tokens = num_tokens;
    if (p.flags & HAS_PENALTIES) {
        u16& count = seen[i64(slot) * seen_words(vocab_size) + token];
        count = u16(min(max(u32(count), 1u) + 1u, 0xffffu));
    }
}

// ---- the beginning of the next

// One thread per token of the step: where decode_slots[t] is a slot, token t is the latest of its request, which is row
// t of block_tables and seq_lens too; elsewhere nothing is written. A request that has ended becomes a padded row.
__global__ void __launch_bounds__(128)
write_decodes(i32* input_ids, i32* positions, i32* slot_mapping, i32* seq_lens, const i32* decode_slots,
              const i32* block_tables, const i32* states, i32 block_size, i32 max_blocks, i32 num_tokens) {
    const i32 t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= num_tokens) return;
    const i32 slot = decode_slots[t];
    if (slot < 0) return;
    const SlotState& state = reinterpret_cast<const SlotState*>(states)[slot];
    const bool is_running = state.outcome == RUNNING;
    const i32 position = is_running ? state.num_tokens - 1 : 0;
    input_ids[t] = is_running ? state.last_token() : 0;
    positions[t] = position;
    seq_lens[t] = is_running ? position + 1 : 0;
    const i32 block = is_running ? block_tables[i64(t) * max_blocks + position / block_size] : NULL_BLOCK;
    slot_mapping[t] = is_running ? block * block_size + position % block_size : NO_SLOT;
}

// ---- admission

struct RecordHeader {
    i32 slot, num_list_words;
    i32 num_allowed;  // -1: all tokens are
    i32 num_seen;
};
constexpr i32 PARAMS_WORDS = sizeof(SlotParams) / 4, STATE_WORDS = sizeof(SlotState) / 4;

DEVICE void copy_words(i32* to, const i32* from, i32 count) {
    for (i32 i = threadIdx.x; i < count; i += blockDim.x) to[i] = from[i];
}

// Sets the bits of what is not allowed, and of all specials.
DEVICE void make_mask(u32* mask, const i32* specials, i32 num_specials, const i32* allowed, i32 num_allowed,
                      i32 vocab_size) {
    for (i32 i = threadIdx.x; i < mask_words(vocab_size); i += blockDim.x) mask[i] = num_allowed < 0 ? 0u : ~0u;
    __syncthreads();
    for (i32 i = threadIdx.x; i < num_allowed; i += blockDim.x)
        atomicAnd(&mask[allowed[i] / 32], ~(1u << allowed[i] % 32));
    __syncthreads();
    for (i32 i = threadIdx.x; i < num_specials; i += blockDim.x) {
        const i32 token = specials[4 * i];
        atomicOr(&mask[token / 32], 1u << token % 32);
    }
}

DEVICE void make_seen(u16* seen, const i32* ids, const i32* counts, i32 num_seen, i32 vocab_size) {
    uint4* const words = reinterpret_cast<uint4*>(seen);
    for (i32 i = threadIdx.x; i < seen_words(vocab_size) / 8; i += blockDim.x) words[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
    for (i32 i = threadIdx.x; i < num_seen; i += blockDim.x) seen[ids[i]] = u16(counts[i]);
}

// Grid (records). Fills a slot for each record: header, params, state, list, allowed ids, ids seen, and for each of
// those 1 + how often it was generated. starts[i] is where the i-th record begins.
__global__ void __launch_bounds__(1024)
start_requests(i32* params, i32* states, u32* masks, u16* seen, i32* lists, const i32* records, const i32* starts,
               i32 vocab_size, i32 list_words) {
    const i32* record = records + starts[blockIdx.x];
    const RecordHeader header = {record[0], record[1], record[2], record[3]};
    const i32* const own_params = record + 4;
    const i32* const own_state = own_params + PARAMS_WORDS;
    const i32* const own_list = own_state + STATE_WORDS;
    const i32* const allowed = own_list + header.num_list_words;
    const i32* const seen_ids = allowed + max(0, header.num_allowed);
    const i64 slot = header.slot;
    copy_words(params + slot * PARAMS_WORDS, own_params, PARAMS_WORDS);
    copy_words(states + slot * STATE_WORDS, own_state, STATE_WORDS);
    copy_words(lists + slot * list_words, own_list, header.num_list_words);
    __syncthreads();
    const SlotParams& p = reinterpret_cast<const SlotParams*>(params)[slot];
    if (p.flags & HAS_MASK)
        make_mask(masks + slot * mask_words(vocab_size), own_list, p.num_specials, allowed, header.num_allowed,
                  vocab_size);
    if (p.flags & HAS_PENALTIES)
        make_seen(seen + slot * seen_words(vocab_size), seen_ids, seen_ids + header.num_seen, header.num_seen,
                  vocab_size);
}
