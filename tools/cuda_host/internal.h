// What the runtime's sources share; kernels never see it.
#pragma once
#include <algorithm>
#include <deque>
#include <string>
#include <vector>

#include "cuda_host.h"

namespace cuda_host {

// ---- the request of cuda_host.py, whose structures mirror these

struct Range {  // one array argument
    uintptr_t begin, end;
    uint32_t element_bytes;
    int32_t is_writable, argument;
};

struct Request {
    void (*invoke)(void**);
    void** args;
    uint32_t grid[3], block[3];
    size_t shared_bytes;      // dynamic shared memory asked for
    unsigned char* dynamic;   // where it is, null for kernels without
    size_t dynamic_capacity;  // bytes that the module sets aside for it
    const Range* ranges;
    int32_t num_ranges;
    int32_t is_checked, is_profiled;
    int32_t preempt;  // of 256 checked accesses, how many let another thread run
    uint64_t order;   // of threads and blocks: 0 ascending, 1 descending, otherwise the seed of a random one
};

// ---- threads

enum class State : uint8_t { Ready, AtBarrier, AtWarp, Exited };

struct Copy {  // a cp.async
    void* shared;
    const void* global;
    int bytes, copied;
    Where where;
    const void* pc;
};

struct Logged {  // an access, for the profile
    uint32_t pc;
    uint8_t bytes;
    bool is_write, is_shared;
    uintptr_t address;
};

struct Fiber : Thread {
    void* stack_pointer;
    State state;
    Where where;  // of the barrier or collective it waits at
    int barrier_result;
    unsigned mask;  // these four: of the warp collective it waits at
    WarpOp op;
    void* arg;
    bool orders_memory;
    std::vector<Copy> open_group;
    std::deque<std::vector<Copy>> groups;
    uint32_t clock[32];  // vector clock over the lanes of its warp, for the race check
    std::vector<Logged> log;
};

extern Request request;
extern std::vector<Fiber> fibers;  // of the block that runs
extern uintptr_t stacks_begin, stacks_size;
extern uint32_t block_number;  // of the block that runs: its linear index in the grid

inline Fiber* current() { return static_cast<Fiber*>(self); }
unsigned random_below(unsigned n);

// fibers.cpp
void make_ready(Fiber* f);
void to_scheduler();

// rendezvous.cpp
void begin_rendezvous();  // at the start of a block
int num_live_threads();
void leave_block();  // the current thread has returned from the kernel
std::string describe_waiting();

// async_copy.cpp
void drop_copies(Fiber& f);

// ---- checks, called in checked launches only, but for the first two

const char* check_begin_launch();  // finds where shared memory is; gives null or an error
void check_begin_block();   // also fills shared memory with NaN
void check_end_block();
void check_join_lanes(int warp, unsigned live_mask);
void check_copy_issued(const Copy& copy);
void check_copy_done(const Copy& copy);

// check.cpp
uint32_t offset_of(const void* pc);  // in the kernel's library
Where at(uint32_t pc);
size_t shared_memory_bytes();
bool find_shared(uintptr_t address, size_t& offset);

// races.cpp
bool races_begin_launch();  // false: no memory
void races_begin_block();
void races_barrier();
void races_fence();
void touch_shared(size_t offset, size_t bytes, Access access, uint32_t pc, bool is_async = false);
void touch_global(const Range& range, uintptr_t address, size_t bytes, Access access, uint32_t pc);
void finish_async(size_t offset, size_t bytes);

// profile.cpp
void profile_begin_launch();
void profile_end_block();

}  // namespace cuda_host
