#pragma once

#include <Python.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "agent/capture.h"
#include "agent/py_ref.h"
#include "agent/trace/trace.h"
#include "scheduler/execution_plan.h"
#include "scheduler/profile_recorder.h"
#include "scheduler/step_observer.h"

namespace cuvil::agent {

// The profile that this process takes, of which there is at most one.
//
// While there is none, a call that Cuvil intercepts pays one relaxed load, and a plan's run another one.
//
// Threads: GIL held, but for active().
class Profiler {
 public:
  static bool active() { return active_.load(std::memory_order_relaxed); }

  // Begins a profile and gives its number.
  //
  // Errors: FailedPrecondition  there is one already
  static absl::StatusOr<uint64_t> Start();
  // Ends the profile with that number; what it recorded, as _native.pyi describes it. None if it is not this process's
  // any more: a fork leaves it to the parent.
  static OwnedRef Stop(uint64_t number);

  // In the child of a fork, where other threads are gone in the middle of what they were recording.
  static void AfterForkInChild();

 private:
  friend class ProfiledCall;
  inline static std::atomic<bool> active_{false};
};

// Records one module call, from the interception to its return, while it lives. Make one only under active().
class ProfiledCall {
 public:
  explicit ProfiledCall(PyObject* module);
  ~ProfiledCall();
  ProfiledCall(const ProfiledCall&) = delete;
  ProfiledCall& operator=(const ProfiledCall&) = delete;

  void set_kind(scheduler::ProfileKind kind) { site_.kind = kind; }

 private:
  friend class StepRecorder;
  inline static thread_local constinit ProfiledCall* innermost_ = nullptr;

  PyObject* const module_;
  ProfiledCall* const outer_;
  std::shared_ptr<scheduler::ProfileRecorder> recorder_;  // null: the profile ended meanwhile
  scheduler::ProfileTrack* track_ = nullptr;
  scheduler::ProfileSite site_;
  uint64_t start_ns_ = 0;
};

// While it lives, calls inside of the one at hand, and its plan's steps, are not recorded on this thread: that one is
// being timed to decide whether its plan is worth having, and recording would be part of the time.
class ProfilePause {
 public:
  explicit ProfilePause(bool wanted) : before_(paused_) { paused_ = before_ || wanted; }
  ~ProfilePause() { paused_ = before_; }
  ProfilePause(const ProfilePause&) = delete;
  ProfilePause& operator=(const ProfilePause&) = delete;
  static bool paused() { return paused_; }

 private:
  inline static thread_local constinit bool paused_ = false;
  const bool before_;
};

// Records the steps of one run of a plan.
//
// Threads: made with the GIL held; OnStep without it.
class StepRecorder final : public scheduler::StepObserver {
 public:
  // `plan_number` tells plans apart over the life of the process.
  StepRecorder(PyObject* module, uint64_t plan_number, const scheduler::ExecutionPlan& plan, const trace::Trace& trace);
  void OnStep(uint32_t index, uint64_t start_ns, uint64_t end_ns) noexcept override;
  // Null if there is nothing to record this run on.
  scheduler::StepObserver* observer() { return track_ == nullptr ? nullptr : this; }

 private:
  std::shared_ptr<scheduler::ProfileRecorder> recorder_;
  scheduler::ProfileTrack* track_ = nullptr;
  uint64_t first_site_ = scheduler::ProfileRecorder::kNoSite;
};

}  // namespace cuvil::agent
