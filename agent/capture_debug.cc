// _native._capture_call: traces one call and tells what became of it, for tests and for looking at traces by hand.

#include "agent/capture_debug.h"

#include <Python.h>

#include <string>
#include <vector>

#include "agent/capture.h"
#include "agent/py_ref.h"
#include "agent/torch_state.h"
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

// _torch_state() -> (why libtorch's functions are not used or '', what they say, what torch's Python functions say)
PyObject* ReadTorchState(PyObject*, PyObject*) {
  if (absl::Status status = InitializeCapture(); !status.ok()) {
    PyErr_SetString(PyExc_RuntimeError, std::string(status.message()).c_str());
    return nullptr;
  }
  const TorchState state = TorchStateReader::Read();
  const NativeTorchState& native = state.native;
  const auto flag = [](bool value) { return value ? Py_True : Py_False; };
  return Py_BuildValue(
      "(s{s:K,s:K,s:L,s:L,s:i,s:i,s:O,s:O,s:O,s:O}{s:O,s:O,s:O,s:O,s:O,s:L,s:L,s:O,s:O,s:O,s:O})",
      std::string(TorchStateReader::NativeStatus().message()).c_str(), "included_keys",
      static_cast<unsigned long long>(native.included_keys), "excluded_keys",
      static_cast<unsigned long long>(native.excluded_keys), "function_modes",
      static_cast<long long>(native.function_modes), "dispatch_modes", static_cast<long long>(native.dispatch_modes),
      "function_state", static_cast<int>(native.function_state), "default_dtype",
      static_cast<int>(native.default_dtype), "grad_enabled", flag(native.grad_enabled), "inference_mode",
      flag(native.inference_mode), "functorch", flag(native.functorch), "profiler", flag(native.profiler),
      "grad_enabled", flag(state.grad_enabled), "inference_mode", flag(state.inference_mode), "autocast_cpu",
      flag(state.autocast_cpu), "autocast_cuda", flag(state.autocast_cuda), "torch_function_enabled",
      flag(state.torch_function_enabled), "function_modes", static_cast<long long>(state.function_modes),
      "dispatch_modes", static_cast<long long>(state.dispatch_modes), "functorch", flag(state.functorch), "forward_ad",
      flag(state.forward_ad), "profiler", flag(state.profiler), "default_dtype", state.default_dtype);
}

PyMethodDef kMethods[] = {
    {"_torch_state", ReadTorchState, METH_NOARGS, "Torch's ambient state on this thread; for tests."},
    {"_capture_call", CaptureOneCall, METH_VARARGS, "Traces one call of a module; for tests."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

int RegisterCaptureDebug(PyObject* module) { return PyModule_AddFunctions(module, kMethods); }

}  // namespace cuvil::agent
