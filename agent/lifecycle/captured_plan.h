#pragma once

#include <cstdint>

#include "absl/types/span.h"
#include "agent/capture.h"
#include "agent/lifecycle/call_plan.h"
#include "scheduler/execution_plan.h"

namespace cuvil::agent {

// The trace injector as a PlanSource: its plans are captures, replayed by the scheduler's plan executor.
PlanSource CaptureTracer();

// How a capture's program, or a part of it with these of its constants, becomes an execution plan. GIL not needed.
scheduler::BuildOptions PlanOptions(const Capture& capture, const torch_abi::TorchApi& api);
scheduler::BuildOptions PlanOptions(const Capture& capture, const torch_abi::TorchApi& api,
                                    absl::Span<const uint32_t> constants);

// A number that no other plan of this process has; never 0.
uint64_t NextPlanNumber();

}  // namespace cuvil::agent
