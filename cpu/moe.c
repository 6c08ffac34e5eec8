// Mixture of experts: routing, and each expert's gated MLP over the rows that chose it.
//
// moe_group sorts the T * A choices by expert; their results stand in that order (places) until moe_gather adds up each
// row's, in the order in which the row chose. Products are those of gemm.h: an expert's rows times some panels are a
// task.

#include "gemm.h"
#include "vector_math.h"

INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }

// ---- routing

typedef struct {
    const float *logits;  // [T, E]
    float *weights;       // [T, A]
    int32_t *ids;         // [T, A]
    int64_t num_rows, num_experts, top_k, normalize, rows_per_task;
} moe_route_args;
ARGS_SIZE(moe_route)

// The top_k largest in falling order, equal ones by id; NaN counts as the least.
INLINE void choose(const float *logits, int64_t count, int64_t top_k, float *chosen, int32_t *ids) {
    for (int64_t e = 0; e < count; e++) {
        float x = logits[e] == logits[e] ? logits[e] : -INFINITY;
        int64_t place = min_of(e, top_k);
        if (place == top_k && !(x > chosen[top_k - 1])) continue;
        if (place == top_k) place--;
        for (; place > 0 && x > chosen[place - 1]; place--) {
            chosen[place] = chosen[place - 1];
            ids[place] = ids[place - 1];
        }
        chosen[place] = x;
        ids[place] = (int32_t)e;
    }
}

// Σ e^(x - largest)
INLINE float sum_of_powers(const float *x, int64_t count, float largest) {
    vecf total = {0};
    int64_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH) total += vexp(vload(x + i) - largest);
    if (i < count) {
        float rest[WIDTH];
        for (int64_t j = 0; j < WIDTH; j++) rest[j] = i + j < count ? x[i + j] - largest : -INFINITY;
        total += vexp(vload(rest));
    }
    return vsum(total);
}

EXPORT void moe_route(const void *args, int64_t task) {
    const moe_route_args *a = args;
    int64_t stop = min_of(a->num_rows, (task + 1) * a->rows_per_task);
    for (int64_t row = task * a->rows_per_task; row < stop; row++) {
        const float *logits = a->logits + row * a->num_experts;
        float *weights = a->weights + row * a->top_k;
        choose(logits, a->num_experts, a->top_k, weights, a->ids + row * a->top_k);
        float largest = weights[0], total = 0;
        for (int64_t i = 0; i < a->top_k; i += WIDTH) {
            float powers[WIDTH];
            int64_t count = min_of(WIDTH, a->top_k - i);
            for (int64_t j = 0; j < WIDTH; j++) powers[j] = j < count ? weights[i + j] - largest : 0;
            vstore(powers, vexp(vload(powers)));
            memcpy(weights + i, powers, count * sizeof *weights);
        }
        for (int64_t i = 0; i < a->top_k; i++) total += weights[i];
        // With a NaN among the logits the sum over all is NaN; so must be that over the chosen.
        float all = sum_of_powers(logits, a->num_experts, largest);
        float divisor = a->normalize && all == all ? total : all;
        for (int64_t i = 0; i < a->top_k; i++) weights[i] /= divisor;
    }
}

// ---- choices by expert

// gemm.c's parts: matrices below each other; one begins at output `first` of all.
typedef struct {
    matrix w;
    int64_t first;
} part;

typedef struct {
    const int32_t *ids;  // [T, A]
    int32_t *experts;    // [E]: those that some row chose
    int32_t *starts;     // [E + 1]: the first place of each of these
    int32_t *rows;       // [T * A]: place → row
    int32_t *places;     // [T * A]: choice → place
    int64_t *num_active;
    int64_t num_choices, num_experts, top_k;
} moe_group_args;
ARGS_SIZE(moe_group)

EXPORT void moe_group(const void *args, int64_t task) {
    (void)task;
    const moe_group_args *a = args;
    int32_t *counts = a->starts + 1;  // and then, one expert behind the other, where its next choice goes
    memset(a->starts, 0, (a->num_experts + 1) * sizeof *a->starts);
    for (int64_t i = 0; i < a->num_choices; i++) counts[a->ids[i]]++;
    int32_t start = 0;
    for (int64_t e = 0; e < a->num_experts; e++) {
        int32_t count = counts[e];
        counts[e] = start;
        start += count;
    }
    for (int64_t i = 0; i < a->num_choices; i++) {
        int32_t place = counts[a->ids[i]]++;
        a->places[i] = place;
        a->rows[place] = (int32_t)(i / a->top_k);
    }
    int64_t active = 0;  // counts[e] is now where expert e ends
    for (int64_t e = 0; e < a->num_experts; e++) {
        if (a->starts[e + 1] == a->starts[active]) continue;
        a->experts[active++] = (int32_t)e;
        a->starts[active] = a->starts[e + 1];
    }
    *a->num_active = active;
}

// ---- products of each expert

typedef struct {
    const part *parts;       // [E, num_parts]
    const float *x;          // rows x_stride apart, which is their depth
    const char *short_x;  // in modes PARTS and DIGITS: what split_rows or digit_rows has made of them, by place
    float *out;              // [T * A, out_stride], by place
    const int32_t *experts, *starts;
    const int32_t *rows;  // place → row of x; NULL: x is by place too
    const int64_t *num_active;
    int64_t num_parts, x_stride, out_stride, mode, panels_per_task, tasks_per_expert;
} moe_product_args;
ARGS_SIZE(moe_product)

EXPORT int64_t count_moe_product(const void *args) {
    const moe_product_args *a = args;
    return *a->num_active * a->tasks_per_expert;
}

EXPORT void moe_product(const void *args, int64_t task) {
    const moe_product_args *a = args;
    const int64_t row_bytes = a->mode == PARTS ? parts_row_bytes(a->x_stride) : digits_row_bytes(a->x_stride);
    int64_t index = task / a->tasks_per_expert, first = task % a->tasks_per_expert * a->panels_per_task;
    const part *p = a->parts + a->experts[index] * a->num_parts;
    int64_t place = a->starts[index], left = a->panels_per_task;
    rows_in x = {a->x, a->x_stride, NULL, a->starts[index + 1] - place};
    if (a->rows) x.index = a->rows + place;
    else x.base += place * a->x_stride;
    for (int64_t i = 0; i < a->num_parts && left > 0; i++, p++) {  // a task's panels may be those of several parts
        int64_t panels = num_panels(p->w.num_outputs), count = min_of(panels - first, left);
        if (count > 0) {
            rows_out out = {a->out + place * a->out_stride + p->first, a->out_stride, NULL};
            if (a->mode == PARTS && !is_quantised((int)p->w.format))
                multiply_parts(&p->w, first, count, a->short_x + place * row_bytes, x.count, &out);
            else if (a->mode == DIGITS && is_quantised((int)p->w.format))
                multiply_digits(&p->w, first, count, a->short_x + place * row_bytes, x.count, &out);
            else
                multiply(&p->w, first, count, &x, &out, a->mode);
            left -= count;
        }
        first = count > 0 ? 0 : first - panels;
    }
}

// ---- the sum of a row's experts

typedef struct {
    const float *results;  // [T * A, H], by place
    const float *weights;  // [T, A]
    const int32_t *places;
    float *out;  // [T, H]
    int64_t num_rows, columns, top_k, rows_per_task;
} moe_gather_args;
ARGS_SIZE(moe_gather)

EXPORT void moe_gather(const void *args, int64_t task) {
    const moe_gather_args *a = args;
    int64_t stop = min_of(a->num_rows, (task + 1) * a->rows_per_task);
    for (int64_t row = task * a->rows_per_task; row < stop; row++) {
        float *restrict out = a->out + row * a->columns;
        memset(out, 0, a->columns * sizeof *out);
        for (int64_t i = 0; i < a->top_k; i++) {
            const float *restrict result = a->results + a->places[row * a->top_k + i] * a->columns;
            float weight = a->weights[row * a->top_k + i];
            for (int64_t c = 0; c < a->columns; c++) out[c] += weight * result[c];
        }
    }
}
