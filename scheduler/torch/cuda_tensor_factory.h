// Fresh, uninitialised CUDA tensors by the function that torch's own operators make their results with.
//
// The stable C shim asks the dispatcher first, which is most of its time.
//
// Threads:   immutable; any thread. The calling thread's inference mode and current stream apply, as in eager.
// GIL:       not needed.
// Errors:    Make: Aborted  torch threw, which means that there is no memory; the message is torch's
// Source:    aten/src/ATen/cuda/EmptyTensor.h; System V ABI: results with destructors are returned through a pointer
//            that goes first
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "jit/cir/tensor_type.h"

namespace cuvil::torch_abi {

class CudaTensorFactory {
 public:
  // Nothing where libtorch does not export the function.
  static CudaTensorFactory Find();

  explicit operator bool() const { return make_ != nullptr; }
  // Puts a tensor of this type into the empty cell. Precondition: the device is a CUDA device.
  absl::Status Make(const cir::TensorType& type, void** cell) const;

 private:
  struct IntArrayRef {
    const int64_t* data;
    size_t size;
  };
  struct OptionalDevice {
    int8_t type;
    int8_t index;
    bool has_value;
  };
  using Function = void* (*)(void** tensor, IntArrayRef sizes, IntArrayRef strides, int8_t dtype,
                             OptionalDevice device);
  Function make_ = nullptr;
};

}  // namespace cuvil::torch_abi
