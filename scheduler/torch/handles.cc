#include "scheduler/torch/handles.h"

#include <atomic>

#include "scheduler/torch/handle_deleter.h"

namespace cuvil::torch_abi {
namespace {

// Set once, before the first OwnedTensor can exist. Relaxed: whoever holds a handle got it through a TorchApi, whose
// publication ordered this store.
std::atomic<HandleDeleter> deleter{nullptr};

}  // namespace

void SetHandleDeleter(HandleDeleter function) { deleter.store(function, std::memory_order_relaxed); }

void OwnedTensor::reset() {
  void* handle = std::exchange(handle_, nullptr);
  if (handle != nullptr) deleter.load(std::memory_order_relaxed)(handle);
}

}  // namespace cuvil::torch_abi
