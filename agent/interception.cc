#include "agent/interception.h"

#include "agent/cpython_compat_internal.h"
#include "agent/py_ref.h"

namespace cuvil::agent {
namespace {

PyFunctionObject* g_function = nullptr;  // owned
vectorcallfunc g_ours = nullptr;
vectorcallfunc g_original = nullptr;

// What the interpreter puts into every function that nobody has touched. Not an exported symbol on 3.13.
vectorcallfunc DefaultVectorcall() {
  ErrorScope errors;
  OwnedRef globals = OwnedRef::Steal(PyDict_New());
  OwnedRef code = OwnedRef::Steal(reinterpret_cast<PyObject*>(PyCode_NewEmpty("", "", 1)));
  if (!globals || !code) return nullptr;
  OwnedRef function = OwnedRef::Steal(PyFunction_New(code.get(), globals.get()));
  return function ? reinterpret_cast<PyFunctionObject*>(function.get())->vectorcall : nullptr;
}

}  // namespace

absl::Status Interception::Install(PyObject* module_call_function, vectorcallfunc ours) {
  if (!PyFunction_Check(module_call_function)) {
    return absl::InvalidArgumentError("only the calls of a Python function can be intercepted");
  }
  if (g_function != nullptr) return absl::FailedPreconditionError("calls are being intercepted already");
  auto* function = reinterpret_cast<PyFunctionObject*>(module_call_function);
  vectorcallfunc standard = DefaultVectorcall();
  if (standard == nullptr || function->vectorcall != standard) {
    return absl::FailedPreconditionError("another tool intercepts the calls of this function");
  }
  g_original = standard;
  g_ours = ours;
  Py_INCREF(function);
  g_function = function;
  compat::SetVectorcall(function, ours);
  return absl::OkStatus();
}

void Interception::Remove() {
  if (g_function == nullptr) return;
  if (g_function->vectorcall == g_ours) compat::SetVectorcall(g_function, g_original);
  PyFunctionObject* function = g_function;
  g_function = nullptr;
  Py_DECREF(function);
}

vectorcallfunc Interception::original() { return g_original; }

bool Interception::installed() { return g_function != nullptr && g_function->vectorcall == g_ours; }

}  // namespace cuvil::agent
