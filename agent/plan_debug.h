// Functions of the extension that tests drive CIR, the torch boundary and plans with; no part of the public face.
#pragma once

#include <Python.h>

namespace cuvil::agent {

// Adds the functions to the module. 0, or -1 with an exception set.
int RegisterPlanDebug(PyObject* module) noexcept;

}  // namespace cuvil::agent
