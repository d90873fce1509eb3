// What the arenas of one device have in common: streams, kernels, budget, health, and the context that all of it is in.
//
// Threads:   any.
// Ownership: arenas borrow from it; it outlives them.
// Errors:    MakeArena: as GraphArena::Create, and Unavailable without the device's context or the kernel that copies
#pragma once

#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "jit/cir/tensor_type.h"
#include "memory/device/context.h"
#include "memory/device/copy_kernel.h"
#include "memory/device/driver_api.h"
#include "memory/device/fill_kernel.h"
#include "scheduler/graph_arena.h"
#include "scheduler/torch/cuda_streams.h"

namespace cuvil::scheduler {

class DeviceShare {
 public:
  // An arena on this device, whichever is current. `driver` and `streams` are borrowed for good.
  absl::StatusOr<std::shared_ptr<GraphArena>> MakeArena(const device::DriverApi& driver,
                                                        const torch_abi::CudaStreams& streams, cir::Device device,
                                                        std::unique_ptr<DeviceAllocator> allocator);
  GraphBudget& budget() { return budget_; }
  DeviceHealth& health() { return health_; }

 private:
  absl::StatusOr<device::ContextHandle> Context(const device::DriverApi& driver, int device_index);
  // The device's context is current.
  absl::StatusOr<GraphArena::Kernels> Kernels(const device::DriverApi& driver);

  StreamShelf shelf_;
  GraphBudget budget_;
  DeviceHealth health_;
  absl::Mutex mutex_;
  bool tried_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<const device::CopyKernel> copy_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<const device::FillKernel> fill_ ABSL_GUARDED_BY(mutex_);
  device::ContextHandle context_ ABSL_GUARDED_BY(mutex_) = nullptr;
};

}  // namespace cuvil::scheduler
