// Runs a grid: one fiber per thread of the block that runs, blocks one after another.
#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>
#include <map>

#include "internal.h"

#if !defined(__x86_64__) || defined(CUDA_HOST_UCONTEXT)
#include <ucontext.h>
#endif

namespace cuda_host {

Thread* self;
uint3 block_idx;
dim3 block_dim, grid_dim;
Request request;
std::vector<Fiber> fibers;
uintptr_t stacks_begin, stacks_size;
uint32_t block_number;

namespace {

constexpr size_t STACK = 256 << 10, GUARD = 4096;
std::deque<Fiber*> ready;
std::string error;
uint64_t random_state;
void* scheduler_stack_pointer;

// ---- context switch

#if defined(__x86_64__) && !defined(CUDA_HOST_UCONTEXT)

extern "C" void cuda_host_switch(void** save, void* load);
asm(R"(
.text
.type cuda_host_switch,@function
cuda_host_switch:
    pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
    ret
)");
void* new_context(char* stack, void (*entry)()) {
    auto** top = reinterpret_cast<void**>(stack + STACK);
    *--top = nullptr;  // the entry's return address; it never returns
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    return top;
}

#else  // other processors: some ten times slower

void cuda_host_switch(void** save, void* load) {
    static std::map<void**, ucontext_t> kept;
    ucontext_t& mine = kept[save];
    *save = &mine;
    swapcontext(&mine, static_cast<ucontext_t*>(load));
}
void* new_context(char* stack, void (*entry)()) {
    static std::map<char*, ucontext_t> fresh;
    ucontext_t& c = fresh[stack];
    getcontext(&c);
    c.uc_stack.ss_sp = stack + GUARD;
    c.uc_stack.ss_size = STACK - GUARD;
    makecontext(&c, entry, 0);
    return &c;
}

#endif

void run_kernel() {  // a fiber's whole life
    request.invoke(request.args);
    leave_block();
    to_scheduler();
}

// ---- blocks

char* stack_of(int thread) { return reinterpret_cast<char*>(stacks_begin) + STACK * size_t(thread); }

bool make_stacks(int num_threads) {
    fibers.resize(size_t(num_threads));
    const size_t wanted = STACK * size_t(num_threads);
    if (stacks_size >= wanted) return true;
    if (stacks_size) munmap(reinterpret_cast<void*>(stacks_begin), stacks_size);
    stacks_size = 0;
    void* p = mmap(nullptr, wanted, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return false;
    stacks_begin = reinterpret_cast<uintptr_t>(p);
    stacks_size = wanted;
    for (int t = 0; t < num_threads; ++t) mprotect(stack_of(t), GUARD, PROT_NONE);
    return true;
}

void begin_block() {
    ready.clear();
    for (int t = 0; t < int(fibers.size()); ++t) {
        Fiber& f = fibers[size_t(t)];
        f.linear = t;
        f.lane = t % 32;
        f.warp = t / 32;
        f.thread_idx = {unsigned(t) % block_dim.x, unsigned(t) / block_dim.x % block_dim.y,
                        unsigned(t) / (block_dim.x * block_dim.y)};
        drop_copies(f);
        f.stack_pointer = new_context(stack_of(t), run_kernel);
        make_ready(&f);
    }
    if (request.order == 1) std::reverse(ready.begin(), ready.end());
    begin_rendezvous();
    check_begin_block();
}

Fiber* pick() {
    if (request.order >= 2) std::swap(ready.front(), ready[random_below(unsigned(ready.size()))]);
    Fiber* f = ready.front();
    ready.pop_front();
    return f;
}

void run_block() {
    begin_block();
    while (num_live_threads() && error.empty()) {
        if (ready.empty()) {
            char place[100];
            snprintf(place, sizeof place, "deadlock in block (%u,%u,%u):", block_idx.x, block_idx.y, block_idx.z);
            error = place + describe_waiting();
            return;
        }
        self = pick();
        cuda_host_switch(&scheduler_stack_pointer, current()->stack_pointer);
        self = nullptr;
    }
    if (error.empty()) check_end_block();
}

std::vector<size_t> order_of_blocks(size_t count) {
    std::vector<size_t> order(count);
    for (size_t b = 0; b < count; ++b) order[b] = request.order == 1 ? count - 1 - b : b;
    if (request.order >= 2)
        for (size_t b = count; b > 1; --b) std::swap(order[b - 1], order[random_below(unsigned(b))]);
    return order;
}

}  // namespace

void make_ready(Fiber* f) {
    f->state = State::Ready;
    ready.push_back(f);
}

void to_scheduler() { cuda_host_switch(&current()->stack_pointer, scheduler_stack_pointer); }

unsigned random_below(unsigned n) {  // xorshift64
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return unsigned((random_state >> 32) * n >> 32);
}

void fail(Where where, const char* format, ...) {
    if (error.empty()) {
        char place[400], text[600];
        snprintf(place, sizeof place, "%s:%d: block (%u,%u,%u) thread %d: ", where.file, where.line, block_idx.x,
                 block_idx.y, block_idx.z, self->linear);
        va_list list;
        va_start(list, format);
        vsnprintf(text, sizeof text, format, list);
        va_end(list);
        error = std::string(place) + text;
    }
    to_scheduler();  // which ends the launch: this fiber is never resumed
    __builtin_unreachable();
}

}  // namespace cuda_host

// Gives null, or the text of the error that stopped the launch. One launch at a time.
extern "C" const char* cuda_host_launch(const cuda_host::Request* r) {
    using namespace cuda_host;
    request = *r;
    error.clear();
    random_state = 0x9e3779b97f4a7c15ull ^ (r->order * 0xd1342543de82ef95ull);
    grid_dim = dim3(r->grid[0], r->grid[1], r->grid[2]);
    block_dim = dim3(r->block[0], r->block[1], r->block[2]);
    if (!make_stacks(int(block_dim.x * block_dim.y * block_dim.z))) return "no memory for the threads' stacks";
    if (const char* problem = check_begin_launch()) return problem;
    for (size_t b : order_of_blocks(size_t(grid_dim.x) * grid_dim.y * grid_dim.z)) {
        block_number = uint32_t(b);
        block_idx = {unsigned(b % grid_dim.x), unsigned(b / grid_dim.x % grid_dim.y),
                     unsigned(b / (size_t(grid_dim.x) * grid_dim.y))};
        run_block();
        if (!error.empty()) return error.c_str();
    }
    return nullptr;
}
