// AMX tiles: whether there are any, and their shapes.

#ifndef LEAN_TILES_H
#define LEAN_TILES_H

#include "common.h"

#if defined(__AVX512F__) && defined(__AVX512BF16__) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && \
    defined(__linux__)
#define HAS_TILES 1
#include <sys/syscall.h>
#include <unistd.h>

// Whether Linux grants the tiles' state to this process, which must ask for it.
INLINE int has_tiles(void) {
    static int state;  // 1 granted, -1 refused
    const long request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM
    if (state == 0) state = syscall(SYS_arch_prctl, request, tile_data) ? -1 : 1;
    return state > 0;
}

#define MAX_TILE_ROWS 16

// Tile instructions, each with others behind it. A core was seen to fall, for seconds at a time, into a state where tile
// instructions run one after another (a guess: its other thread, another tenant's, holds tiles too). There they take 1.7
// times as long side by side as with a dozen instructions between them: 25 ns a product with its loads, or 15. Else 7.
#define SPACED(INSTRUCTION) \
    do { \
        INSTRUCTION; \
        __asm__ volatile(".rept 12\n\tnop\n\t.endr"); \
    } while (0)
#define tile_zero(t) SPACED(_tile_zero(t))
#define tile_load(t, from, stride) SPACED(_tile_loadd(t, from, stride))
#define tile_store(t, to, stride) SPACED(_tile_stored(t, to, stride))
#define tile_multiply_bf16(sum, left, right) SPACED(_tile_dpbf16ps(sum, left, right))
#define tile_multiply_bytes(sum, left, right) SPACED(_tile_dpbssd(sum, left, right))

typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_shapes;

// Of tiles 0 to 7.
INLINE void set_tile_shapes(const uint16_t *row_bytes, const uint8_t *rows) {
    tile_shapes shapes __attribute__((aligned(64))) = {.palette = 1};
    memcpy(shapes.row_bytes, row_bytes, 8 * sizeof *row_bytes);
    memcpy(shapes.rows, rows, 8 * sizeof *rows);
    __asm__ volatile("" : : "r"(&shapes) : "memory");  // gcc thinks that only the first bytes are read
    _tile_loadconfig(&shapes);
}

// Tiles are 16 rows of 64 bytes, but those whose bits are set in `shorter` have `rows` where that is less.
INLINE void configure_tiles(int64_t rows, int shorter) {
    uint16_t row_bytes[8];
    uint8_t num_rows[8];
    for (int i = 0; i < 8; i++) {
        row_bytes[i] = 64;
        num_rows[i] = (uint8_t)(shorter >> i & 1 && rows < MAX_TILE_ROWS ? rows : MAX_TILE_ROWS);
    }
    set_tile_shapes(row_bytes, num_rows);
}
#endif

#endif
