// Packs live intervals into one arena; intervals that overlap in time never share a byte.
//
// Shapes:    n intervals -> n offsets, same order.
// Units:     sizes and offsets in bytes; first/last are step indices, both inclusive.
// Threads:   pure; any thread.
// Ownership: borrows `intervals` for the call.
// Errors:    InvalidArgument    last < first, or the alignment is no power of two
//            ResourceExhausted  high-water mark above options.limit_bytes
// Source:    greedy by size, Pisarchyk & Lee 2020, arXiv:2001.03288; ours breaks ties by first use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace cuvil::memory {

struct LiveInterval {
  uint32_t first = 0;
  uint32_t last = 0;
  size_t size_bytes = 0;  // zero is legal and takes no room
};

struct MemoryPlanOptions {
  size_t alignment_bytes = 64;  // a cache line, and what torch's CPU allocator gives
  size_t limit_bytes = SIZE_MAX;
};

struct MemoryPlan {
  std::vector<size_t> offsets_bytes;
  size_t high_water_bytes = 0;  // size of the arena
  size_t live_peak_bytes = 0;   // most bytes live at one step: no arena can be smaller
  size_t sum_bytes = 0;         // what separate buffers would take together
};

absl::StatusOr<MemoryPlan> PlanMemory(absl::Span<const LiveInterval> intervals, const MemoryPlanOptions& options = {});

}  // namespace cuvil::memory
