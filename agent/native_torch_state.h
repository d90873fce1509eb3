#pragma once

#include <cstdint>

#include "absl/status/status.h"

namespace cuvil::agent {

// Torch's ambient state on this thread as libtorch's own C++ functions show it; equal states mean that every question
// TorchStateReader asks has the same answer, but for the function mode that is active and the forward-mode AD level.
struct NativeTorchState {
  uint64_t included_keys = 0;  // as c10's thread-local struct holds them: autocast, inference mode, tracing show here
  uint64_t excluded_keys = 0;
  int64_t function_modes = 0;
  int64_t dispatch_modes = 0;
  int32_t function_state = 0;  // 0: torch functions are enabled
  int8_t default_dtype = -1;   // the number of its ScalarType
  bool grad_enabled = false;
  bool inference_mode = false;
  bool functorch = false;
  bool tracing = false;  // by torch.jit.trace
  bool profiler = false;

  bool operator==(const NativeTorchState&) const = default;
};

// Reads that state in some tens of nanoseconds: a dozen loads and calls without an argument, none into Python.
//
// Threads: immutable after Initialize; Read is about the calling thread and needs no GIL.
// Errors:  Unavailable         this torch lacks one of the functions
//          FailedPrecondition  one of them did not follow when the state was changed from Python; names it
// Source:  c10/core/impl/LocalDispatchKeySet.h, c10/core/GradMode.h, c10/core/InferenceMode.h,
//          ATen/PythonTorchFunctionTLS.h, ATen/functorch/DynamicLayer.h, torch/csrc/jit/frontend/tracer.h.
class NativeTorchStateReader {
 public:
  // GIL held. Changes the calling thread's state for the length of the test and restores it.
  static absl::Status Initialize();
  static bool available();
  // Precondition: available().
  static NativeTorchState Read();
};

}  // namespace cuvil::agent
