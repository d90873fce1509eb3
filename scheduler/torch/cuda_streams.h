// The calling thread's current CUDA stream and device, as torch's operators see them.
//
// Threads:   the functions concern the calling thread only.
// GIL:       not needed.
// Errors:    Load: Unavailable  this torch has no CUDA, or lacks a function of its stable interface
//            Current, Set: Internal  torch refused
// Source:    torch/csrc/stable/c/shim.h, torch/csrc/inductor/aoti_torch/c/shim.h, c10/cuda/CUDAFunctions.h
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace cuvil::torch_abi {

class CudaStreams {
 public:
  // torch with CUDA has been imported.
  static absl::StatusOr<CudaStreams> Load();
  // c10::cuda::ExchangeDevice: makes a device current and gives the one before.
  using ExchangeDevice = int8_t (*)(int8_t device_index);
  CudaStreams(int32_t (*get)(int32_t, void**), int32_t (*set)(void*, int32_t), ExchangeDevice exchange)
      : get_(get), set_(set), exchange_(exchange) {}

  // A CUstream.
  absl::StatusOr<void*> Current(int32_t device_index) const;
  absl::Status Set(int32_t device_index, void* stream) const;

 private:
  int32_t (*get_)(int32_t device_index, void** stream);
  int32_t (*set_)(void* stream, int32_t device_index);
  ExchangeDevice exchange_;
  friend class CurrentDeviceScope;
};

// Makes a device current for as long as it lives. Handles of streams, the default stream's above all, mean something
// in their own device's context only. Nothing but a look if the device is current already.
class CurrentDeviceScope {
 public:
  CurrentDeviceScope(const CudaStreams& streams, int32_t device_index)
      : streams_(streams),
        device_index_(static_cast<int8_t>(device_index)),
        outer_(device_index < 0 ? device_index_ : streams.exchange_(device_index_)) {}
  ~CurrentDeviceScope() {
    if (outer_ != device_index_) streams_.exchange_(outer_);
  }
  CurrentDeviceScope(const CurrentDeviceScope&) = delete;
  CurrentDeviceScope& operator=(const CurrentDeviceScope&) = delete;

 private:
  const CudaStreams& streams_;
  const int8_t device_index_;
  const int8_t outer_;
};

// A function that gives the calling thread's current device, or -1 when torch cannot tell. Null where libtorch does not
// export what it takes.
int (*FindCurrentCudaDevice())();

// Makes a stream current for as long as it lives.
class CurrentStreamScope {
 public:
  // OK, or what torch said; then nothing has changed.
  absl::Status Enter(const CudaStreams& streams, int32_t device_index, void* stream);
  CurrentStreamScope() = default;
  ~CurrentStreamScope();
  CurrentStreamScope(const CurrentStreamScope&) = delete;
  CurrentStreamScope& operator=(const CurrentStreamScope&) = delete;

 private:
  const CudaStreams* streams_ = nullptr;
  int32_t device_index_ = 0;
  void* outer_ = nullptr;
};

}  // namespace cuvil::torch_abi
