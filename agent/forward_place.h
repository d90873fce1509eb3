// Where the code of a module's call begins: the place of what concerns the whole call and no instruction of it.
//
// Threads:   GIL held. No Python code runs, nothing is changed.
// Ownership: borrows.
#pragma once

#include <Python.h>

#include <string>

namespace cuvil::agent {

// The code that answers calls of the module: its own `forward` or its class's, below decorators that functools.wraps
// has marked. Null if that is no Python function.
PyCodeObject* ForwardCode(PyObject* module) noexcept;

struct CodePlace {
  std::string file;
  int line = 0;
};

// The first line of ForwardCode(), or of the class's __call__ if there is none.
CodePlace ForwardPlace(PyObject* module);

}  // namespace cuvil::agent
