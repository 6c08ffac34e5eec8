// What bounds a product on this machine: reading memory in order, and multiply-adds in registers. For bench/cpu_gemm.py.

#include "common.h"

typedef struct {
    const uint8_t *bytes;
    float *out;  // one line per task, so that nothing is optimised away
    int64_t count, per_task;
} read_bytes_args;
ARGS_SIZE(read_bytes)

EXPORT void read_bytes(const void *args, int64_t task) {
    const read_bytes_args *a = args;
    const int64_t end = (task + 1) * a->per_task < a->count ? (task + 1) * a->per_task : a->count;
    veci sums[4] = {{0}};
    int64_t i = task * a->per_task;
    for (; i + 16 * WIDTH <= end; i += 16 * WIDTH)
        for (int j = 0; j < 4; j++) sums[j] ^= *(const veci *)(a->bytes + i + 4 * WIDTH * j);
    vstore(a->out + 16 * task, (vecf)(sums[0] ^ sums[1] ^ sums[2] ^ sums[3]));
}

typedef struct {
    float *out;
    int64_t rounds;
} multiply_registers_args;
ARGS_SIZE(multiply_registers)

// 12 independent chains of `rounds` multiply-adds.
EXPORT void multiply_registers(const void *args, int64_t task) {
    const multiply_registers_args *a = args;
    vecf sums[12], x = vbroadcast(0.5f), y = vbroadcast(1e-9f), total = {0};
#pragma GCC unroll 12
    for (int j = 0; j < 12; j++) sums[j] = vbroadcast((float)j);
    for (int64_t i = 0; i < a->rounds; i++) {
#pragma GCC unroll 12
        for (int j = 0; j < 12; j++) sums[j] = sums[j] * x + y;
    }
#pragma GCC unroll 12
    for (int j = 0; j < 12; j++) total += sums[j];
    vstore(a->out + 16 * task, total);
}

EXPORT int64_t registers_width(void) { return WIDTH; }
