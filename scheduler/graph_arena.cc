#include "scheduler/graph_arena.h"

#include <utility>

namespace cuvil::scheduler {
namespace {

constexpr int kMaxDevices = 64;

// What arenas of one device share for as long as the process lives.
struct DeviceShare {
  StreamShelf shelf;
  absl::Mutex mutex;
  bool tried ABSL_GUARDED_BY(mutex) = false;
  absl::Status status ABSL_GUARDED_BY(mutex);
  std::unique_ptr<const device::CopyKernel> copy ABSL_GUARDED_BY(mutex);
  std::unique_ptr<const device::FillKernel> fill ABSL_GUARDED_BY(mutex);

  absl::StatusOr<GraphArena::Kernels> Kernels(const device::DriverApi& driver) {
    const absl::MutexLock lock(&mutex);
    if (!std::exchange(tried, true)) {
      absl::StatusOr<device::CopyKernel> copies = device::CopyKernel::Load(driver);
      status = copies.status();
      if (copies.ok()) copy = std::make_unique<const device::CopyKernel>(*std::move(copies));
      // Without it memset nodes stay, which is only slower.
      absl::StatusOr<device::FillKernel> fills = device::FillKernel::Load(driver);
      if (fills.ok()) fill = std::make_unique<const device::FillKernel>(*std::move(fills));
    }
    if (!status.ok()) return status;
    return GraphArena::Kernels{copy.get(), fill.get()};
  }
};

struct Process {
  device::DriverApi driver;
  torch_abi::CudaStreams streams;
};

absl::StatusOr<Process> LoadProcess() {
  absl::StatusOr<device::DriverApi> driver = device::DriverApi::Load();
  if (!driver.ok()) return driver.status();
  absl::StatusOr<torch_abi::CudaStreams> streams = torch_abi::CudaStreams::Load();
  if (!streams.ok()) return streams.status();
  return Process{*std::move(driver), *std::move(streams)};
}

}  // namespace

absl::StatusOr<CaptureStream> StreamShelf::Take(const device::DriverApi& driver, DeviceAllocator& allocator) {
  {
    const absl::MutexLock lock(&mutex_);
    if (!idle_.empty()) {
      CaptureStream stream = std::move(idle_.back());
      idle_.pop_back();
      return stream;
    }
  }
  absl::StatusOr<std::unique_ptr<AllocationPool>> workspaces = allocator.MakePool();
  if (!workspaces.ok()) return workspaces.status();
  absl::StatusOr<device::Stream> stream = device::Stream::Create(driver);
  if (!stream.ok()) return stream.status();
  return CaptureStream{*std::move(stream), *std::move(workspaces)};
}

void StreamShelf::PutBack(CaptureStream stream) {
  const absl::MutexLock lock(&mutex_);
  idle_.push_back(std::move(stream));
}

absl::StatusOr<std::shared_ptr<GraphArena>> GraphArena::CreateForProcess(cir::Device device,
                                                                         std::unique_ptr<DeviceAllocator> allocator) {
  // Never freed: graphs may live as long as the process.
  static const absl::StatusOr<Process>* const process = new absl::StatusOr<Process>(LoadProcess());
  static DeviceShare* const shares = new DeviceShare[kMaxDevices];
  if (!process->ok()) return process->status();
  if (device.index < 0 || device.index >= kMaxDevices) return absl::UnavailableError("a device of unknown number");
  DeviceShare& share = shares[device.index];
  const absl::StatusOr<Kernels> kernels = share.Kernels((*process)->driver);
  if (!kernels.ok()) return kernels.status();
  return Create((*process)->driver, (*process)->streams, device, share.shelf, std::move(allocator), *kernels);
}

absl::StatusOr<std::shared_ptr<GraphArena>> GraphArena::Create(const device::DriverApi& driver,
                                                               const torch_abi::CudaStreams& streams,
                                                               cir::Device device, StreamShelf& shelf,
                                                               std::unique_ptr<DeviceAllocator> allocator,
                                                               Kernels kernels) {
  if (!driver.HasGraphs()) return absl::UnavailableError("the CUDA driver has no graphs; update it");
  absl::StatusOr<std::unique_ptr<AllocationPool>> pool = allocator->MakePool();
  if (!pool.ok()) return pool.status();
  absl::StatusOr<CaptureStream> stream = shelf.Take(driver, *allocator);
  if (!stream.ok()) return stream.status();
  absl::StatusOr<device::Event> done = device::Event::Create(driver);
  if (!done.ok()) return done.status();
  return std::shared_ptr<GraphArena>(new GraphArena(driver, streams, device, shelf, std::move(allocator),
                                                    *std::move(pool), *std::move(stream), *std::move(done), kernels));
}

GraphArena::~GraphArena() {
  WaitUntilIdle();
  shelf_.PutBack(std::move(capture_stream_));
}

void GraphArena::WaitUntilIdle() {
  const absl::MutexLock lock(&mutex_);
  // After a device error there is nothing left to wait for.
  if (used_) (void)done_.Synchronize();
}

absl::Status GraphArena::Use::Begin() {
  arena_.mutex_.AssertHeld();
  if (!arena_.broken_.ok()) return arena_.broken_;
  if (arena_.used_ && arena_.last_stream_ != stream_) {
    if (absl::Status s = arena_.done_.MakeWait(stream_); !s.ok()) return s;
  }
  begun_ = true;
  return absl::OkStatus();
}

GraphArena::Use::~Use() {
  if (!begun_) return;
  arena_.mutex_.AssertHeld();
  arena_.used_ = true;
  arena_.last_stream_ = stream_;
  if (absl::Status s = arena_.done_.Record(stream_); !s.ok()) arena_.broken_ = s;
}

}  // namespace cuvil::scheduler
