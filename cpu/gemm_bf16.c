// x and weights as bfloat16, sums in float32: AMX tiles where the processor has them and the system grants them, else
// AVX-512's pairwise products; elsewhere such products are exact ones (gemm.c).
//
// x is rounded once, by a launch of its own (round_rows), into blocks [T/16][C/32][16][32]: one of the inner two is an
// A tile, and a unit of a bfloat16 panel is the B tile for it. Weights in other formats are rounded to such units, two
// panels at a time, for all rows of the task. Sums run over k in order, whatever the number of rows.

#include "gemm.h"

#define BLOCK_ROWS 16
#define MAX_BLOCKS 16     // that share rounded weights
#define CHUNK_UNITS 24    // of weights that are rounded at a time: 2 x 24 KiB
#define TILE_BYTES 1024   // of a unit of one block or panel

typedef struct {
    const float *x;  // [num_rows, depth]
    bf16 *out;       // [num_rows / 16, depth / 32, 16, 32], both rounded up, zeros where x has nothing
    int64_t num_rows, depth, stride;
} round_rows_args;
ARGS_SIZE(round_rows)

#if defined(HAS_AVX512) && defined(__AVX512BF16__)

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define HAS_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

INLINE __m512i round_32(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

void round_block(const rows_in *x, int64_t depth, bf16 *out) {
    const int64_t units = num_units(depth);
    if (x->count < BLOCK_ROWS) memset(out, 0, units * TILE_BYTES);
    for (int64_t r = 0; r < x->count; r++) {
        const float *row = row_of(x, r);
        for (int64_t u = 0; u < units; u++, row += UNIT) {
            const int64_t left = depth - u * UNIT;
            const __mmask16 low = left >= 16 ? 0xffff : (1 << left) - 1;
            const __mmask16 high = left >= 32 ? 0xffff : left > 16 ? (1 << (left - 16)) - 1 : 0;
            const __m512i rounded = round_32(_mm512_maskz_loadu_ps(low, row), _mm512_maskz_loadu_ps(high, row + 16));
            _mm512_storeu_si512(out + (u * BLOCK_ROWS + r) * UNIT, rounded);
        }
    }
}

// A task is a block of rows.
EXPORT void round_rows(const void *args, int64_t task) {
    const round_rows_args *a = args;
    const int64_t first = task * BLOCK_ROWS, left = a->num_rows - first;
    const rows_in rows = {a->x + first * a->stride, a->stride, NULL, left < BLOCK_ROWS ? left : BLOCK_ROWS};
    round_block(&rows, a->depth, a->out + task * num_units(a->depth) * BLOCK_ROWS * UNIT);
}

// Units of a panel as bfloat16 pairs, the form of a bfloat16 panel.
INLINE void round_units(int format, const matrix *w, int64_t index, int64_t first, int64_t count, bf16 *out) {
    const panel p = panel_at(format, w, index);
    const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
            21, 5,
                                           20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    for (int64_t u = first; u < first + count; u++) {
        const uint8_t *next = p.weights + u * weight_bytes(format) + 2 * w->panel_bytes;
        for (int64_t line = 0; line < weight_bytes(format); line += 64) __builtin_prefetch(next + line);
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const scales s = load_scales(format, &p, u, half);
#pragma GCC unroll 1
            for (int i = 0; i < QUADS / 2; i++, out += 4 * PANEL) {
                vecf k[4][VECS];
                load_quad(format, &p, u, half, i, &s, k);
                for (int j = 0; j < 4; j += 2) {
                    const __m512i rounded = round_32((__m512)k[j][0], (__m512)k[j + 1][0]);
                    _mm512_store_si512(out + j * PANEL, _mm512_permutexvar_epi16(pairs, rounded));
                }
            }
        }
    }
}

#define CASE(format) \
    case format: round_units(format, w, index, first, count, out); break;

static void round_panel(const matrix *w, int64_t index, int64_t first, int64_t count, bf16 *out) {
    switch (w->format) {
        CASE(FLOAT32) CASE(FLOAT16) CASE(INT8) CASE(Q8_0) CASE(Q4_0) CASE(Q4_1) CASE(Q4_K) CASE(Q6_K)
    }
}

// What a product of up to two blocks of rows with two panels reads and writes. Sums of row r of block b and panel p are
// at sums + b * block_step + r * row_step + p * panel_step.
typedef struct {
    const bf16 *x[2], *w[2];
    float *sums;
    int64_t block_step, row_step, panel_step;
    int64_t units, ahead;  // weights `ahead` bytes on are asked for; 0 = none
    int num_blocks, rows, is_first;
} product;

#define SUMS 256  // of a block and panel

// R rows of a block at once, two panels.
INLINE void pair_rows(int R, const product *t, int block, int row) {
    __m512 sums[8][2], zero = _mm512_setzero_ps();
    float *place = t->sums + block * t->block_step + row * t->row_step;
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
        for (int p = 0; p < 2; p++)
            sums[r][p] = t->is_first ? zero : _mm512_loadu_ps(place + p * t->panel_step + r * t->row_step);
    const bf16 *x = t->x[block] + row * UNIT, *w0 = t->w[0], *w1 = t->w[1];
    for (int64_t u = 0; u < t->units; u++, x += BLOCK_ROWS * UNIT) {
#pragma GCC unroll 1
        for (int i = 0; i < UNIT; i += 2, w0 += 2 * PANEL, w1 += 2 * PANEL) {
            const __m512bh k0 = (__m512bh)_mm512_loadu_si512(w0), k1 = (__m512bh)_mm512_loadu_si512(w1);
            __builtin_prefetch((const char *)w0 + t->ahead);
            __builtin_prefetch((const char *)w1 + t->ahead);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                int32_t pair;
                memcpy(&pair, x + r * UNIT + i, sizeof pair);
                const __m512bh value = (__m512bh)_mm512_set1_epi32(pair);
                sums[r][0] = _mm512_dpbf16_ps(sums[r][0], k0, value);
                sums[r][1] = _mm512_dpbf16_ps(sums[r][1], k1, value);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
        for (int p = 0; p < 2; p++) _mm512_storeu_ps(place + p * t->panel_step + r * t->row_step, sums[r][p]);
}

static void multiply_pairs(const product *t) {
    for (int block = 0; block < t->num_blocks; block++) {
        const int rows = block == t->num_blocks - 1 ? t->rows : BLOCK_ROWS;
        if (rows == 1) pair_rows(1, t, block, 0);
        else if (rows == 2) pair_rows(2, t, block, 0);
        else if (rows <= 4) pair_rows(4, t, block, 0);
        else for (int row = 0; row < rows; row += 8) pair_rows(8, t, block, row);
    }
}

#if defined(HAS_AMX)

// Tiles 0..3 hold sums, 4 and 5 rows, 6 and 7 panels.
static void configure_tiles(int rows) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config __attribute__((aligned(64))) = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.row_bytes[i] = 64;
        config.rows[i] = (uint8_t)(i < 6 ? rows : 16);
    }
    __asm__ volatile("" : : "r"(&config) : "memory");  // gcc thinks that only the first bytes are read
    _tile_loadconfig(&config);
}

INLINE void prefetch_units(const product *t, int64_t u) {
    for (int64_t line = 0; line < TILE_BYTES; line += 64) {
        __builtin_prefetch((const char *)t->w[0] + u * TILE_BYTES + line + t->ahead);
        __builtin_prefetch((const char *)t->w[1] + u * TILE_BYTES + line + t->ahead);
    }
}

INLINE void multiply_tiles_of(const product *t, int two) {
    float *s0 = t->sums, *s1 = s0 + t->panel_step, *s2 = s0 + t->block_step, *s3 = s2 + t->panel_step;
    const int64_t step = t->row_step * (int64_t)sizeof(float);
    if (t->is_first) {
        _tile_zero(0);
        _tile_zero(1);
        if (two) _tile_zero(2);
        if (two) _tile_zero(3);
    } else {
        _tile_loadd(0, s0, step);
        _tile_loadd(1, s1, step);
        if (two) _tile_loadd(2, s2, step);
        if (two) _tile_loadd(3, s3, step);
    }
    for (int64_t u = 0; u < t->units; u++) {
        if (t->ahead) prefetch_units(t, u);
        _tile_loadd(6, (const char *)t->w[0] + u * TILE_BYTES, 64);
        _tile_loadd(4, (const char *)t->x[0] + u * TILE_BYTES, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, (const char *)t->w[1] + u * TILE_BYTES, 64);
        _tile_dpbf16ps(1, 4, 7);
        if (two) {
            _tile_loadd(5, (const char *)t->x[1] + u * TILE_BYTES, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, s0, step);
    _tile_stored(1, s1, step);
    if (two) _tile_stored(2, s2, step);
    if (two) _tile_stored(3, s3, step);
}

static void multiply_tiles(const product *t) {
    if (t->num_blocks == 2) multiply_tiles_of(t, 1);
    else multiply_tiles_of(t, 0);
}

// Linux grants the tiles' state to a process that asks for it. 1 granted, -1 refused.
static int amx_state;

static int has_amx(void) {
    const long request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM
    if (amx_state == 0) amx_state = syscall(SYS_arch_prctl, request, tile_data) ? -1 : 1;
    return amx_state > 0;
}

#endif

// Two panels times all blocks of a task. Sums that need nothing more go to their place at once, whole blocks of them.
static void multiply_two(const matrix *w, int64_t index, int64_t count, const bf16 *x, const rows_out *out,
        int64_t rows, void (*run)(const product *)) {
    bf16 rounded[2][CHUNK_UNITS * UNIT * PANEL] __attribute__((aligned(64)));
    float sums[MAX_BLOCKS * 2 * SUMS] __attribute__((aligned(64)));
    const int64_t units = num_units(w->depth), blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const int64_t chunk = w->format == BFLOAT16 ? units : CHUNK_UNITS;
    const int64_t second = count > 1;  // a single panel stands for both
    const int is_plain = second && (index + 2) * PANEL <= w->num_outputs && !out->bias && !w->scales;
    const int64_t direct = is_plain && units <= chunk ? rows / (2 * BLOCK_ROWS) * 2 : 0;  // blocks
    for (int64_t u = 0; u < units; u += chunk) {
        product t = {.units = units - u < chunk ? units - u : chunk, .is_first = u == 0};
        for (int64_t p = 0; p < 2; p++) {
            t.w[p] = (const bf16 *)(w->panels + (index + p * second) * w->panel_bytes) + u * UNIT * PANEL;
            if (w->format == BFLOAT16) continue;
            if (p <= second) round_panel(w, index + p, u, t.units, rounded[p]);
            t.w[p] = rounded[p * second];
        }
        for (int64_t b = 0; b < blocks; b += 2) {
            const int64_t left = rows - b * BLOCK_ROWS;
            t.num_blocks = left <= BLOCK_ROWS ? 1 : 2;
            t.rows = left >= 2 * BLOCK_ROWS ? BLOCK_ROWS : (int)(left - (t.num_blocks - 1) * BLOCK_ROWS);
            for (int i = 0; i < t.num_blocks; i++) t.x[i] = x + ((b + i) * units + u) * BLOCK_ROWS * UNIT;
            t.sums = sums + b * 2 * SUMS;
            t.block_step = 2 * SUMS, t.row_step = PANEL, t.panel_step = SUMS;
            if (b < direct) {
                t.sums = out->base + b * BLOCK_ROWS * out->stride + index * PANEL;
                t.block_step = BLOCK_ROWS * out->stride, t.row_step = out->stride, t.panel_step = PANEL;
            }
            t.ahead = w->format == BFLOAT16 && b == 0 ? 2 * TILE_BYTES : 0;
            run(&t);
        }
    }
    for (int64_t r = direct * BLOCK_ROWS; r < rows; r++)
        for (int64_t p = 0; p < count; p++)
            finish(w, index + p, sums + (r / BLOCK_ROWS * 2 + p) * SUMS + r % BLOCK_ROWS * PANEL, out, r);
}

int has_bf16(void) {
#if defined(HAS_AMX)
    if (has_amx()) return 2;
#endif
    return 1;
}

void multiply_bf16(const matrix *w, int64_t first_panel, int64_t count, const bf16 *x, int64_t rows,
        const rows_out *out) {
    void (*run)(const product *) = multiply_pairs;
    const int64_t block_bytes = num_units(w->depth) * TILE_BYTES;
#if defined(HAS_AMX)
    if (has_amx()) {
        run = multiply_tiles;
        configure_tiles(rows < BLOCK_ROWS ? (int)rows : BLOCK_ROWS);
    }
#endif
    for (int64_t r = 0; r < rows; r += MAX_BLOCKS * BLOCK_ROWS) {
        const int64_t some = rows - r < MAX_BLOCKS * BLOCK_ROWS ? rows - r : MAX_BLOCKS * BLOCK_ROWS;
        const rows_out place = {out->base + r * out->stride, out->stride, out->bias};
        const bf16 *start = (const bf16 *)((const char *)x + r / BLOCK_ROWS * block_bytes);
        for (int64_t p = 0; p < count; p += 2)
            multiply_two(w, first_panel + p, count - p < 2 ? 1 : 2, start, &place, some, run);
    }
#if defined(HAS_AMX)
    if (run == multiply_tiles) _tile_release();
#endif
}

#else

EXPORT void round_rows(const void *args, int64_t task) { (void)args, (void)task; }

void round_block(const rows_in *x, int64_t depth, bf16 *out) { (void)x, (void)depth, (void)out; }

int has_bf16(void) { return 0; }

void multiply_bf16(const matrix *w, int64_t first_panel, int64_t count, const bf16 *x, int64_t rows,
        const rows_out *out) {
    (void)w, (void)first_panel, (void)count, (void)x, (void)rows, (void)out;
}

#endif
