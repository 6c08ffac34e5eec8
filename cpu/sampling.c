// Choosing tokens from rows of logits: the greatest, a draw by noise under temperature, min_p, top_k and top_p, and
// log-probabilities. A task is a row.
//
// A draw gives what sampling/sampler.py gives, always. Noise and masses are computed here to a few units in the last
// place, so what they decide is decided with a margin: a row's result is every token whose sum of scaled logit and
// noise is within MARGIN of the greatest, nearly always one; the caller compares those by the definition's own
// arithmetic. Where the rounding of a sum of masses may decide whether such a token is in the nucleus, the row is left
// to the caller. What is compared exactly there (the greatest logit, thresholds, the k-th greatest) is so here too.

#include <float.h>

#include "row_search.h"

#define MARGIN 1e-4f        // of a sum; its error is below 2e-5
#define MASS_MARGIN 1e-5    // of a sum of masses, relative
#define MAX_GUMBEL 16.64f   // as in sampling/philox.py
#define MIN_GUMBEL -2.82f
#define MAX_CONTENDERS 16
#define CONTEST 64          // noted at a time
#define LOG2_E 1.44269504f
#define LEAST_POWER 126.0f  // 2^-x is taken to be that beyond

// ---- the greatest

typedef struct {
    const float *logits;  // [R, V]
    int32_t *ids;         // [R]: of the first NaN, or of the first of the greatest
    int64_t vocab_size;
} greatest_args;
ARGS_SIZE(greatest)

#define STRIP 1024  // logits that are looked through again
#define CHAINS 4    // maxima and sums at once

// The greatest of some logits. A sum tells whether there may be a NaN: infinities of both signs give one too.
INLINE float greatest_of(const float *row, int64_t size, int *may_be_nan) {
    vecf most[CHAINS], sums[CHAINS] = {{0}};
    for (int i = 0; i < CHAINS; i++) most[i] = vbroadcast(-INFINITY);
    int64_t i = 0;
    for (; i + CHAINS * WIDTH <= size; i += CHAINS * WIDTH)
        UNROLL for (int j = 0; j < CHAINS; j++) {
            vecf x = vload(row + i + j * WIDTH);
            sums[j] += x;
            most[j] = vgreater(x, most[j]);
        }
    for (; i < size; i += WIDTH) {
        vecf x = logits_at(row, size, i);
        most[0] = vgreater(x, most[0]);
        for (int64_t j = i; j < min_of(size, i + WIDTH); j++) sums[1] += row[j];
    }
    vecf sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    *may_be_nan = any(sum != sum);
    return vgreatest(vgreater(vgreater(most[0], most[1]), vgreater(most[2], most[3])));
}

EXPORT void greatest(const void *args, int64_t task) {
    const greatest_args *a = args;
    const float *row = a->logits + task * a->vocab_size;
    float best = -INFINITY;
    int64_t id = 0;
    for (int64_t start = 0; start < a->vocab_size; start += STRIP) {
        int64_t stop = min_of(a->vocab_size, start + STRIP);
        int may_be_nan;
        float most = greatest_of(row + start, stop - start, &may_be_nan);
        for (int64_t i = start; may_be_nan && i < stop; i++)
            if (row[i] != row[i]) {
                a->ids[task] = (int32_t)i;
                return;
            }
        if (most > best) best = most, id = start;
    }
    while (row[id] != best) id++;
    a->ids[task] = (int32_t)id;
}

// ---- the nucleus

// What top_p keeps: surely the logits from `sure` on, perhaps those from `perhaps` on, no others.
typedef struct {
    float sure, perhaps;
} nucleus;

static __attribute__((noinline)) nucleus nucleus_of(const float *row, int64_t size, float least, float peak, float rate,
                                                    double top_p) {
    search s = search_of(row, size, peak, rate, 1, greater(least, peak - LEAST_POWER / rate));
    s.inside = counts_from(row, size, s.least).count;
    if (s.inside <= CAPACITY) gather(&s);
    double total = masses_from(s.is_gathered ? s.gathered : row, s.size, s.least, peak, rate).mass;
    double low = top_p * total * (1 - MASS_MARGIN), high = top_p * total * (1 + MASS_MARGIN);
    int may_be_all = high >= total;
    int is_found = narrow(&s, low, may_be_all ? low : high);
    // Logits that differ by less may be equal once they are scaled, and of equal ones some are kept by their ids.
    float near = 1e-6f * (fabsf(peak) + fabsf(s.least)) + 5e-45f / rate;
    if (!is_found) return (nucleus){s.limit + near, may_be_all ? least : s.least - near};
    float powers[FEW + WIDTH] = {0};
    for (int64_t i = 0; i < s.inside; i += WIDTH)
        vstore(powers + i, power(logits_at(s.gathered, s.inside, i), peak, rate));
    int64_t i = 0;
    double mass = s.above.mass + powers[0];
    while (mass < low && i + 1 < s.inside) mass += powers[++i];
    float sure = s.gathered[i];
    int64_t kept = s.above.count + i + 1;
    if (counts_from(row, size, greater(sure - near, least)).count > kept) sure = nextafterf(sure + near, INFINITY);
    while (mass < high && i + 1 < s.inside) mass += powers[++i];
    return (nucleus){sure, may_be_all ? least : s.gathered[i] - near};
}

// ---- noise

#define BLOCKS (WIDTH / 2)  // of Philox at once, four tokens each

typedef uint32_t vecu __attribute__((vector_size(4 * WIDTH)));
typedef uint64_t vecl __attribute__((vector_size(4 * WIDTH)));

// The product of the lanes' lower halves with a word.
INLINE vecl times(vecl x, uint32_t word) {
#if WIDTH == 16
    return (vecl)_mm512_mul_epu32((__m512i)x, _mm512_set1_epi64(word));
#elif WIDTH == 8 && defined(__AVX2__)
    return (vecl)_mm256_mul_epu32((__m256i)x, _mm256_set1_epi64x(word));
#else
    return (x & 0xffffffffu) * (uint64_t)word;
#endif
}

// Ten rounds of Philox4x32 for blocks first … first + BLOCKS of a row: the words of 4 * BLOCKS tokens in order
// (sampling/philox.py has the definition). Upper halves of the lanes hold nothing of meaning in between.
INLINE void noise_words(uint64_t seed, uint64_t position, uint64_t first, uint32_t *words) {
    vecl c0 = {0}, c1 = {0}, c2 = {0}, c3 = {0};
    for (int i = 0; i < BLOCKS; i++) c2[i] = first + i;
    c0 += position & 0xffffffffu;
    c1 += position >> 32;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int i = 0; i < 10; i++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        vecl p0 = times(c0, 0xD2511F53u), p1 = times(c2, 0xCD9E8D57u);
        c0 = (p1 >> 32) ^ c1 ^ (uint64_t)k0;
        c1 = p1;
        c2 = (p0 >> 32) ^ c3 ^ (uint64_t)k1;
        c3 = p0;
    }
    vecl left = (c0 & 0xffffffffu) | c1 << 32, right = (c2 & 0xffffffffu) | c3 << 32;
#if WIDTH == 16
    __m512i low = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11), high = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
    _mm512_storeu_si512(words, _mm512_permutex2var_epi64((__m512i)left, low, (__m512i)right));
    _mm512_storeu_si512(words + 16, _mm512_permutex2var_epi64((__m512i)left, high, (__m512i)right));
#else
    for (int i = 0; i < BLOCKS; i++) {
        uint64_t pair[2] = {left[i], right[i]};
        memcpy(words + 4 * i, pair, sizeof pair);
    }
#endif
}

// ln x of a normal positive x, to about 1 unit in the last place (the Cephes library's coefficients, S. L. Moshier).
INLINE vecf vlog(vecf x) {
    veci bits = (veci)x, exponent = (bits - 0x3f3504f3) >> 23;  // so that the rest is in [√½, √2)
    vecf f = (vecf)(bits - (exponent << 23)) - 1.0f, e = __builtin_convertvector(exponent, vecf), z = f * f;
    vecf p = f * 7.0376836292e-2f - 1.1514610310e-1f;
    p = p * f + 1.1676998740e-1f;
    p = p * f - 1.2420140846e-1f;
    p = p * f + 1.4249322787e-1f;
    p = p * f - 1.6668057665e-1f;
    p = p * f + 2.0000714765e-1f;
    p = p * f - 2.4999993993e-1f;
    p = p * f + 3.3333331174e-1f;
    vecf y = f * z * p + e * -2.12194440e-4f - 0.5f * z;
    return f + y + e * 0.693359375f;
}

INLINE vecf gumbel(const uint32_t *words) {
    veci w;
    memcpy(&w, words, sizeof w);
    vecf u = (__builtin_convertvector((veci)((vecu)w >> 9), vecf) + 0.5f) * 0x1p-23f;
    return -vlog(-vlog(u));
}

// ---- draws

typedef struct {
    const float *logits;
    uint64_t seed, position;
    double top_p;
    int64_t top_k;  // 0: all
    float peak;     // the greatest logit
    float temperature;
    float least;    // logits below are left out
    int32_t num_contenders;              // 0: the row is left to the caller
    int32_t contenders[MAX_CONTENDERS];  // ascending
} draw_row;

typedef struct {
    draw_row *rows;
    int64_t vocab_size;
} draw_args;
ARGS_SIZE(draw)
EXPORT int64_t sizeof_draw_row(void) { return sizeof(draw_row); }

typedef struct {
    float best;
    int64_t count;
    int32_t ids[CONTEST];
    float sums[CONTEST];
} contest;

// Note a token that may win, and forget those that no longer can.
static __attribute__((noinline)) void enter(contest *c, int64_t id, float sum) {
    int64_t kept = 0;
    c->best = greater(sum, c->best);
    for (int64_t i = 0; i < c->count; i++)
        if (c->sums[i] >= c->best - MARGIN) c->ids[kept] = c->ids[i], c->sums[kept++] = c->sums[i];
    if (kept < CONTEST) c->ids[kept] = (int32_t)id, c->sums[kept++] = sum;
    c->count = kept;
}

// Every token from logit `least` on whose sum is within MARGIN of the greatest.
static __attribute__((noinline)) void contend(const draw_row *r, int64_t size, float least, contest *c) {
    float rate = 1 / r->temperature;
    c->best = MIN_GUMBEL, c->count = 0;  // the greatest logit reaches that
    for (int64_t start = 0; start < size; start += 2 * WIDTH) {
        // No noise lifts a lesser logit to the best sum so far.
        float bound = greater(least, r->peak + (c->best - MARGIN - MAX_GUMBEL) * r->temperature);
        vecf logits[2] = {logits_at(r->logits, size, start), logits_at(r->logits, size, start + WIDTH)};
        if (!any((logits[0] >= bound) | (logits[1] >= bound))) continue;
        uint32_t words[2 * WIDTH];
        noise_words(r->seed, r->position, start / 4, words);
        for (int half = 0; half < 2; half++) {
            vecf sums = (logits[half] - r->peak) * rate + gumbel(words + half * WIDTH);
            veci may_win = (logits[half] >= bound) & (sums >= c->best - MARGIN);
            if (!any(may_win)) continue;
            for (int i = 0; i < WIDTH; i++)
                if (may_win[i] && sums[i] >= c->best - MARGIN) enter(c, start + half * WIDTH + i, sums[i]);
        }
    }
}

EXPORT void draw(const void *args, int64_t task) {
    const draw_args *a = args;
    draw_row *r = a->rows + task;
    int64_t size = a->vocab_size;
    float least = r->least, sure = -INFINITY;
    if (r->top_k > 0 && r->top_k < size) least = kth_greatest(r->logits, size, r->top_k, least, r->peak);
    if (r->top_p < 1) {
        nucleus n = nucleus_of(r->logits, size, least, r->peak, LOG2_E / r->temperature, r->top_p);
        least = greater(least, n.perhaps), sure = n.sure;
    }
    contest c;
    contend(r, size, least, &c);
    r->num_contenders = 0;
    if (c.count > MAX_CONTENDERS) return;
    for (int64_t i = 0; i < c.count; i++)
        if (r->logits[c.ids[i]] < sure) return;
    memcpy(r->contenders, c.ids, c.count * sizeof *c.ids);
    r->num_contenders = (int32_t)c.count;
}

// ---- log-probabilities

typedef struct {
    const float *logits;
    int32_t *top_ids;   // [num_top]: the greatest, falling, equal ones by id
    double log_sum;     // ln Σ e^logit
    int64_t rank;       // of the chosen token: 1 + the number of greater logits
    int64_t num_top;    // at most MAX_TOP
    int32_t chosen;
    int32_t is_done;  // 0: left to the caller, since fewer than num_top are finite
} logprobs_row;

typedef struct {
    logprobs_row *rows;
    int64_t vocab_size;
} logprobs_args;
ARGS_SIZE(logprobs)
EXPORT int64_t sizeof_logprobs_row(void) { return sizeof(logprobs_row); }

static void find_top(const float *row, int64_t size, int64_t num_top, float peak, int32_t *ids) {
    float last = kth_greatest(row, size, num_top, -FLT_MAX, peak);
    int64_t equal_left = num_top - counts_from(row, size, nextafterf(last, INFINITY)).count, count = 0;
    for (int64_t i = 0; i < size && count < num_top; i += WIDTH) {
        if (!any(logits_at(row, size, i) >= last)) continue;
        for (int64_t id = i; id < min_of(size, i + WIDTH); id++) {
            if (row[id] < last || (row[id] == last && equal_left-- <= 0)) continue;
            int64_t j = count++;
            for (; j > 0 && row[ids[j - 1]] < row[id]; j--) ids[j] = ids[j - 1];
            ids[j] = (int32_t)id;
        }
    }
}

EXPORT void logprobs(const void *args, int64_t task) {
    const logprobs_args *a = args;
    logprobs_row *r = a->rows + task;
    int64_t size = a->vocab_size;
    int may_be_nan;
    float peak = greatest_of(r->logits, size, &may_be_nan);
    r->is_done = counts_from(r->logits, size, -FLT_MAX).count >= r->num_top;
    if (!r->is_done) return;
    r->log_sum = peak + log(masses_from(r->logits, size, -FLT_MAX, peak, LOG2_E).mass);
    r->rank = 1 + counts_from(r->logits, size, nextafterf(r->logits[r->chosen], INFINITY)).count;
    if (r->num_top > 0) find_top(r->logits, size, r->num_top, peak, r->top_ids);
}
