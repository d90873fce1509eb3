#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "agent/py_ref.h"
#include "scheduler/graph_arena.h"

namespace cuvil::agent {

// Torch's caching allocator for one device.
//
// Threads:   any; takes the GIL.
// Errors:    MakePool: as CudaMemoryPool::Create. MakeWorkspaces, Room: Internal  torch refused
class TorchCudaAllocator final : public scheduler::DeviceAllocator {
 public:
  explicit TorchCudaAllocator(int device_index) : device_index_(device_index) {}
  // Takes the GIL.
  absl::StatusOr<std::unique_ptr<scheduler::AllocationPool>> MakePool() override;
  // Multiplies small matrices, which is how torch comes to its workspaces.
  absl::Status MakeWorkspaces() override;
  // The device's free memory, and no more than torch.cuda.set_per_process_memory_fraction() leaves. Takes the GIL.
  absl::StatusOr<scheduler::DeviceRoom> Room() override;

 private:
  const int device_index_;
};

// A private pool of torch's caching allocator, by its number. torch.cuda.MemPool is no help: its destructor empties the
// pool, which throws, and so ends the process, while anybody in it captures a graph.
//
// Threads:   Create with the GIL held; the rest, destruction included, takes it.
// Errors:    Create: Unimplemented  the allocator is not torch's own (backend:cudaMallocAsync)
//                    Unavailable    this torch has no such pools
//            Enter, ReservedBytes: Internal  torch refused
class CudaMemoryPool final : public scheduler::AllocationPool {
 public:
  static absl::StatusOr<std::unique_ptr<CudaMemoryPool>> Create(int device_index);
  ~CudaMemoryPool() override;

  absl::Status Enter() override;
  void Leave() override;
  absl::StatusOr<uint64_t> ReservedBytes() override;

 private:
  CudaMemoryPool() = default;

  OwnedRef id_;
  OwnedRef arguments_;  // (device, id)
  OwnedRef begin_, end_, release_;
  bool is_held_ = false;  // torch counts us among the pool's users
};

}  // namespace cuvil::agent
