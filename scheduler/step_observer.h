// What the plan executor tells whoever wants to know when each step ran.
//
// Threads: the executor's calling thread, GIL not held.
#pragma once

#include <cstdint>

namespace cuvil::scheduler {

class StepObserver {
 public:
  virtual ~StepObserver() = default;
  // Step `index` is about to run.
  virtual void OnStepStart(uint32_t) noexcept {}
  // Step `index` of the plan ran, the release of what it used last included; also when it failed.
  virtual void OnStep(uint32_t index, uint64_t start_ns, uint64_t end_ns) noexcept = 0;
};

}  // namespace cuvil::scheduler
