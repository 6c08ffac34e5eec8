// Kernels that treat each row or element by itself: norms, activations, sums and gathers. All values are float32.
//
// Outputs may lie where inputs of the same shape lie: a task reads what it needs before it writes over it.

#include "vector_math.h"

// Vectors of a row whose length is no multiple of WIDTH: the missing lanes are 0, and are not stored.
INLINE vecf load_part(const float *p, int64_t count) {
    vecf v = {0};
    memcpy(&v, p, (size_t)count * sizeof(float));
    return v;
}

INLINE void store_part(float *p, vecf v, int64_t count) { memcpy(p, &v, (size_t)count * sizeof(float)); }

INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }

// ---- norms

// Σ x² over a row, in 4 partial sums, so that one addition need not wait for the one before.
static float sum_of_squares(const float *x, int64_t count) {
    vecf sums[4] = {{0}};
    int64_t i = 0;
    for (; i + 4 * WIDTH <= count; i += 4 * WIDTH)
        for (int j = 0; j < 4; j++) {
            vecf v = vload(x + i + j * WIDTH);
            sums[j] += v * v;
        }
    for (; i + WIDTH <= count; i += WIDTH) {
        vecf v = vload(x + i);
        sums[0] += v * v;
    }
    vecf rest = load_part(x + i, count - i);
    sums[1] += rest * rest;
    return vsum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// out = x / √(mean(x²) + eps) · (weight + offset)
static void norm_row(const float *x, const float *weight, float *out, int64_t count, float eps, float offset) {
    float scale = 1.0f / sqrtf(sum_of_squares(x, count) / (float)count + eps);
    int64_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH) vstore(out + i, vload(x + i) * scale * (vload(weight + i) + offset));
    vecf rest = load_part(x + i, count - i) * scale * (load_part(weight + i, count - i) + offset);
    store_part(out + i, rest, count - i);
}

typedef struct {
    const float *x, *weight;  // [rows, columns], [columns]
    float *out;               // [rows, columns]
    int64_t rows, columns, rows_per_task;
    float eps, offset;
} rms_norm_args;
ARGS_SIZE(rms_norm)

EXPORT void rms_norm(const void *pointer, int64_t task) {
    const rms_norm_args *a = pointer;
    int64_t stop = min_of(a->rows, (task + 1) * a->rows_per_task);
    for (int64_t row = task * a->rows_per_task; row < stop; row++) {
        int64_t start = row * a->columns;
        norm_row(a->x + start, a->weight, a->out + start, a->columns, a->eps, a->offset);
    }
}

typedef struct {
    const float *x, *residual, *weight;  // [rows, columns] twice, [columns]
    float *out, *sum;                    // [rows, columns]; over x and residual perhaps
    int64_t rows, columns, rows_per_task;
    float eps, offset;
} add_rms_norm_args;
ARGS_SIZE(add_rms_norm)

EXPORT void add_rms_norm(const void *pointer, int64_t task) {
    const add_rms_norm_args *a = pointer;
    int64_t stop = min_of(a->rows, (task + 1) * a->rows_per_task);
    for (int64_t row = task * a->rows_per_task; row < stop; row++) {
        int64_t start = row * a->columns, i = 0;
        const float *x = a->x + start, *residual = a->residual + start;
        float *sum = a->sum + start;
        for (; i + WIDTH <= a->columns; i += WIDTH) vstore(sum + i, vload(x + i) + vload(residual + i));
        for (; i < a->columns; i++) sum[i] = x[i] + residual[i];
        norm_row(sum, a->weight, a->out + start, a->columns, a->eps, a->offset);
    }
}

// ---- activations of gated MLPs

typedef struct {
    const float *gate_up;  // [rows, 2 · columns], gate at the left
    float *out;            // [rows, columns]
    int64_t rows, columns, rows_per_task;
} act_and_mul_args;
ARGS_SIZE(act_and_mul)

#define ACT_AND_MUL(name)                                                                      \
    EXPORT void name##_and_mul(const void *pointer, int64_t task) {                            \
        const act_and_mul_args *a = pointer;                                                   \
        int64_t n = a->columns, stop = min_of(a->rows, (task + 1) * a->rows_per_task);         \
        for (int64_t row = task * a->rows_per_task; row < stop; row++) {                       \
            const float *gate = a->gate_up + row * 2 * n, *up = gate + n;                      \
            float *out = a->out + row * n;                                                     \
            int64_t i = 0;                                                                     \
            for (; i + WIDTH <= n; i += WIDTH) vstore(out + i, v##name(vload(gate + i)) * vload(up + i)); \
            vecf rest = v##name(load_part(gate + i, n - i)) * load_part(up + i, n - i);        \
            store_part(out + i, rest, n - i);                                                  \
        }                                                                                      \
    }
ACT_AND_MUL(silu)
ACT_AND_MUL(gelu_tanh)

// ---- one element at a time

typedef struct {
    const float *x;
    float *out;
    int64_t count, per_task;  // elements; per_task is a multiple of WIDTH
    float cap;
} unary_args;
ARGS_SIZE(unary)

#define UNARY(name, result)                                                      \
    EXPORT void name(const void *pointer, int64_t task) {                        \
        const unary_args *a = pointer;                                           \
        int64_t i = task * a->per_task, stop = min_of(a->count, i + a->per_task); \
        for (; i < stop; i += WIDTH) {                                           \
            int64_t count = min_of(WIDTH, stop - i);                             \
            vecf x = count == WIDTH ? vload(a->x + i) : load_part(a->x + i, count); \
            vecf y = result;                                                     \
            if (count == WIDTH)                                                  \
                vstore(a->out + i, y);                                           \
            else                                                                 \
                store_part(a->out + i, y, count);                                \
        }                                                                        \
    }
UNARY(silu, vsilu(x))
UNARY(gelu_tanh, vgelu_tanh(x))
UNARY(softcap, vtanh(x / a->cap) * a->cap)

typedef struct {
    const float *left, *right;
    float *out;
    int64_t count, per_task;
} binary_args;
ARGS_SIZE(binary)

EXPORT void add(const void *pointer, int64_t task) {
    const binary_args *a = pointer;
    int64_t i = task * a->per_task, stop = min_of(a->count, i + a->per_task);
    for (; i + WIDTH <= stop; i += WIDTH) vstore(a->out + i, vload(a->left + i) + vload(a->right + i));
    for (; i < stop; i++) a->out[i] = a->left[i] + a->right[i];
}

EXPORT void mul(const void *pointer, int64_t task) {
    const binary_args *a = pointer;
    int64_t i = task * a->per_task, stop = min_of(a->count, i + a->per_task);
    for (; i + WIDTH <= stop; i += WIDTH) vstore(a->out + i, vload(a->left + i) * vload(a->right + i));
    for (; i < stop; i++) a->out[i] = a->left[i] * a->right[i];
}

// ---- copies

typedef struct {
    const float *x;        // [max_rows, columns]
    const int32_t *chosen;  // [rows]
    float *out;            // [rows, columns]
    int64_t rows, columns, max_rows, rows_per_task;
} gather_rows_args;
ARGS_SIZE(gather_rows)

// A number outside of x is taken for the nearest row.
EXPORT void gather_rows(const void *pointer, int64_t task) {
    const gather_rows_args *a = pointer;
    int64_t stop = min_of(a->rows, (task + 1) * a->rows_per_task);
    for (int64_t row = task * a->rows_per_task; row < stop; row++) {
        int64_t from = a->chosen[row] < 0 ? 0 : min_of(a->chosen[row], a->max_rows - 1);
        memcpy(a->out + row * a->columns, a->x + from * a->columns, (size_t)a->columns * sizeof(float));
    }
}

typedef struct {
    const float *x;  // [rows, columns]
    float *out;      // [rows, width]
    int64_t rows, columns, start, width, rows_per_task;
} slice_columns_args;
ARGS_SIZE(slice_columns)

EXPORT void slice_columns(const void *pointer, int64_t task) {
    const slice_columns_args *a = pointer;
    int64_t stop = min_of(a->rows, (task + 1) * a->rows_per_task);
    for (int64_t row = task * a->rows_per_task; row < stop; row++)
        memcpy(a->out + row * a->width, a->x + row * a->columns + a->start, (size_t)a->width * sizeof(float));
}
