#pragma once

#include "agent/lifecycle/call_plan.h"

namespace cuvil::agent {

// The trace injector as a Tracer: its plans are captures, replayed by the scheduler's plan executor.
Tracer CaptureTracer();

}  // namespace cuvil::agent
