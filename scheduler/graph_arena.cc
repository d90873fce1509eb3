#include "scheduler/graph_arena.h"

#include <atomic>
#include <mutex>
#include <utility>

#include "scheduler/device_share.h"

namespace cuvil::scheduler {
namespace {

struct Process {
  device::DriverApi driver;
  torch_abi::CudaStreams streams;
};

std::atomic<const device::DriverApi*> g_driver{nullptr};

absl::StatusOr<Process> LoadProcess() {
  absl::StatusOr<device::DriverApi> driver = device::DriverApi::Load();
  if (!driver.ok()) return driver.status();
  absl::StatusOr<torch_abi::CudaStreams> streams = torch_abi::CudaStreams::Load();
  if (!streams.ok()) return streams.status();
  return Process{*std::move(driver), *std::move(streams)};
}

// Never freed: graphs may live as long as the process.
std::atomic<DeviceShare*> g_shares[GraphArena::kMaxDevices];
std::mutex g_shares_mutex;

DeviceShare* FindShare(int device_index) {
  if (device_index < 0 || device_index >= GraphArena::kMaxDevices) return nullptr;
  return g_shares[device_index].load(std::memory_order_acquire);  // with the release in MakeShare
}

DeviceShare& MakeShare(int device_index) {
  const std::lock_guard<std::mutex> lock(g_shares_mutex);
  DeviceShare* share = g_shares[device_index].load(std::memory_order_relaxed);
  if (share == nullptr) {
    share = new DeviceShare();
    g_shares[device_index].store(share, std::memory_order_release);
  }
  return *share;
}

thread_local int t_num_uses = 0;

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

absl::StatusOr<device::Stream> StreamShelf::TakeSide(const device::DriverApi& driver) {
  {
    const absl::MutexLock lock(&mutex_);
    if (!idle_side_.empty()) {
      device::Stream stream = std::move(idle_side_.back());
      idle_side_.pop_back();
      return stream;
    }
  }
  return device::Stream::Create(driver);
}

void StreamShelf::PutBackSide(device::Stream stream) {
  const absl::MutexLock lock(&mutex_);
  idle_side_.push_back(std::move(stream));
}

absl::StatusOr<std::shared_ptr<GraphArena>> GraphArena::CreateForProcess(cir::Device device,
                                                                         std::unique_ptr<DeviceAllocator> allocator) {
  static const absl::StatusOr<Process>* const process = new absl::StatusOr<Process>(LoadProcess());
  if (!process->ok()) return process->status();
  g_driver.store(&(*process)->driver, std::memory_order_release);  // with the acquire in FreeingScope
  if (device.index < 0 || device.index >= kMaxDevices) return absl::UnavailableError("a device of unknown number");
  return MakeShare(device.index).MakeArena((*process)->driver, (*process)->streams, device, std::move(allocator));
}

FreeingScope::FreeingScope() {
  if (const device::DriverApi* driver = g_driver.load(std::memory_order_acquire)) relaxed_.emplace(*driver);
}

GraphBudget* GraphArena::BudgetOf(int device_index) {
  DeviceShare* share = FindShare(device_index);
  return share == nullptr ? nullptr : &share->budget();
}

DeviceHealth* GraphArena::HealthOf(int device_index) {
  DeviceShare* share = FindShare(device_index);
  return share == nullptr ? nullptr : &share->health();
}

absl::StatusOr<std::shared_ptr<GraphArena>> GraphArena::Create(const device::DriverApi& driver,
                                                               const torch_abi::CudaStreams& streams,
                                                               cir::Device device,
                                                               std::unique_ptr<DeviceAllocator> allocator,
                                                               const Shared& shared) {
  if (!driver.HasGraphs()) return absl::UnavailableError("the CUDA driver has no graphs; update it");
  absl::StatusOr<std::unique_ptr<AllocationPool>> pool = allocator->MakePool();
  if (!pool.ok()) return pool.status();
  absl::StatusOr<CaptureStream> stream = shared.shelf.Take(driver, *allocator);
  if (!stream.ok()) return stream.status();
  absl::StatusOr<device::Event> done = device::Event::Create(driver);
  if (!done.ok()) return done.status();
  return std::shared_ptr<GraphArena>(new GraphArena(driver, streams, device, std::move(allocator), *std::move(pool),
                                                    *std::move(stream), *std::move(done), shared));
}

GraphArena::~GraphArena() {
  dying_.emplace(driver_);
  WaitUntilIdle();
  shared_.shelf.PutBack(std::move(capture_stream_));
  for (device::Stream& stream : side_streams_) shared_.shelf.PutBackSide(std::move(stream));
}

absl::StatusOr<std::vector<device::StreamHandle>> GraphArena::SideStreams(uint32_t count) {
  const absl::MutexLock lock(&side_mutex_);
  while (side_streams_.size() < count) {
    absl::StatusOr<device::Stream> stream = shared_.shelf.TakeSide(driver_);
    if (!stream.ok()) return stream.status();
    side_streams_.push_back(*std::move(stream));
  }
  std::vector<device::StreamHandle> handles;
  for (const device::Stream& stream : side_streams_) handles.push_back(stream.handle());
  return handles;
}

void GraphArena::WaitUntilIdle() {
  const absl::MutexLock lock(&mutex_);
  // Models die at any time, in a capture of the program's own too.
  const device::RelaxedCaptureMode relaxed(driver_);
  // After a device error there is nothing left to wait for.
  if (used_) shared_.health.Note(done_.Synchronize());
}

absl::Status GraphArena::Measure() {
  const absl::StatusOr<uint64_t> pool = pool_->ReservedBytes();
  if (!pool.ok()) return pool.status();
  const absl::StatusOr<uint64_t> workspaces = capture_stream_.workspaces->ReservedBytes();
  if (!workspaces.ok()) return workspaces.status();
  account_.Set(*pool, *workspaces);
  return absl::OkStatus();
}

bool GraphArena::IsInUseByThisThread() { return t_num_uses != 0; }

GraphArena::Use::Use(GraphArena& arena, device::StreamHandle stream)
    : arena_(arena), stream_(stream), lock_(&arena.mutex_) {
  ++t_num_uses;
}

absl::Status GraphArena::Use::Begin() {
  arena_.mutex_.AssertHeld();
  if (!arena_.shared_.health.ok()) return arena_.shared_.health.status();
  if (!arena_.broken_.ok()) return arena_.broken_;
  if (arena_.used_ && arena_.last_stream_ != stream_) {
    if (absl::Status s = arena_.done_.MakeWait(stream_); !s.ok()) return s;
  }
  begun_ = true;
  return absl::OkStatus();
}

GraphArena::Use::~Use() {
  --t_num_uses;
  if (!begun_) return;
  arena_.mutex_.AssertHeld();
  arena_.used_ = true;
  arena_.last_stream_ = stream_;
  if (absl::Status s = arena_.done_.Record(stream_); !s.ok()) {
    arena_.broken_ = s;
    arena_.shared_.health.Note(s);
  }
}

}  // namespace cuvil::scheduler
