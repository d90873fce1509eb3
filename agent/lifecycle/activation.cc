#include "agent/lifecycle/activation.h"

#include <Python.h>
#include <pthread.h>

#include <charconv>
#include <memory>
#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "agent/capture.h"
#include "agent/collector_pause.h"
#include "agent/cpython_compat.h"
#include "agent/fault_injection.h"
#include "agent/frame_hook.h"
#include "agent/gil.h"
#include "agent/interception.h"
#include "agent/interpreter_self_test.h"
#include "agent/lifecycle/graph_runner.h"
#include "agent/lifecycle/lifecycle.h"
#include "agent/lifecycle/log.h"
#include "agent/lifecycle/module_call.h"
#include "agent/lifecycle/profiler.h"
#include "agent/lifecycle/thread_extent.h"
#include "agent/py_ref.h"
#include "scheduler/live_sampler.h"

namespace cuvil::agent {
namespace {

constexpr int kMinTorchMajor = 2;
constexpr int kMinTorchMinor = 10;

// The pending exception as one line; clears it.
std::string TakeError() {
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  const OwnedRef owned_type = OwnedRef::Steal(type), owned_value = OwnedRef::Steal(value);
  const OwnedRef owned_traceback = OwnedRef::Steal(traceback);
  const OwnedRef text = value == nullptr ? OwnedRef() : OwnedRef::Steal(PyObject_Str(value));
  const char* utf8 = text ? PyUnicode_AsUTF8(text.get()) : nullptr;
  std::string message = utf8 != nullptr ? utf8 : "unknown error";
  PyErr_Clear();
  return message.substr(0, message.find('\n'));
}

absl::Status CheckTorchVersion(PyObject* torch) {
  const OwnedRef version = OwnedRef::Steal(PyObject_GetAttrString(torch, "__version__"));
  const OwnedRef text = version ? OwnedRef::Steal(PyObject_Str(version.get())) : OwnedRef();
  const char* utf8 = text ? PyUnicode_AsUTF8(text.get()) : nullptr;
  if (utf8 == nullptr) return absl::FailedPreconditionError(absl::StrCat("torch has no version: ", TakeError()));
  const std::string_view view = utf8;
  int major = 0, minor = 0;
  const auto [dot, error] = std::from_chars(view.data(), view.data() + view.size(), major);
  bool parsed = error == std::errc() && dot != view.data() + view.size() && *dot == '.';
  if (parsed) parsed = std::from_chars(dot + 1, view.data() + view.size(), minor).ec == std::errc();
  if (!parsed) return absl::FailedPreconditionError(absl::StrCat("torch ", utf8, " is no version Cuvil understands"));
  if (major < kMinTorchMajor || (major == kMinTorchMajor && minor < kMinTorchMinor)) {
    return absl::FailedPreconditionError(absl::StrCat("torch ", utf8, " is too old: Cuvil needs torch ", kMinTorchMajor,
                                                      ".", kMinTorchMinor, " or later"));
  }
  return absl::OkStatus();
}

absl::Status CheckPython() {
#ifdef Py_DEBUG
  return absl::UnimplementedError("this is a debug build of Python, whose object layout Cuvil does not support");
#endif
  const absl::Status status = InterpreterSelfTest();
  if (!absl::IsFailedPrecondition(status)) return status;
  // Not the interpreter is at fault, but what else is at work in it.
  return absl::FailedPreconditionError(absl::StrCat(status.message(), "; call enable() when that is over"));
}

// Registered with atexit, so it runs before the interpreter takes anything down.
PyObject* OnExit(PyObject*, PyObject*) noexcept {
  Lifecycle& lifecycle = TheLifecycle();
  lifecycle.exiting.store(true, std::memory_order_relaxed);
  lifecycle.active.store(false, std::memory_order_relaxed);
  {
    AssertGilHeld();
    const GilRelease no_gil;
    lifecycle.worker.Stop();
    scheduler::LiveSampler::ForProcess().Stop();
  }
  Py_RETURN_NONE;
}

// Registered with os.register_at_fork. Only the forking thread goes on: what others were in the middle of never ends.
PyObject* OnForkInChild(PyObject*, PyObject*) noexcept {
  Profiler::AfterForkInChild();
  Lifecycle& lifecycle = TheLifecycle();
  if (lifecycle.tracing && thread_extent != Extent::kTracing) {
    lifecycle.tracing = false;
    if (TraceExtent::AfterForkInChild()) CollectorPause::AfterForkInChild();
  }
  for (ModuleState* state : lifecycle.modules.States()) {
    for (const std::shared_ptr<PlanEntry>& entry : *state->plans.Snapshot()) entry->comparing = false;
  }
  Py_RETURN_NONE;
}

absl::Status RegisterForkHandler() {
  static PyMethodDef definition = {"_cuvil_fork", OnForkInChild, METH_NOARGS, nullptr};
  const OwnedRef callback = OwnedRef::Steal(PyCFunction_New(&definition, nullptr));
  const OwnedRef os = OwnedRef::Steal(PyImport_ImportModule("os"));
  const OwnedRef function = os ? OwnedRef::Steal(PyObject_GetAttrString(os.get(), "register_at_fork")) : OwnedRef();
  const OwnedRef arguments = OwnedRef::Steal(PyTuple_New(0));
  const OwnedRef keywords =
      callback ? OwnedRef::Steal(Py_BuildValue("{sO}", "after_in_child", callback.get())) : OwnedRef();
  if (!function || !arguments || !keywords ||
      !OwnedRef::Steal(PyObject_Call(function.get(), arguments.get(), keywords.get()))) {
    return absl::InternalError(absl::StrCat("os.register_at_fork: ", TakeError()));
  }
  return absl::OkStatus();
}

absl::Status RegisterExitHandlers() {
  static bool registered = false;
  if (registered) return absl::OkStatus();
  static PyMethodDef definition = {"_cuvil_exit", OnExit, METH_NOARGS, nullptr};
  const OwnedRef callback = OwnedRef::Steal(PyCFunction_New(&definition, nullptr));
  const OwnedRef atexit = OwnedRef::Steal(PyImport_ImportModule("atexit"));
  if (!callback || !atexit) return absl::InternalError(absl::StrCat("atexit: ", TakeError()));
  const OwnedRef done = OwnedRef::Steal(PyObject_CallMethod(atexit.get(), "register", "O", callback.get()));
  if (!done) return absl::InternalError(absl::StrCat("atexit.register: ", TakeError()));
  if (absl::Status status = RegisterForkHandler(); !status.ok()) return status;
  // The worker's own mutex is the only one that a thread without the GIL takes, so it is the only one that a fork,
  // which Python makes under the GIL, could find taken.
  const int error =
      pthread_atfork([] { TheLifecycle().worker.BeforeFork(); }, [] { TheLifecycle().worker.AfterForkInParent(); },
                     [] { TheLifecycle().worker.AfterForkInChild(); });
  if (error != 0) return absl::InternalError(absl::StrCat("pthread_atfork: error ", error));
  registered = true;
  return absl::OkStatus();
}

}  // namespace

absl::Status Enable() {
  Lifecycle& lifecycle = TheLifecycle();
  if (lifecycle.exiting.load(std::memory_order_relaxed)) {
    return absl::FailedPreconditionError("the interpreter is shutting down");
  }
  if (Enabled()) return absl::OkStatus();
  const Settings settings = Settings::FromEnvironment();
  if (settings.disabled) {
    SetLogLevel(settings.log_level);
    Log(LogLevel::kInfo, "", "CUVIL_DISABLE is set, enable() does nothing");
    return absl::OkStatus();
  }
  if (absl::Status status = CheckPython(); !status.ok()) return status;
  const OwnedRef torch = OwnedRef::Steal(PyImport_ImportModule("torch"));
  if (!torch) return absl::FailedPreconditionError(absl::StrCat("torch cannot be imported: ", TakeError()));
  if (absl::Status status = CheckTorchVersion(torch.get()); !status.ok()) return status;
  if (absl::Status status = lifecycle.tracer.initialize(); !status.ok()) return status;
  absl::StatusOr<OwnedRef> function = FindModuleCall();
  if (!function.ok()) return function.status();
  if (absl::Status status = RegisterExitHandlers(); !status.ok()) return status;
  if (absl::Status status = Interception::Install(function->get(), OnModuleCall); !status.ok()) return status;

  lifecycle.settings = settings;
  SetLogLevel(settings.log_level);
  GraphRunner::SetMaxStreams(settings.max_streams);
  for (const std::string& problem : settings.problems) Log(LogLevel::kWarning, problem, problem);
  if (absl::Status status = InjectFaults(settings.faults); !status.ok()) {
    Log(LogLevel::kWarning, "CUVIL_FAULT", absl::StrCat("CUVIL_FAULT is ignored: ", std::string(status.message())));
  }
  lifecycle.active.store(true, std::memory_order_relaxed);
  Log(LogLevel::kInfo, "", "enabled");
  return absl::OkStatus();
}

void Disable() {
  Lifecycle& lifecycle = TheLifecycle();
  if (!Enabled()) return;
  lifecycle.active.store(false, std::memory_order_relaxed);
  Interception::Remove();
  Log(LogLevel::kInfo, "", "disabled");
}

bool Enabled() { return TheLifecycle().active.load(std::memory_order_relaxed); }

}  // namespace cuvil::agent
