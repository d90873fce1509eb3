#include "agent/lifecycle/bindings.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "agent/assumptions.h"
#include "agent/boundary.h"
#include "agent/fault_injection.h"
#include "agent/gil.h"
#include "agent/lifecycle/activation.h"
#include "agent/lifecycle/call_times.h"
#include "agent/lifecycle/captured_plan.h"
#include "agent/lifecycle/explain.h"
#include "agent/lifecycle/graph_memory.h"
#include "agent/lifecycle/lifecycle.h"
#include "agent/lifecycle/plan_entry.h"
#include "agent/lifecycle/profiler.h"
#include "agent/lifecycle/record.h"
#include "agent/lifecycle/session.h"
#include "agent/py_ref.h"

namespace cuvil::agent {
namespace {

// trace, compare, and the same for modules inside of a model that is refused; each pass reaches one level further
// down. Beyond this the rest is left to real calls.
constexpr int kMaxPrepareCalls = 12;

OwnedRef None() { return OwnedRef::New(Py_None); }
OwnedRef Bool(bool value) { return OwnedRef::New(value ? Py_True : Py_False); }

// Null with TypeError set unless `object` is a torch.nn.Module.
bool CheckIsModule(PyObject* object) {
  // Without torch there are no modules.
  PyObject* modules = PyImport_GetModuleDict();
  PyObject* module_file = PyDict_GetItemString(modules, "torch.nn.modules.module");
  const OwnedRef type =
      module_file == nullptr ? OwnedRef() : OwnedRef::Steal(PyObject_GetAttrString(module_file, "Module"));
  if (!type) {
    PyErr_Clear();
  } else {
    const int is_module = PyObject_IsInstance(object, type.get());
    if (is_module != 0) return is_module > 0;
  }
  PyErr_Format(PyExc_TypeError, "expected a torch.nn.Module, not a %s", Py_TYPE(object)->tp_name);
  return false;
}

PyObject* EnableBinding(PyObject*, PyObject*) noexcept {
  return Boundary([]() -> absl::StatusOr<OwnedRef> {
    if (absl::Status status = Enable(); !status.ok()) {
      // RuntimeError whatever the code: callers have one thing to catch.
      // (PyErr_Format knows no "%.*s" before Python 3.12.)
      PyErr_SetString(PyExc_RuntimeError, std::string(status.message()).c_str());
      return status;
    }
    return None();
  });
}

PyObject* DisableBinding(PyObject*, PyObject*) noexcept {
  return Boundary([] {
    Disable();
    return None();
  });
}

PyObject* EnabledBinding(PyObject*, PyObject*) noexcept {
  return Boundary([] { return Bool(Enabled()); });
}

PyObject* ResetBinding(PyObject*, PyObject*) noexcept {
  return Boundary([] {
    TheLifecycle().Reset();
    EmptyCachesOfGraphs();
    return None();
  });
}

OwnedRef Prepare(PyObject* model, PyObject* args, PyObject* kwargs) {
  PrepareSession session(model);
  for (int i = 0; i < kMaxPrepareCalls; ++i) {
    const uint32_t steps_before = session.num_steps;
    session.model_ready = false;
    const OwnedRef result = OwnedRef::Steal(PyObject_Call(model, args, kwargs));
    if (!result) return OwnedRef();
    if (session.model_ready || session.num_steps == steps_before) break;
  }
  return Bool(session.model_ready);
}

PyObject* PrepareBinding(PyObject*, PyObject* arguments) noexcept {
  return Boundary([&]() -> absl::StatusOr<OwnedRef> {
    PyObject *model, *args, *kwargs;
    if (!PyArg_ParseTuple(arguments, "OO!O!:prepare", &model, &PyTuple_Type, &args, &PyDict_Type, &kwargs)) {
      return OwnedRef();
    }
    if (!CheckIsModule(model)) return OwnedRef();
    const bool was_enabled = Enabled();
    if (absl::Status status = Enable(); !status.ok()) return status;
    OwnedRef ready = Prepare(model, args, kwargs);
    if (!was_enabled) {
      const ErrorScope errors;
      Disable();
    }
    return ready;
  });
}

PyObject* OptOutBinding(PyObject*, PyObject* arguments) noexcept {
  return Boundary([&]() -> absl::StatusOr<OwnedRef> {
    PyObject* module;
    int value;
    if (!PyArg_ParseTuple(arguments, "Op:opt_out", &module, &value) || !CheckIsModule(module)) return OwnedRef();
    Lifecycle& lifecycle = TheLifecycle();
    ModuleState* state = lifecycle.modules.FindOrAdd(module, lifecycle.settings);
    if (state == nullptr) return absl::InvalidArgumentError("this module cannot be referenced weakly");
    if (state->opted_out == (value != 0)) return None();
    state->opted_out = value != 0;
    // Plans of modules around this one contain it, or would from now on: all start over.
    std::vector<std::shared_ptr<const PlanCache<PlanEntry>::List>> dropped;
    for (ModuleState* other : lifecycle.modules.States()) {
      dropped.push_back(other->Forget(BookOptions(lifecycle.settings)));
    }
    return None();
  });
}

PyObject* StatsBinding(PyObject*, PyObject*) noexcept {
  return Boundary([] { return DescribeStatistics(); });
}

PyObject* ExplainBinding(PyObject*, PyObject* module) noexcept {
  return Boundary([&] { return CheckIsModule(module) ? DescribeModel(module) : OwnedRef(); });
}

PyObject* ModuleStateBinding(PyObject*, PyObject* module) noexcept {
  return Boundary([&] { return CheckIsModule(module) ? DescribeModule(module, "") : OwnedRef(); });
}

PyObject* ProfileStartBinding(PyObject*, PyObject* arguments) noexcept {
  return Boundary([&]() -> absl::StatusOr<OwnedRef> {
    const char* no_kernels = "";
    if (!PyArg_ParseTuple(arguments, "|s:profile_start", &no_kernels)) return OwnedRef();
    const absl::StatusOr<uint64_t> number = Profiler::Start(no_kernels);
    if (!number.ok()) return number.status();
    return OwnedRef::Steal(PyLong_FromUnsignedLongLong(*number));
  });
}

PyObject* ProfileStopBinding(PyObject*, PyObject* arguments) noexcept {
  return Boundary([&] {
    unsigned long long number = 0;
    int shared = 0;
    if (!PyArg_ParseTuple(arguments, "K|p:profile_stop", &number, &shared)) return OwnedRef();
    return Profiler::Stop(number, shared != 0);
  });
}

// Durations of calls of `model`, by one of the functions of call_times.h.
template <typename Times>
PyObject* TimesBinding(PyObject* arguments, const char* format, const Times& times_of) noexcept {
  return Boundary([&]() -> absl::StatusOr<OwnedRef> {
    PyObject *model, *args, *kwargs;
    long count;
    int num_detaches = 1;
    if (!PyArg_ParseTuple(arguments, format, &model, &PyTuple_Type, &args, &PyDict_Type, &kwargs, &count,
                          &num_detaches) ||
        !CheckIsModule(model)) {
      return OwnedRef();
    }
    return times_of(model, args, kwargs, count, num_detaches);
  });
}

PyObject* CheckTimesBinding(PyObject*, PyObject* arguments) noexcept {
  return TimesBinding(arguments, "OO!O!l:_check_times",
                      [](PyObject* model, PyObject* args, PyObject* kwargs, long count, int) {
                        return CheckTimes(model, args, kwargs, count);
                      });
}

PyObject* DispatchTimesBinding(PyObject*, PyObject* arguments) noexcept {
  return TimesBinding(arguments, "OO!O!l|i:_dispatch_times", DispatchTimes);
}

PyObject* FaultInjectBinding(PyObject*, PyObject* arguments) noexcept {
  return Boundary([&]() -> absl::StatusOr<OwnedRef> {
    const char* name;
    long long count = -1;
    if (!PyArg_ParseTuple(arguments, "s|L:_fault_inject", &name, &count)) return OwnedRef();
    if (absl::Status status = InjectFault(name, count); !status.ok()) return status;
    return None();
  });
}

PyObject* FaultLeftBinding(PyObject*, PyObject* arguments) noexcept {
  return Boundary([&]() -> absl::StatusOr<OwnedRef> {
    const char* name;
    if (!PyArg_ParseTuple(arguments, "s:_fault_left", &name)) return OwnedRef();
    const absl::StatusOr<int64_t> left = FaultsLeft(name);
    if (!left.ok()) return left.status();
    return OwnedRef::Steal(PyLong_FromLongLong(*left));
  });
}

PyObject* FaultPointsBinding(PyObject*, PyObject*) noexcept {
  return Boundary([] {
    RecordList names;
    for (const std::string& name : FaultPointNames()) names.Add(Record::Text(name));
    return names.Take();
  });
}

PyObject* CorruptAssumptionBinding(PyObject*, PyObject* arguments) noexcept {
  return Boundary([&]() -> absl::StatusOr<OwnedRef> {
    const char* name;
    if (!PyArg_ParseTuple(arguments, "s:_corrupt_assumption", &name)) return OwnedRef();
    if (absl::Status status = CorruptAssumption(name); !status.ok()) return status;
    return None();
  });
}

PyObject* AssumptionsBinding(PyObject*, PyObject*) noexcept {
  return Boundary([] {
    RecordList names;
    for (const std::string& name : AssumptionNames()) names.Add(Record::Text(name));
    return names.Take();
  });
}

// Waits until the background thread has nothing to do, so that tests need not sleep.
PyObject* QuiesceBinding(PyObject*, PyObject*) noexcept {
  return Boundary([] {
    Lifecycle& lifecycle = TheLifecycle();
    {
      AssertGilHeld();
      const GilRelease no_gil;
      lifecycle.worker.Drain();
    }
    lifecycle.CollectFinishedJobs();
    return None();
  });
}

PyMethodDef kMethods[] = {
    {"enable", EnableBinding, METH_NOARGS, nullptr},
    {"disable", DisableBinding, METH_NOARGS, nullptr},
    {"enabled", EnabledBinding, METH_NOARGS, nullptr},
    {"reset", ResetBinding, METH_NOARGS, nullptr},
    {"prepare", PrepareBinding, METH_VARARGS, nullptr},
    {"opt_out", OptOutBinding, METH_VARARGS, nullptr},
    {"stats", StatsBinding, METH_NOARGS, nullptr},
    {"explain", ExplainBinding, METH_O, nullptr},
    {"module_state", ModuleStateBinding, METH_O, nullptr},
    {"profile_start", ProfileStartBinding, METH_VARARGS, nullptr},
    {"profile_stop", ProfileStopBinding, METH_VARARGS, nullptr},
    {"_check_times", CheckTimesBinding, METH_VARARGS, nullptr},
    {"_dispatch_times", DispatchTimesBinding, METH_VARARGS, nullptr},
    {"_fault_inject", FaultInjectBinding, METH_VARARGS, nullptr},
    {"_fault_left", FaultLeftBinding, METH_VARARGS, nullptr},
    {"_fault_points", FaultPointsBinding, METH_NOARGS, nullptr},
    {"_assumptions", AssumptionsBinding, METH_NOARGS, nullptr},
    {"_corrupt_assumption", CorruptAssumptionBinding, METH_VARARGS, nullptr},
    {"_quiesce", QuiesceBinding, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

int RegisterLifecycle(PyObject* module) noexcept { return RegisterLifecycleWith(module, CaptureTracer()); }

int RegisterLifecycleWith(PyObject* module, const PlanSource& tracer) noexcept {
  TheLifecycle().tracer = tracer;
  return PyModule_AddFunctions(module, kMethods);
}

}  // namespace cuvil::agent
