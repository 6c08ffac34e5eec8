// What compute-sanitizer's racecheck and initcheck do on a GPU, and more: races through global memory too, between the
// threads of a block and between blocks. The check compares what barriers order, not what happened, so it finds a race
// in any order of threads.
//
// Two accesses to one place, at least one of them a write and not both atomic, must be ordered:
//   in one block    by a block barrier between them (each starts a new epoch), or, for two lanes of a warp, by
//                   __syncwarp (vector clocks);
//   in two blocks   by the pattern "write, __threadfence, atomic" in the first and "atomic, read" in the second.
// The second rule is looser than CUDA's: any fence of the one block and any atomic of the other will do.
#include <sys/mman.h>

#include <cstdio>

#include "internal.h"

namespace cuda_host {
namespace {

struct Mark {  // the last access of a kind to a place; epoch 0 = none
    uint32_t epoch, clock, pc, block, time;
    uint16_t thread;
    bool is_atomic, is_async;  // is_async: by a cp.async that was not waited for
};

struct Cell {
    Mark write;
    Mark read[2];  // the last, and the last by another warp than that one's
};

uint32_t epoch, block_epoch, launch_epoch;  // epoch grows at every start of a block and at every block barrier
uint32_t now;                               // grows with every access
std::vector<uint32_t> last_fence;           // per block of the grid: when one of its threads last ran __threadfence
bool has_acquired;                          // the block that runs has done an atomic on global memory

std::vector<Cell> shared_cells;  // a byte each
Cell* global_cells;              // an element each
size_t global_capacity;
std::vector<size_t> first_cell;  // per range of the request

bool is_ordered(const Mark& m) {
    const Fiber* f = current();
    if (m.block != block_number) return m.time < last_fence[m.block] && has_acquired;
    if (m.epoch != epoch || m.thread == f->linear) return true;
    return m.thread / 32 == f->warp && f->clock[m.thread % 32] >= m.clock;
}

[[noreturn]] void fail_race(const char* here, const char* there, const Mark& m, uint32_t pc) {
    char other[64] = "";
    if (m.block != block_number) snprintf(other, sizeof other, " of block %u", m.block);
    fail(at(pc), "race: %s here, %s by thread %d%s (@%x), with no %s between", here, there, m.thread, other, m.pc,
         m.block == block_number ? "barrier" : "fence and atomic");
}

Mark mark_of(const Fiber* f, Access access, uint32_t pc, bool is_async) {
    return {epoch, f->clock[f->lane], pc, block_number, now, uint16_t(f->linear), access == Access::Atomic, is_async};
}

void touch(Cell& c, uint32_t first_epoch, Access access, uint32_t pc, bool is_async) {
    const Fiber* f = current();
    const char* here = access == Access::Read ? "read" : "written";
    const bool was_written = c.write.epoch >= first_epoch;
    if (was_written && !(access == Access::Atomic && c.write.is_atomic) && !is_ordered(c.write))
        fail_race(here, "written", c.write, pc);
    const Mark mark = mark_of(f, access, pc, is_async);
    if (access == Access::Read) {
        if (c.read[0].epoch >= first_epoch && (c.read[0].block != block_number || c.read[0].thread / 32 != f->warp))
            c.read[1] = c.read[0];
        c.read[0] = mark;
        return;
    }
    for (const Mark& r : c.read)
        if (r.epoch >= first_epoch && !is_ordered(r)) fail_race(here, "read", r, pc);
    c.write = mark;
}

}  // namespace

void touch_shared(size_t offset, size_t bytes, Access access, uint32_t pc, bool is_async) {
    ++now;
    for (size_t i = offset; i < offset + bytes; ++i) {
        Cell& c = shared_cells[i];
        const bool was_written = c.write.epoch >= block_epoch;
        if (was_written && c.write.is_async && !is_async)
            fail(at(pc), "%s of shared memory that a cp.async by thread %d (@%x) may still be writing",
                 access == Access::Read ? "read" : "write", c.write.thread, c.write.pc);
        if (access != Access::Write && !was_written)
            fail(at(pc), "uninitialised: read of shared memory that no thread of the block has written");
        touch(c, block_epoch, access, pc, is_async);
    }
}

void touch_global(const Range& range, uintptr_t address, size_t bytes, Access access, uint32_t pc) {
    ++now;
    if (access == Access::Atomic) has_acquired = true;
    if (!range.is_writable) return;
    Cell* cells = global_cells + first_cell[size_t(&range - request.ranges)];
    const size_t first = (address - range.begin) / range.element_bytes;
    const size_t last = (address - range.begin + bytes - 1) / range.element_bytes;
    for (size_t i = first; i <= last; ++i) touch(cells[i], launch_epoch, access, pc, false);
}

void finish_async(size_t offset, size_t bytes) {
    const Fiber* f = current();
    for (size_t i = offset; i < offset + bytes; ++i) {
        const uint32_t pc = shared_cells[i].write.pc;
        shared_cells[i].write = mark_of(f, Access::Write, pc, false);
    }
}

bool races_begin_launch() {
    launch_epoch = epoch + 1;
    now = 1;
    last_fence.assign(size_t(grid_dim.x) * grid_dim.y * grid_dim.z, 0);
    if (shared_cells.size() < shared_memory_bytes()) shared_cells.assign(shared_memory_bytes(), Cell{});
    size_t count = 0;
    first_cell.clear();
    for (int i = 0; i < request.num_ranges; ++i) {
        const Range& r = request.ranges[i];
        first_cell.push_back(count);
        if (r.is_writable) count += (r.end - r.begin) / r.element_bytes + 1;
    }
    if (count <= global_capacity) return true;
    if (global_cells) munmap(global_cells, global_capacity * sizeof(Cell));
    // Zeroed, and a page takes memory only once it is touched. Cells of earlier launches are told by their epoch.
    void* p = mmap(nullptr, count * sizeof(Cell), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                   -1, 0);
    global_cells = p == MAP_FAILED ? nullptr : static_cast<Cell*>(p);
    global_capacity = global_cells ? count : 0;
    return global_cells != nullptr;
}

void races_begin_block() {
    block_epoch = ++epoch;
    has_acquired = false;
    for (auto& f : fibers) {
        std::memset(f.clock, 0, sizeof f.clock);
        f.clock[f.lane] = 1;
        f.log.clear();
    }
}

void races_barrier() { ++epoch; }

void races_fence() { last_fence[block_number] = ++now; }

void check_join_lanes(int warp, unsigned live_mask) {
    Fiber* lanes = &fibers[size_t(warp) * 32];
    uint32_t joined[32] = {};
    for (int l = 0; l < 32; ++l)
        if (live_mask >> l & 1)
            for (int k = 0; k < 32; ++k) joined[k] = std::max(joined[k], lanes[l].clock[k]);
    for (int l = 0; l < 32; ++l)
        if (live_mask >> l & 1) {
            std::memcpy(lanes[l].clock, joined, sizeof joined);
            ++lanes[l].clock[l];
        }
}

}  // namespace cuda_host
