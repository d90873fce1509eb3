#include "scheduler/monotonic_clock.h"

#include <time.h>

namespace cuvil::scheduler {

uint64_t MonotonicNs() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace cuvil::scheduler
