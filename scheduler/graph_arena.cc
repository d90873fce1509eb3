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
  std::unique_ptr<const device::FillKernel> fill_kernel ABSL_GUARDED_BY(mutex);

  // Null if the driver cannot: memset nodes then stay, which is only slower.
  const device::FillKernel* FillKernel(const device::DriverApi& driver) {
    const absl::MutexLock lock(&mutex);
    if (!tried) {
      tried = true;
      absl::StatusOr<device::FillKernel> kernel = device::FillKernel::Load(driver);
      if (kernel.ok()) fill_kernel = std::make_unique<const device::FillKernel>(*std::move(kernel));
    }
    return fill_kernel.get();
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
  return Create((*process)->driver, (*process)->streams, device, share.shelf, std::move(allocator),
                share.FillKernel((*process)->driver));
}

absl::StatusOr<std::shared_ptr<GraphArena>> GraphArena::Create(const device::DriverApi& driver,
                                                               const torch_abi::CudaStreams& streams,
                                                               cir::Device device, StreamShelf& shelf,
                                                               std::unique_ptr<DeviceAllocator> allocator,
                                                               const device::FillKernel* fill_kernel) {
  if (!driver.HasGraphs()) return absl::UnavailableError("the CUDA driver has no graphs; update it");
  absl::StatusOr<std::unique_ptr<AllocationPool>> pool = allocator->MakePool();
  if (!pool.ok()) return pool.status();
  absl::StatusOr<CaptureStream> stream = shelf.Take(driver, *allocator);
  if (!stream.ok()) return stream.status();
  absl::StatusOr<device::Event> done = device::Event::Create(driver);
  if (!done.ok()) return done.status();
  return std::shared_ptr<GraphArena>(new GraphArena(driver, streams, device, shelf, std::move(allocator),
                                                    *std::move(pool), *std::move(stream), *std::move(done),
                                                    fill_kernel));
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
