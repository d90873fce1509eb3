#include "agent/frame_hook.h"

#include <pthread.h>

#include <cstring>
#include <string>
#include <utility>

#include "agent/cpython_compat_internal.h"
#include "agent/fault_injection.h"
#include "agent/instrument.h"
#include "agent/py_ref.h"

namespace cuvil::agent {

struct TraceExtent::State {
  ProbeSink* sink;
  PyThreadState* thread;
  uint64_t serial;
  uint64_t mismatches_at_begin;
  // Callbacks under way and UnobservedScopes: nothing is announced while it is not zero.
  int paused = 0;
  // While the C stack is nearly used up the hook is out, so that deeper frames cost none of it.
  int unhooked = 0;
  absl::Status status;
  ExtentStatistics statistics;
};

namespace {

using State = TraceExtent::State;

State* g_state = nullptr;
uint64_t g_next_serial = 1;

PyObject* Hook(PyThreadState* thread, _PyInterpreterFrame* frame, int throw_flag);

void Install(PyInterpreterState* interpreter) { _PyInterpreterState_SetEvalFrameFunc(interpreter, Hook); }

bool IsInstalled(PyInterpreterState* interpreter) { return _PyInterpreterState_GetEvalFrameFunc(interpreter) == Hook; }

// Somebody who installed an evaluator after us would lose it if we reset ours.
void Uninstall(PyInterpreterState* interpreter) {
  if (IsInstalled(interpreter)) _PyInterpreterState_SetEvalFrameFunc(interpreter, _PyEval_EvalFrameDefault);
}

void Fail(State* state, absl::Status status) {
  if (state->status.ok()) state->status = std::move(status);
}

void UpdateProbes(State* state) {
  Instrumenter::SetProbedThread(state->paused == 0 && state->unhooked == 0 ? state->thread : nullptr);
}

// Stops announcing for a scope.
class Pause {
 public:
  explicit Pause(State* state) : state_(state) {
    if (state_->paused++ == 0) Instrumenter::SetProbedThread(nullptr);
  }
  ~Pause() {
    if (--state_->paused == 0) UpdateProbes(state_);
  }
  Pause(const Pause&) = delete;
  Pause& operator=(const Pause&) = delete;

 private:
  State* state_;
};

// A hooked frame takes C stack where an inlined one takes none, so a recursion that the interpreter allows could run
// into the guard page. Below this address the hook steps aside.
const char* StackFloor() {
  thread_local const char* floor = [] {
    pthread_attr_t attributes;
    void* low = nullptr;
    size_t size_bytes = 0;
    if (pthread_getattr_np(pthread_self(), &attributes) != 0) return static_cast<const char*>(nullptr);
    pthread_attr_getstack(&attributes, &low, &size_bytes);
    pthread_attr_destroy(&attributes);
    // Half a small stack, 2 MiB of a large one, is left to what the deepest frame calls: BLAS and oneDNN are C++ with
    // buffers on the stack.
    constexpr size_t kReserveBytes = size_t{2} << 20;
    size_t reserve_bytes = size_bytes / 2 < kReserveBytes ? size_bytes / 2 : kReserveBytes;
    return static_cast<const char*>(low) + reserve_bytes;
  }();
  return floor;
}

bool StackIsLow() { return static_cast<const char*>(__builtin_frame_address(0)) < StackFloor(); }

PyObject* Evaluate(PyThreadState* thread, _PyInterpreterFrame* frame, int throw_flag) {
  compat::RecursionCredit credit(thread);
  return _PyEval_EvalFrameDefault(thread, frame, throw_flag);
}

// Runs a frame of the tracing thread with the hook out of the way.
PyObject* EvaluateUnhooked(State* state, PyThreadState* thread, _PyInterpreterFrame* frame, int throw_flag) {
  const uint64_t serial = state->serial;
  ++state->unhooked;
  Uninstall(thread->interp);
  UpdateProbes(state);
  PyObject* result = Evaluate(thread, frame, throw_flag);
  if (g_state == nullptr || g_state->serial != serial) return result;
  if (--state->unhooked == 0) {
    // A foreign evaluator that came meanwhile stays; the end of the extent notices it.
    if (_PyInterpreterState_GetEvalFrameFunc(thread->interp) == _PyEval_EvalFrameDefault) Install(thread->interp);
    UpdateProbes(state);
  }
  return result;
}

bool NameIsOurs(PyObject* globals) {
  static PyObject* key = PyUnicode_InternFromString("__name__");
  if (key == nullptr || !PyDict_Check(globals)) return false;
  PyObject* name = PyDict_GetItem(globals, key);  // suppresses errors; none are pending here
  if (name == nullptr || !PyUnicode_Check(name)) return false;
  const char* text = PyUnicode_AsUTF8(name);
  if (text == nullptr) {
    PyErr_Clear();
    return false;
  }
  return std::strncmp(text, "cuvil", 5) == 0 && (text[5] == '\0' || text[5] == '.');
}

// Frames of the package itself are not the user's program.
bool IsOurs(_PyInterpreterFrame* frame, CodeRecord* record) {
  PyObject* globals = frame->f_globals;
  if (record == nullptr) return NameIsOurs(globals);
  if (record->checked_globals != globals) {
    record->globals_are_ours = NameIsOurs(globals);
    record->checked_globals = globals;
  }
  return record->globals_are_ours;
}

constexpr char kNoRoom[] = "the interpreter's stack chunk was full";
constexpr char kStartedOutside[] = "the generator was created without instrumentation, outside this trace";
constexpr char kOriginalGone[] = "the code of its function was replaced while it ran";
constexpr char kEnteredInside[] = "the frame was entered in the middle";
constexpr char kTooDeep[] = "the recursion is too deep to follow";
constexpr char kNoMemory[] = "its instrumented copy could not be made";

// Points a frame that has not started to the instrumented copy. Null, or why it runs the original.
const char* Instrument(State* state, PyThreadState* thread, _PyInterpreterFrame* frame, CodeRecord* record,
                       int allocated_stack) {
  if (record == nullptr) {
    Fail(state, absl::InternalError(kNoMemory));
    return kNoMemory;
  }
  if (record->copy() == nullptr) {
    ++state->statistics.frames_refused_code;
    return record->refusal();
  }
  const int growth = record->copy()->co_stacksize - allocated_stack;
  if (growth > 0 && !compat::GrowTopFrame(thread, frame, record->original(), allocated_stack, growth)) {
    ++state->statistics.frames_no_room;
    return kNoRoom;
  }
  compat::SetFrameCode(frame, record->copy());
  return nullptr;
}

struct Entry {
  PyCodeObject* code;  // the original
  const char* why_not;
  bool ours;
};

Entry Enter(State* state, PyThreadState* thread, _PyInterpreterFrame* frame, int throw_flag) {
  PyCodeObject* code = compat::FrameCode(frame);
  CodeRecord* record = Instrumenter::FindRecord(code);
  if (IsOurs(frame, record)) return {code, nullptr, true};
  if (Instrumenter::IsCopy(code)) {
    // A generator that was created in this extent or an earlier one, or a function made from such a frame's f_code.
    if (record == nullptr) return {code, kOriginalGone, false};
    return {record->original(), nullptr, false};
  }
  if (compat::Owner(frame) == FrameOwner::kGenerator) {
    ++state->statistics.frames_started_outside;
    return {code, kStartedOutside, false};
  }
  if (throw_flag != 0 || compat::InstructionPointer(frame) != compat::EntryPointer(code)) {
    return {code, kEnteredInside, false};
  }
  const int allocated_stack = code->co_stacksize;  // RecordFor may raise it
  if (record == nullptr) record = Instrumenter::RecordFor(code);
  return {code, Instrument(state, thread, frame, record, allocated_stack), false};
}

PyObject* RunAnnounced(State* state, PyThreadState* thread, _PyInterpreterFrame* frame, int throw_flag) {
  const uint64_t serial = state->serial;
  const FrameOwner owner = compat::Owner(frame);
  // Both outlive the run: the callback at the end needs them.
  OwnedRef generator = owner == FrameOwner::kGenerator
                           ? OwnedRef::New(reinterpret_cast<PyObject*>(compat::Generator(frame)))
                           : OwnedRef();
  // Swapping the frame's code drops a reference to the original, which may be its last one but for this.
  OwnedRef original = OwnedRef::New(reinterpret_cast<PyObject*>(compat::FrameCode(frame)));
  // The evaluator links the frame when it starts, but the callback before that may want to know the caller.
  frame->previous = compat::TopFrame(thread);
  const bool too_deep = StackIsLow();
  Entry entry;
  {
    ErrorScope errors;  // throw() enters with the exception pending
    Pause pause(state);
    entry = Enter(state, thread, frame, throw_flag);
    if (!entry.ours) {
      original = OwnedRef::New(reinterpret_cast<PyObject*>(entry.code));
      ++state->statistics.frames;
      if (entry.why_not == nullptr) ++state->statistics.frames_instrumented;
      if (FaultInjected(FaultPoint::kHook)) Fail(state, absl::InternalError("injected fault: hook"));
      if (too_deep) {
        ++state->statistics.frames_too_deep;
        Fail(state, absl::ResourceExhaustedError(kTooDeep));
      }
      state->sink->OnFrameEnter(FrameView(frame, entry.code, owner), entry.why_not == nullptr && !too_deep,
                                too_deep ? kTooDeep : entry.why_not);
    }
  }
  PyObject* result =
      too_deep ? EvaluateUnhooked(state, thread, frame, throw_flag) : Evaluate(thread, frame, throw_flag);
  // The extent may have ended, or another one begun, inside the frame.
  if (entry.ours || g_state == nullptr || g_state->serial != serial) return result;

  FrameExit exit = FrameExit::kReturned;
  if (result == nullptr) {
    exit = FrameExit::kRaised;
  } else if (generator && compat::IsSuspended(reinterpret_cast<PyGenObject*>(generator.get()))) {
    exit = FrameExit::kYielded;
  }
  {
    ErrorScope errors;
    Pause pause(state);
    state->sink->OnFrameLeave(FrameView(frame, entry.code, owner), exit, result);
  }
  return result;
}

PyObject* Hook(PyThreadState* thread, _PyInterpreterFrame* frame, int throw_flag) {
  State* state = g_state;
  if (state == nullptr) {  // the extent ended, but somebody who had saved the hook still calls it
    return Evaluate(thread, frame, throw_flag);
  }
  if (thread == state->thread) {
    if (state->paused == 0 && state->unhooked == 0) return RunAnnounced(state, thread, frame, throw_flag);
    ++state->statistics.frames_in_sink;
    if (StackIsLow()) return EvaluateUnhooked(state, thread, frame, throw_flag);
    return Evaluate(thread, frame, throw_flag);
  }
  ++state->statistics.frames_other_thread;
  if (StackIsLow()) {
    // A deep recursion on another thread must go on as it would without us: give up the trace instead.
    Fail(state, absl::ResourceExhaustedError("another thread needed the frame evaluator to itself"));
    Uninstall(thread->interp);
  }
  return Evaluate(thread, frame, throw_flag);
}

void OnProbe(PyThreadState* thread, const FrameView& frame, const Site& site, PyObject** stack_top) {
  State* state = g_state;
  if (state == nullptr) return;
  ++state->statistics.probes;
  Pause pause(state);
  state->sink->OnProbe(frame, site, stack_top);
  if (compat::HasError(thread)) [[unlikely]] {
    PyErr_Clear();
    Fail(state, absl::InternalError("a probe left an exception behind"));
  }
}

}  // namespace

TraceExtent::TraceExtent(std::unique_ptr<State> state) : state_(std::move(state)) {}

absl::StatusOr<std::unique_ptr<TraceExtent>> TraceExtent::Begin(ProbeSink* sink, Observers observers) {
  PyThreadState* thread = PyThreadState_Get();
  if (thread->interp != PyInterpreterState_Main()) {
    return absl::UnimplementedError("calls are traced in the main interpreter only");
  }
  if (g_state != nullptr) {
    return absl::FailedPreconditionError(g_state->thread == thread ? "a trace is being taken already"
                                                                   : "a trace is being taken on another thread");
  }
  if (_PyInterpreterState_GetEvalFrameFunc(thread->interp) != _PyEval_EvalFrameDefault) {
    return absl::FailedPreconditionError(
        "another frame evaluator is installed (torch.compile, a debugger or a profiler)");
  }
  if (observers == Observers::kRefuse && ThreadIsObserved(thread)) {
    return absl::FailedPreconditionError("a trace function, a profiler or a monitoring tool is active");
  }
  if (absl::Status status = Instrumenter::Prepare(OnProbe); !status.ok()) return status;
  StackFloor();  // once per thread: reads /proc/self/maps on the main thread
  auto state = std::make_unique<State>();
  state->sink = sink;
  state->thread = thread;
  state->serial = g_next_serial++;
  state->mismatches_at_begin = Instrumenter::num_mismatches();
  std::unique_ptr<TraceExtent> extent(new TraceExtent(std::move(state)));
  g_state = extent->state_.get();
  UpdateProbes(g_state);
  Install(thread->interp);
  return extent;
}

TraceExtent::~TraceExtent() {
  Uninstall(state_->thread->interp);
  Instrumenter::SetProbedThread(nullptr);
  g_state = nullptr;
}

bool TraceExtent::AfterForkInChild() {
  PyThreadState* thread = PyThreadState_Get();
  if (g_state == nullptr || g_state->thread == thread) return false;
  // The sink was on that thread's stack.
  Uninstall(thread->interp);
  Instrumenter::SetProbedThread(nullptr);
  g_state = nullptr;
  return true;
}

absl::Status TraceExtent::status() const {
  if (!state_->status.ok()) return state_->status;
  if (!IsInstalled(state_->thread->interp)) {
    return absl::FailedPreconditionError("another frame evaluator was installed during the trace");
  }
  if (uint64_t count = Instrumenter::num_mismatches() - state_->mismatches_at_begin; count != 0) {
    return absl::InternalError(std::to_string(count) + " probes found another stack than the analysis had said");
  }
  return absl::OkStatus();
}

const ExtentStatistics& TraceExtent::statistics() const { return state_->statistics; }

UnobservedScope::UnobservedScope() : state_(nullptr) {
  if (g_state == nullptr || g_state->thread != PyThreadState_Get()) return;
  state_ = g_state;
  if (state_->paused++ == 0) Instrumenter::SetProbedThread(nullptr);
}

UnobservedScope::~UnobservedScope() {
  if (state_ == nullptr || state_ != g_state) return;  // the extent ended inside
  if (--state_->paused == 0) UpdateProbes(state_);
}

}  // namespace cuvil::agent
