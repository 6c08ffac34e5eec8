// Threads that walk a list of launches together.
//
// One 64-bit word holds the number of the launch in turn and the number of its next task. A thread takes a task by
// advancing the word, and counts it when it is done; whoever finishes a launch's last task starts the next launch. So
// nobody waits for a thread that holds no task: where another process takes a processor away, a step slows down by the
// task that was on it and no more. A launch of one task runs on the thread that starts it and wakes nobody.
//
// A thread without a task looks for one for some microseconds and then sleeps; between runs all of them sleep.

#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "common.h"

#if defined(__linux__)
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define TASK_BITS 28
#define TASK_MASK ((UINT64_C(1) << TASK_BITS) - 1)
#define SPIN_NS 50000
#define STACK_BYTES (2 << 20)  // of a worker: some systems give less than a task of attention takes
#define LOOKS_PER_CLOCK 16  // reading the clock costs about as much as a pause

// What a thread needs of the launch in turn. Two of them, used in turns: one is rewritten only when the word has moved
// on from it, so a thread that read it half old and half new fails to take a task.
typedef struct {
    _Atomic(const launch *) entry;
    _Atomic uint64_t count;
} turn;

typedef struct lean_pool {
    // Every thread reads the word all the time: it has a cache line of its own, as what is written often has.
    _Alignas(64) _Atomic uint64_t word;  // launch number << TASK_BITS | next task; numbers go on from run to run
    _Alignas(64) _Atomic uint64_t done;  // finished tasks of the launch in turn
    _Alignas(64) turn turns[2];
    const launch *list;  // of this run; read and written by whoever starts a launch
    int64_t length, next;
    _Alignas(64) _Atomic uint32_t signal;  // what sleepers wait on: advanced to wake them
    _Atomic uint32_t num_sleepers;
    _Atomic uint32_t is_caller_asleep;
    _Atomic uint32_t is_busy;     // a run is going on: the next one is refused
    _Atomic uint32_t is_walking;  // its list has not come to the end
    _Atomic uint32_t is_closing;
    int64_t num_workers;
    pthread_mutex_t mutex;  // of sleepers where there is no futex
    pthread_cond_t condition;
    pthread_t workers[];
} lean_pool;

static void pause_briefly(void) {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

// ---- sleeping

static void sleep_until_signal(lean_pool *pool, uint32_t seen) {
#if defined(__linux__)
    syscall(SYS_futex, &pool->signal, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
#else
    pthread_mutex_lock(&pool->mutex);
    while (atomic_load(&pool->signal) == seen) pthread_cond_wait(&pool->condition, &pool->mutex);
    pthread_mutex_unlock(&pool->mutex);
#endif
}

// Called after whatever is to be seen was written: a thread counts itself among the sleepers before it looks a last time.
static void wake(lean_pool *pool, uint64_t max_threads) {
    if (atomic_load(&pool->num_sleepers) == 0) return;
#if defined(__linux__)
    atomic_fetch_add(&pool->signal, 1);
    syscall(SYS_futex, &pool->signal, FUTEX_WAKE_PRIVATE, max_threads > INT_MAX ? INT_MAX : (int)max_threads, NULL, NULL, 0);
#else
    (void)max_threads;
    pthread_mutex_lock(&pool->mutex);
    atomic_fetch_add(&pool->signal, 1);
    pthread_cond_broadcast(&pool->condition);
    pthread_mutex_unlock(&pool->mutex);
#endif
}

// ---- walking

// Start the launches that follow, up to one whose tasks are worth sharing, or to the list's end.
static void start_next(lean_pool *pool) {
    while (pool->next < pool->length) {
        const launch *entry = &pool->list[pool->next++];
        int64_t count = entry->count_of ? entry->count_of(entry->args) : entry->count;
        if (count <= 1 || count > (int64_t)TASK_MASK || pool->num_workers == 0) {
            for (int64_t task = 0; task < count; task++) entry->run(entry->args, task);
            continue;
        }
        uint64_t number = (atomic_load_explicit(&pool->word, memory_order_relaxed) >> TASK_BITS) + 1;
        turn *turn = &pool->turns[number & 1];
        atomic_store_explicit(&turn->entry, entry, memory_order_release);
        atomic_store_explicit(&turn->count, (uint64_t)count, memory_order_release);
        atomic_store_explicit(&pool->done, 0, memory_order_relaxed);
        atomic_store(&pool->word, number << TASK_BITS);
        wake(pool, (uint64_t)count - 1);
        return;
    }
    atomic_store(&pool->is_walking, 0);
    if (atomic_load(&pool->is_caller_asleep)) wake(pool, UINT64_MAX);
}

// Take one task and run it; 0 if there is none.
static int run_one_task(lean_pool *pool) {
    uint64_t word = atomic_load_explicit(&pool->word, memory_order_acquire);
    for (;;) {
        turn *turn = &pool->turns[(word >> TASK_BITS) & 1];
        const launch *entry = atomic_load_explicit(&turn->entry, memory_order_acquire);
        uint64_t count = atomic_load_explicit(&turn->count, memory_order_acquire);
        uint64_t task = word & TASK_MASK;
        if (task >= count) return 0;
        if (!atomic_compare_exchange_weak_explicit(&pool->word, &word, word + 1, memory_order_acq_rel, memory_order_acquire))
            continue;
        entry->run(entry->args, (int64_t)task);
        if (atomic_fetch_add_explicit(&pool->done, 1, memory_order_acq_rel) + 1 == count) start_next(pool);
        return 1;
    }
}

static int has_task(lean_pool *pool) {
    uint64_t word = atomic_load(&pool->word);
    return (word & TASK_MASK) < atomic_load_explicit(&pool->turns[(word >> TASK_BITS) & 1].count, memory_order_acquire);
}

// Whether the thread that called lean_pool_run, or a worker, is to look for more tasks.
static int goes_on(lean_pool *pool, int is_caller) {
    return is_caller ? atomic_load(&pool->is_walking) != 0 : atomic_load(&pool->is_closing) == 0;
}

static void sleep_without_task(lean_pool *pool, int is_caller) {
    uint32_t seen = atomic_load(&pool->signal);
    atomic_fetch_add(&pool->num_sleepers, 1);
    if (is_caller) atomic_store(&pool->is_caller_asleep, 1);
    if (!has_task(pool) && goes_on(pool, is_caller)) sleep_until_signal(pool, seen);
    if (is_caller) atomic_store(&pool->is_caller_asleep, 0);
    atomic_fetch_sub(&pool->num_sleepers, 1);
}

static void work(lean_pool *pool, int is_caller) {
    int64_t idle_since = 0;
    for (int looks = 0; goes_on(pool, is_caller);) {
        if (run_one_task(pool)) {
            looks = 0, idle_since = 0;
            continue;
        }
        pause_briefly();
        if (++looks % LOOKS_PER_CLOCK) continue;
        int64_t now = now_ns();
        if (idle_since == 0) idle_since = now;
        if (now - idle_since < SPIN_NS) continue;
        sleep_without_task(pool, is_caller);
        idle_since = 0;
    }
}

static void *worker(void *pool) {
    work(pool, 0);
    return NULL;
}

// ---- what Python calls

EXPORT void lean_pool_destroy(lean_pool *pool);

// A pool of num_threads, the calling one among them; NULL where the system gives no more threads or memory.
EXPORT lean_pool *lean_pool_create(int64_t num_threads) {
    int64_t num_workers = num_threads - 1;
    size_t size = sizeof(lean_pool) + (size_t)num_workers * sizeof(pthread_t);
    lean_pool *pool = aligned_alloc(64, (size + 63) / 64 * 64);
    if (pool == NULL) return NULL;
    memset(pool, 0, size);
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->condition, NULL);
    sigset_t all, before;  // signals are the calling program's: none is delivered to a worker
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    while (pool->num_workers < num_workers) {
        if (pthread_create(&pool->workers[pool->num_workers], &attributes, worker, pool) != 0) break;
        pool->num_workers++;
    }
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (pool->num_workers == num_workers) return pool;
    lean_pool_destroy(pool);
    return NULL;
}

// Run a list; 0 when all of it is done, 1 if the pool is in the middle of another run (nothing has happened then).
EXPORT int64_t lean_pool_run(lean_pool *pool, const launch *list, int64_t length) {
    if (atomic_exchange(&pool->is_busy, 1)) return 1;
    pool->list = list;
    pool->length = length;
    pool->next = 0;
    atomic_store(&pool->is_walking, 1);
    start_next(pool);
    work(pool, 1);
    atomic_store(&pool->is_busy, 0);
    return 0;
}

// End the threads, after the run that another thread may be in.
EXPORT void lean_pool_destroy(lean_pool *pool) {
    while (atomic_exchange(&pool->is_busy, 1)) sched_yield();
    atomic_store(&pool->is_closing, 1);
    wake(pool, UINT64_MAX);
    for (int64_t i = 0; i < pool->num_workers; i++) pthread_join(pool->workers[i], NULL);
    pthread_mutex_destroy(&pool->mutex);
    pthread_cond_destroy(&pool->condition);
    free(pool);
}

EXPORT int64_t sizeof_launch(void) { return sizeof(launch); }
EXPORT int64_t vector_width(void) { return WIDTH; }
