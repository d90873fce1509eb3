#pragma once

#include <Python.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "agent/py_ref.h"
#include "scheduler/kernel_profile.h"
#include "scheduler/live_sampler.h"

namespace cuvil::agent {

// Decides when a profile attaches CUPTI, and tells Python what came of it.
//
// A profile may begin before torch uses CUDA, or before torch is imported: initialising CUDA is the program's business,
// because a process that has done so cannot fork workers that use it. So CUPTI is attached by the first intercepted
// call after that, if not at the beginning. When it cannot be had the profile has no kernels, and says why. The GPUs'
// counters are sampled meanwhile, with or without CUPTI.
//
// Threads: GIL held.
class DeviceProfiler {
 public:
  // `refusal`: a sentence on why there are to be no kernels of a GPU that is used; empty: there may be.
  explicit DeviceProfiler(std::string refusal);

  // Before one is made: waits for the devices if torch uses CUDA, with the GIL released, and gives a refusal if other
  // threads use them.
  static std::string WaitForDevices();

  // Attaches CUPTI if that has not been tried and torch uses CUDA.
  void AttachIfDue() {
    if (due_) [[unlikely]]
      AttachLate();
  }
  // Null: nothing is attached.
  const std::shared_ptr<scheduler::KernelProfile>& kernels() const { return kernels_; }

  // Ends the recording; waits for the device, some milliseconds of it with the GIL held (scheduler/quiet_moment.h).
  // `shared`: torch.profiler is at work.
  void Finish(bool shared);
  void AfterForkInChild() {
    if (kernels_ != nullptr) kernels_->AfterForkInChild();
  }
  // After Finish: "device" and "counters" of the record that _native.pyi describes. None if no device was watched.
  OwnedRef Describe() const;
  OwnedRef DescribeCounters() const;
  const std::vector<std::string>& notes() const { return notes_; }

 private:
  void Attach();
  // Inside of the profile, where other threads cannot be watched without letting go of the GIL: only if there is none.
  void AttachLate();
  void AttachCupti();
  void FinishSampling();
  void Take(scheduler::DeviceProfile result);

  bool due_ = true;
  std::string refusal_;
  std::shared_ptr<scheduler::KernelProfile> kernels_;
  bool watched_ = false;
  scheduler::DeviceProfile result_;
  scheduler::LiveSampler::Use sampling_;
  uint64_t sampled_since_ns_ = 0;  // 0: no
  std::vector<scheduler::LiveSample> samples_;
  std::vector<std::string> notes_;
};

}  // namespace cuvil::agent
