// What the binary is and what the machine offers, for `python -m cuvil doctor`.
#pragma once

#include <Python.h>

namespace cuvil::agent {

// Adds build_info(), machine_report() and the three self-tests (llvm, interpreter, torch) to `module`.
//
// Threads:   GIL held; the functions release it while they probe.
// Errors:    -1 with an exception set.
int RegisterDoctor(PyObject* module) noexcept;

}  // namespace cuvil::agent
