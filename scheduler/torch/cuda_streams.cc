#include "scheduler/torch/cuda_streams.h"

#include <dlfcn.h>

#include "absl/strings/str_cat.h"
#include "scheduler/torch/boundary.h"

namespace cuvil::torch_abi {
namespace {

// c10::cuda::current_device; a DeviceIndex is a signed byte.
int8_t (*g_current_device)() = nullptr;

int CurrentCudaDevice() {
  int device = -1;
  if (!CallForeign([&] { device = g_current_device(); }).ok()) return -1;
  return device;
}

}  // namespace

int (*FindCurrentCudaDevice())() {
  static const bool found = [] {
    void* library = dlopen("libc10_cuda.so", RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD);
    if (library == nullptr) return false;
    g_current_device = reinterpret_cast<int8_t (*)()>(dlsym(library, "_ZN3c104cuda14current_deviceEv"));
    return g_current_device != nullptr;
  }();
  return found ? CurrentCudaDevice : nullptr;
}

absl::StatusOr<CudaStreams> CudaStreams::Load() {
  void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD);
  if (library == nullptr) return absl::UnavailableError("this torch has no CUDA");
  const auto get = reinterpret_cast<int32_t (*)(int32_t, void**)>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
  const auto set = reinterpret_cast<int32_t (*)(void*, int32_t)>(dlsym(library, "torch_set_current_cuda_stream"));
  void* c10 = dlopen("libc10_cuda.so", RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD);
  const auto exchange =
      reinterpret_cast<ExchangeDevice>(c10 == nullptr ? nullptr : dlsym(c10, "_ZN3c104cuda14ExchangeDeviceEa"));
  if (get == nullptr || set == nullptr || exchange == nullptr) {
    return absl::UnavailableError(
        "this torch cannot be told which CUDA stream and device to use; install torch >= 2.11");
  }
  return CudaStreams(get, set, exchange);
}

absl::StatusOr<void*> CudaStreams::Current(int32_t device_index) const {
  void* stream = nullptr;
  if (get_(device_index, &stream) != 0) return absl::InternalError("torch does not tell its current CUDA stream");
  return stream;
}

absl::Status CudaStreams::Set(int32_t device_index, void* stream) const {
  if (set_(stream, device_index) != 0) return absl::InternalError("torch refused a CUDA stream");
  return absl::OkStatus();
}

absl::Status CurrentStreamScope::Enter(const CudaStreams& streams, int32_t device_index, void* stream) {
  absl::StatusOr<void*> outer = streams.Current(device_index);
  if (!outer.ok()) return outer.status();
  if (absl::Status s = streams.Set(device_index, stream); !s.ok()) return s;
  streams_ = &streams;
  device_index_ = device_index;
  outer_ = *outer;
  return absl::OkStatus();
}

CurrentStreamScope::~CurrentStreamScope() {
  // Torch accepted this stream a moment ago, so there is nobody to tell if it does not now.
  if (streams_ != nullptr) (void)streams_->Set(device_index_, outer_);
}

}  // namespace cuvil::torch_abi
