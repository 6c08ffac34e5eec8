// The choice of a token for each row of logits: scan_logits, cut_logits where a row has top_k or top_p, draw_tokens
// where a row is not greedy; accept_tokens (step_update.cu) takes the best that the parts have found.
//
// A drawn row is read twice, not once: noise is added to logits that are shifted by their peak, so that it rounds as on
// the CPU; and once the peak is known nearly all tokens are too far below it, so that noise is made for few of them.
#include "sampling.cuh"

// Grid (P, R). Each part's best candidate, which is the choice of a greedy row, and its greatest raw logit.
__global__ void __launch_bounds__(256)
scan_logits(u64* scan, const float* logits, const i32* row_slots, const i32* params, const i32* states,
            const u32* masks, const u16* seen, const u32* forms, const i32* row_forms, const i32* lists,
            i32 vocab_size, i32 list_words) {
    __shared__ u64 partial[32];
    const i32 slot = running_slot(row_slots, states, blockIdx.y);
    if (slot < 0) return;
    const Row row = row_of(logits, params, states, masks, seen, forms, row_forms, lists, blockIdx.y, slot, vocab_size,
                           list_words);
    const i32 first = blockIdx.x * PART_TOKENS, end = min(first + PART_TOKENS, vocab_size);
    u64 best = 0;
    u32 raw_peak = 0;
    for (i32 token = first + 4 * i32(threadIdx.x); token < end; token += 4 * i32(blockDim.x)) {
        float x[4];
        row.load_raw(token, x);
#pragma unroll
        for (int i = 0; i < 4; ++i) raw_peak = max(raw_peak, x[i] != x[i] ? NAN_KEY : ordered(x[i]));
        row.change(token, x);
#pragma unroll
        for (int i = 0; i < 4; ++i) best = max(best, candidate(x[i], token + i));
    }
    if (blockIdx.x == 0) row.for_specials([&](i32 token, float x) { best = max(best, candidate(x, token)); });
    best = reduce_block<Max>(best, partial);
    const u64 peak = reduce_block<Max>(raw_peak, partial);
    if (threadIdx.x == 0) reinterpret_cast<PartScan*>(scan)[i64(blockIdx.y) * gridDim.x + blockIdx.x] = {best, peak};
}

// ---- top_k and top_p

// What stays of a row: values from `lowest` on, scaled values above `scaled_lowest`, and of those equal to it the ids up
// to last_id.
struct __align__(16) Cut {
    float lowest, scaled_lowest;
    i32 last_id, unused;
};

DEVICE float scaled(float x, float peak, float temperature) { return (x - peak) / temperature; }

DEVICE float lowest_with_min_p(const SlotParams& p, float peak) {
    constexpr double LEAST = -3.4028234663852886e38;  // excludes -inf
    const double lowest = double(peak) + p.min_p_reach;
    return float(lowest > LEAST ? lowest : LEAST);
}

// Shares of probability, relative to the greatest, fall into bins, 32 to an octave, the greatest into bin 0. So a first
// pass over the row tells between which bins a cut is, and the exact search runs over a list of their tokens: of all
// down to the cut where these fit, else of those in the bins around it. Where even they do not, since the distribution
// is flat, the search runs over the row. Tokens beyond the last bin are below 2^-32 and hopeless: a cut among them
// changes nothing.
constexpr i32 BINS_PER_OCTAVE = 32, NUM_OCTAVES = 32, NUM_BINS = BINS_PER_OCTAVE * NUM_OCTAVES;
constexpr i32 MAX_LISTED = 4096;
constexpr i32 BIN_MASS_BITS = 12;  // 2^20 shares, relative to their octave, add up in 32 bits

DEVICE i32 bin_of(float share) { return i32((0x3f800000u - __float_as_uint(min(share, 1.0f))) >> 18); }
// A share relative to its octave's upper end, rounded down: sums of them are never too great.
DEVICE u32 bin_mass(float share, i32 octave) {
    return u32(share * __uint_as_float(u32(127 + BIN_MASS_BITS + octave) << 23));
}
DEVICE u64 unscaled(u32 mass, i32 octave) {
    static_assert(MASS_BITS - BIN_MASS_BITS >= NUM_OCTAVES - 1, "shifts to the left, so that nothing is rounded");
    return u64(mass) << (MASS_BITS - BIN_MASS_BITS - octave);
}

struct Listing {
    u64 before;      // the weight of all tokens in earlier bins
    i32 num_tokens;  // MAX_LISTED at most, or there is no list and the search runs over the row
    i32 first_bin, last_bin;
};

struct Cutter {
    Row row;
    float peak, lowest;
    u64* partial;
    u32* bins;         // [NUM_BINS]
    i32* ids;          // [MAX_LISTED], and their values: the list
    float* values;
    Listing* listing;  // shared, as the arrays are

    DEVICE float share(float x) const { return expf(scaled(x, peak, row.params->temperature)); }

    template <typename F> DEVICE void for_row(F f) const {
        row.for_groups(0, row.vocab_size, [&](i32 token, const float(&x)[4]) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (x[i] >= lowest) f(token + i, x[i]);
        });
        row.for_specials([&](i32 token, float x) {
            if (x >= lowest) f(token, x);
        });
    }
    DEVICE bool is_listed() const { return listing->num_tokens <= MAX_LISTED; }
    DEVICE bool is_whole() const { return is_listed() && listing->first_bin == 0; }

    // f(token, value) for this thread's tokens that are not below lowest.
    template <typename F> DEVICE void for_tokens(F f) const {
        if (!is_listed()) return for_row(f);
        for (i32 i = threadIdx.x; i < listing->num_tokens; i += blockDim.x)
            if (values[i] >= lowest) f(ids[i], values[i]);
    }

    template <typename F> DEVICE u64 sum(F weight) const {
        u64 total = 0;
        for_tokens([&](i32 token, float x) { total += weight(token, x); });
        return reduce_block<Sum>(total, partial);
    }

    // The greatest key such that tokens with at least this key weigh at least so much together; 0 if all weigh less.
    template <typename KEY, typename WEIGHT> DEVICE u32 greatest_key(u64 wanted, KEY key, WEIGHT weight) const {
        u32 found = 0;
        for (u32 bit = 1u << 31; bit; bit >>= 1) {
            const u32 trial = found | bit;
            const u64 total = sum([&](i32 token, float x) { return key(token, x) >= trial ? weight(token, x) : 0; });
            if (total >= wanted) found = trial;
        }
        return found;
    }

    // Fill the bins with numbers of tokens, or with masses; gives the exact mass of all.
    DEVICE u64 fill_bins(bool is_mass) {
        for (i32 i = threadIdx.x; i < NUM_BINS; i += blockDim.x) bins[i] = 0;
        __syncthreads();
        u64 total = 0;
        for_row([&](i32, float x) {
            const float e = share(x);
            const i32 bin = bin_of(e);
            total += mass_of(e);
            if (bin < NUM_BINS) atomicAdd(&bins[bin], is_mass ? bin_mass(e, bin / BINS_PER_OCTAVE) : 1u);
        });
        return reduce_block<Sum>(total, partial);  // with a barrier, unless there is one warp only
    }

    // The first bin up to which the bins hold so much, or may hold it, since their masses were rounded down by 2^-11 at
    // most; the last bin if they do not. One warp.
    DEVICE i32 bin_reaching(u64 wanted, bool is_mass, bool is_sure) const {
        u64 sum = 0;
        for (i32 octave = 0; octave < NUM_OCTAVES; ++octave) {
            const u32 own = bins[octave * BINS_PER_OCTAVE + threadIdx.x];
            u64 upto = is_mass ? unscaled(own, octave) : own;
            for (i32 offset = 1; offset < 32; offset <<= 1) {
                const u64 other = __shfl_up_sync(FULL_WARP, upto, offset);
                if (i32(threadIdx.x) >= offset) upto += other;
            }
            const u64 low = sum + upto, high = is_mass ? low + (low >> (BIN_MASS_BITS - 1)) + 1 : low;
            const u32 reaches = __ballot_sync(FULL_WARP, (is_sure ? low : high) >= wanted);
            if (reaches) return octave * BINS_PER_OCTAVE + __ffs(reaches) - 1;
            sum += __shfl_sync(FULL_WARP, upto, 31);
        }
        return NUM_BINS - 1;
    }

    DEVICE void make_list(i32 first_bin, i32 last_bin, bool is_mass) {
        if (threadIdx.x == 0) listing->num_tokens = 0;
        __syncthreads();
        u64 own = 0;
        for_row([&](i32 token, float x) {
            const float e = share(x);
            const i32 bin = bin_of(e);
            if (bin > last_bin) return;
            if (bin < first_bin) {
                own += is_mass ? mass_of(e) : 1;
                return;
            }
            const i32 at = atomicAdd(&listing->num_tokens, 1);
            if (at < MAX_LISTED) ids[at] = token, values[at] = x;
        });
        const u64 before = reduce_block<Sum>(own, partial);
        __syncthreads();
        if (threadIdx.x == 0) listing->before = is_listed() ? before : 0, listing->first_bin = first_bin;
        __syncthreads();
    }

    // From filled bins to a list for the search of the cut; it has a bin more than needed at both ends, since expf may
    // not grow with every step.
    DEVICE void narrow(u64 wanted, bool is_mass) {
        __syncthreads();
        if (threadIdx.x < 32) {
            const i32 first = max(bin_reaching(wanted, is_mass, false) - 1, 0);
            const i32 last = min(bin_reaching(wanted, is_mass, true) + 1, NUM_BINS - 1);
            if (threadIdx.x == 0) listing->first_bin = first, listing->last_bin = last;
        }
        __syncthreads();
        const i32 first = listing->first_bin, last = listing->last_bin;
        __syncthreads();
        make_list(0, last, is_mass);
        if (is_listed()) return;
        __syncthreads();  // all have seen that it does not fit
        make_list(first, last, is_mass);
    }

    DEVICE void cut_top_k(i32 k) {
        const auto value = [](i32, float x) { return ordered(x); };
        const auto one = [](i32, float) { return u64(1); };
        const u32 key = greatest_key(k - listing->before, value, one);
        if (key) lowest = from_ordered(key);
    }

    // The smallest set that holds so much mass, of equal tokens the first.
    DEVICE void cut_top_p(u64 wanted, float& scaled_lowest, i32& last_id) const {
        const float temperature = row.params->temperature;
        const auto key = [&](i32, float x) { return ordered(scaled(x, peak, temperature)); };
        const auto mass = [&](i32, float x) { return mass_of(share(x)); };
        const u32 smallest = greatest_key(wanted - listing->before, key, mass);
        if (!smallest) return;
        scaled_lowest = from_ordered(smallest);
        const u64 above = listing->before + sum([&](i32 t, float x) { return key(t, x) > smallest ? mass(t, x) : 0; });
        const u64 num_equal = sum([&](i32 t, float x) { return u64(key(t, x) == smallest); });
        const u64 each = mass_of(expf(scaled_lowest));
        const u64 num_kept = (wanted - above + each - 1) / each;
        if (num_kept >= num_equal) return;
        const auto earliness = [&](i32 t, float x) { return key(t, x) == smallest ? ~u32(t) : 0; };
        last_id = i32(~greatest_key(num_kept, earliness, [](i32, float) { return u64(1); }));
    }
};

// Grid (R), up to 768 threads. The cut of each row that has top_k or top_p; those of other rows are left as they are.
__global__ void __launch_bounds__(768, 1)
cut_logits(i32* cuts, const float* logits, const u64* scan, const i32* row_slots, const i32* params,
           const i32* states, const u32* masks, const u16* seen, const u32* forms, const i32* row_forms,
           const i32* lists, i32 vocab_size, i32 list_words,
           i32 num_parts) {
    __shared__ u64 partial[32];
    __shared__ u32 bins[NUM_BINS];
    __shared__ i32 ids[MAX_LISTED];
    __shared__ float values[MAX_LISTED];
    __shared__ Listing listing;
    const i32 slot = running_slot(row_slots, states, blockIdx.x);
    if (slot < 0) return;
    const Row row = row_of(logits, params, states, masks, seen, forms, row_forms, lists, blockIdx.x, slot, vocab_size,
                           list_words);
    const SlotParams& p = *row.params;
    const PartScan whole = merge_scan(scan, blockIdx.x, num_parts);
    if (p.temperature == 0.0f || damage_of(whole) != RUNNING || (p.top_k == 0 && p.top_p >= 1.0)) return;
    const float peak = value_of(whole.best);
    Cutter cutter = {row, peak, lowest_with_min_p(p, peak), partial, bins, ids, values, &listing};
    if (p.top_k) {
        cutter.fill_bins(false);
        cutter.narrow(p.top_k, false);
        cutter.cut_top_k(p.top_k);
    }
    float scaled_lowest = minus_infinite();
    i32 last_id = 0x7fffffff;
    if (p.top_p < 1.0) {
        const bool is_ready = p.top_k && cutter.is_whole();
        const u64 total =
            is_ready ? cutter.sum([&](i32, float x) { return mass_of(cutter.share(x)); }) : cutter.fill_bins(true);
        const u64 wanted = u64(ceil(p.top_p * double(total)));
        if (!is_ready) cutter.narrow(wanted, true);
        cutter.cut_top_p(wanted, scaled_lowest, last_id);
    }
    if (threadIdx.x == 0) reinterpret_cast<Cut*>(cuts)[blockIdx.x] = {cutter.lowest, scaled_lowest, last_id, 0};
}

// Grid (P, R). Each part's best candidate of the rows that are not greedy, noise included. Rows with top_k or top_p
// need their cut.
__global__ void __launch_bounds__(128, 6)
draw_tokens(u64* drawn, const float* logits, const u64* scan, const i32* cuts, const i32* row_slots,
            const i32* params, const i32* states, const u32* masks, const u16* seen, const u32* forms,
            const i32* row_forms, const i32* lists, i32 vocab_size, i32 list_words) {
    __shared__ u64 partial[32];
    const i32 slot = running_slot(row_slots, states, blockIdx.y);
    if (slot < 0) return;
    const Row row = row_of(logits, params, states, masks, seen, forms, row_forms, lists, blockIdx.y, slot, vocab_size,
                           list_words);
    const SlotParams& p = *row.params;
    const PartScan whole = merge_scan(scan, blockIdx.y, gridDim.x);
    if (p.temperature == 0.0f || damage_of(whole) != RUNNING) return;
    const float peak = value_of(whole.best), temperature = p.temperature;
    Cut cut = {lowest_with_min_p(p, peak), minus_infinite(), 0x7fffffff, 0};
    if (p.top_k || p.top_p < 1.0) cut = reinterpret_cast<const Cut*>(cuts)[blockIdx.y];
    const float lowest = max(cut.lowest, float(double(peak) + p.hopeless_reach));
    const u64 seed = p.seed;
    const i32 position = row.state->num_tokens;
    u64 best = 0;
    const auto consider = [&](i32 token, float x, u32 word) {
        const float s = scaled(x, peak, temperature);
        if (s < cut.scaled_lowest || (s == cut.scaled_lowest && token > cut.last_id)) return;
        best = max(best, candidate(s + gumbel(word), token));
    };
    const i32 first = blockIdx.x * PART_TOKENS;
    row.for_groups(first, min(first + PART_TOKENS, vocab_size), [&](i32 token, const float(&x)[4]) {
        if (!(max(max(x[0], x[1]), max(x[2], x[3])) >= lowest)) return;
        u32 words[4];
        noise_words(words, seed, position, token);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (x[i] >= lowest) consider(token + i, x[i], words[i]);
    });
    if (blockIdx.x == 0) {
        row.for_specials([&](i32 token, float x) {
            if (!(x >= lowest)) return;
            u32 words[4];
            noise_words(words, seed, position, token & ~3);
            const u32 low = token & 1 ? words[1] : words[0], high = token & 1 ? words[3] : words[2];
            consider(token, x, token & 2 ? high : low);
        });
    }
    best = reduce_block<Max>(best, partial);
    if (threadIdx.x == 0) drawn[i64(blockIdx.y) * gridDim.x + blockIdx.x] = best;
}
