#include "agent/interpreter_self_test.h"

#include <cstring>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "agent/assumptions.h"
#include "agent/cpython_compat_internal.h"
#include "agent/frame_hook.h"
#include "agent/instrument.h"
#include "agent/layout_self_test.h"
#include "agent/py_ref.h"

namespace cuvil::agent {
namespace {

// Bytecode of every patch release of a minor version has one magic number (Lib/importlib/_bootstrap_external.py).
#if CUVIL_PY311
constexpr long kMagicNumber = 3495;
#elif CUVIL_PY312
constexpr long kMagicNumber = 3531;
#else
constexpr long kMagicNumber = 3571;
#endif

// Deterministic, touches nothing outside its namespace, and uses what the agent knows about frames and calls.
constexpr char kProgram[] = R"(
def straight(a, b=2, *, c=3):
    d = a + b
    e = (d, c)
    return e[0] + d

class Box:
    def __init__(self, x):
        self.x = x
    @property
    def twice(self):
        return self.x * 2
    def add(self, y, *, z=1):
        return self.x + y + z
    def __enter__(self):
        return self
    def __exit__(self, kind, value, traceback):
        return kind is KeyError

class Derived(Box):
    def add(self, y, *, z=1):
        return super().add(y, z=z) + 1

class Plain:
    pass

class Sized(tuple):
    pass

class Slotted:
    __slots__ = ('a',)

def make_closure():
    held = 1
    def closure(a: int = 1, *, b: int = 2) -> int:
        return held
    return closure

closure = make_closure()

def generate(n):
    try:
        for i in range(n):
            got = yield i
            if got:
                yield got
    finally:
        n = 0

def nest(n):
    return nest(n - 1) if n else 0

def program(first_time):
    box = Derived(3)
    out = [straight(1), straight(1, c=4), straight(*(1,), **{'c': 2}), box.twice, box.add(4), box.add(4, z=5)]
    with box as inside:
        out.append(inside.x)
        {}['missing']
    try:
        box.missing
    except AttributeError as error:
        out.append(type(error).__name__)
    total = 0
    def closure(step):
        nonlocal total
        total += step
        return lambda: total + box.x
    out.append(closure(5)())
    out.append([i * box.x for i in range(3) if i != 1])
    out.append({k: v for k, v in zip('ab', (1, 2))})
    iterator = generate(3)
    out.append((next(iterator), iterator.send(7), next(iterator)))
    iterator.close()
    out.append(sum(i for i in generate(4)))
    out.append(f'{box.x!r:>4}' + ('yes' if box.x and total else 'no'))
    out.append(nest(6))
    value = box.x
    if first_time:
        class Local:
            value = box.x
        value = Local.value
    out.append(value)
    while total > 3:
        total -= 1
    out.append(total)
    return out
)";

absl::Status CheckBuild() {
  if (!Holds(Assumption::kVersion, (Py_Version >> 16) == (PY_VERSION_HEX >> 16))) {
    return Violated(Assumption::kVersion);
  }
  if (!Holds(Assumption::kReleaseBuild, PySys_GetObject("gettotalrefcount") == nullptr)) {
    return Violated(Assumption::kReleaseBuild);
  }
  OwnedRef abi = OwnedRef::New(PySys_GetObject("abiflags"));
  const bool free_threaded = abi && PyUnicode_Check(abi.get()) &&
                             PyUnicode_FindChar(abi.get(), 't', 0, PyUnicode_GET_LENGTH(abi.get()), 1) >= 0;
  if (!Holds(Assumption::kGil, !free_threaded)) return Violated(Assumption::kGil);
  if (!Holds(Assumption::kBytecode, PyImport_GetMagicNumber() % 65536 == kMagicNumber)) {
    return Violated(Assumption::kBytecode);
  }
  return absl::OkStatus();
}

absl::Status CheckDictTags() {
  OwnedRef owned = OwnedRef::Steal(PyDict_New());
  OwnedRef key = OwnedRef::Steal(PyUnicode_FromString("key"));
  if (!owned || !key) return absl::ResourceExhaustedError("out of memory");
  auto* dict = reinterpret_cast<PyDictObject*>(owned.get());
  uint64_t seen[4] = {DictTag(dict)};
  for (int i = 1; i < 4; ++i) {
    int status = i < 3 ? PyDict_SetItem(owned.get(), key.get(), i == 1 ? Py_None : Py_True)
                       : PyDict_DelItem(owned.get(), key.get());
    seen[i] = DictTag(dict);
    if (status < 0 || !Holds(Assumption::kDictVersion, seen[i] != seen[i - 1])) {
      return Violated(Assumption::kDictVersion);
    }
  }
  PyDict_GetItemWithError(owned.get(), key.get());
  if (DictTag(dict) != seen[3]) return Violated(Assumption::kDictVersion);
  return absl::OkStatus();
}

absl::Status CheckAttributes(PyObject* box_type) {
  OwnedRef one = OwnedRef::Steal(PyLong_FromLong(1000003)), two = OwnedRef::Steal(PyLong_FromLong(1000033));
  OwnedRef box = OwnedRef::Steal(one ? PyObject_CallOneArg(box_type, one.get()) : nullptr);
  if (!box || !two) return Violated(Assumption::kTestProgram);
  PyDictObject* dict = InstanceDict(box.get());
  if (!Holds(Assumption::kInstanceDict, dict != nullptr && dict->ma_used == 1)) {
    return Violated(Assumption::kInstanceDict);
  }
  const uint64_t before = DictTag(dict);
  if (PyObject_SetAttrString(box.get(), "x", two.get()) < 0 ||
      !Holds(Assumption::kInstanceStore, DictTag(dict) != before) || InstanceDict(box.get()) != dict) {
    return Violated(Assumption::kInstanceStore);
  }

  auto* type = reinterpret_cast<PyTypeObject*>(box_type);
  const uint32_t tag = TypeTag(type);
  if (tag == 0 || CurrentTypeTag(type) != tag) return Violated(Assumption::kTypeVersion);
  if (PyObject_SetAttrString(box_type, "unused", Py_None) < 0 ||
      !Holds(Assumption::kTypeVersion, CurrentTypeTag(type) != tag) || TypeTag(type) == 0 || TypeTag(type) == tag) {
    return Violated(Assumption::kTypeVersion);
  }
  return absl::OkStatus();
}

absl::Status CheckCodeLayout(PyObject* function) {
  auto* code = reinterpret_cast<PyCodeObject*>(reinterpret_cast<PyFunctionObject*>(function)->func_code);
  OwnedRef bytes = OwnedRef::Steal(PyCode_GetCode(code));
  if (!bytes || !Holds(Assumption::kCodeLayout, PyBytes_GET_SIZE(bytes.get()) == Py_SIZE(code) * 2)) {
    return Violated(Assumption::kCodeLayout);
  }
  // a, c, b, d, e as the first locals; no cells, no free variables
  if (code->co_argcount != 2 || code->co_kwonlyargcount != 1 || code->co_nlocalsplus != 5 ||
      !PyTuple_Check(code->co_localsplusnames) || PyTuple_GET_SIZE(code->co_localsplusnames) != 5 ||
      !PyBytes_Check(code->co_localspluskinds) || PyBytes_GET_SIZE(code->co_localspluskinds) != 5) {
    return Violated(Assumption::kCodeLayout);
  }
  if (!Holds(Assumption::kResume, static_cast<unsigned char>(PyBytes_AS_STRING(bytes.get())[0]) == compat::kResume)) {
    return Violated(Assumption::kResume);
  }
  return absl::OkStatus();
}

// Checks in every callback what it is given; keeps the first thing that is wrong.
class CheckingSink : public ProbeSink {
 public:
  CheckingSink(PyObject* globals, PyObject* straight, PyThreadState* thread)
      : globals_(globals),
        straight_(reinterpret_cast<PyCodeObject*>(reinterpret_cast<PyFunctionObject*>(straight)->func_code)),
        thread_(thread) {}

  Assumption wrong() const { return wrong_; }
  const std::vector<int>& straight_offsets() const { return straight_offsets_; }
  int num_resumes() const { return num_resumes_; }
  int num_yields() const { return num_yields_; }
  int num_calls() const { return num_calls_; }

  void OnFrameEnter(const FrameView& frame, bool instrumented, const char* /*why_not*/) noexcept override {
    ++depth_;
    Expect(instrumented, Assumption::kInstrumentable);
    Expect(PyCode_Check(reinterpret_cast<PyObject*>(frame.code())), Assumption::kFrameCode);
    Expect(frame.globals() == globals_, Assumption::kFrameGlobals);
    const bool is_function = (frame.code()->co_flags & CO_OPTIMIZED) != 0;
    Expect(is_function ? frame.locals() == nullptr : frame.locals() != nullptr && PyDict_Check(frame.locals()),
           Assumption::kFrameNamespace);
    Expect(frame.builtins() != nullptr && PyDict_Check(frame.builtins()), Assumption::kFrameBuiltins);
    PyFunctionObject* function = frame.function();
    Expect(function != nullptr && function->func_code == reinterpret_cast<PyObject*>(frame.code()),
           Assumption::kFrameFunction);
    FrameView caller = frame.previous();
    if (depth_ > 1) Expect(static_cast<bool>(caller) && caller.globals() == globals_, Assumption::kFrameCaller);
    if (frame.resumed()) {
      ++num_resumes_;
      PyObject* generator = frame.generator();
      Expect(generator != nullptr && PyGen_CheckExact(generator), Assumption::kFrameGenerator);
    }
    CheckRecursion(frame);
  }

  void OnFrameExit(const FrameView&, bool) noexcept override {}

  void OnFrameLeave(const FrameView&, FrameExit exit, PyObject* result) noexcept override {
    --depth_;
    if (exit == FrameExit::kYielded) ++num_yields_;
    Expect((exit == FrameExit::kRaised) == (result == nullptr), Assumption::kFrameResult);
  }

  void OnProbe(const FrameView& frame, const Site& site, PyObject** stack_top) noexcept override {
    Expect(site.op != Op::kUnknown, Assumption::kInstructions);
    Expect(CurrentFrame(thread_).id() == frame.id(), Assumption::kCurrentFrame);
    for (int i = 1; i <= site.depth; ++i) {
      PyObject* value = stack_top[-i];
      if (value != nullptr) Expect(Py_REFCNT(value) > 0 && Py_TYPE(Py_TYPE(value)) != nullptr, Assumption::kFrameStack);
    }
    if (frame.code() == straight_) {
      straight_offsets_.push_back(site.offset);
      // Once for each instruction: looking for a line takes longer than all the rest.
      if (straight_offsets_.size() < kMaxLines) {
        Expect(frame.line() == ExactSourceLine(straight_, site.offset), Assumption::kFrameLine);
      }
      PyObject* argument = frame.localsplus()[0];
      Expect(argument != nullptr && PyLong_CheckExact(argument) && PyLong_AsLong(argument) == 1,
             Assumption::kFrameLocals);
    }
    if (site.op == Op::kLoadAttr || site.op == Op::kLoadGlobal || site.op == Op::kLoadMethod) {
      PyObject* name = NameOperand(frame, site);
      Expect(name != nullptr && PyUnicode_Check(name), Assumption::kInstructionNames);
    }
    CallSiteView call;
    if (DecodeCall(frame, site, stack_top, &call)) {
      ++num_calls_;
      Expect(PyCallable_Check(call.callable) != 0, Assumption::kCallable);
      if (call.kwnames != nullptr) {
        Expect(PyTuple_Check(call.kwnames) && PyTuple_GET_SIZE(call.kwnames) <= call.nargs, Assumption::kCallKeywords);
      }
      for (Py_ssize_t i = 0; i < call.nargs; ++i) Expect(call.args[i] != nullptr, Assumption::kCallArguments);
    }
    CallExView call_ex;
    if (DecodeCallEx(frame, site, stack_top, &call_ex)) {
      ++num_calls_;
      Expect(PyCallable_Check(call_ex.callable) != 0 && PyTuple_Check(call_ex.positional) &&
                 (call_ex.keywords == nullptr || PyDict_Check(call_ex.keywords)),
             Assumption::kCallArguments);
    }
  }

 private:
  static constexpr size_t kMaxLines = 20;

  void Expect(bool condition, Assumption assumption) {
    if (!Holds(assumption, condition) && wrong_ == Assumption::kNone) wrong_ = assumption;
  }

  // Nested calls must not use up the C recursion that the interpreter allows.
  void CheckRecursion(const FrameView& frame) {
#if CUVIL_PY311
    static_cast<void>(frame);
#else
    if (std::strcmp(PyUnicode_AsUTF8(frame.code()->co_name), "nest") != 0) return;
    if (nest_remaining_ == 0) nest_remaining_ = thread_->c_recursion_remaining;
    Expect(thread_->c_recursion_remaining == nest_remaining_, Assumption::kRecursion);
#endif
  }

  PyObject* globals_;
  PyCodeObject* straight_;
  PyThreadState* thread_;
  Assumption wrong_ = Assumption::kNone;
  std::vector<int> straight_offsets_;
  int depth_ = 0, num_resumes_ = 0, num_yields_ = 0, num_calls_ = 0;
  [[maybe_unused]] int nest_remaining_ = 0;
};

// The collector could run foreign code inside the extent: a finalizer, or the end of an abandoned generator.
class CollectorPause {
 public:
  CollectorPause() : was_enabled_(PyGC_Disable() != 0) {}
  ~CollectorPause() {
    if (was_enabled_) PyGC_Enable();
  }
  CollectorPause(const CollectorPause&) = delete;
  CollectorPause& operator=(const CollectorPause&) = delete;

 private:
  const bool was_enabled_;
};

absl::Status CheckExtent(PyObject* globals, PyThreadState* thread) {
  const CollectorPause pause;
  PyObject* program = PyDict_GetItemString(globals, "program");
  PyObject* straight = PyDict_GetItemString(globals, "straight");
  OwnedRef expected = OwnedRef::Steal(PyObject_CallOneArg(program, Py_False));
  if (!expected) return Violated(Assumption::kTestProgram);

  CheckingSink sink(globals, straight, thread);
  // Often enough for the interpreter to specialise the copies' instructions.
  constexpr int kRounds = 12;
  for (int round = 0; round < kRounds; ++round) {
    absl::StatusOr<std::unique_ptr<TraceExtent>> extent = TraceExtent::Begin(&sink, Observers::kIgnore);
    if (!extent.ok()) return extent.status();
    OwnedRef result = OwnedRef::Steal(PyObject_CallOneArg(program, round == 0 ? Py_True : Py_False));
    absl::Status status = (*extent)->status();
    extent->reset();
    const bool same = result && PyObject_RichCompareBool(result.get(), expected.get(), Py_EQ) == 1;
    if (!Holds(Assumption::kSameResult, same)) return Violated(Assumption::kSameResult);
    if (!Holds(Assumption::kProbes, status.ok())) return Violated(Assumption::kProbes);
    if (sink.wrong() != Assumption::kNone) return Violated(sink.wrong());
  }

  auto* code = reinterpret_cast<PyCodeObject*>(reinterpret_cast<PyFunctionObject*>(straight)->func_code);
  const std::vector<Site>& sites = Instrumenter::FindRecord(code)->sites();
  const std::vector<int>& seen = sink.straight_offsets();
  constexpr int kCallsOfStraight = 3;
  bool complete = seen.size() == sites.size() * kCallsOfStraight * kRounds && !sites.empty();
  for (size_t i = 0; complete && i < seen.size(); ++i) complete = seen[i] == sites[i % sites.size()].offset;
  if (!Holds(Assumption::kAnnounced, complete)) return Violated(Assumption::kAnnounced);
  // generate(3): three values, then close() raises inside. generate(4) and the expression around it: four values and an
  // end for each.
  constexpr int kYields = 11, kResumes = 14;
  if (!Holds(Assumption::kGenerators,
             sink.num_yields() == kYields * kRounds && sink.num_resumes() == kResumes * kRounds)) {
    return Violated(Assumption::kGenerators);
  }
  if (sink.num_calls() == 0) return Violated(Assumption::kAnnounced);
  return absl::OkStatus();
}

PyObject* CountCall(PyObject* callable, PyObject* const* args, size_t nargsf, PyObject* kwnames);
int g_num_counted = 0;
vectorcallfunc g_forward = nullptr;
PyObject* CountCall(PyObject* callable, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  ++g_num_counted;
  return g_forward(callable, args, nargsf, kwnames);
}

// The slot is put to use on a throw-away method that call sites are specialised for already.
absl::Status CheckVectorcall(PyObject* globals) {
  constexpr char kCalls[] = R"(
class Callable:
    def __call__(self, x):
        return x
def calls(target):
    return sum([target(i) for i in range(20)])
calls(Callable())
)";
  OwnedRef done = OwnedRef::Steal(PyRun_String(kCalls, Py_file_input, globals, globals));
  if (!done) return Violated(Assumption::kTestProgram);
  PyObject* type = PyDict_GetItemString(globals, "Callable");
  PyObject* calls = PyDict_GetItemString(globals, "calls");
  OwnedRef function = OwnedRef::Steal(PyObject_GetAttrString(type, "__call__"));
  OwnedRef target = OwnedRef::Steal(PyObject_CallNoArgs(type));
  if (!function || !PyFunction_Check(function.get()) || !target) return Violated(Assumption::kTestProgram);
  auto* raw = reinterpret_cast<PyFunctionObject*>(function.get());
  g_forward = raw->vectorcall;
  g_num_counted = 0;
  compat::SetVectorcall(raw, CountCall);
  OwnedRef first = OwnedRef::Steal(PyObject_CallOneArg(calls, target.get()));
  compat::SetVectorcall(raw, g_forward);
  OwnedRef second = OwnedRef::Steal(PyObject_CallOneArg(calls, target.get()));
  if (!first || !second || PyLong_AsLong(first.get()) != 190 || PyLong_AsLong(second.get()) != 190 ||
      !Holds(Assumption::kVectorcall, g_num_counted == 20)) {
    return Violated(Assumption::kVectorcall);
  }
  return absl::OkStatus();
}

absl::Status RunChecks(PyThreadState* thread) {
  if (absl::Status status = CheckBuild(); !status.ok()) return status;
  if (absl::Status status = CheckDictTags(); !status.ok()) return status;
  OwnedRef globals = OwnedRef::Steal(PyDict_New());
  OwnedRef name = OwnedRef::Steal(PyUnicode_FromString("cuvil_self_test"));
  if (!globals || !name || PyDict_SetItemString(globals.get(), "__name__", name.get()) < 0 ||
      PyDict_SetItemString(globals.get(), "__builtins__", PyEval_GetBuiltins()) < 0) {
    return absl::ResourceExhaustedError("out of memory");
  }
  OwnedRef defined = OwnedRef::Steal(PyRun_String(kProgram, Py_file_input, globals.get(), globals.get()));
  if (!Holds(Assumption::kTestProgram, static_cast<bool>(defined))) return Violated(Assumption::kTestProgram);
  absl::Status status = CheckCodeLayout(PyDict_GetItemString(globals.get(), "straight"));
  if (status.ok()) status = CheckAttributes(PyDict_GetItemString(globals.get(), "Box"));
  if (status.ok()) status = CheckLayouts(globals.get(), thread);
  if (status.ok()) status = CheckExtent(globals.get(), thread);
  if (status.ok()) status = CheckVectorcall(globals.get());
  PyDict_Clear(globals.get());  // functions and their globals hold each other
  return status;
}

}  // namespace

absl::Status InterpreterSelfTest() {
  static absl::Status* verdict = nullptr;  // leaked: no destructor may run after the interpreter
  if (verdict != nullptr) return *verdict;
  ErrorScope errors;
  PyThreadState* thread = PyThreadState_Get();
  // A debugger or a coverage tool is not told about the throw-away program.
  PyThreadState_EnterTracing(thread);
  absl::Status status = RunChecks(thread);
  PyThreadState_LeaveTracing(thread);
  PyErr_Clear();
  // Another trace or evaluator in the way says nothing about the interpreter: ask again.
  if (status.code() == absl::StatusCode::kFailedPrecondition) return status;
  verdict = new absl::Status(std::move(status));
  return *verdict;
}

}  // namespace cuvil::agent
