// The loops around products of bfloat16 numbers: rows in blocks of 16, panels in pairs, and between them weights that
// are prepared for all rows of a task, a piece of the depth at a time.

#include "gemm_blocks.h"

#if defined(HAS_BF16)

// Two panels and all blocks of rows of a task.
typedef struct {
    const operands *o;
    const matrix *w;
    int64_t index, count;  // panels; a single one stands for both
    const char *x;
    int64_t rows;
    const rows_out *out;
    int64_t direct;                    // so many blocks need nothing more: their sums are at their place in out
    float *sums, *own;                 // [blocks][2][16][16]: of all chains, and of one that is not the first
    char (*prepared)[PREPARED_BYTES];  // [2], of a panel
} task;

// Where sums of blocks b and b + 1 lie: those of the first chain, and of all later, or those of another.
INLINE void place_sums(const task *k, int64_t b, int is_own, product *t) {
    t->sums = (is_own ? k->own : k->sums) + b * 2 * SUMS;
    t->block_step = 2 * SUMS, t->row_step = PANEL, t->panel_step = SUMS;
    if (b < k->direct && !is_own) {
        t->sums = k->out->base + b * BLOCK_ROWS * k->out->stride + k->index * PANEL;
        t->block_step = BLOCK_ROWS * k->out->stride, t->row_step = k->out->stride, t->panel_step = PANEL;
    }
}

// Weights from unit u on for the runs: as they are stored, or prepared.
static void place_weights(const task *k, int64_t u, product *t) {
    const int64_t second = k->count > 1;
    t->stored_left = (num_units(k->w->depth) - u) * weight_bytes((int)k->w->format), t->skip = k->w->panel_bytes;
    for (int64_t p = 0; p < 2; p++) {
        const int64_t index = k->index + p * second;
        t->w[p] = (const char *)k->w->panels + index * k->w->panel_bytes + u * weight_bytes((int)k->w->format);
        t->stored[p] = k->o->splits ? t->w[p] : NULL;
        if (k->o->prepare && p <= second) k->o->prepare(k->w, index, u, t->units, (bf16 *)k->prepared[p]);
        if (k->o->prepare) t->w[p] = k->prepared[p * second];
        if (k->o->splits) t->w[p] = k->prepared[p];
    }
}

// Units [u, u + t->units) of a chain that began at `first`.
static void multiply_piece(const task *k, int64_t first, int64_t u, product *t) {
    place_weights(k, u, t);
    t->is_first = u == first;
    for (int64_t b = 0; b * BLOCK_ROWS < k->rows; b += 2) {
        const int64_t left = k->rows - b * BLOCK_ROWS;
        t->num_blocks = left <= BLOCK_ROWS ? 1 : 2;
        t->rows = left >= 2 * BLOCK_ROWS ? BLOCK_ROWS : (int)(left - (t->num_blocks - 1) * BLOCK_ROWS);
        for (int i = 0; i < t->num_blocks; i++) t->x[i] = k->x + (b + i) * k->o->x_block + u * k->o->x_unit;
        place_sums(k, b, first > 0, t);
        t->ahead = !k->o->prepare && !k->o->splits && b == 0 ? 2 * TILE_BYTES : 0;
        k->o->run(t);
        t->stored[0] = t->stored[1] = NULL;  // the other blocks find them split
    }
}

// Adds what a chain has summed to what those before it have.
static void add_chain(const task *k) {
    for (int64_t b = 0; b * BLOCK_ROWS < k->rows; b++) {
        product t;
        place_sums(k, b, 0, &t);
        for (int64_t p = 0; p < 2; p++)
            for (int64_t r = 0; r < BLOCK_ROWS; r++) {
                float *place = t.sums + p * t.panel_step + r * t.row_step;
                vstore(place, vload(place) + vload(k->own + (2 * b + p) * SUMS + r * PANEL));
            }
    }
}

static void multiply_two(const operands *o, const matrix *w, int64_t index, int64_t count, const char *x,
        int64_t rows, const rows_out *out) {
    char prepared[2][PREPARED_BYTES] __attribute__((aligned(64)));
    float sums[MAX_BLOCKS * 2 * SUMS] __attribute__((aligned(64)));
    float own[MAX_BLOCKS * 2 * SUMS] __attribute__((aligned(64)));
    const int64_t units = num_units(w->depth);
    const int is_plain = count > 1 && (index + 2) * PANEL <= w->num_outputs && !out->bias && !w->scales;
    const int64_t direct = is_plain ? rows / (2 * BLOCK_ROWS) * 2 : 0;
    const task k = {o, w, index, count, x, rows, out, direct, sums, own, prepared};
    product t = {.x_row = o->x_row, .x_unit = o->x_unit, .w_unit = o->w_unit};
    for (int64_t first = 0; first < units; first += o->chain) {
        const int64_t end = units - first < o->chain ? units : first + o->chain;
        const int64_t pieces = (end - first + o->piece - 1) / o->piece;
        const int64_t length = (end - first + pieces - 1) / pieces;  // as equal as they can be
        for (int64_t u = first; u < end; u += t.units) {
            t.units = end - u < length ? end - u : length;
            multiply_piece(&k, first, u, &t);
        }
        if (first > 0) add_chain(&k);
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
