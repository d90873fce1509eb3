// _native._capture_call: traces one call and tells what became of it, for tests and for looking at traces by hand.

#include "agent/capture_debug.h"

#include <Python.h>

#include <string>
#include <vector>

#include "agent/capture.h"
#include "agent/py_ref.h"
#include "jit/cir/text.h"

namespace cuvil::agent {
namespace {

// _capture_call(module, args, kwargs) -> (result, dict)
PyObject* CaptureOneCall(PyObject*, PyObject* arguments) {
  PyObject* module;
  PyObject* args;
  PyObject* kwargs;
  if (!PyArg_ParseTuple(arguments, "OO!O!:_capture_call", &module, &PyTuple_Type, &args, &PyDict_Type, &kwargs)) {
    return nullptr;
  }
  if (absl::Status status = InitializeCapture(); !status.ok()) {
    PyErr_SetString(PyExc_RuntimeError, std::string(status.message()).c_str());
    return nullptr;
  }
  std::vector<PyObject*> values = {module};
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i) values.push_back(PyTuple_GET_ITEM(args, i));
  size_t num_positional = values.size();
  OwnedRef names = OwnedRef::Steal(PyTuple_New(PyDict_GET_SIZE(kwargs)));
  if (!names) return nullptr;
  Py_ssize_t position = 0;
  PyObject* key;
  PyObject* value;
  for (Py_ssize_t i = 0; PyDict_Next(kwargs, &position, &key, &value); ++i) {
    PyTuple_SET_ITEM(names.get(), i, Py_NewRef(key));
    values.push_back(value);
  }
  CallArgs call{values.data(), num_positional, PyTuple_GET_SIZE(names.get()) == 0 ? nullptr : names.get()};
  auto* function = reinterpret_cast<PyFunctionObject*>(ModuleCallFunction());
  CaptureOutcome outcome = CaptureCall(call, function->vectorcall);
  if (outcome.result == nullptr) return nullptr;
  OwnedRef result = OwnedRef::Steal(outcome.result);
  if (outcome.capture == nullptr) {
    return Py_BuildValue("(O{s:s,s:s,s:i,s:s,s:s,s:O})", result.get(), "code", outcome.refusal.code.c_str(), "file",
                         outcome.refusal.file.c_str(), "line", outcome.refusal.line, "message",
                         outcome.refusal.message.c_str(), "advice", outcome.refusal.advice.c_str(), "retry",
                         outcome.refusal.retry ? Py_True : Py_False);
  }
  bool matches = outcome.capture->MatchesInputs(call);
  bool hold = matches && outcome.capture->GuardsHold();
  return Py_BuildValue(
      "(O{s:s,s:n,s:s,s:n,s:O,s:O,s:s,s:K})", result.get(), "cir", cir::Print(outcome.capture->graph()).c_str(),
      "guards", static_cast<Py_ssize_t>(outcome.capture->num_guards()), "guard_kinds",
      outcome.capture->DescribeGuards().c_str(), "ops", static_cast<Py_ssize_t>(outcome.capture->graph().ops.size()),
      "matches", matches ? Py_True : Py_False, "hold", hold ? Py_True : Py_False, "failure",
      outcome.capture->LastFailure().c_str(), "trace_ns", static_cast<unsigned long long>(outcome.trace_ns));
}

PyMethodDef kMethods[] = {
    {"_capture_call", CaptureOneCall, METH_VARARGS, "Traces one call of a module; for tests."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

int RegisterCaptureDebug(PyObject* module) { return PyModule_AddFunctions(module, kMethods); }

}  // namespace cuvil::agent
