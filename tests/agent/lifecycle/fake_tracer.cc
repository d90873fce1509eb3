// An extension module with the agent's lifecycle around a tracer that a Python test scripts.
//
// `_cuvil_lifecycle_fake.set_script(script)`: script.hash(args, kwargs) -> int, and script.trace(args, kwargs, result)
// after each traced call, which returns a plan, or a refusal as (code, message, retry). A plan has
// matches(args, kwargs), guards(), run(args, kwargs), and the attributes build_error (text or None), build_seconds,
// is_random and uninitialized. What run() raises stands for an operator's error.

#include <Python.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "agent/boundary.h"
#include "agent/fault_injection.h"
#include "agent/gil.h"
#include "agent/lifecycle/bindings.h"
#include "agent/lifecycle/call_plan.h"
#include "agent/py_ref.h"

namespace cuvil::agent {
namespace {

PyObject* script = nullptr;

OwnedRef ArgsOf(const CallArgs& call) {
  OwnedRef args = OwnedRef::Steal(PyTuple_New(call.num_positional() - 1));
  for (Py_ssize_t i = 1; args && i < call.num_positional(); ++i) {
    Py_INCREF(call.args[i]);
    PyTuple_SET_ITEM(args.get(), i - 1, call.args[i]);
  }
  return args;
}

OwnedRef KwargsOf(const CallArgs& call) {
  OwnedRef kwargs = OwnedRef::Steal(PyDict_New());
  for (Py_ssize_t i = 0; kwargs && i < call.num_keywords(); ++i) {
    if (PyDict_SetItem(kwargs.get(), PyTuple_GET_ITEM(call.kwnames, i), call.args[call.num_positional() + i]) < 0) {
      kwargs.reset();
    }
  }
  return kwargs;
}

std::string TextAttribute(PyObject* object, const char* name) {
  const OwnedRef value = OwnedRef::Steal(PyObject_GetAttrString(object, name));
  const char* text = value && value.get() != Py_None ? PyUnicode_AsUTF8(value.get()) : "";
  PyErr_Clear();
  return text == nullptr ? "" : text;
}

bool TruthAttribute(PyObject* object, const char* name) {
  const OwnedRef value = OwnedRef::Steal(PyObject_GetAttrString(object, name));
  const bool truth = value && PyObject_IsTrue(value.get()) == 1;
  PyErr_Clear();
  return truth;
}

double NumberAttribute(PyObject* object, const char* name) {
  const OwnedRef value = OwnedRef::Steal(PyObject_GetAttrString(object, name));
  const double number = value ? PyFloat_AsDouble(value.get()) : 0;
  PyErr_Clear();
  return number;
}

// A signal that arrives while a script runs belongs to the program: it is raised again later. Real plans run no Python
// where this fake does.
class ScriptScope {
 public:
  ~ScriptScope() {
    if (PyErr_Occurred() != nullptr && PyErr_ExceptionMatches(PyExc_KeyboardInterrupt) != 0) PyErr_SetInterrupt();
  }

 private:
  ErrorScope errors_;
};

class ScriptedPlan : public CallPlan {
 public:
  explicit ScriptedPlan(OwnedRef plan)
      : plan_(std::move(plan)),
        build_error_(TextAttribute(plan_.get(), "build_error")),
        build_seconds_(NumberAttribute(plan_.get(), "build_seconds")) {}

  bool MatchesInputs(const CallArgs& call) const override {
    const ScriptScope errors;
    const OwnedRef answer =
        OwnedRef::Steal(PyObject_CallMethod(plan_.get(), "matches", "OO", ArgsOf(call).get(), KwargsOf(call).get()));
    return answer.get() == Py_True;
  }
  bool GuardsHold() override {
    const ScriptScope errors;
    return OwnedRef::Steal(PyObject_CallMethod(plan_.get(), "guards", nullptr)).get() == Py_True;
  }
  std::string LastGuardFailure() const override { return "the script said so"; }
  bool is_random() const override { return TruthAttribute(plan_.get(), "is_random"); }
  std::optional<trace::SourceLocation> UninitializedMemory() const override {
    if (!TruthAttribute(plan_.get(), "uninitialized")) return std::nullopt;
    trace::SourceLocation place;
    place.user_file = "model.py";
    place.user_line = 7;
    return place;
  }

  absl::Status Build() override {
    usleep(static_cast<useconds_t>(build_seconds_ * 1e6));
    return build_error_.empty() ? absl::OkStatus() : absl::UnimplementedError(build_error_);
  }

  absl::StatusOr<OwnedRef> Run(const CallArgs& call) override {
    if (FaultInjected(FaultPoint::kCollect)) return absl::UnavailableError("injected fault: collect");
    if (FaultInjected(FaultPoint::kRunBegin)) return absl::UnavailableError("injected fault: run-begin");
    OwnedRef result =
        OwnedRef::Steal(PyObject_CallMethod(plan_.get(), "run", "OO", ArgsOf(call).get(), KwargsOf(call).get()));
    if (result && FaultInjected(FaultPoint::kRun)) return absl::UnavailableError("injected fault: run");
    if (FaultInjected(FaultPoint::kRebuild)) return absl::InternalError("injected fault: rebuild");
    if (result) return result;
    if (PyErr_ExceptionMatches(PyExc_Exception) == 0) return absl::CancelledError("interrupted");
    PyErr_Clear();
    return absl::AbortedError("the script's plan raised");
  }

  void Describe(bool built, Record* record) const override { record->SetBool("built", built); }
  std::string Summary() const override { return "scripted"; }
  uint32_t num_python_steps() const override { return 0; }

 private:
  const OwnedRef plan_;
  const std::string build_error_;
  const double build_seconds_;
};

TracedCall Trace(PyObject* callable, const CallArgs& call, vectorcallfunc original) {
  TracedCall traced;
  traced.result = original(callable, call.args, call.nargsf, call.kwnames);
  traced.trace_ns = 1;
  const ErrorScope errors;
  const OwnedRef answer =
      OwnedRef::Steal(PyObject_CallMethod(script, "trace", "OOO", ArgsOf(call).get(), KwargsOf(call).get(),
                                          traced.result == nullptr ? Py_None : traced.result));
  if (!answer) {
    traced.refusal.code = "script-raised";
    PyErr_WriteUnraisable(script);
  } else if (PyTuple_Check(answer.get())) {
    const char *code, *message;
    int retry;
    if (PyArg_ParseTuple(answer.get(), "ssp", &code, &message, &retry)) {
      traced.refusal = {code, "script.py", 7, message, "change the script", retry != 0};
    }
  } else if (answer.get() != Py_None) {
    traced.plan = std::make_unique<ScriptedPlan>(OwnedRef::New(answer.get()));
  }
  return traced;
}

uint64_t Hash(const CallArgs& call) {
  const ScriptScope errors;
  const OwnedRef hash =
      OwnedRef::Steal(PyObject_CallMethod(script, "hash", "OO", ArgsOf(call).get(), KwargsOf(call).get()));
  return hash ? PyLong_AsUnsignedLongLongMask(hash.get()) : 0;
}

PyObject* SetScript(PyObject*, PyObject* object) noexcept {
  Py_INCREF(object);
  Py_XSETREF(script, object);
  Py_RETURN_NONE;
}

PyMethodDef kMethods[] = {{"set_script", SetScript, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};

PyModuleDef kDefinition = {PyModuleDef_HEAD_INIT, "_cuvil_lifecycle_fake", nullptr, -1, kMethods};

}  // namespace

int AddMemoryProbe(PyObject* module);  // memory_probe.cc

}  // namespace cuvil::agent

PyMODINIT_FUNC PyInit__cuvil_lifecycle_fake() {
  using namespace cuvil::agent;
  PyObject* module = PyModule_Create(&kDefinition);
  if (module == nullptr) return nullptr;
  const PlanSource tracer{[] { return absl::OkStatus(); }, Trace, Hash};
  if (RegisterLifecycleWith(module, tracer) < 0 || AddMemoryProbe(module) < 0) {
    Py_DECREF(module);
    return nullptr;
  }
  return module;
}
