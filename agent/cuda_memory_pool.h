#pragma once

#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "agent/py_ref.h"
#include "scheduler/graph_arena.h"

namespace cuvil::agent {

// Torch's caching allocator for one device.
//
// Threads:   any; takes the GIL.
// Errors:    MakePool: as CudaMemoryPool::Create. MakeWorkspaces: Internal  torch refused
class TorchCudaAllocator final : public scheduler::DeviceAllocator {
 public:
  explicit TorchCudaAllocator(int device_index) : device_index_(device_index) {}
  // Takes the GIL.
  absl::StatusOr<std::unique_ptr<scheduler::AllocationPool>> MakePool() override;
  // Multiplies small matrices, which is how torch comes to its workspaces.
  absl::Status MakeWorkspaces() override;

 private:
  const int device_index_;
};

// A private pool of torch's caching allocator (torch.cuda.MemPool). Its memory goes back to the device with the object.
//
// Threads:   Create with the GIL held; the rest, destruction included, takes it.
// Errors:    Create: Unimplemented  the allocator is not torch's own (backend:cudaMallocAsync)
//                    Unavailable    this torch has no such pools
//            Enter:  Internal       torch refused
class CudaMemoryPool final : public scheduler::AllocationPool {
 public:
  static absl::StatusOr<std::unique_ptr<CudaMemoryPool>> Create(int device_index);
  ~CudaMemoryPool() override;

  absl::Status Enter() override;
  void Leave() override;

 private:
  CudaMemoryPool() = default;

  OwnedRef pool_;       // the MemPool
  OwnedRef arguments_;  // (device, id)
  OwnedRef begin_, end_, release_;
};

}  // namespace cuvil::agent
