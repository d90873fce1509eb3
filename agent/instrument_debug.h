// Functions of the extension that tests use to look at instrumentation, tags and interception; no part of the API.
#pragma once

#include <Python.h>

namespace cuvil::agent {

// Adds the functions named _debug_*. Returns 0, or -1 with an exception set.
int RegisterInstrumentDebug(PyObject* module) noexcept;

}  // namespace cuvil::agent
