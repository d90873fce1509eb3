// Checks a memory plan without any code of the planner: no two intervals that are live at one step share a byte.
//
// Method:    steps through time with the set of live buffers ordered by offset; a buffer that starts must fit between
//            its neighbours. (The planner compares intervals pairwise.)
// Threads:   pure; any thread.
// Errors:    Internal  the first violation, with both intervals
#pragma once

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "memory/memory_plan.h"

namespace cuvil::memory {

absl::Status VerifyMemoryPlan(absl::Span<const LiveInterval> intervals, const MemoryPlan& plan, size_t alignment_bytes);

}  // namespace cuvil::memory
