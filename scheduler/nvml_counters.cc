#include "scheduler/nvml_counters.h"

#include <utility>

#include "memory/device/driver_api.h"

namespace cuvil::scheduler {
namespace {

constexpr uint64_t kGpmIntervalNs = 100'000'000;
constexpr uint64_t kPcieIntervalNs = 500'000'000;
constexpr double kMiB = 1024.0 * 1024.0;

void Add(const uint16_t device, LiveCounter counter, uint64_t now_ns, double value, std::vector<LiveSample>* samples) {
  samples->push_back({now_ns, value, device, counter});
}

}  // namespace

absl::StatusOr<std::unique_ptr<NvmlCounters>> NvmlCounters::Create(const NvmlApi& api,
                                                                   absl::Span<const Device> devices) {
  if (absl::Status s = api.ToStatus("nvmlInit_v2", api.nvmlInit_v2()); !s.ok()) return s;
  std::unique_ptr<NvmlCounters> counters(new NvmlCounters(api));
  absl::Status status = absl::UnavailableError("this process uses no GPU");
  for (const Device& device : devices) {
    Gpu gpu;
    gpu.number = device.number;
    const int found = api.nvmlDeviceGetHandleByPciBusId_v2(device.bus_id.c_str(), &gpu.handle);
    if (absl::Status s = api.ToStatus("nvmlDeviceGetHandleByPciBusId", found); !s.ok()) {
      status = s;
      continue;
    }
    counters->OpenGpm(&gpu);
    counters->gpus_.push_back(gpu);
  }
  if (counters->gpus_.empty()) return status;
  return counters;
}

NvmlCounters::~NvmlCounters() {
  for (Gpu& gpu : gpus_) CloseGpm(&gpu);
  api_.nvmlShutdown();
}

void NvmlCounters::OpenGpm(Gpu* gpu) const {
  if (!api_.HasGpm()) return;
  NvmlGpmSupport support{kNvmlGpmSupportVersion, 0};
  if (api_.nvmlGpmQueryDeviceSupport(gpu->handle, &support) != 0 || support.is_supported == 0) return;
  if (api_.nvmlGpmSampleAlloc(&gpu->last) != 0) gpu->last = nullptr;
  if (gpu->last != nullptr && api_.nvmlGpmSampleAlloc(&gpu->spare) != 0) gpu->spare = nullptr;
  if (gpu->spare == nullptr) CloseGpm(gpu);
}

void NvmlCounters::CloseGpm(Gpu* gpu) const {
  for (void** sample : {&gpu->last, &gpu->spare}) {
    if (*sample != nullptr) api_.nvmlGpmSampleFree(std::exchange(*sample, nullptr));
  }
}

void NvmlCounters::Read(uint64_t now_ns, std::vector<LiveSample>* samples) {
  for (Gpu& gpu : gpus_) {
    NvmlMemory memory{};
    if (api_.nvmlDeviceGetMemoryInfo(gpu.handle, &memory) == 0) {
      Add(gpu.number, LiveCounter::kMemoryUsed, now_ns, static_cast<double>(memory.used_bytes), samples);
    }
    if (api_.nvmlDeviceGetClockInfo != nullptr) {
      unsigned megahertz = 0;
      if (api_.nvmlDeviceGetClockInfo(gpu.handle, kNvmlClockSm, &megahertz) == 0) {
        Add(gpu.number, LiveCounter::kSmClock, now_ns, megahertz * 1e6, samples);
      }
      if (api_.nvmlDeviceGetClockInfo(gpu.handle, kNvmlClockMemory, &megahertz) == 0) {
        Add(gpu.number, LiveCounter::kMemoryClock, now_ns, megahertz * 1e6, samples);
      }
    }
    if (gpu.last != nullptr) {
      ReadGpm(&gpu, now_ns, samples);
    } else {
      ReadOlder(&gpu, now_ns, samples);
    }
  }
}

void NvmlCounters::ReadGpm(Gpu* gpu, uint64_t now_ns, std::vector<LiveSample>* samples) const {
  if (gpu->last_ns != 0 && now_ns - gpu->last_ns < kGpmIntervalNs) return;
  if (api_.nvmlGpmSampleGet(gpu->handle, gpu->spare) != 0) {
    // Not allowed to this user, or a GPU divided into instances: the older counters from now on.
    CloseGpm(gpu);
    return;
  }
  std::swap(gpu->last, gpu->spare);  // `spare` is the earlier one
  if (std::exchange(gpu->last_ns, now_ns) == 0) return;
  NvmlGpmMetrics metrics{};
  metrics.version = kNvmlGpmMetricsVersion;
  metrics.earlier = gpu->spare;
  metrics.later = gpu->last;
  constexpr struct {
    NvmlGpmMetricId id;
    LiveCounter counter;
    double unit;
  } kMetrics[] = {
      {kNvmlGpmSmUtilization, LiveCounter::kSmBusy, 1},
      {kNvmlGpmSmOccupancy, LiveCounter::kSmOccupancy, 1},
      {kNvmlGpmPcieReceived, LiveCounter::kPcieReceived, kMiB},
      {kNvmlGpmPcieSent, LiveCounter::kPcieSent, kMiB},
  };
  for (const auto& metric : kMetrics) metrics.metrics[metrics.count++].id = metric.id;
  if (api_.nvmlGpmMetricsGet(&metrics) != 0) return;
  for (unsigned i = 0; i < metrics.count; ++i) {
    if (metrics.metrics[i].result != 0) continue;
    Add(gpu->number, kMetrics[i].counter, now_ns, metrics.metrics[i].value * kMetrics[i].unit, samples);
  }
}

void NvmlCounters::ReadOlder(Gpu* gpu, uint64_t now_ns, std::vector<LiveSample>* samples) const {
  NvmlUtilization utilization{};
  if (api_.nvmlDeviceGetUtilizationRates != nullptr &&
      api_.nvmlDeviceGetUtilizationRates(gpu->handle, &utilization) == 0) {
    Add(gpu->number, LiveCounter::kSmBusy, now_ns, utilization.gpu, samples);
  }
  if (api_.nvmlDeviceGetPcieThroughput == nullptr) return;
  if (gpu->pcie_ns != 0 && now_ns - gpu->pcie_ns < kPcieIntervalNs) return;
  gpu->pcie_ns = now_ns;
  gpu->received_next = !gpu->received_next;
  const NvmlPcieCounter counter = gpu->received_next ? kNvmlPcieReceived : kNvmlPcieSent;
  unsigned kilobytes = 0;
  if (api_.nvmlDeviceGetPcieThroughput(gpu->handle, counter, &kilobytes) != 0) return;
  Add(gpu->number, gpu->received_next ? LiveCounter::kPcieReceived : LiveCounter::kPcieSent, now_ns, kilobytes * 1e3,
      samples);
}

absl::StatusOr<std::unique_ptr<CounterReader>> MakeNvmlCounters() {
  absl::StatusOr<device::DriverApi> driver = device::DriverApi::Load();
  if (!driver.ok()) return driver.status();
  absl::StatusOr<std::vector<device::ActiveGpu>> gpus = device::ActiveGpus(*driver);
  if (!gpus.ok()) return gpus.status();
  absl::StatusOr<NvmlApi> api = NvmlApi::Load();
  if (!api.ok()) return api.status();
  std::vector<NvmlCounters::Device> devices;
  for (const device::ActiveGpu& gpu : *gpus) {
    devices.push_back({static_cast<uint16_t>(gpu.ordinal), gpu.bus_id});
  }
  absl::StatusOr<std::unique_ptr<NvmlCounters>> counters = NvmlCounters::Create(*api, devices);
  if (!counters.ok()) return counters.status();
  return std::unique_ptr<CounterReader>(*std::move(counters));
}

}  // namespace cuvil::scheduler
