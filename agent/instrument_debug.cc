#include "agent/instrument_debug.h"

#include <cstring>
#include <memory>
#include <string>

#include "agent/boundary.h"
#include "agent/cpython_compat.h"
#include "agent/frame_hook.h"
#include "agent/instrument.h"
#include "agent/interception.h"
#include "agent/interpreter_self_test.h"
#include "agent/py_ref.h"

namespace cuvil::agent {
namespace {

enum LogKinds : unsigned {
  kLogInstructions = 1,
  kLogFrames = 2,
  kLogReads = 4,
  kLogCalls = 8,
  kLogBranches = 16,
  kIdle = 32
};

PyObject* OrNone(PyObject* object) { return object != nullptr ? object : Py_None; }

// Looks at the whole stack at every probe, counts, and writes down what it is asked to.
class DebugSink : public ProbeSink {
 public:
  explicit DebugSink(unsigned kinds) : kinds_(kinds), log_(OwnedRef::Steal(PyList_New(0))) {}

  OwnedRef TakeLog() { return std::move(log_); }
  uint64_t num_values() const { return num_values_; }
  uint64_t num_unknown() const { return num_unknown_; }
  uint64_t num_enters() const { return num_enters_; }
  uint64_t num_leaves() const { return num_leaves_; }

  void OnFrameEnter(const FrameView& frame, bool instrumented, const char* why_not) noexcept override {
    ++num_enters_;
    if ((kinds_ & kLogFrames) == 0) return;
    Append(Py_BuildValue("(sOniziiO)", "enter", frame.code()->co_qualname, reinterpret_cast<Py_ssize_t>(frame.id()),
                         static_cast<int>(instrumented), why_not, static_cast<int>(frame.resumed()),
                         static_cast<int>(frame.creates_generator()),
                         frame.previous() ? frame.previous().code()->co_qualname : Py_None));
  }

  void OnFrameExit(const FrameView&, bool) noexcept override {}

  void OnFrameLeave(const FrameView& frame, FrameExit exit, PyObject* result) noexcept override {
    ++num_leaves_;
    if ((kinds_ & kLogFrames) == 0) return;
    constexpr const char* kExits[] = {"returned", "yielded", "raised"};
    Append(Py_BuildValue("(sOnsO)", "leave", frame.code()->co_qualname, reinterpret_cast<Py_ssize_t>(frame.id()),
                         kExits[static_cast<int>(exit)], Py_TYPE(OrNone(result))));
  }

  void OnProbe(const FrameView& frame, const Site& site, PyObject** stack_top) noexcept override {
    if ((kinds_ & kIdle) != 0) return;  // to time the probes themselves
    for (int i = 1; i <= site.depth; ++i) {
      // Faults, or shows under a sanitizer, if an entry is not an object.
      if (stack_top[-i] != nullptr && Py_REFCNT(stack_top[-i]) > 0 && Py_TYPE(stack_top[-i]) != nullptr) ++num_values_;
    }
    if (site.op == Op::kUnknown) ++num_unknown_;
    PyObject* code_name = frame.code()->co_qualname;
    if ((kinds_ & kLogInstructions) != 0) {
      Append(Py_BuildValue("(sOis)", "op", code_name, site.offset, OpName(site.op)));
    }
    if ((kinds_ & kLogReads) != 0) LogRead(frame, site, stack_top);
    if ((kinds_ & kLogCalls) != 0) LogCall(frame, site, stack_top);
    if ((kinds_ & kLogBranches) != 0 && (site.op == Op::kBranchTruth || site.op == Op::kBranchNone)) {
      Append(Py_BuildValue("(sOiOiiii)", "branch", code_name, site.offset, stack_top[-1],
                           static_cast<int>(BranchSense(site)), static_cast<int>(BranchKeepsValue(site)), site.target,
                           site.next));
    }
  }

 private:
  void Append(PyObject* entry) {
    if (entry == nullptr || PyList_Append(log_.get(), entry) < 0) PyErr_WriteUnraisable(log_.get());
    Py_XDECREF(entry);
  }

  void LogRead(const FrameView& frame, const Site& site, PyObject** stack_top) {
    PyObject* code_name = frame.code()->co_qualname;
    if (site.op == Op::kLoadAttr || site.op == Op::kLoadMethod) {
      Append(Py_BuildValue("(sOiOO)", "attr", code_name, site.offset, stack_top[-1], NameOperand(frame, site)));
    } else if (PyObject* name = NameOperand(frame, site)) {
      Append(Py_BuildValue("(ssOiO)", "name", OpName(site.op), code_name, site.offset, name));
    }
  }

  void LogCall(const FrameView& frame, const Site& site, PyObject** stack_top) {
    PyObject* code_name = frame.code()->co_qualname;
    CallSiteView call;
    CallExView call_ex;
    if (DecodeCall(frame, site, stack_top, &call)) {
      OwnedRef args = OwnedRef::Steal(PyTuple_New(call.nargs));
      if (!args) return;
      for (Py_ssize_t i = 0; i < call.nargs; ++i) PyTuple_SET_ITEM(args.get(), i, Py_NewRef(call.args[i]));
      Append(Py_BuildValue("(sOiOOOO)", "call", code_name, site.offset, call.callable, OrNone(call.self_or_null),
                           args.get(), OrNone(call.kwnames)));
    } else if (DecodeCallEx(frame, site, stack_top, &call_ex)) {
      Append(Py_BuildValue("(sOiOOO)", "call_ex", code_name, site.offset, call_ex.callable, call_ex.positional,
                           OrNone(call_ex.keywords)));
    }
  }

  unsigned kinds_;
  OwnedRef log_;
  uint64_t num_values_ = 0, num_unknown_ = 0, num_enters_ = 0, num_leaves_ = 0;
};

// The extent that _debug_begin opened; the tests that use it run on one thread.
std::unique_ptr<DebugSink> g_sink;
std::unique_ptr<TraceExtent> g_extent;

OwnedRef Report(const TraceExtent& extent, DebugSink* sink) {
  const ExtentStatistics& s = extent.statistics();
  OwnedRef log = sink->TakeLog();
  auto number = [](uint64_t value) { return static_cast<unsigned long long>(value); };
  return OwnedRef::Steal(Py_BuildValue(
      "{s:s,s:O,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K}", "status",
      std::string(extent.status().message()).c_str(), "log", log.get(), "frames", number(s.frames), "instrumented",
      number(s.frames_instrumented), "no_room", number(s.frames_no_room), "refused", number(s.frames_refused_code),
      "started_outside", number(s.frames_started_outside), "too_deep", number(s.frames_too_deep), "in_sink",
      number(s.frames_in_sink), "other_thread", number(s.frames_other_thread), "probes", number(s.probes), "values",
      number(sink->num_values()), "unknown", number(sink->num_unknown()), "enters", number(sink->num_enters()),
      "leaves", number(sink->num_leaves()), "copies", number(Instrumenter::num_copies()), "refused_codes",
      number(Instrumenter::num_refused()), "mismatches", number(Instrumenter::num_mismatches())));
}

// _debug_run(kinds, callable, *args, **kwargs) -> (result, exception or None, report)
PyObject* DebugRun(PyObject*, PyObject* args, PyObject* kwargs) noexcept {
  return Boundary([&]() -> absl::StatusOr<OwnedRef> {
    if (PyTuple_GET_SIZE(args) < 2) return absl::InvalidArgumentError("_debug_run(kinds, callable, ...)");
    const unsigned kinds = static_cast<unsigned>(PyLong_AsUnsignedLongMask(PyTuple_GET_ITEM(args, 0)));
    OwnedRef rest = OwnedRef::Steal(PyTuple_GetSlice(args, 2, PyTuple_GET_SIZE(args)));
    if (!rest) return OwnedRef();
    DebugSink sink(kinds);
    absl::StatusOr<std::unique_ptr<TraceExtent>> extent = TraceExtent::Begin(&sink);
    if (!extent.ok()) return extent.status();
    OwnedRef result = OwnedRef::Steal(PyObject_Call(PyTuple_GET_ITEM(args, 1), rest.get(), kwargs));
    OwnedRef exception;
    if (!result) {
      PyObject *type, *value, *traceback;
      PyErr_Fetch(&type, &value, &traceback);
      PyErr_NormalizeException(&type, &value, &traceback);
      if (traceback != nullptr) PyException_SetTraceback(value, traceback);
      Py_XDECREF(type);
      Py_XDECREF(traceback);
      exception = OwnedRef::Steal(value);
    }
    OwnedRef report = Report(**extent, &sink);
    extent->reset();
    if (!report) return OwnedRef();
    return OwnedRef::Steal(Py_BuildValue("(OOO)", OrNone(result.get()), OrNone(exception.get()), report.get()));
  });
}

PyObject* DebugBegin(PyObject*, PyObject* kinds) noexcept {
  return Boundary([&]() -> absl::StatusOr<OwnedRef> {
    if (g_extent != nullptr) return absl::FailedPreconditionError("begun already");
    auto sink = std::make_unique<DebugSink>(static_cast<unsigned>(PyLong_AsUnsignedLongMask(kinds)));
    absl::StatusOr<std::unique_ptr<TraceExtent>> extent = TraceExtent::Begin(sink.get());
    if (!extent.ok()) return extent.status();
    g_sink = std::move(sink);
    g_extent = *std::move(extent);
    return OwnedRef::New(Py_None);
  });
}

PyObject* DebugEnd(PyObject*, PyObject*) noexcept {
  return Boundary([&]() -> absl::StatusOr<OwnedRef> {
    if (g_extent == nullptr) return absl::FailedPreconditionError("not begun");
    OwnedRef report = Report(*g_extent, g_sink.get());
    g_extent.reset();
    g_sink.reset();
    return report;
  });
}

CodeRecord* RecordOrRaise(PyObject* code) {
  if (!PyCode_Check(code)) {
    PyErr_SetString(PyExc_TypeError, "a code object is needed");
    return nullptr;
  }
  CodeRecord* record = Instrumenter::RecordFor(reinterpret_cast<PyCodeObject*>(code));
  if (record == nullptr) PyErr_SetString(PyExc_RuntimeError, "not prepared: run _debug_self_test first");
  return record;
}

// _debug_copy(code) -> the instrumented copy; ValueError with the reason if the code is refused
PyObject* DebugCopy(PyObject*, PyObject* code) noexcept {
  return Boundary([&]() -> absl::StatusOr<OwnedRef> {
    CodeRecord* record = RecordOrRaise(code);
    if (record == nullptr) return OwnedRef();
    if (record->copy() == nullptr) return absl::InvalidArgumentError(record->refusal());
    return OwnedRef::New(reinterpret_cast<PyObject*>(record->copy()));
  });
}

// _debug_sites(code) -> [(offset, opcode, oparg, op, depth, target, next, kwnames)]
PyObject* DebugSites(PyObject*, PyObject* code) noexcept {
  return Boundary([&]() -> OwnedRef {
    CodeRecord* record = RecordOrRaise(code);
    OwnedRef list = OwnedRef::Steal(record != nullptr ? PyList_New(0) : nullptr);
    if (!list) return OwnedRef();
    for (const Site& s : record->sites()) {
      OwnedRef entry = OwnedRef::Steal(
          Py_BuildValue("(iiisiiii)", s.offset, s.opcode, s.oparg, OpName(s.op), s.depth, s.target, s.next, s.kwnames));
      if (!entry || PyList_Append(list.get(), entry.get()) < 0) return OwnedRef();
    }
    return list;
  });
}

PyObject* DebugClassify(PyObject*, PyObject* args) noexcept {
  int opcode, oparg;
  if (PyArg_ParseTuple(args, "ii", &opcode, &oparg) == 0) return nullptr;
  return PyUnicode_FromString(OpName(Classify(opcode, oparg)));
}

PyObject* DebugSelfTest(PyObject*, PyObject*) noexcept {
  return Boundary([]() -> absl::StatusOr<OwnedRef> {
    if (absl::Status status = InterpreterSelfTest(); !status.ok()) return status;
    return OwnedRef::New(Py_None);
  });
}

PyObject* DebugInstanceDict(PyObject*, PyObject* object) noexcept {
  return Py_NewRef(OrNone(reinterpret_cast<PyObject*>(InstanceDict(object))));
}

PyObject* DebugDictTag(PyObject*, PyObject* dict) noexcept {
  if (!PyDict_Check(dict)) return PyErr_Format(PyExc_TypeError, "a dict is needed");
  return PyLong_FromUnsignedLongLong(DictTag(reinterpret_cast<PyDictObject*>(dict)));
}

PyObject* DebugTypeTag(PyObject*, PyObject* type) noexcept {
  if (!PyType_Check(type)) return PyErr_Format(PyExc_TypeError, "a class is needed");
  return PyLong_FromUnsignedLong(TypeTag(reinterpret_cast<PyTypeObject*>(type)));
}

PyObject* DebugCurrentTypeTag(PyObject*, PyObject* type) noexcept {
  if (!PyType_Check(type)) return PyErr_Format(PyExc_TypeError, "a class is needed");
  return PyLong_FromUnsignedLong(CurrentTypeTag(reinterpret_cast<PyTypeObject*>(type)));
}

PyObject* DebugObserved(PyObject*, PyObject*) noexcept {
  return PyBool_FromLong(ThreadIsObserved(PyThreadState_Get()));
}

PyObject* DebugLine(PyObject*, PyObject* args) noexcept {
  PyObject* code;
  int offset;
  if (PyArg_ParseTuple(args, "O!i", &PyCode_Type, &code, &offset) == 0) return nullptr;
  return PyLong_FromLong(ExactSourceLine(reinterpret_cast<PyCodeObject*>(code), offset));
}

bool g_serves = false;
unsigned long g_num_hits = 0;

// Returns the call's second positional argument itself when it serves, or lets the original run.
PyObject* Intercepted(PyObject* callable, PyObject* const* args, size_t nargsf, PyObject* kwnames) noexcept {
  ++g_num_hits;
  if (!g_serves) return Interception::original()(callable, args, nargsf, kwnames);
  return Py_NewRef(PyVectorcall_NARGS(nargsf) > 1 ? args[1] : Py_None);
}

// _debug_intercept(function, serves)
PyObject* DebugIntercept(PyObject*, PyObject* args) noexcept {
  return Boundary([&]() -> absl::StatusOr<OwnedRef> {
    PyObject* function;
    int serves;
    if (PyArg_ParseTuple(args, "Op", &function, &serves) == 0) return OwnedRef();
    if (absl::Status status = Interception::Install(function, Intercepted); !status.ok()) return status;
    g_serves = serves != 0;
    g_num_hits = 0;
    return OwnedRef::New(Py_None);
  });
}

// _debug_intercept_hits() -> calls intercepted since the last time it was asked
PyObject* DebugInterceptHits(PyObject*, PyObject*) noexcept {
  unsigned long hits = g_num_hits;
  g_num_hits = 0;
  return PyLong_FromUnsignedLong(hits);
}

PyObject* DebugInterceptRemove(PyObject*, PyObject*) noexcept {
  Interception::Remove();
  Py_RETURN_NONE;
}

PyMethodDef kMethods[] = {
    {"_debug_run", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(DebugRun)), METH_VARARGS | METH_KEYWORDS,
     nullptr},
    {"_debug_begin", DebugBegin, METH_O, nullptr},
    {"_debug_end", DebugEnd, METH_NOARGS, nullptr},
    {"_debug_copy", DebugCopy, METH_O, nullptr},
    {"_debug_sites", DebugSites, METH_O, nullptr},
    {"_debug_classify", DebugClassify, METH_VARARGS, nullptr},
    {"_debug_self_test", DebugSelfTest, METH_NOARGS, nullptr},
    {"_debug_instance_dict", DebugInstanceDict, METH_O, nullptr},
    {"_debug_dict_tag", DebugDictTag, METH_O, nullptr},
    {"_debug_type_tag", DebugTypeTag, METH_O, nullptr},
    {"_debug_current_type_tag", DebugCurrentTypeTag, METH_O, nullptr},
    {"_debug_observed", DebugObserved, METH_NOARGS, nullptr},
    {"_debug_line", DebugLine, METH_VARARGS, nullptr},
    {"_debug_intercept", DebugIntercept, METH_VARARGS, nullptr},
    {"_debug_intercept_hits", DebugInterceptHits, METH_NOARGS, nullptr},
    {"_debug_intercept_remove", DebugInterceptRemove, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

int RegisterInstrumentDebug(PyObject* module) noexcept { return PyModule_AddFunctions(module, kMethods); }

}  // namespace cuvil::agent
