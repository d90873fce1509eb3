#pragma once

#include <Python.h>

namespace cuvil::agent {

// Adds the functions behind `python -m cuvil doctor` to `module`.
//
// Threads:   GIL held.
// Errors:    -1 with an exception set.
int RegisterDoctor(PyObject* module) noexcept;

}  // namespace cuvil::agent
