#pragma once

#include <Python.h>

#include <string>

#include "agent/py_ref.h"

namespace cuvil::agent {

// The data behind cuvil.stats() and cuvil.explain(): plain dicts, lists, strings and numbers, times in ns, sizes in
// bytes. docs/design/0005-lifecycle-and-adoption.md lists the keys.
//
// Threads: GIL held.
// Errors:  null with an exception set

OwnedRef DescribeStatistics();

// The model and every module inside it that was looked at on its own.
OwnedRef DescribeModel(PyObject* model);

// One module; `path` as named_modules() gives it. None if it was never looked at.
OwnedRef DescribeModule(PyObject* module, const std::string& path);

}  // namespace cuvil::agent
