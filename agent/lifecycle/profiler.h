#pragma once

#include <Python.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "agent/capture.h"
#include "agent/py_ref.h"
#include "scheduler/kernel_profile.h"
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

  // Begins a profile and gives its number. `no_kernels`: why it is to have none of a GPU's, as a sentence, or empty.
  //
  // Errors: FailedPrecondition  there is one already
  static absl::StatusOr<uint64_t> Start(std::string no_kernels);
  // Ends the profile with that number; what it recorded, as _native.pyi describes it. None if it is not this process's
  // any more: a fork leaves it to the parent. `shared`: torch.profiler is at work, and must go on being so.
  static OwnedRef Stop(uint64_t number, bool shared);

  // In the child of a fork, where other threads are gone in the middle of what they were recording.
  static void AfterForkInChild();

 private:
  friend class ProfiledCall;
  inline static std::atomic<bool> active_{false};
};

// What of a plan sites are for: its operators one by one, its graph, or the graph's tail.
enum class PlanPart : uint8_t { kSteps, kGraph, kTail };
inline constexpr uint64_t kNumPlanParts = 3;

// Records one module call, from the interception to its return, while it lives. Make one only under active().
class ProfiledCall {
 public:
  explicit ProfiledCall(PyObject* module);
  ~ProfiledCall();
  ProfiledCall(const ProfiledCall&) = delete;
  ProfiledCall& operator=(const ProfiledCall&) = delete;

  void set_kind(scheduler::ProfileKind kind) { site_.kind = kind; }

  // Null: kernels are not recorded.
  const std::shared_ptr<scheduler::KernelProfile>& kernels() const { return kernels_; }
  // As kernels() knows this call.
  uint64_t kernel_call() const { return kernel_call_; }

  // The number of the first of a plan's sites, which `make` makes for a module's path if they are not there. No GIL.
  template <typename Make>
  uint64_t AddSites(uint64_t plan_number, PlanPart part, Make&& make) const {
    const uint64_t key = plan_number * kNumPlanParts + static_cast<uint64_t>(part);
    return recorder_->AddSites(key, site_.module, [&] { return make(site_.module); });
  }

 private:
  friend class StepRecorder;
  inline static thread_local constinit ProfiledCall* innermost_ = nullptr;

  PyObject* const module_;
  ProfiledCall* const outer_;
  std::shared_ptr<scheduler::ProfileRecorder> recorder_;  // null: the profile ended meanwhile
  scheduler::ProfileTrack* track_ = nullptr;
  scheduler::ProfileSite site_;
  std::shared_ptr<scheduler::KernelProfile> kernels_;
  uint64_t kernel_call_ = scheduler::KernelProfile::kNoCall;
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
// Threads: made with the GIL held, or with the GIL released inside of the call; OnStep without it.
class StepRecorder final : public scheduler::StepObserver {
 public:
  // The call of `module` that this thread is in the middle of, if it is recorded. Null otherwise: a profile may have
  // begun after the call had been intercepted.
  static const ProfiledCall* CallOf(PyObject* module) { return ProfilePause::paused() ? nullptr : AnyCallOf(module); }
  // The same also while the call is timed, and its steps are not recorded.
  static const ProfiledCall* AnyCallOf(PyObject* module) {
    const ProfiledCall* call = ProfiledCall::innermost_;
    return call != nullptr && call->module_ == module && call->recorder_ != nullptr ? call : nullptr;
  }

  // `plan_number` tells plans apart over the life of the process; `make` is as of ProfiledCall::AddSites.
  template <typename Make>
  StepRecorder(const ProfiledCall& call, uint64_t plan_number, PlanPart part, Make&& make)
      : recorder_(call.recorder_),
        kernels_(call.kernels_),
        track_(call.track_),
        first_site_(call.AddSites(plan_number, part, make)) {}
  // A step that ended by an exception has not been told to end.
  ~StepRecorder() override { LeaveStep(); }
  StepRecorder(const StepRecorder&) = delete;
  StepRecorder& operator=(const StepRecorder&) = delete;

  void OnStepStart(uint32_t index) noexcept override;
  void OnStep(uint32_t index, uint64_t start_ns, uint64_t end_ns) noexcept override;
  scheduler::StepObserver* observer() { return this; }

 private:
  uint64_t SiteOf(uint32_t index) const {
    const bool has_site = first_site_ != scheduler::ProfileRecorder::kNoSite;
    return has_site ? first_site_ + index : scheduler::ProfileRecorder::kNoSite;
  }

  void LeaveStep() {
    if (entered_) kernels_->Leave();
    entered_ = false;
  }

  const std::shared_ptr<scheduler::ProfileRecorder> recorder_;
  const std::shared_ptr<scheduler::KernelProfile> kernels_;
  scheduler::ProfileTrack* const track_;
  const uint64_t first_site_;
  bool entered_ = false;
};

}  // namespace cuvil::agent
