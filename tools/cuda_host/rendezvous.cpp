// Where threads wait for one another: block barriers and warp collectives, and what a deadlock's report says.
#include <cstdio>
#include <map>

#include "internal.h"

namespace cuda_host {
namespace {

int num_live, num_arrived, barrier_sum;
std::vector<unsigned> live_lanes;  // per warp, a bit a lane

bool is_same_place(Where a, Where b) { return a.line == b.line && !std::strcmp(a.file, b.file); }

void release_barrier_if_complete() {
    if (!num_arrived || num_arrived != num_live) return;
    const Fiber* first = nullptr;
    for (auto& f : fibers) {
        if (f.state != State::AtBarrier) continue;
        if (!first) first = &f;
        if (!is_same_place(f.where, first->where))
            fail(f.where, "threads of one block meet at different barriers: thread %d here, thread %d at %s:%d",
                 f.linear, first->linear, first->where.file, first->where.line);
    }
    for (auto& f : fibers) {
        if (f.state != State::AtBarrier) continue;
        f.barrier_result = barrier_sum;
        make_ready(&f);
    }
    num_arrived = barrier_sum = 0;
    if (request.is_checked) races_barrier();
}

// Runs the collective that the caller waits at, if all its lanes are there.
void complete_if_all_arrived(const Fiber& caller) {
    Fiber* lanes = &fibers[size_t(caller.warp) * 32];
    const WarpOp op = caller.op;
    const unsigned mask = caller.mask, live = mask & live_lanes[size_t(caller.warp)];
    void* args[32];
    for (int l = 0; l < 32; ++l) {
        if (!(live >> l & 1)) continue;
        const Fiber& f = lanes[l];
        if (f.state != State::AtWarp || f.op != op || f.mask != mask) return;
        args[l] = f.arg;
    }
    op(args, live);
    if (request.is_checked && caller.orders_memory) check_join_lanes(caller.warp, live);
    for (int l = 0; l < 32; ++l)
        if (live >> l & 1) make_ready(&lanes[l]);
}

}  // namespace

void begin_rendezvous() {
    num_live = int(fibers.size());
    num_arrived = barrier_sum = 0;
    live_lanes.assign((fibers.size() + 31) / 32, 0);
    for (auto& f : fibers) live_lanes[size_t(f.warp)] |= 1u << f.lane;
}

int num_live_threads() { return num_live; }

void leave_block() {
    Fiber* f = current();
    f->state = State::Exited;
    --num_live;
    live_lanes[size_t(f->warp)] &= ~(1u << f->lane);
    for (size_t i = size_t(f->warp) * 32; i < std::min(size_t(f->warp + 1) * 32, fibers.size()); ++i)
        if (fibers[i].state == State::AtWarp) complete_if_all_arrived(fibers[i]);  // may have waited for this one only
    release_barrier_if_complete();
}

int block_barrier(int value, Where where) {
    Fiber* f = current();
    f->state = State::AtBarrier;
    f->where = where;
    barrier_sum += value;
    ++num_arrived;
    release_barrier_if_complete();
    to_scheduler();
    return f->barrier_result;
}

void warp_collective(unsigned mask, WarpOp op, void* arg, bool orders_memory, Where where) {
    Fiber* f = current();
    if (!(mask >> f->lane & 1)) fail(where, "lane %d is not in the mask %08x of its warp collective", f->lane, mask);
    f->where = where;
    f->mask = mask;
    f->op = op;
    f->arg = arg;
    f->orders_memory = orders_memory;
    f->state = State::AtWarp;
    complete_if_all_arrived(*f);
    to_scheduler();
}

std::string describe_waiting() {
    std::map<std::string, int> groups;
    for (auto& f : fibers) {
        char text[300];
        if (f.state == State::AtBarrier)
            snprintf(text, sizeof text, "at the block barrier of %s:%d", f.where.file, f.where.line);
        else if (f.state == State::AtWarp)
            snprintf(text, sizeof text, "at a warp collective with mask %08x of %s:%d (warp %d)", f.mask, f.where.file,
                     f.where.line, f.warp);
        else
            snprintf(text, sizeof text, "returned");
        ++groups[text];
    }
    std::string all;
    for (auto& [text, count] : groups) all += "\n  " + std::to_string(count) + " threads " + text;
    return all;
}

}  // namespace cuda_host
