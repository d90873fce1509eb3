#pragma once

#include <Python.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "agent/kernel_registrations.h"
#include "agent/native_torch_state.h"

namespace cuvil::agent {

// Torch's ambient state as far as it decides what a plan means on this thread.
struct TorchState {
  bool grad_enabled = false;
  bool inference_mode = false;
  bool autocast_cpu = false;
  bool autocast_cuda = false;
  bool torch_function_enabled = true;
  int64_t function_modes = 0;
  int64_t dispatch_modes = 0;
  bool functorch = false;
  bool forward_ad = false;
  bool profiler = false;
  PyObject* default_dtype = nullptr;  // borrowed: dtypes are immortal
  // torch.set_default_device()'s function mode when it is the only one active; compared by address. What it holds is
  // read by its Python code, so the guards cover it.
  PyObject* default_device_mode = nullptr;
  // Of the thread, not of torch: what is computed once for all calls was rounded in it.
  uint32_t floating_point_mode = 0;
  // Of the process: kernels that are not what a plan takes operators to do.
  KernelRegistrations kernels;
  // All zeros where libtorch's own functions are not used.
  NativeTorchState native;

  bool operator==(const TorchState&) const = default;
};

// Asks torch's C getters, and libtorch's own functions where they are proved to say the same; no Python code runs.
//
// Threads: GIL held; the state is the calling thread's.
class TorchStateReader {
 public:
  static absl::Status Initialize();
  static TorchState Read();
  // Read() == state, in a tenth of the time where libtorch's own functions are used.
  static bool Is(const TorchState& state);
  // Why libtorch's own functions are not used.
  static absl::Status NativeStatus();
  // The part that the operators of one trace must agree on: grad mode, inference mode and autocast.
  static uint32_t ModeBits();
  // A call under this state must run as it is, for the reason given; empty: it may be traced and planned.
  static std::string WhyUntouched(const TorchState& state);
  // The same for kernels of the program's own, which for CUDA tensors only matter to programs that have such.
  static std::string WhyKernelsCount(bool for_cuda);
};

}  // namespace cuvil::agent
