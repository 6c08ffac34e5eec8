// The loops around products of bfloat16 numbers: rows in blocks of 16, panels in pairs, and between them weights that
// are prepared for all rows of a task, a piece of the depth at a time.

#include "gemm_blocks.h"

#if defined(HAS_BF16)

// Two panels times all blocks of a task. Sums that need nothing more go to their place at once, whole blocks of them.
static void multiply_two(const operands *o, const matrix *w, int64_t index, int64_t count, const char *x,
        int64_t rows, const rows_out *out) {
    bf16 prepared[2][PREPARED_BYTES / sizeof(bf16)] __attribute__((aligned(64)));
    float sums[MAX_BLOCKS * 2 * SUMS] __attribute__((aligned(64)));
    const int64_t units = num_units(w->depth), blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const int64_t chunk = o->chunk;
    const int64_t second = count > 1;  // a single panel stands for both
    const int is_plain = second && (index + 2) * PANEL <= w->num_outputs && !out->bias && !w->scales;
    const int64_t direct = is_plain && units <= chunk ? rows / (2 * BLOCK_ROWS) * 2 : 0;  // blocks
    product t = {.x_row = o->x_row, .x_unit = o->x_unit, .w_unit = o->w_unit};
    for (int64_t u = 0; u < units; u += chunk) {
        t.units = units - u < chunk ? units - u : chunk;
        t.is_first = u == 0;
        for (int64_t p = 0; p < 2; p++) {
            t.w[p] = (const char *)w->panels + (index + p * second) * w->panel_bytes
                    + u * weight_bytes((int)w->format);
            if (o->splits) {
                t.stored[p] = t.w[p];
                t.w[p] = (const char *)prepared[p];
            } else if (o->prepare) {
                if (p <= second) o->prepare(w, index + p, u, t.units, prepared[p]);
                t.w[p] = (const char *)prepared[p * second];
            }
        }
        for (int64_t b = 0; b < blocks; b += 2) {
            const int64_t left = rows - b * BLOCK_ROWS;
            t.num_blocks = left <= BLOCK_ROWS ? 1 : 2;
            t.rows = left >= 2 * BLOCK_ROWS ? BLOCK_ROWS : (int)(left - (t.num_blocks - 1) * BLOCK_ROWS);
            for (int i = 0; i < t.num_blocks; i++) t.x[i] = x + (b + i) * o->x_block + u * o->x_unit;
            t.sums = sums + b * 2 * SUMS;
            t.block_step = 2 * SUMS, t.row_step = PANEL, t.panel_step = SUMS;
            if (b < direct) {
                t.sums = out->base + b * BLOCK_ROWS * out->stride + index * PANEL;
                t.block_step = BLOCK_ROWS * out->stride, t.row_step = out->stride, t.panel_step = PANEL;
            }
            t.ahead = !o->prepare && !o->splits && b == 0 ? 2 * TILE_BYTES : 0;
            o->run(&t);
            t.stored[0] = t.stored[1] = NULL;  // the other blocks find them split
        }
    }
    for (int64_t r = direct * BLOCK_ROWS; r < rows; r++)
        for (int64_t p = 0; p < count; p++)
            finish(w, index + p, sums + (r / BLOCK_ROWS * 2 + p) * SUMS + r % BLOCK_ROWS * PANEL, out, r);
}

void multiply_blocks(const operands *o, const matrix *w, int64_t first_panel, int64_t count, const void *x,
        int64_t rows, const rows_out *out) {
    for (int64_t r = 0; r < rows; r += MAX_BLOCKS * BLOCK_ROWS) {
        const int64_t some = rows - r < MAX_BLOCKS * BLOCK_ROWS ? rows - r : MAX_BLOCKS * BLOCK_ROWS;
        const rows_out place = {out->base + r * out->stride, out->stride, out->bias};
        const char *start = (const char *)x + r / BLOCK_ROWS * o->x_block;
        for (int64_t p = 0; p < count; p += 2)
            multiply_two(o, w, first_panel + p, count - p < 2 ? 1 : 2, start, some, &place);
    }
}

#endif
