// Test-only kernels: they write down who ran when, and evaluate the vector functions.

#include <stdatomic.h>
#include <time.h>

#include "vector_math.h"

// A launch's place in a list, what it must see, and what it leaves.
typedef struct {
    int64_t *values;       // [num_values]
    int64_t *wrong;        // tasks that saw another value than the launch before left
    int64_t num_values;
    int64_t expected;      // what every value is when the launch begins
    int64_t spin;          // work per task, in loops
    const int64_t *count;  // tasks, for dynamic launches
} probe_args;
ARGS_SIZE(probe)

// Each task owns the values task, task + num_tasks, … of its launch, whose stride is `count`.
EXPORT void probe(const void *pointer, int64_t task) {
    const probe_args *args = pointer;
    for (volatile int64_t i = 0; i < args->spin; i = i + 1) {}
    for (int64_t i = task; i < args->num_values; i += *args->count) {
        if (args->values[i] != args->expected) __atomic_fetch_add(args->wrong, 1, __ATOMIC_RELAXED);
        args->values[i]++;
    }
}

EXPORT int64_t probe_count(const void *pointer) { return *((const probe_args *)pointer)->count; }

// Writes the count of a later launch.
typedef struct {
    int64_t *target;
    int64_t value;
} set_count_args;
ARGS_SIZE(set_count)

EXPORT void set_count(const void *pointer, int64_t task) {
    const set_count_args *args = pointer;
    (void)task;
    *args->target = args->value;
}

// Runs a list on the pool that is running it.
typedef struct {
    int64_t (*run)(void *, const launch *, int64_t);
    void *pool;
    int64_t *result;
} nested_args;
ARGS_SIZE(nested)

EXPORT void nested(const void *pointer, int64_t task) {
    const nested_args *args = pointer;
    (void)task;
    *args->result = args->run(args->pool, NULL, 0);
}

typedef struct {
    const float *x;
    float *out;
    int64_t count;  // a multiple of 16
} map_args;
ARGS_SIZE(map)

#define MAP(name)                                                                                      \
    EXPORT void map_##name(const void *pointer, int64_t task) {                                        \
        const map_args *args = pointer;                                                                \
        (void)task;                                                                                    \
        for (int64_t i = 0; i < args->count; i += WIDTH) vstore(args->out + i, v##name(vload(args->x + i))); \
    }
MAP(exp)
MAP(tanh)
MAP(silu)
MAP(gelu_tanh)
