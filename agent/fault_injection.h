#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace cuvil::agent {

enum class FaultPoint : uint8_t {
#define CUVIL_FAULT_POINT(enumerator, name, description) enumerator,
#include "agent/fault_points.def"
#undef CUVIL_FAULT_POINT
  kNumPoints,
};

namespace fault_internal {
// How many points are armed; the only thing that the hot path looks at. Relaxed: a fault armed on another thread may
// be seen a call later.
inline constinit std::atomic<int> num_armed{0};
bool Take(FaultPoint point);
}  // namespace fault_internal

// True iff a test asked this point to fail; consumes one of the failures asked for.
//
// Threads: any; no GIL; no locks.
inline bool FaultInjected(FaultPoint point) {
  return fault_internal::num_armed.load(std::memory_order_relaxed) != 0 && fault_internal::Take(point);
}

std::string_view FaultPointName(FaultPoint point);
std::vector<std::string> FaultPointNames();

// Makes the named point fail `count` times from now on; negative: until disarmed; 0 disarms.
//
// Errors: InvalidArgument  no point of that name
absl::Status InjectFault(std::string_view name, int64_t count);

// Arms from text, "point[:count],…"; a missing count means every time.
//
// Errors: InvalidArgument  as above, or a count that is no number; nothing is armed then
absl::Status InjectFaults(std::string_view text);

// How many of the failures asked for at the named point have not happened yet; negative: there is no end.
//
// Errors: InvalidArgument  no point of that name
absl::StatusOr<int64_t> FaultsLeft(std::string_view name);

void DisarmFaults();

}  // namespace cuvil::agent
