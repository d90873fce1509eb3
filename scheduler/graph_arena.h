// The memory that the CUDA graphs of one model share, and the order of their launches.
//
// Graphs that share memory must not overlap on the device. Uses of an arena are therefore in one order: a lock while
// work is queued, and an event wherever the next work goes to another stream (docs/design/0007-cuda-graphs.md).
//
// Threads:   any; Use holds the lock for its life, which is the time it takes to queue work, not to do it.
// Ownership: shared by the plans of a model; the last one frees it.
// Errors:    Create: Unavailable as the driver says
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "jit/cir/tensor_type.h"
#include "memory/device/capture_mode.h"
#include "memory/device/context.h"
#include "memory/device/copy_kernel.h"
#include "memory/device/cuda_graph.h"
#include "memory/device/driver_api.h"
#include "memory/device/fill_kernel.h"
#include "scheduler/device_health.h"
#include "scheduler/graph_budget.h"
#include "scheduler/torch/cuda_streams.h"

namespace cuvil::scheduler {

// What the scheduler asks of whoever can talk to torch's allocator.
//
// Memory of a pool that dies becomes a cache of torch's, which goes back to the device when torch is asked to empty its
// caches or runs short. To insist on it then and there could end the process: torch refuses, in a destructor, while
// anybody captures.
//
// Threads:   Enter and Leave concern the calling thread's allocations only; GIL not held.
class AllocationPool {
 public:
  virtual ~AllocationPool() = default;
  // From now on the calling thread's device memory comes from the pool. Memory that is given back meanwhile is reused
  // by the pool alone.
  virtual absl::Status Enter() = 0;
  virtual void Leave() = 0;
  // What it has of the device, in use or not.
  virtual absl::StatusOr<uint64_t> ReservedBytes() = 0;
};

class DeviceAllocator {
 public:
  virtual ~DeviceAllocator() = default;
  virtual absl::StatusOr<std::unique_ptr<AllocationPool>> MakePool() = 0;
  // Makes what torch keeps for the calling thread's library handles and its current stream: workspaces of cuBLAS.
  virtual absl::Status MakeWorkspaces() = 0;
  virtual absl::StatusOr<DeviceRoom> Room() = 0;
};

// Uses a pool for as long as it lives.
class PoolScope {
 public:
  explicit PoolScope(AllocationPool& pool) : pool_(pool), status_(pool.Enter()) {}
  ~PoolScope() {
    if (status_.ok()) pool_.Leave();
  }
  PoolScope(const PoolScope&) = delete;
  PoolScope& operator=(const PoolScope&) = delete;
  const absl::Status& status() const { return status_; }

 private:
  AllocationPool& pool_;
  const absl::Status status_;
};

// A stream to capture on, and the memory that torch keeps for it.
//
// Torch keeps cuBLAS workspaces for ever, one for each stream that ever multiplied a matrix, and graphs hold their
// addresses. They come from a pool that nothing else uses: when another tool has torch drop its workspaces, the memory
// stays out of everybody's reach.
struct CaptureStream {
  device::Stream stream;
  std::unique_ptr<AllocationPool> workspaces;
};

// Streams that no arena uses at the moment; they are used again rather than made anew. Side streams, which a capture
// forks to, are kept apart: they have no workspaces, and a capture stream has.
//
// Threads:   any.
class StreamShelf {
 public:
  absl::StatusOr<CaptureStream> Take(const device::DriverApi& driver, DeviceAllocator& allocator);
  void PutBack(CaptureStream stream);
  absl::StatusOr<device::Stream> TakeSide(const device::DriverApi& driver);
  void PutBackSide(device::Stream stream);

 private:
  absl::Mutex mutex_;
  std::vector<CaptureStream> idle_ ABSL_GUARDED_BY(mutex_);
  std::vector<device::Stream> idle_side_ ABSL_GUARDED_BY(mutex_);
};

// Lets the calling thread give device memory back while other threads capture. Nothing before the first arena.
class FreeingScope {
 public:
  FreeingScope();

 private:
  std::optional<device::RelaxedCaptureMode> relaxed_;
};

class GraphArena {
 public:
  // On the driver and the torch of this process, which are found at first use.
  static absl::StatusOr<std::shared_ptr<GraphArena>> CreateForProcess(cir::Device device,
                                                                      std::unique_ptr<DeviceAllocator> allocator);
  // Of the process's devices by number: null for one that no graph was ever wanted for.
  static constexpr int kMaxDevices = 64;
  static GraphBudget* BudgetOf(int device_index);
  static DeviceHealth* HealthOf(int device_index);
  // Kernels of ours in the device's context.
  struct Kernels {
    const device::CopyKernel* copy = nullptr;
    const device::FillKernel* fill = nullptr;  // may be null: memset nodes then stay
  };
  // What the arenas of one device share.
  struct Shared {
    StreamShelf& shelf;
    GraphBudget& budget;
    DeviceHealth& health;
    Kernels kernels;
    device::ContextHandle context = nullptr;  // of the device; null: whatever is current
  };
  // `driver`, `streams` and what is shared are borrowed for good. The device is current.
  static absl::StatusOr<std::shared_ptr<GraphArena>> Create(const device::DriverApi& driver,
                                                            const torch_abi::CudaStreams& streams, cir::Device device,
                                                            std::unique_ptr<DeviceAllocator> allocator,
                                                            const Shared& shared);
  // Waits for the last work.
  ~GraphArena();

  const device::DriverApi& driver() const { return driver_; }
  const torch_abi::CudaStreams& streams() const { return streams_; }
  const device::Stream& capture_stream() const { return capture_stream_.stream; }
  // At least so many streams to fork to; always the same ones, because the pool's free memory is kept by stream.
  absl::StatusOr<std::vector<device::StreamHandle>> SideStreams(uint32_t count);
  AllocationPool& workspaces() { return *capture_stream_.workspaces; }
  AllocationPool& pool() { return *pool_; }
  DeviceAllocator& allocator() { return *allocator_; }
  cir::Device device() const { return device_; }
  const Kernels& kernels() const { return shared_.kernels; }
  device::ContextHandle context() const { return shared_.context; }
  GraphBudget& budget() { return shared_.budget; }
  GraphBudget::Account& account() { return account_; }
  DeviceHealth& health() { return shared_.health; }

  // Asks the pools what they have and puts it on the account. Takes the GIL: not while the arena is in use.
  absl::Status Measure();

  // Whether the calling thread is in a Use, of whichever arena: it cannot wait for one then.
  static bool IsInUseByThisThread();

  // One use on one stream, ordered behind all that came before.
  class Use {
   public:
    Use(GraphArena& arena, device::StreamHandle stream);
    // The stream waits for the last use; before any work is queued.
    absl::Status Begin();
    // Marks the end of what was queued; also after an error.
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    GraphArena& arena_;
    const device::StreamHandle stream_;
    const absl::MutexLock lock_;
    bool begun_ = false;
  };

  // Blocks until nothing in flight uses the arena: before memory of it is given back.
  void WaitUntilIdle();

 private:
  GraphArena(const device::DriverApi& driver, const torch_abi::CudaStreams& streams, cir::Device device,
             std::unique_ptr<DeviceAllocator> allocator, std::unique_ptr<AllocationPool> pool, CaptureStream stream,
             device::Event done, const Shared& shared)
      : driver_(driver),
        streams_(streams),
        device_(device),
        shared_(shared),
        allocator_(std::move(allocator)),
        pool_(std::move(pool)),
        capture_stream_(std::move(stream)),
        done_(std::move(done)),
        account_(shared.budget) {}

  std::optional<device::RelaxedCaptureMode> dying_;  // as GraphPlan's
  const device::DriverApi& driver_;
  const torch_abi::CudaStreams& streams_;
  const cir::Device device_;
  const Shared shared_;
  const std::unique_ptr<DeviceAllocator> allocator_;
  const std::unique_ptr<AllocationPool> pool_;
  CaptureStream capture_stream_;
  const device::Event done_;
  GraphBudget::Account account_;

  absl::Mutex side_mutex_;  // nothing else is locked under it
  std::vector<device::Stream> side_streams_ ABSL_GUARDED_BY(side_mutex_);

  absl::Mutex mutex_;
  device::StreamHandle last_stream_ ABSL_GUARDED_BY(mutex_) = nullptr;
  bool used_ ABSL_GUARDED_BY(mutex_) = false;
  // An end that could not be recorded is a device error, after which nothing here can be ordered.
  absl::Status broken_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace cuvil::scheduler
