#pragma once

#include <Python.h>

#include "agent/lifecycle/call_plan.h"

namespace cuvil::agent {

// Adds enable, disable, enabled, reset, prepare, opt_out, stats, explain, module_state, and what tests use
// (_fault_inject, _fault_points, _quiesce), to `module`.
//
// Threads: GIL held.
// Errors:  -1 with an exception set.
int RegisterLifecycle(PyObject* module) noexcept;

// The same with a tracer of the caller's; one tracer per process.
int RegisterLifecycleWith(PyObject* module, const PlanSource& tracer) noexcept;

}  // namespace cuvil::agent
