// Counts how well the accesses of a warp fit together, per source line. The n-th time that the lanes of a warp run the
// access at one place is one request. Global memory: 32-byte sectors. Shared memory: passes over 32 banks of 4 bytes.
#include <map>
#include <set>

#include "internal.h"

namespace cuda_host {
namespace {

struct Statistic { uint64_t requests, lanes, bytes, transactions, ideal; };  // mirrored by cuda_host.py
std::map<std::pair<uint32_t, int>, Statistic> statistics;                    // by pc and kind (2 * shared + write)

using Lanes = std::vector<const Logged*>;

uint64_t num_sectors(const Lanes& lanes) {
    std::set<uintptr_t> sectors;
    for (auto* a : lanes)
        for (uintptr_t s = a->address / 32; s <= (a->address + a->bytes - 1) / 32; ++s) sectors.insert(s);
    return sectors.size();
}

// Of accesses wider than 4 bytes only as many lanes go at a time as take 128 bytes.
size_t lanes_a_pass(const Lanes& lanes) { return lanes[0]->bytes <= 4 ? 32 : 128 / lanes[0]->bytes; }

uint64_t num_bank_passes(const Lanes& lanes) {
    uint64_t passes = 0;
    const size_t group = lanes_a_pass(lanes);
    for (size_t i = 0; i < lanes.size(); i += group) {
        std::set<uintptr_t> words;
        for (size_t k = i; k < std::min(i + group, lanes.size()); ++k)
            for (uintptr_t b = 0; b < lanes[k]->bytes; b += 4) words.insert((lanes[k]->address + b) / 4);
        unsigned load[32] = {}, most = 0;
        for (uintptr_t w : words) most = std::max(most, ++load[w % 32]);
        passes += most;
    }
    return passes;
}

void profile_warp(size_t first, size_t last) {
    std::map<std::pair<uint32_t, uint32_t>, Lanes> requests;
    for (size_t t = first; t < last; ++t) {
        std::map<uint32_t, uint32_t> nth;
        for (auto& a : fibers[t].log) requests[{a.pc, nth[a.pc]++}].push_back(&a);
    }
    for (auto& [key, lanes] : requests) {
        const Logged& a = *lanes[0];
        Statistic& s = statistics[{a.pc, 2 * a.is_shared + a.is_write}];
        const uint64_t bytes = lanes.size() * a.bytes, group = lanes_a_pass(lanes);
        s.requests += 1;
        s.lanes += lanes.size();
        s.bytes += bytes;
        s.transactions += a.is_shared ? num_bank_passes(lanes) : num_sectors(lanes);
        s.ideal += a.is_shared ? (lanes.size() + group - 1) / group : (bytes + 31) / 32;
    }
}

}  // namespace

void profile_begin_launch() { statistics.clear(); }

void profile_end_block() {
    for (size_t t = 0; t < fibers.size(); t += 32) profile_warp(t, std::min(t + 32, fibers.size()));
}

}  // namespace cuda_host

// Fills the arrays, five values a row, and gives the number of rows.
extern "C" size_t cuda_host_statistics(uint32_t* pc, int32_t* kind, uint64_t* values, size_t capacity) {
    size_t n = 0;
    for (auto& [key, s] : cuda_host::statistics) {
        if (n == capacity) break;
        pc[n] = key.first;
        kind[n] = key.second;
        std::memcpy(values + 5 * n++, &s, sizeof s);
    }
    return n;
}
