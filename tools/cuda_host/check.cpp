// The checked build: what compute-sanitizer's memcheck does on a GPU. Kernels are compiled with g++ -fsanitize=thread,
// which puts a call before every memory access, and linked to the functions at the end of this file instead of libtsan:
// no preloaded library, and an error is a Python exception, not the end of the process. Each access is looked up: a
// thread's stack (ignored), shared memory, or one of the arrays that the launch was given.
#include <link.h>

#include <cstdio>

#include "internal.h"

namespace cuda_host {
namespace {

uintptr_t shared_begin, shared_size;    // this OS thread's copy of the module's TLS segment
uintptr_t module_begin, module_end;     // the kernel's library
uintptr_t runtime_begin, runtime_end;   // this library, where threadIdx and the like lie
const Range* last_range;

const char* verb(Access access) {
    return access == Access::Read ? "read" : access == Access::Write ? "write" : "atomic access";
}

int find_libraries(dl_phdr_info* info, size_t, void*) {
    uintptr_t low = ~uintptr_t(0), high = 0, tls = 0;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        auto& h = info->dlpi_phdr[i];
        if (h.p_type == PT_LOAD) {
            low = std::min(low, uintptr_t(info->dlpi_addr + h.p_vaddr));
            high = std::max(high, uintptr_t(info->dlpi_addr + h.p_vaddr + h.p_memsz));
        }
        if (h.p_type == PT_TLS) tls = h.p_memsz;
    }
    const auto own = reinterpret_cast<uintptr_t>(&request), code = reinterpret_cast<uintptr_t>(request.invoke);
    if (own >= low && own < high) runtime_begin = low, runtime_end = high;
    if (code < low || code >= high) return 0;
    module_begin = low;
    module_end = high;
    shared_begin = reinterpret_cast<uintptr_t>(info->dlpi_tls_data);
    shared_size = shared_begin ? tls : 0;
    return 0;
}

const Range* range_of(uintptr_t a, size_t bytes, bool is_write) {
    const Range* found = nullptr;
    for (const Range* r = request.ranges; r != request.ranges + request.num_ranges; ++r)
        if (a >= r->begin && a + bytes <= r->end && (!found || (is_write && r->is_writable))) found = r;
    return found;  // of arguments that overlap, one that allows the access
}

[[noreturn]] void fail_out_of_bounds(uintptr_t a, size_t bytes, Access access, uint32_t pc) {
    const Range* nearest = nullptr;
    uintptr_t distance = ~uintptr_t(0);
    for (const Range* r = request.ranges; r != request.ranges + request.num_ranges; ++r) {
        const uintptr_t d = a >= r->end ? a - r->end : a < r->begin ? r->begin - a : 0;
        if (d < distance) distance = d, nearest = r;
    }
    if (!nearest) fail(at(pc), "out of bounds: the kernel was given no array");
    fail(at(pc), "out of bounds: %s of %zu bytes in no array; the nearest place is %zu bytes %s argument %d",
         verb(access), bytes, size_t(distance), a < nearest->begin ? "before the start of" : "past the end of",
         nearest->argument);
}

// Gives false for what is not global memory: threadIdx and the like, __constant__ and __device__ variables.
bool check_global(uintptr_t a, size_t bytes, Access access, uint32_t pc) {
    const bool is_write = access != Access::Read;
    if (a >= module_begin && a + bytes <= module_end) return false;
    if (!is_write && a >= runtime_begin && a + bytes <= runtime_end) return false;
    if (a - reinterpret_cast<uintptr_t>(fibers.data()) < fibers.size() * sizeof(Fiber)) return false;
    const Range* r = last_range;
    if (!r || a < r->begin || a + bytes > r->end || (is_write && !r->is_writable)) r = range_of(a, bytes, is_write);
    if (!r) fail_out_of_bounds(a, bytes, access, pc);
    if (is_write && !r->is_writable)
        fail(at(pc), "%s to argument %d, which is a read-only array", verb(access), r->argument);
    last_range = r;
    touch_global(*r, a, bytes, access, pc);
    return true;
}

void check_shared(size_t offset, size_t bytes, Access access, uint32_t pc, bool is_async = false) {
    const uintptr_t a = shared_begin + offset, dynamic = reinterpret_cast<uintptr_t>(request.dynamic);
    const bool is_dynamic = dynamic && a >= dynamic && a < dynamic + request.dynamic_capacity;
    if (is_dynamic && a + bytes > dynamic + request.shared_bytes)
        fail(at(pc), "out of bounds: %s of %zu bytes at offset %zu of dynamic shared memory, which has %zu bytes",
             verb(access), bytes, size_t(a - dynamic), request.shared_bytes);
    touch_shared(offset, bytes, access, pc, is_async);
}

void check(const void* p, size_t bytes, Access access, uint32_t pc) {
    const auto a = reinterpret_cast<uintptr_t>(p);
    if (!self || a - stacks_begin < stacks_size) return;
    if (bytes <= 16 && a % bytes)
        fail(at(pc), "misaligned: %s of %zu bytes at an address that is %zu modulo %zu", verb(access), bytes,
             size_t(a % bytes), bytes);
    size_t offset;
    const bool is_shared = find_shared(a, offset);
    if (is_shared) check_shared(offset, bytes, access, pc);
    else if (!check_global(a, bytes, access, pc)) return;
    if (request.is_profiled) current()->log.push_back({pc, uint8_t(bytes), access != Access::Read, is_shared, a});
    if (request.preempt && int(random_below(256)) < request.preempt) {
        make_ready(current());
        to_scheduler();
    }
}

// Shared memory starts as NaN: static arrays, then the dynamic bytes asked for, then what the linker put behind them.
void poison_shared() {
    auto fill = [](uintptr_t from, uintptr_t to) {
        if (to > from) std::memset(reinterpret_cast<void*>(from), 0xff, to - from);
    };
    const uintptr_t end = shared_begin + shared_size;
    if (!request.dynamic) return fill(shared_begin, end);
    const auto dynamic = reinterpret_cast<uintptr_t>(request.dynamic);
    fill(shared_begin, dynamic);
    fill(dynamic, dynamic + request.shared_bytes);
    fill(dynamic + request.dynamic_capacity, end);
}

}  // namespace

uint32_t offset_of(const void* pc) { return uint32_t(reinterpret_cast<uintptr_t>(pc) - 1 - module_begin); }

Where at(uint32_t pc) {  // cuda_host.py turns @<offset> into file:line
    static char text[32];
    snprintf(text, sizeof text, "@%x", pc);
    return {text, 0};
}

size_t shared_memory_bytes() { return shared_size; }

bool find_shared(uintptr_t address, size_t& offset) {
    offset = address - shared_begin;
    return offset < shared_size;
}

const char* check_begin_launch() {
    shared_begin = shared_size = 0;
    dl_iterate_phdr(find_libraries, nullptr);
    last_range = nullptr;
    profile_begin_launch();
    if (request.is_checked && !races_begin_launch()) return "no memory to keep what each array element's last access was";
    return nullptr;
}

void check_begin_block() {
    poison_shared();
    if (request.is_checked) races_begin_block();
}

void check_end_block() {
    if (request.is_profiled) profile_end_block();
}

void check_access(const void* p, size_t bytes, Access access, const void* pc) {
    if (request.is_checked) check(p, bytes, access, offset_of(pc));
}

void check_copy_issued(const Copy& c) {
    const uint32_t pc = offset_of(c.pc);
    if (c.copied) check_global(reinterpret_cast<uintptr_t>(c.global), size_t(c.copied), Access::Read, pc);
    size_t offset;
    if (!find_shared(reinterpret_cast<uintptr_t>(c.shared), offset))
        fail(c.where, "cp.async to an address that is not shared memory");
    check_shared(offset, size_t(c.bytes), Access::Write, pc, true);
}

void check_copy_done(const Copy& c) {
    size_t offset;
    if (find_shared(reinterpret_cast<uintptr_t>(c.shared), offset)) finish_async(offset, size_t(c.bytes));
}

void memory_fence() {
    if (request.is_checked) races_fence();
}

}  // namespace cuda_host

// ---- what the compiler's sanitizers call

extern "C" {

#define CUDA_HOST_HOOK(NAME, BYTES, ACCESS)                                                            \
    void NAME(void* p) {                                                                               \
        cuda_host::check(p, BYTES, cuda_host::Access::ACCESS,                                          \
                         cuda_host::offset_of(__builtin_return_address(0)));                           \
    }
CUDA_HOST_HOOK(__tsan_read1, 1, Read)
CUDA_HOST_HOOK(__tsan_read2, 2, Read)
CUDA_HOST_HOOK(__tsan_read4, 4, Read)
CUDA_HOST_HOOK(__tsan_read8, 8, Read)
CUDA_HOST_HOOK(__tsan_read16, 16, Read)
CUDA_HOST_HOOK(__tsan_write1, 1, Write)
CUDA_HOST_HOOK(__tsan_write2, 2, Write)
CUDA_HOST_HOOK(__tsan_write4, 4, Write)
CUDA_HOST_HOOK(__tsan_write8, 8, Write)
CUDA_HOST_HOOK(__tsan_write16, 16, Write)
void __tsan_read_range(void* p, long n) {
    cuda_host::check(p, size_t(n), cuda_host::Access::Read, cuda_host::offset_of(__builtin_return_address(0)));
}
void __tsan_write_range(void* p, long n) {
    cuda_host::check(p, size_t(n), cuda_host::Access::Write, cuda_host::offset_of(__builtin_return_address(0)));
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

// UndefinedBehaviorSanitizer: indices of arrays with a known size, alignment of what a pointer is used as.
struct UbsanPlace { const char* file; uint32_t line, column; };
struct UbsanMismatch { UbsanPlace place; void* type; uint8_t log_alignment, kind; };
void __ubsan_handle_out_of_bounds(UbsanPlace* place, uintptr_t index) {
    cuda_host::fail({place->file, int(place->line)}, "out of bounds: index %ld of an array", long(index));
}
void __ubsan_handle_type_mismatch_v1(UbsanMismatch* m, uintptr_t p) {
    if (!cuda_host::self || !m->log_alignment || p % (1u << m->log_alignment) == 0) return;
    cuda_host::fail(cuda_host::at(cuda_host::offset_of(__builtin_return_address(0))),
                    "misaligned: an address that is %zu modulo %d", size_t(p % (1u << m->log_alignment)),
                    1 << m->log_alignment);
}

}  // extern "C"
