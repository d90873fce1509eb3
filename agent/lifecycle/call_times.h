#pragma once

#include <Python.h>

#include "absl/status/statusor.h"
#include "agent/py_ref.h"

namespace cuvil::agent {

// What a planned call costs beside its operators, for benchmarks/guards_bench.py: lists of `count` durations in ns.
//
// Threads: GIL held.

// Matching and guards of the plan that serves this call, back to back; empty if none does. Null with an exception set.
OwnedRef CheckTimes(PyObject* model, PyObject* args, PyObject* kwargs, long count);

// Whole calls of the model, from the call in C to its result, answered by the plan that serves them with its operators
// left out (CallPlan::WithoutOperators): interception, decision, guards, pinning of the weights, the executor, the
// result. `num_detaches`: what WithoutOperators() leaves for each tensor of it. For the extent of this only, and on
// this thread only, the model's result for such a call is not its own; other threads' calls of it run eagerly.
//
// Errors: FailedPrecondition  no plan serves this call, or one of the calls was not answered by the plan
//         others as CallPlan::WithoutOperators; an exception of the call stays set, with null
absl::StatusOr<OwnedRef> DispatchTimes(PyObject* model, PyObject* args, PyObject* kwargs, long count, int num_detaches);

}  // namespace cuvil::agent
