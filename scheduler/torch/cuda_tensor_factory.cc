#include "scheduler/torch/cuda_tensor_factory.h"

#include <dlfcn.h>

#include "scheduler/torch/boundary.h"

namespace cuvil::torch_abi {

CudaTensorFactory CudaTensorFactory::Find() {
  CudaTensorFactory factory;
  void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD);
  if (library == nullptr) return factory;
  // The name is a proof of the signature: empty_strided_cuda(IntArrayRef, IntArrayRef, ScalarType, optional<Device>).
  factory.make_ = reinterpret_cast<Function>(dlsym(
      library, "_ZN2at6detail18empty_strided_cudaEN3c108ArrayRefIlEES3_NS1_10ScalarTypeESt8optionalINS1_6DeviceEE"));
  return factory;
}

absl::Status CudaTensorFactory::Make(const cir::TensorType& type, void** cell) const {
  return CallForeign([&] {
    make_(cell, {type.sizes.data(), type.sizes.size()}, {type.strides.data(), type.strides.size()},
          static_cast<int8_t>(type.dtype), {static_cast<int8_t>(type.device), type.device_index, true});
  });
}

}  // namespace cuvil::torch_abi
