// What sampling on the device is made of: the state of a request, a row of logits as its request changes it, noise.
//
// Letters: R rows of logits, V vocabulary, P parts of PART_TOKENS tokens that a row is cut into. A slot holds one
// running request; row_slots names the slot of each row, NO_SLOT where nothing is to be sampled. Logits are only read:
// what a request changes is found when a token is looked at. A token whose bit is set in the slot's mask is left out of
// the pass over the vocabulary: it is excluded, or a Special, which a second, short pass looks at.
//
// The order of operations, the noise and every rounding are those of lean_engine/sampling/sampler.py, so that the same
// logits give the same token. Sums over the vocabulary are of integers: no order of threads changes them.

#pragma once
#include "common.cuh"

constexpr i32 PART_TOKENS = 8192;
constexpr i32 HISTORY_TOKENS = 32;  // of the output, for bad words
constexpr i32 MAX_TOP_LOGPROBS = 20;
constexpr i32 MASS_BITS = 43;  // of the fraction of a share of probability; 2^20 of them fit in 64 bits
constexpr i32 NO_TOKEN = -1;

// ---- a request's slot; lean_engine/runtime/cuda/sampling.py has the same layouts

constexpr i32 HAS_MASK = 1, HAS_PENALTIES = 2;  // flags

struct SlotParams {
    u64 seed;
    double repetition, presence;
    double min_p_reach;     // temperature * ln(min_p), -inf without min_p
    double hopeless_reach;  // how far below the best logit no noise can help; negative
    double top_p;
    float frequency, temperature;  // 0: greedy
    i32 top_k, flags;              // 0: all
    i32 num_prompt, min_tokens, max_total_tokens;
    i32 num_logprobs;                   // -1: none
    i32 num_specials;                   // they begin the slot's list
    i32 first_stop, num_eos, num_stop;  // ids that end the request: eos, then stop token ids, from there in the list
};

struct __align__(16) SlotState {
    i32 num_tokens;  // of prompt and output: the position of the next token to be drawn
    i32 outcome;     // RUNNING, or why it ended
    i32 unused[2];
    i32 history[HISTORY_TOKENS];  // the latest tokens of the output, the last one last

    DEVICE i32 last_token() const { return history[HISTORY_TOKENS - 1]; }
};

struct __align__(16) Special {
    i32 token;
    float bias;
    i32 is_ending;   // excluded until min_tokens are out
    i32 first_word;  // in the slot's list, of the bad words that end with it; 0: none
};
static_assert(sizeof(SlotParams) == 96 && sizeof(SlotState) == 144 && sizeof(Special) == 16, "as in sampling.py");

enum Outcome : i32 { RUNNING, ENDED_BY_EOS, ENDED_BY_STOP_ID, ENDED_BY_LENGTH, IS_NAN, IS_INFINITE, IS_EMPTY,
                     NOTHING_LEFT, SKIPPED };

// ---- arithmetic

DEVICE float minus_infinite() { return __uint_as_float(0xff800000u); }
DEVICE bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

#ifdef CUDA_HOST
DEVICE float multiply(float a, float b) { return a * b; }
DEVICE double multiply(double a, double b) { return a * b; }
#else
// Never contracted with what follows.
DEVICE float multiply(float a, float b) { return __fmul_rn(a, b); }
DEVICE double multiply(double a, double b) { return __dmul_rn(a, b); }
#endif

// Unsigned integers in the order of floats; 0 is below all of them, and -0 equals 0.
DEVICE u32 ordered(float x) {
    const u32 bits = __float_as_uint(x + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
DEVICE float from_ordered(u32 key) { return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key); }

// A token with its value in one integer: the greater value, then the lower id, is the greater. 0: none.
DEVICE u64 candidate(float x, i32 token) { return u64(ordered(x)) << 32 | ~u32(token); }
DEVICE i32 token_of(u64 candidate) { return i32(~u32(candidate)); }
DEVICE float value_of(u64 candidate) { return from_ordered(u32(candidate >> 32)); }

// A share of probability, at most 1, in fixed point.
DEVICE u64 mass_of(float share) { return u64(share * float(1ll << MASS_BITS)); }

struct Max {
    static DEVICE u64 apply(u64 a, u64 b) { return max(a, b); }
};
struct Sum {
    static DEVICE u64 apply(u64 a, u64 b) { return a + b; }
};
template <typename OP> DEVICE u64 reduce_warp(u64 v) {
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) v = OP::apply(v, __shfl_xor_sync(FULL_WARP, v, offset));
    return v;
}
// The sum or maximum over the block, in each thread. partial: 32 words of shared memory, free again afterwards.
template <typename OP> DEVICE u64 reduce_block(u64 v, u64* partial) {
    v = reduce_warp<OP>(v);
    if (blockDim.x == 32) return v;
    const i32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) partial[warp] = v;
    __syncthreads();
    v = reduce_warp<OP>(lane < i32(blockDim.x / 32) ? partial[lane] : 0);
    __syncthreads();  // before the next call writes
    return v;
}

// ---- noise: lean_engine/sampling/philox.py has the definition

DEVICE void philox(u32 (&c)[4], u32 k0, u32 k1) {
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const u32 high0 = __umulhi(0xd2511f53u, c[0]), low0 = 0xd2511f53u * c[0];
        const u32 high1 = __umulhi(0xcd9e8d57u, c[2]), low1 = 0xcd9e8d57u * c[2];
        c[0] = high1 ^ c[1] ^ k0;
        c[1] = low1;
        c[2] = high0 ^ c[3] ^ k1;
        c[3] = low0;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
}
DEVICE float gumbel(u32 word) {
    const float u = (float(word >> 9) + 0.5f) * 0x1p-23f;  // exact
    return -logf(-logf(u));
}
// The words of tokens token … token + 3; token is a multiple of 4.
DEVICE void noise_words(u32 (&words)[4], u64 seed, i32 position, i32 token) {
    words[0] = u32(position);
    words[1] = 0;
    words[2] = u32(token) / 4;
    words[3] = 0;
    philox(words, u32(seed), u32(seed >> 32));
}

// ---- a row of logits, with the masks, biases and penalties of its request

DEVICE float penalise(const SlotParams& p, float x, u32 seen) {
    if (seen == 0) return x;
    double logit = x;  // no penalty overflows it
    if (p.repetition != 1.0) logit = logit > 0.0 ? logit / p.repetition : multiply(logit, p.repetition);
    const u32 num_generated = seen - 1;
    logit -= double(multiply(p.frequency, float(num_generated)));
    if (num_generated) logit -= p.presence;
    return float(logit);
}

struct Row {
    const float* logits;
    const SlotParams* params;
    const SlotState* state;
    const u32* mask;  // null without HAS_MASK
    const u16* seen;  // of each token, 0 or 1 + how often it was generated; null without HAS_PENALTIES
    const u32* form;  // a bit per token that this step's form of the answer allows; null without one
    const i32* list;  // specials, bad words, ids that end the request
    i32 num_specials, vocab_size;

    // Raw logits of tokens token … token + 3, -inf beyond the vocabulary; token is a multiple of 4.
    DEVICE void load_raw(i32 token, float (&x)[4]) const {
        if (vocab_size % 4 == 0) {
            load(logits + token, x);
            return;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = token + i < vocab_size ? logits[token + i] : minus_infinite();
    }

    // What penalties make of them; -inf where the mask is set.
    DEVICE void change(i32 token, float (&x)[4]) const {
        if (seen) {
            const ushort4 counts = *reinterpret_cast<const ushort4*>(seen + token);
            const u32 count[4] = {counts.x, counts.y, counts.z, counts.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) x[i] = penalise(*params, x[i], count[i]);
        }
        if (mask) {
            const u32 bits = mask[token / 32] >> token % 32;
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (bits >> i & 1) x[i] = minus_infinite();
        }
        if (form) {
            const u32 bits = form[token / 32] >> token % 32;
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (!(bits >> i & 1)) x[i] = minus_infinite();
        }
    }

    // The words that end with one token: their number, then each one's length before that token and its tokens.
    DEVICE bool ends_bad_word(i32 at, i32 num_output) const {
        for (i32 words_left = list[at++]; words_left > 0; --words_left) {
            const i32 length = list[at++];
            bool is_same = length <= num_output;
            for (i32 i = 0; i < length; ++i) is_same &= list[at + i] == state->history[HISTORY_TOKENS - length + i];
            if (is_same) return true;
            at += length;
        }
        return false;
    }

    DEVICE float special_value(const Special& special) const {
        if (form && !(form[special.token / 32] >> special.token % 32 & 1)) return minus_infinite();
        const i32 num_output = state->num_tokens - params->num_prompt;
        if (special.is_ending && num_output < params->min_tokens) return minus_infinite();
        if (special.first_word && ends_bad_word(special.first_word, num_output)) return minus_infinite();
        const float x = logits[special.token] + special.bias;
        return seen ? penalise(*params, x, seen[special.token]) : x;
    }

    // f(token, values of it and the next three) for this thread's tokens of [first, end); both are multiples of 4, or
    // end is the vocabulary's.
    template <typename F> DEVICE void for_groups(i32 first, i32 end, F f) const {
        for (i32 token = first + 4 * i32(threadIdx.x); token < end; token += 4 * i32(blockDim.x)) {
            float x[4];
            load_raw(token, x);
            change(token, x);
            f(token, x);
        }
    }
    // f(token, value) for this thread's specials.
    template <typename F> DEVICE void for_specials(F f) const {
        const Special* const specials = reinterpret_cast<const Special*>(list);
        for (i32 i = threadIdx.x; i < num_specials; i += blockDim.x)
            f(specials[i].token, special_value(specials[i]));
    }
};

// The slot of a row; NO_SLOT if nothing is to be sampled there, or its request has ended.
DEVICE i32 running_slot(const i32* row_slots, const i32* states, i32 row) {
    const i32 slot = row_slots[row];
    return slot >= 0 && reinterpret_cast<const SlotState*>(states)[slot].outcome == RUNNING ? slot : NO_SLOT;
}

DEVICE i32 mask_words(i32 vocab_size) { return (vocab_size + 31) / 32; }
DEVICE i32 seen_words(i32 vocab_size) { return (vocab_size + 7) / 8 * 8; }  // a row begins at 16 bytes

// row_forms may be null; else row_forms[row] is NO_FORM, or twice the row of forms that this row is held to, plus 1
// where nothing but the form counts, which is finished.
constexpr i32 NO_FORM = -1;
DEVICE Row row_of(const float* logits, const i32* params, const i32* states, const u32* masks, const u16* seen,
                  const u32* forms, const i32* row_forms, const i32* lists, i32 row, i32 slot, i32 vocab_size,
                  i32 list_words) {
    const SlotParams* const p = reinterpret_cast<const SlotParams*>(params) + slot;
    const i32 form = row_forms ? row_forms[row] : NO_FORM;
    const i32 flags = form != NO_FORM && form % 2 ? 0 : p->flags;
    return {logits + i64(row) * vocab_size,
            p,
            reinterpret_cast<const SlotState*>(states) + slot,
            flags & HAS_MASK ? masks + i64(slot) * mask_words(vocab_size) : nullptr,
            flags & HAS_PENALTIES ? seen + i64(slot) * seen_words(vocab_size) : nullptr,
            form != NO_FORM ? forms + i64(form / 2) * mask_words(vocab_size) : nullptr,
            lists + i64(slot) * list_words,
            flags & HAS_MASK ? p->num_specials : 0,
            vocab_size};
}

// ---- what scan_logits finds in a part of a row

struct __align__(16) PartScan {
    u64 best;      // candidate among the changed logits
    u64 raw_peak;  // ordered() greatest raw logit; NAN_KEY if any is NaN
};
constexpr u32 NAN_KEY = 0xffffffffu;

// The whole row's, in each lane. All 32 lanes must call it.
DEVICE PartScan merge_scan(const u64* scan, i32 row, i32 num_parts) {
    const PartScan* const parts = reinterpret_cast<const PartScan*>(scan) + i64(row) * num_parts;
    u64 best = 0, raw_peak = 0;
    for (i32 part = threadIdx.x % 32; part < num_parts; part += 32) {
        best = max(best, parts[part].best);
        raw_peak = max(raw_peak, parts[part].raw_peak);
    }
    return {reduce_warp<Max>(best), reduce_warp<Max>(raw_peak)};
}

// Why a row has no distribution; RUNNING if it has one.
DEVICE i32 damage_of(const PartScan& scan) {
    if (scan.raw_peak == NAN_KEY) return IS_NAN;
    const float peak = from_ordered(u32(scan.raw_peak));
    if (!is_finite(peak)) return peak > 0.0f ? IS_INFINITE : IS_EMPTY;
    return is_finite(value_of(scan.best)) ? RUNNING : NOTHING_LEFT;
}
