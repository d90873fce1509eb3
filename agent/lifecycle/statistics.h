#pragma once

#include <atomic>
#include <cstdint>

namespace cuvil::agent {

// The process's counters since the last reset.
//
// Threads: any; relaxed, since no counter orders anything.
struct Statistics {
#define CUVIL_COUNTER(member, description) std::atomic<uint64_t> member{0};
#include "agent/lifecycle/statistics.def"
#undef CUVIL_COUNTER

  void Reset() {
#define CUVIL_COUNTER(member, description) member.store(0, std::memory_order_relaxed);
#include "agent/lifecycle/statistics.def"
#undef CUVIL_COUNTER
  }
};

inline void Count(std::atomic<uint64_t>& counter, uint64_t amount = 1) {
  counter.fetch_add(amount, std::memory_order_relaxed);
}

}  // namespace cuvil::agent
