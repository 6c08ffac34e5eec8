// cp.async. A copy may land at any time between its issue and its wait. Here it lands at the last moment, so that a
// missing wait shows as stale data; in random orders some land at once.
#include "internal.h"

namespace cuda_host {
namespace {

void land(const Copy& c) {
    std::memcpy(c.shared, c.global, size_t(c.copied));
    std::memset(static_cast<char*>(c.shared) + c.copied, 0, size_t(c.bytes - c.copied));
}

bool is_misaligned(const void* p, int bytes) { return reinterpret_cast<uintptr_t>(p) % uintptr_t(bytes) != 0; }

}  // namespace

void cp_async(void* shared, const void* global, int bytes, int copied, const char* host_file, int host_line) {
    const Copy c{shared, global, bytes, copied, CUDA_HOST_WHERE, __builtin_return_address(0)};
    if (is_misaligned(shared, bytes) || is_misaligned(global, bytes))
        fail(c.where, "cp.async of %d bytes needs both addresses aligned to %d", bytes, bytes);
    if (request.is_checked) check_copy_issued(c);
    if (request.order >= 2 && random_below(2)) land(c);
    current()->open_group.push_back(c);
}

void cp_async_commit() {
    Fiber* f = current();
    f->groups.push_back(std::move(f->open_group));
    f->open_group.clear();
}

void cp_async_wait(int pending_groups) {
    Fiber* f = current();
    while (int(f->groups.size()) > pending_groups) {
        for (auto& c : f->groups.front()) {
            land(c);
            if (request.is_checked) check_copy_done(c);
        }
        f->groups.pop_front();
    }
}

void drop_copies(Fiber& f) {
    f.open_group.clear();
    f.groups.clear();
}

}  // namespace cuda_host
