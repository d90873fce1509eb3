// Calls of one Python function go to a C function of ours first; every attribute Python can see stays as it was.
//
// Not intercepted, on 3.11 only: calls that the interpreter makes of the bare function (super().__call__(x),
// Module.__call__(m, x), m.__call__(x)), which never look at the slot. They run the original: slower, correct.
//
// Threads:   GIL held.
// Ownership: holds a reference to the function while installed.
// Source:    docs/design/0003-interception.md
#pragma once

#include <Python.h>

#include "absl/status/status.h"

namespace cuvil::agent {

class Interception {
 public:
  // Errors: InvalidArgument     not a Python function
  //         FailedPrecondition  installed already, or the function's calls go to somebody else's C function
  static absl::Status Install(PyObject* module_call_function, vectorcallfunc ours);
  // Puts the original back, unless somebody else has taken the slot meanwhile. Without effect when not installed.
  static void Remove();
  // What ran before; valid from the first Install on, also after Remove, because calls may be under way.
  static vectorcallfunc original();
  // True while calls of the function reach `ours`.
  static bool installed();
};

// What a call of `function` runs and fills in. Assigning any of them does not disturb an interception, so a guard
// compares them. Borrowed.
struct FunctionState {
  PyObject* code;
  PyObject* defaults;    // tuple or null
  PyObject* kwdefaults;  // dict or null
};
inline FunctionState ReadFunction(const PyFunctionObject* function) noexcept {
  return {function->func_code, function->func_defaults, function->func_kwdefaults};
}

}  // namespace cuvil::agent
