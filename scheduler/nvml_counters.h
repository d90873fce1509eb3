// Reads GPU counters from NVML: GPM where the GPU has it (Hopper and later), its older counters elsewhere.
//
// GPM's values are means over the time between two reads, which must be 100 ms apart or more. Without it PCIe
// throughput costs 20 ms a direction, in which the driver counts; it is then read rarely, one direction at a time, and
// there is no occupancy.
//
// Threads:   one; NvmlCounters belongs to the thread that made it.
// Ownership: holds NVML initialised.
// Errors:    MakeNvmlCounters: Unavailable  no NVML, no CUDA driver, or no GPU that this process uses
// Source:    NVML API reference, nvmlGpmMetricsGet and nvmlDeviceGetPcieThroughput
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "scheduler/live_sampler.h"
#include "scheduler/nvml_api.h"

namespace cuvil::scheduler {

class NvmlCounters final : public CounterReader {
 public:
  struct Device {
    uint16_t number = 0;  // CUDA's
    std::string bus_id;   // "0000:18:00.0": NVML's own order is another
  };

  // Devices that NVML does not know are left out.
  //
  // Errors: Unavailable  NVML refused, or knows none of them
  static absl::StatusOr<std::unique_ptr<NvmlCounters>> Create(const NvmlApi& api, absl::Span<const Device> devices);
  ~NvmlCounters() override;

  void Read(uint64_t now_ns, std::vector<LiveSample>* samples) override;

 private:
  struct Gpu {
    uint16_t number = 0;
    void* handle = nullptr;
    // GPM: the last sample and a buffer for the next; null without.
    void* last = nullptr;
    void* spare = nullptr;
    uint64_t last_ns = 0;  // 0: none yet
    // Without GPM: when PCIe was read last, and which direction is next.
    uint64_t pcie_ns = 0;
    bool received_next = false;
  };

  explicit NvmlCounters(const NvmlApi& api) : api_(api) {}
  void OpenGpm(Gpu* gpu) const;
  void CloseGpm(Gpu* gpu) const;
  void ReadGpm(Gpu* gpu, uint64_t now_ns, std::vector<LiveSample>* samples) const;
  void ReadOlder(Gpu* gpu, uint64_t now_ns, std::vector<LiveSample>* samples) const;

  const NvmlApi api_;
  std::vector<Gpu> gpus_;
};

// Of the GPUs on which this process has a context.
absl::StatusOr<std::unique_ptr<CounterReader>> MakeNvmlCounters();

}  // namespace cuvil::scheduler
