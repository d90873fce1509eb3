// For the life of a TraceExtent, every Python frame that its thread enters is announced, instruction by instruction.
//
// The PEP 523 hook is installed when the extent begins and removed when it ends; other threads run untouched meanwhile.
//
// Threads:   GIL held. One extent at a time in the process.
// Errors:    FailedPrecondition  an extent is active (on this or another thread), another frame evaluator is installed,
//                                or the thread is observed (sys.settrace, sys.setprofile, sys.monitoring)
//            Unimplemented       not the main interpreter
#pragma once

#include <Python.h>

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "agent/cpython_compat.h"

namespace cuvil::agent {

enum class FrameExit : uint8_t { kReturned, kYielded, kRaised };

// Receives what happens on the tracing thread. Callbacks must not let a Python exception escape; the error indicator is
// clear when they are called and is restored afterwards. Python code that runs inside a callback is not announced but
// counted (frames_in_sink); on 3.11 allocating a container there may collect garbage, which runs finalizers.
class ProbeSink {
 public:
  virtual ~ProbeSink() = default;
  // Before the frame's first instruction; for a generator at every resume (frame.resumed()). `instrumented` false: no
  // probe will come from this frame, for the reason `why_not` (static storage), though frames it calls are announced.
  virtual void OnFrameEnter(const FrameView& frame, bool instrumented, const char* why_not) noexcept = 0;
  // Before the instruction. stack_top[-1] is the top of the operand stack; entries may be null (PUSH_NULL, methods).
  virtual void OnProbe(const FrameView& frame, const Site& site, PyObject** stack_top) noexcept = 0;
  // After the frame ran; `raised`: it left through an exception. Only id(), code() are valid: the frame is gone.
  virtual void OnFrameExit(const FrameView& frame, bool raised) noexcept = 0;
  // The same event with more detail; a sink overrides one of the two. `result` is the value returned or yielded
  // (for frame.creates_generator(): the generator), null if raised.
  virtual void OnFrameLeave(const FrameView& frame, FrameExit exit, PyObject* /*result*/) noexcept {
    OnFrameExit(frame, exit == FrameExit::kRaised);
  }
};

struct ExtentStatistics {
  uint64_t frames = 0;  // announced
  uint64_t frames_instrumented = 0;
  uint64_t frames_no_room = 0;  // the stack chunk was full; the next call finds room
  uint64_t frames_refused_code = 0;
  uint64_t frames_started_outside = 0;  // generators whose body began before the extent
  uint64_t frames_too_deep = 0;         // the C stack was nearly used up
  uint64_t frames_in_sink = 0;          // Python code that ran inside a callback: not announced
  uint64_t frames_other_thread = 0;
  uint64_t probes = 0;
};

enum class Observers : uint8_t {
  kRefuse,
  kIgnore,  // for code of our own that no observer is told about
};

class TraceExtent {
 public:
  static absl::StatusOr<std::unique_ptr<TraceExtent>> Begin(ProbeSink* sink, Observers observers = Observers::kRefuse);
  ~TraceExtent();
  TraceExtent(const TraceExtent&) = delete;
  TraceExtent& operator=(const TraceExtent&) = delete;

  // In the child of a fork: ends the extent of another thread, which the fork left behind. True if there was one.
  static bool AfterForkInChild();

  // Not OK: something ran unseen, so that what the sink saw is incomplete and must be thrown away.
  // FailedPrecondition: another evaluator took the hook's place; ResourceExhausted: recursion too deep to follow;
  // Internal: a probe did not find what the analysis had said.
  absl::Status status() const;
  const ExtentStatistics& statistics() const;

  struct State;

 private:
  explicit TraceExtent(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

// While it lives, nothing that the tracing thread does is announced: for the tracer's own use of Python.
// On other threads, and without an extent, it does nothing. Nests.
class UnobservedScope {
 public:
  UnobservedScope();
  ~UnobservedScope();
  UnobservedScope(const UnobservedScope&) = delete;
  UnobservedScope& operator=(const UnobservedScope&) = delete;

 private:
  TraceExtent::State* state_;
};

}  // namespace cuvil::agent
