#pragma once

#include "agent/lifecycle/call_plan.h"

namespace cuvil::agent {

// The trace injector as a PlanSource: its plans are captures, replayed by the scheduler's plan executor.
PlanSource CaptureTracer();

}  // namespace cuvil::agent
