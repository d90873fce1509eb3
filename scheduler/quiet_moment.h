// Does something to CUPTI at a moment when nothing of the process runs on a device and no thread is inside of CUDA.
//
// CUPTI's state may not be changed under kernels that run: what it then takes away, they still write to, and the
// process cannot use its device any more ("unspecified launch failure", seen on an H200, driver 580, CUPTI 13.0). The
// caller holds the GIL, so that no Python thread can begin anything. The device has to be found idle several times;
// after that CUPTI's callbacks of calls tell of threads that launch without the GIL.
//
// Threads:   one at a time, which should hold the GIL. Waits some ten milliseconds; each wait for the device is
// bounded. Errors:    Unavailable         no such moment was found, or the device cannot be waited for; nothing has
// been changed
//            FailedPrecondition  another tool holds CUPTI; nothing has been changed
//            else                what `action` returns
#pragma once

#include <chrono>
#include <functional>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "scheduler/cupti_api.h"

namespace cuvil::scheduler {

struct QuietMomentOptions {
  // Longer than a call of CUDA takes that does not wait for the device.
  std::chrono::microseconds quiet{2000};
  std::chrono::milliseconds wait_limit{500};
  int num_rounds = 10;
};

// Waits for all work of the process; runs on a thread of its own, because the work may need the GIL to end.
using SynchronizeFunction = std::function<absl::Status()>;

absl::Status AtQuietMoment(const CuptiApi& api, const SynchronizeFunction& synchronize,
                           absl::FunctionRef<absl::Status()> action, const QuietMomentOptions& options = {});

// The same without asking CUPTI of calls: at a moment when the device is found idle.
absl::Status AtIdleMoment(const SynchronizeFunction& synchronize, absl::FunctionRef<absl::Status()> action,
                          const QuietMomentOptions& options = {});

// Whether torch.profiler has left CUPTI attached: it stays subscribed for good, and gives CUPTI a clock of its own.
// That is no other tool; CUPTI cannot tell of calls then.
bool TorchLeftCupti(const CuptiApi& api);

}  // namespace cuvil::scheduler
