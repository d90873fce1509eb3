// Checks on throw-away objects where builtin objects, classes and threads keep what the agent reads directly.
//
// Threads:   GIL held, in a PyThreadState_EnterTracing scope. Microseconds.
// Errors:    Unimplemented  an assumption does not hold; the message names it
#pragma once

#include <Python.h>

#include "absl/status/status.h"

namespace cuvil::agent {

// `globals` is the namespace of the self-test's program.
absl::Status CheckLayouts(PyObject* globals, PyThreadState* thread);

}  // namespace cuvil::agent
