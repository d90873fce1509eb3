#include "agent/interpreter_self_test.h"

#include <cstring>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "agent/cpython_compat_internal.h"
#include "agent/frame_hook.h"
#include "agent/instrument.h"
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

def program():
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
    while total > 3:
        total -= 1
    out.append(total)
    return out
)";

absl::Status Unexpected(const std::string& what) {
  return absl::UnimplementedError(
      absl::StrCat("this interpreter differs from CPython ", PY_MAJOR_VERSION, ".", PY_MINOR_VERSION, ": ", what));
}

absl::Status CheckBuild() {
  const unsigned long running = Py_Version;
  if ((running >> 16) != (PY_VERSION_HEX >> 16)) {
    return absl::UnimplementedError(absl::StrCat("this build is for CPython ", PY_MAJOR_VERSION, ".", PY_MINOR_VERSION,
                                                 ", not for ", running >> 24, ".", (running >> 16) & 0xFF));
  }
  if (PySys_GetObject("gettotalrefcount") != nullptr) {
    return absl::UnimplementedError("debug builds of CPython are not supported");
  }
  OwnedRef abi = OwnedRef::New(PySys_GetObject("abiflags"));
  if (abi && PyUnicode_Check(abi.get()) &&
      PyUnicode_FindChar(abi.get(), 't', 0, PyUnicode_GET_LENGTH(abi.get()), 1) >= 0) {
    return absl::UnimplementedError("free-threaded CPython is not supported");
  }
  if (PyImport_GetMagicNumber() % 65536 != kMagicNumber) {
    return Unexpected(absl::StrCat("its bytecode has the magic number ", PyImport_GetMagicNumber() % 65536));
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
    if (status < 0 || seen[i] == seen[i - 1]) return Unexpected("a change of a dict does not move its version");
  }
  PyDict_GetItemWithError(owned.get(), key.get());
  if (DictTag(dict) != seen[3]) return Unexpected("reading a dict moves its version");
  return absl::OkStatus();
}

absl::Status CheckAttributes(PyObject* box_type) {
  OwnedRef one = OwnedRef::Steal(PyLong_FromLong(1000003)), two = OwnedRef::Steal(PyLong_FromLong(1000033));
  OwnedRef box = OwnedRef::Steal(one ? PyObject_CallOneArg(box_type, one.get()) : nullptr);
  if (!box || !two) return Unexpected("an object cannot be made");
  PyDictObject* dict = InstanceDict(box.get());
  if (dict == nullptr || dict->ma_used != 1) return Unexpected("an object's attributes cannot be found");
  const uint64_t before = DictTag(dict);
  if (PyObject_SetAttrString(box.get(), "x", two.get()) < 0 || DictTag(dict) == before ||
      InstanceDict(box.get()) != dict) {
    return Unexpected("a store to an attribute does not move the version of the object's dict");
  }

  auto* type = reinterpret_cast<PyTypeObject*>(box_type);
  const uint32_t tag = TypeTag(type);
  if (tag == 0 || CurrentTypeTag(type) != tag) return Unexpected("a class gets no version tag");
  if (PyObject_SetAttrString(box_type, "unused", Py_None) < 0 || CurrentTypeTag(type) == tag || TypeTag(type) == 0 ||
      TypeTag(type) == tag) {
    return Unexpected("a change of a class does not move its version tag");
  }
  return absl::OkStatus();
}

absl::Status CheckCodeLayout(PyObject* function) {
  auto* code = reinterpret_cast<PyCodeObject*>(reinterpret_cast<PyFunctionObject*>(function)->func_code);
  OwnedRef bytes = OwnedRef::Steal(PyCode_GetCode(code));
  if (!bytes || PyBytes_GET_SIZE(bytes.get()) != Py_SIZE(code) * 2)
    return Unexpected("code objects are laid out otherwise");
  // a, c, b, d, e as the first locals; no cells, no free variables
  if (code->co_argcount != 2 || code->co_kwonlyargcount != 1 || code->co_nlocalsplus != 5 ||
      !PyTuple_Check(code->co_localsplusnames) || PyTuple_GET_SIZE(code->co_localsplusnames) != 5 ||
      !PyBytes_Check(code->co_localspluskinds) || PyBytes_GET_SIZE(code->co_localspluskinds) != 5) {
    return Unexpected("code objects are laid out otherwise");
  }
  if (static_cast<unsigned char>(PyBytes_AS_STRING(bytes.get())[0]) != compat::kResume) {
    return Unexpected("functions do not begin with RESUME");
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

  const char* wrong() const { return wrong_; }
  const std::vector<int>& straight_offsets() const { return straight_offsets_; }
  int num_resumes() const { return num_resumes_; }
  int num_yields() const { return num_yields_; }
  int num_calls() const { return num_calls_; }

  void OnFrameEnter(const FrameView& frame, bool instrumented, const char* /*why_not*/) noexcept override {
    ++depth_;
    Expect(instrumented, "a frame cannot be instrumented");
    Expect(PyCode_Check(reinterpret_cast<PyObject*>(frame.code())), "a frame has no code");
    Expect(frame.globals() == globals_, "a frame's globals are elsewhere");
    Expect(frame.builtins() != nullptr && PyDict_Check(frame.builtins()), "a frame's builtins are elsewhere");
    PyFunctionObject* function = frame.function();
    Expect(function != nullptr && function->func_code == reinterpret_cast<PyObject*>(frame.code()),
           "a frame's function is elsewhere");
    FrameView caller = frame.previous();
    if (depth_ > 1) Expect(static_cast<bool>(caller) && caller.globals() == globals_, "a frame's caller is elsewhere");
    if (frame.resumed()) {
      ++num_resumes_;
      PyObject* generator = frame.generator();
      Expect(generator != nullptr && PyGen_CheckExact(generator), "a generator's frame is elsewhere");
    }
    CheckRecursion(frame);
  }

  void OnFrameExit(const FrameView&, bool) noexcept override {}

  void OnFrameLeave(const FrameView&, FrameExit exit, PyObject* result) noexcept override {
    --depth_;
    if (exit == FrameExit::kYielded) ++num_yields_;
    Expect((exit == FrameExit::kRaised) == (result == nullptr), "a frame's result is elsewhere");
  }

  void OnProbe(const FrameView& frame, const Site& site, PyObject** stack_top) noexcept override {
    Expect(site.op != Op::kUnknown, "an instruction is not known");
    Expect(CurrentFrame(thread_).id() == frame.id(), "the current frame is elsewhere");
    for (int i = 1; i <= site.depth; ++i) {
      PyObject* value = stack_top[-i];
      if (value != nullptr)
        Expect(Py_REFCNT(value) > 0 && Py_TYPE(Py_TYPE(value)) != nullptr, "the stack is elsewhere");
    }
    if (frame.code() == straight_) {
      straight_offsets_.push_back(site.offset);
      PyObject* argument = frame.localsplus()[0];
      Expect(argument != nullptr && PyLong_CheckExact(argument) && PyLong_AsLong(argument) == 1,
             "a frame's locals are elsewhere");
    }
    if (site.op == Op::kLoadAttr || site.op == Op::kLoadGlobal || site.op == Op::kLoadMethod) {
      PyObject* name = NameOperand(frame, site);
      Expect(name != nullptr && PyUnicode_Check(name), "an instruction's name is elsewhere");
    }
    CallSiteView call;
    if (DecodeCall(frame, site, stack_top, &call)) {
      ++num_calls_;
      Expect(PyCallable_Check(call.callable) != 0, "a call's callable is elsewhere");
      if (call.kwnames != nullptr) {
        Expect(PyTuple_Check(call.kwnames) && PyTuple_GET_SIZE(call.kwnames) <= call.nargs,
               "a call's keyword names are elsewhere");
      }
      for (Py_ssize_t i = 0; i < call.nargs; ++i) Expect(call.args[i] != nullptr, "a call's arguments are elsewhere");
    }
    CallExView call_ex;
    if (DecodeCallEx(frame, site, stack_top, &call_ex)) {
      ++num_calls_;
      Expect(PyCallable_Check(call_ex.callable) != 0 && PyTuple_Check(call_ex.positional) &&
                 (call_ex.keywords == nullptr || PyDict_Check(call_ex.keywords)),
             "a call's arguments are elsewhere");
    }
  }

 private:
  void Expect(bool condition, const char* otherwise) {
    if (!condition && wrong_ == nullptr) wrong_ = otherwise;
  }

  // Nested calls must not use up the C recursion that the interpreter allows.
  void CheckRecursion(const FrameView& frame) {
#if CUVIL_PY311
    static_cast<void>(frame);
#else
    if (std::strcmp(PyUnicode_AsUTF8(frame.code()->co_name), "nest") != 0) return;
    if (nest_remaining_ == 0) nest_remaining_ = thread_->c_recursion_remaining;
    Expect(thread_->c_recursion_remaining == nest_remaining_, "recursion is counted otherwise");
#endif
  }

  PyObject* globals_;
  PyCodeObject* straight_;
  PyThreadState* thread_;
  const char* wrong_ = nullptr;
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
  OwnedRef expected = OwnedRef::Steal(PyObject_CallNoArgs(program));
  if (!expected) return Unexpected("the test program fails");

  CheckingSink sink(globals, straight, thread);
  // Often enough for the interpreter to specialise the copies' instructions.
  constexpr int kRounds = 12;
  for (int round = 0; round < kRounds; ++round) {
    absl::StatusOr<std::unique_ptr<TraceExtent>> extent = TraceExtent::Begin(&sink, Observers::kIgnore);
    if (!extent.ok()) return extent.status();
    OwnedRef result = OwnedRef::Steal(PyObject_CallNoArgs(program));
    absl::Status status = (*extent)->status();
    extent->reset();
    if (!result || PyObject_RichCompareBool(result.get(), expected.get(), Py_EQ) != 1) {
      return Unexpected("instrumented code computes something else");
    }
    if (!status.ok()) return Unexpected(std::string(status.message()));
    if (sink.wrong() != nullptr) return Unexpected(sink.wrong());
  }

  auto* code = reinterpret_cast<PyCodeObject*>(reinterpret_cast<PyFunctionObject*>(straight)->func_code);
  const std::vector<Site>& sites = Instrumenter::FindRecord(code)->sites();
  const std::vector<int>& seen = sink.straight_offsets();
  constexpr int kCallsOfStraight = 3;
  bool complete = seen.size() == sites.size() * kCallsOfStraight * kRounds && !sites.empty();
  for (size_t i = 0; complete && i < seen.size(); ++i) complete = seen[i] == sites[i % sites.size()].offset;
  if (!complete) return Unexpected("instructions run unannounced");
  // generate(3): three values, then close() raises inside. generate(4) and the expression around it: four values and an
  // end for each.
  constexpr int kYields = 11, kResumes = 14;
  if (sink.num_yields() != kYields * kRounds || sink.num_resumes() != kResumes * kRounds) {
    return Unexpected("generators are resumed otherwise");
  }
  if (sink.num_calls() == 0) return Unexpected("calls run unannounced");
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
  if (!done) return Unexpected("the test program fails");
  PyObject* type = PyDict_GetItemString(globals, "Callable");
  PyObject* calls = PyDict_GetItemString(globals, "calls");
  OwnedRef function = OwnedRef::Steal(PyObject_GetAttrString(type, "__call__"));
  OwnedRef target = OwnedRef::Steal(PyObject_CallNoArgs(type));
  if (!function || !PyFunction_Check(function.get()) || !target) return Unexpected("the test program fails");
  auto* raw = reinterpret_cast<PyFunctionObject*>(function.get());
  g_forward = raw->vectorcall;
  g_num_counted = 0;
  compat::SetVectorcall(raw, CountCall);
  OwnedRef first = OwnedRef::Steal(PyObject_CallOneArg(calls, target.get()));
  compat::SetVectorcall(raw, g_forward);
  OwnedRef second = OwnedRef::Steal(PyObject_CallOneArg(calls, target.get()));
  if (!first || !second || PyLong_AsLong(first.get()) != 190 || PyLong_AsLong(second.get()) != 190 ||
      g_num_counted != 20) {
    return Unexpected("calls of a function pass by its vectorcall slot");
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
  if (!defined) return Unexpected("the test program does not compile");
  absl::Status status = CheckCodeLayout(PyDict_GetItemString(globals.get(), "straight"));
  if (status.ok()) status = CheckAttributes(PyDict_GetItemString(globals.get(), "Box"));
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
