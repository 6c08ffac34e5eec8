// gemm: out [T, O] = x [T, C] . W^T + bias, as tasks of rows times panels; embedding: rows of a matrix by their index.

#include "gemm.h"

#define MAX_ROUNDED_DEPTH 1024  // of 16 rows on the stack: 32 KiB

EXPORT int64_t sizeof_gemm_part(void) { return sizeof(gemm_part); }

static void multiply_exact(const matrix *w, int64_t first_panel, int64_t count, const rows_in *x, const rows_out *out) {
    if (x->count <= 4) multiply_few(w, first_panel, count, x, out);
    else multiply_many(w, first_panel, count, x, out);
}

void multiply(const matrix *w, int64_t first_panel, int64_t count, const rows_in *x, const rows_out *out,
        int64_t mode) {
    if (mode != BF16 || x->count <= 4 || w->depth > MAX_ROUNDED_DEPTH || !has_bf16()) {
        multiply_exact(w, first_panel, count, x, out);
        return;
    }
    for (int64_t r = 0; r < x->count; r += 16) {
        bf16 rounded[16 * MAX_ROUNDED_DEPTH] __attribute__((aligned(64)));
        const rows_in rows = rows_from(x, r, x->count - r < 16 ? x->count - r : 16);
        const rows_out place = {out->base + r * out->stride, out->stride, out->bias};
        round_block(&rows, w->depth, rounded);
        multiply_bf16(w, first_panel, count, rounded, rows.count, &place);
    }
}

typedef struct {
    const gemm_part *parts;
    const float *x;       // [num_rows, depth], rows x_stride apart
    const void *short_x;  // what round_rows, digit_rows or split_rows has made of x, for the mode
    const float *bias;    // [outputs of all parts] or NULL
    float *out;           // rows out_stride apart
    int64_t num_parts, num_rows, x_stride, short_stride, out_stride, mode;  // short_stride: bytes of 16 rows
    int64_t rows_per_task, panels_per_task, is_by_rows;
} gemm_args;
ARGS_SIZE(gemm)

INLINE int64_t tasks_of(const matrix *w, int64_t panels_per_task) {
    return (num_panels(w->num_outputs) + panels_per_task - 1) / panels_per_task;
}

// Tasks that share weights follow each other, which finds them in the second-level cache; or, by rows, those that share
// a block of rows of x.
EXPORT void gemm(const void *args, int64_t task) {
    const gemm_args *a = args;
    const int64_t blocks = (a->num_rows + a->rows_per_task - 1) / a->rows_per_task;
    int64_t per_block = 0;
    for (int64_t i = 0; i < a->num_parts; i++) per_block += tasks_of(&a->parts[i].w, a->panels_per_task);
    const int64_t row = (a->is_by_rows ? task / per_block : task % blocks) * a->rows_per_task;
    const gemm_part *part = a->parts;
    task = a->is_by_rows ? task % per_block : task / blocks;
    for (; task >= tasks_of(&part->w, a->panels_per_task); part++)
        task -= tasks_of(&part->w, a->panels_per_task);
    const int64_t first = task * a->panels_per_task, left = num_panels(part->w.num_outputs) - first;
    const int64_t panels = left < a->panels_per_task ? left : a->panels_per_task;
    const int64_t rows = a->num_rows - row < a->rows_per_task ? a->num_rows - row : a->rows_per_task;
    const rows_out out = {a->out + row * a->out_stride + part->first, a->out_stride,
            a->bias ? a->bias + part->first : NULL};
    const char *short_x = (const char *)a->short_x + row / 16 * a->short_stride;
    if (a->mode == BF16) {
        multiply_bf16(&part->w, first, panels, (const bf16 *)short_x, rows, &out);
    } else if (a->mode == DIGITS && is_quantised((int)part->w.format)) {
        multiply_digits(&part->w, first, panels, short_x, rows, &out);
    } else if (a->mode == PARTS && !is_quantised((int)part->w.format)) {
        multiply_parts(&part->w, first, panels, short_x, rows, &out);
    } else {
        const rows_in x = {a->x + row * a->x_stride, a->x_stride, NULL, rows};
        multiply_exact(&part->w, first, panels, &x, &out);
    }
}

// Whether there are instructions for products in a mode; 2: AMX tiles.
EXPORT int64_t has_mode(int64_t mode) {
    return mode == BF16 ? has_bf16() : mode == DIGITS ? has_digits() : mode == PARTS ? has_parts() : 1;
}

typedef struct {
    const gemm_part *parts;  // of one table
    const int32_t *ids;      // [num_rows]
    float *out;              // [num_rows, depth]
    int64_t num_parts, num_rows, rows_per_task;
    float scale;
} embedding_args;
ARGS_SIZE(embedding)

// A panel holds an output's weights 16 apart: a unit is expanded, and one lane of it kept.
static void copy_row(const matrix *w, int64_t id, float scale, float *out) {
    const float own = w->scales ? w->scales[id] : 1.0f;
    for (int64_t k = 0; k < w->depth; k += UNIT) {
        float tile[UNIT * PANEL] __attribute__((aligned(64)));
        expand_panel(w, id / PANEL, k / UNIT, 1, tile);
        const int64_t count = w->depth - k < UNIT ? w->depth - k : UNIT;
        for (int64_t i = 0; i < count; i++) out[k + i] = tile[i * PANEL + id % PANEL] * own * scale;
    }
}

EXPORT void embedding(const void *args, int64_t task) {
    const embedding_args *a = args;
    const int64_t depth = a->parts->w.depth, end = (task + 1) * a->rows_per_task;
    for (int64_t row = task * a->rows_per_task; row < end && row < a->num_rows; row++) {
        const gemm_part *part = a->parts + a->num_parts - 1;
        while (a->ids[row] < part->first) part--;
        copy_row(&part->w, a->ids[row] - part->first, a->scale, a->out + row * depth);
    }
}
