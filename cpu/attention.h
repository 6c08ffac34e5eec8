// What the plan of a step's attention and the kernels that follow it share.

#ifndef LEAN_ATTENTION_H
#define LEAN_ATTENTION_H

#include "kv_types.h"

#define STRETCH 256               // keys
#define TILE 48                   // rows
#define TILE_FLOATS 6144          // of a tile's results: tiles of large heads have fewer rows
#define LARGE_TILE 384            // rows, of the kernels on AMX tiles
#define LARGE_TILE_ELEMENTS 24576 // of its queries
#define FEW_TILES 32              // a step of fewer tiles is split by stretches
#define FEW_ROWS 192              // as long as they have no more rows

// A task. request -1: the tokens first_row … are padding and give zeros.
typedef struct {
    int32_t request, head;
    int32_t first_row, num_rows;
    int32_t stretch, num_stretches;
    int32_t partial;    // its first row's place among the partial results; -1: it writes the result itself
    int32_t num_parts;  // of a merge: its stretches
} attention_item;

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows of a request and KV head.
INLINE int64_t rows_of(const int32_t *cu_seqlens_q, int64_t request, int64_t group) {
    return (cu_seqlens_q[request + 1] - cu_seqlens_q[request]) * group;
}

// The first key that a query at a position sees.
INLINE int64_t first_key(int64_t position, int64_t window) { return window ? larger(0, position - window + 1) : 0; }

#endif
