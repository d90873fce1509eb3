#pragma once

#include <Python.h>

namespace cuvil::agent {

// What torch.nn.Module.__call__ runs while Cuvil is enabled: answers by a plan where one fits, and else by the
// original, which it may watch, compare or time meanwhile. Returns, and raises, what the original would have.
//
// Threads: GIL held on entry and exit; re-entrant on any number of threads.
PyObject* OnModuleCall(PyObject* callable, PyObject* const* args, size_t nargsf, PyObject* kwnames) noexcept;

}  // namespace cuvil::agent
