#pragma once

#include <Python.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "agent/lifecycle/profiler.h"
#include "agent/trace/trace.h"
#include "scheduler/graph_plan.h"
#include "scheduler/kernel_profile.h"

namespace cuvil::agent {

// Records one launch of a plan's graph and its tail for the process's profile.
//
// Threads: made and prepared with the GIL held; Begin and End without it, around the launch, on one thread.
class GraphRecorder {
 public:
  // `plan_number` tells plans apart over the life of the process. The plan's operators are those of the trace from
  // `first_op` on.
  GraphRecorder(PyObject* module, uint64_t plan_number, const trace::Trace& trace, uint32_t first_op);
  ~GraphRecorder() { End(); }
  GraphRecorder(const GraphRecorder&) = delete;
  GraphRecorder& operator=(const GraphRecorder&) = delete;

  // False: kernels are recorded, but this graph's cannot be, and it is not to be launched meanwhile.
  bool Prepare(const std::shared_ptr<const scheduler::GraphPlan>& plan);
  // What the launch is to look at; null if nobody looks.
  const scheduler::GraphPlan::Watch* Begin();
  void End();

 private:
  PyObject* const module_;
  const uint64_t plan_number_;
  const trace::Trace& trace_;
  const uint32_t first_op_;
  std::shared_ptr<scheduler::KernelProfile> kernels_;
  std::shared_ptr<const device::ExecutableGraph> executable_;
  std::optional<StepRecorder> tail_;
  scheduler::GraphPlan::Watch watch_;
  uint64_t first_site_ = scheduler::ProfileRecorder::kNoSite;
  uint64_t call_ = scheduler::KernelProfile::kNoCall;
  bool entered_ = false;
  bool watched_ = false;
};

}  // namespace cuvil::agent
