// Takes CUPTI out of the process, at a moment when nothing of the process runs on a device.
//
// Attached, CUPTI makes graphs a quarter slower even when it records nothing, so a profile has to end with
// cuptiFinalize(). That frees memory which kernels launched under CUPTI write to: one that is still running ends in an
// error after which the process cannot use its device any more (seen on an H200, driver 580, CUPTI 13.0). So it is done
// only when no thread has entered CUDA for a while and the device is idle. The caller holds the GIL, so that no Python
// thread can begin anything; threads that are inside of CUDA, or launch without the GIL, are noticed by CUPTI's
// callbacks of calls.
//
// Threads:   one at a time, which should hold the GIL. Waits some milliseconds; the wait for the device is bounded.
// Errors:    Unavailable         no such moment was found, or the device cannot be waited for; CUPTI stays
//            FailedPrecondition  another tool holds CUPTI, which stays
#pragma once

#include <chrono>
#include <functional>

#include "absl/status/status.h"
#include "scheduler/cupti_api.h"

namespace cuvil::scheduler {

struct CuptiRemovalOptions {
  // Longer than a call of CUDA takes that does not wait for the device.
  std::chrono::microseconds quiet{2000};
  std::chrono::milliseconds wait_limit{500};
  int num_rounds = 10;
};

// Waits for all work of the process; runs on a thread of its own, because the work may need the GIL to end.
using SynchronizeFunction = std::function<absl::Status()>;

absl::Status RemoveCupti(const CuptiApi& api, const SynchronizeFunction& synchronize,
                         const CuptiRemovalOptions& options = {});

// Whether torch.profiler has left CUPTI attached: it stays subscribed for good, and gives CUPTI a clock of its own.
bool TorchLeftCupti(const CuptiApi& api);

// The same where torch.profiler has left its subscriber, so that nobody can be told of calls: the device has to be
// found idle several times.
absl::Status RemoveCuptiThatTorchLeft(const CuptiApi& api, const SynchronizeFunction& synchronize,
                                      const CuptiRemovalOptions& options = {});

}  // namespace cuvil::scheduler
