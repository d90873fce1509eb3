// Proves on throw-away tensors what calls of libtorch rely on, before a plan relies on it.
//
// The C shim must work, else nothing does. Each feature of the C++ ABI is tried by operators whose results would differ
// if an argument were laid out otherwise; a feature that fails is not used, and what needs it goes another way.
//
// Threads:   one call, inside TorchApi::Load, on a fresh thread. Takes 10 to 40 ms, most of it torch's first-call
// costs. GIL:       not needed; the caller may hold it. Errors:    FailedPrecondition  the C shim did not do what it
// should
#pragma once

#include "absl/status/status.h"
#include "scheduler/torch/torch_api.h"

namespace cuvil::torch_abi {

class SelfTest {
 public:
  static absl::Status Run(TorchApi& api);

  // For tests, before the one call: the first result is expected to be another one.
  static inline bool expects_other_results = false;

 private:
  // Finds the bit that makes a 0-dim tensor a wrapped number, by looking at what type promotion then does.
  static absl::Status CalibrateWrappedNumbers(TorchApi& api);
};

}  // namespace cuvil::torch_abi
