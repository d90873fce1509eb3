#pragma once

#include <Python.h>

namespace cuvil::agent {

// Adds _capture_call to the extension module. 0, or -1 with an exception set.
int RegisterCaptureDebug(PyObject* module);

}  // namespace cuvil::agent
