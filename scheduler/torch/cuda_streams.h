// The calling thread's current CUDA stream, as torch's operators see it.
//
// Threads:   the functions concern the calling thread only.
// GIL:       not needed.
// Errors:    Load: Unavailable  this torch has no CUDA, or lacks a function of its stable interface
//            Current, Set: Internal  torch refused
// Source:    torch/csrc/stable/c/shim.h, torch/csrc/inductor/aoti_torch/c/shim.h
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace cuvil::torch_abi {

class CudaStreams {
 public:
  // torch with CUDA has been imported.
  static absl::StatusOr<CudaStreams> Load();
  CudaStreams(int32_t (*get)(int32_t, void**), int32_t (*set)(void*, int32_t)) : get_(get), set_(set) {}

  // A CUstream.
  absl::StatusOr<void*> Current(int32_t device_index) const;
  absl::Status Set(int32_t device_index, void* stream) const;

 private:
  int32_t (*get_)(int32_t device_index, void** stream);
  int32_t (*set_)(void* stream, int32_t device_index);
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
