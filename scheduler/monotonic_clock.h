// CLOCK_MONOTONIC in nanoseconds: the one clock of every duration that Cuvil measures or records.
//
// Threads:   any.
#pragma once

#include <cstdint>

namespace cuvil::scheduler {

uint64_t MonotonicNs();

}  // namespace cuvil::scheduler
