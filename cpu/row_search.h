// Searches in a row of logits, by value: how many logits, or what share of the mass, are at least some logit. Passes over
// the row halve the range of what is sought until little is left, which is gathered and sorted.

#ifndef LEAN_ROW_SEARCH_H
#define LEAN_ROW_SEARCH_H

#include "powers.h"

#define CAPACITY 2048  // logits gathered to search among
#define FEW 32         // of them sorted

#define UNROLL _Pragma("GCC unroll 16")

INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE float greater(float a, float b) { return a > b ? a : b; }

// WIDTH logits from i on; behind the end -inf.
INLINE vecf logits_at(const float *row, int64_t size, int64_t i) {
    if (i + WIDTH <= size) return vload(row + i);
    float rest[WIDTH];
    for (int64_t j = 0; j < WIDTH; j++) rest[j] = i + j < size ? row[i + j] : -INFINITY;
    return vload(rest);
}

#if WIDTH == 16
INLINE __mmask16 lane_bits(veci mask) { return _mm512_cmplt_epi32_mask((__m512i)mask, _mm512_setzero_si512()); }
#endif

INLINE int any(veci mask) {
#if WIDTH == 16
    return lane_bits(mask) != 0;
#else
    int64_t words[WIDTH / 2], found = 0;
    memcpy(words, &mask, sizeof words);
    UNROLL for (int i = 0; i < WIDTH / 2; i++) found |= words[i];
    return found != 0;
#endif
}

INLINE int64_t sum_of_lanes(veci v) {
    int32_t lanes[WIDTH], total = 0;
    memcpy(lanes, &v, sizeof lanes);
    UNROLL for (int i = 0; i < WIDTH; i++) total += lanes[i];
    return total;
}

// How many logits, and Σ e^((logit - peak) · rate) over them.
typedef struct {
    double mass;
    int64_t count;
} share;

// rate: log2 e / temperature.
INLINE vecf power(vecf logits, float peak, float rate) { return vpower_of_two((logits - peak) * rate); }

#define RUN (16 * WIDTH)  // logits whose masses are summed in float32

// Add those of `size` logits that are at least `least`; RUN logits if is_whole. Without masses only count.
INLINE void add_share(const float *x, int64_t size, float least, float peak, float rate, const int is_whole,
                      const int has_masses, veci *counts, double *mass) {
    vecf sums = {0};
    for (int64_t i = 0; i < (is_whole ? RUN : size); i += WIDTH) {
        vecf logits = is_whole ? vload(x + i) : logits_at(x, size, i);
        veci is_in = logits >= least;
        *counts -= is_in;
        if (has_masses) sums += (vecf)((veci)power(logits, peak, rate) & is_in);
    }
    if (has_masses) *mass += vsum(sums);
}

INLINE share share_from(const float *x, int64_t size, float least, float peak, float rate, const int has_masses) {
    veci counts = {0};
    double mass = 0;
    int64_t i = 0;
    for (; i + RUN <= size; i += RUN) add_share(x + i, RUN, least, peak, rate, 1, has_masses, &counts, &mass);
    add_share(x + i, size - i, least, peak, rate, 0, has_masses, &counts, &mass);
    int64_t count = sum_of_lanes(counts);
    return (share){has_masses ? mass : (double)count, count};
}

// Of the logits that are at least `least`. Without masses the mass is their number.
static __attribute__((noinline)) share masses_from(const float *x, int64_t size, float least, float peak, float rate) {
    return share_from(x, size, least, peak, rate, 1);
}

static __attribute__((noinline)) share counts_from(const float *x, int64_t size, float least) {
    return share_from(x, size, least, 0, 0, 0);
}

// A search, from the greatest logit downwards, for where a share is reached.
typedef struct {
    const float *row;
    int64_t size;
    float peak, rate;    // rate: log2 e / temperature
    int has_masses;
    float least, limit;  // it is reached in [least, limit)
    int64_t inside;      // logits there
    share above;         // of those from `limit` on
    int is_gathered;
    float gathered[CAPACITY + WIDTH];  // those inside
} search;

// Gather what is inside, out of the row or of what was gathered before.
static __attribute__((noinline)) void gather(search *s) {
    const float *x = s->is_gathered ? s->gathered : s->row;
    int64_t count = 0;
    for (int64_t i = 0; i < s->size; i += WIDTH) {
        vecf logits = logits_at(x, s->size, i);
        veci is_in = (logits >= s->least) & (logits < s->limit);
#if WIDTH == 16
        __mmask16 mask = lane_bits(is_in);
        _mm512_storeu_ps(s->gathered + count, _mm512_maskz_compress_ps(mask, (__m512)logits));
        count += __builtin_popcount(mask);
#else
        if (!any(is_in)) continue;
        for (int j = 0; j < WIDTH; j++) {
            s->gathered[count] = logits[j];
            count -= is_in[j];
        }
#endif
    }
    s->size = s->inside = count;
    s->is_gathered = 1;
}

// Halfway between two values, or between their places among all floats where no mean lies between them.
static float middle_of(float low, float high) {
    float mean = low * 0.5f + high * 0.5f;
    if (mean > low && mean < high) return mean;
    int32_t keys[2], key;
    memcpy(keys, &low, sizeof low), memcpy(keys + 1, &high, sizeof high);
    for (int i = 0; i < 2; i++) keys[i] ^= keys[i] < 0 ? 0x7fffffff : 0;  // in the order of the floats
    key = (int32_t)(((int64_t)keys[0] + keys[1]) >> 1);
    key ^= key < 0 ? 0x7fffffff : 0;
    memcpy(&mean, &key, sizeof mean);
    return mean;
}

// Narrow a search until FEW logits are inside, gathered and sorted. 0: not possible, since the share at some logit is
// in [low, high), or since more than FEW are equal.
static __attribute__((noinline)) int narrow(search *s, double low, double high) {
    float reach = 12 / s->rate;  // where the mass is 2^-12 of the greatest
    int is_open = 1;  // nothing has yet been found to hold the share
    while (s->inside > FEW) {
        float middle = s->peak - reach;
        if (middle <= s->least || middle >= s->limit) is_open = 0;
        if (!is_open) middle = middle_of(s->least, s->limit);
        if (middle <= s->least || middle >= s->limit) return 0;
        const float *x = s->is_gathered ? s->gathered : s->row;
        share found =
            s->has_masses ? masses_from(x, s->size, middle, s->peak, s->rate) : counts_from(x, s->size, middle);
        if (s->is_gathered) found.mass += s->above.mass, found.count += s->above.count;
        if (found.mass >= high) {
            s->least = middle, s->inside = found.count - s->above.count;
            is_open = 0;
        } else if (found.mass < low) {
            s->limit = middle, s->inside -= found.count - s->above.count, s->above = found;
            reach *= 2;
        } else {
            return 0;
        }
        if (s->is_gathered || s->inside <= CAPACITY) gather(s);
    }
    gather(s);
    for (int64_t i = 1; i < s->inside; i++) {
        float value = s->gathered[i];
        int64_t j = i;
        for (; j > 0 && s->gathered[j - 1] < value; j--) s->gathered[j] = s->gathered[j - 1];
        s->gathered[j] = value;
    }
    return 1;
}

INLINE search search_of(const float *row, int64_t size, float peak, float rate, int has_masses, float least) {
    search s;
    s.row = row, s.size = size, s.peak = peak, s.rate = rate, s.has_masses = has_masses;
    s.least = least, s.limit = nextafterf(peak, INFINITY), s.above = (share){0, 0}, s.is_gathered = 0;
    return s;
}

// The k-th greatest logit, or `least` if fewer than k are at least that. Exact.
static __attribute__((noinline, unused)) float kth_greatest(const float *row, int64_t size, int64_t k, float least,
                                                            float peak) {
    search s = search_of(row, size, peak, 1, 0, least);
    s.inside = counts_from(row, size, least).count;
    if (s.inside < k) return least;
    if (!narrow(&s, (double)k, (double)k)) return s.least;  // all that are left are equal
    return s.gathered[k - s.above.count - 1];
}

#endif
