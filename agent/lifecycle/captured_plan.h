#pragma once

#include "agent/capture.h"
#include "agent/lifecycle/call_plan.h"
#include "scheduler/execution_plan.h"

namespace cuvil::agent {

// The trace injector as a PlanSource: its plans are captures, replayed by the scheduler's plan executor.
PlanSource CaptureTracer();

// How a capture's program, or a part of it with the same constants, becomes an execution plan. GIL not needed.
scheduler::BuildOptions PlanOptions(const Capture& capture, const torch_abi::TorchApi& api);

}  // namespace cuvil::agent
