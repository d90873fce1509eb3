// Decides how a run issues its steps: what happens around each of them, and when tensors are released.
//
// Threads: the executor's calling thread, GIL not held.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace cuvil::scheduler {

class StepDirector {
 public:
  virtual ~StepDirector() = default;
  virtual absl::Status Before(uint32_t step) = 0;
  // The step has been issued; `cells` are the run's, before those of released() are emptied. An error ends the run.
  virtual absl::Status After(uint32_t step, void** cells) = 0;
  // In the place of PlanStep::released_cells.
  virtual absl::Span<const uint32_t> released(uint32_t step) const = 0;
};

}  // namespace cuvil::scheduler
