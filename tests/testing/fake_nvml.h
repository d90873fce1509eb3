// An NVML whose counters the test sets, and which keeps count of what it is asked. One at a time.
#pragma once

#include <atomic>
#include <map>
#include <string>

#include "scheduler/nvml_api.h"

namespace cuvil::testing {

struct FakeNvml {
  FakeNvml() { current = this; }
  ~FakeNvml() { current = nullptr; }
  FakeNvml(const FakeNvml&) = delete;
  FakeNvml& operator=(const FakeNvml&) = delete;

  std::map<std::string, int> results;  // by function; absent: success
  bool gpm = true;
  int num_initialised = 0;
  int num_samples = 0;  // GPM's, allocated and not freed
  std::map<std::string, int> calls;
  uint64_t used_bytes = 5;
  unsigned sm_megahertz = 1980, memory_megahertz = 3201;
  unsigned gpu_percent = 37;
  unsigned sent_kilobytes = 11, received_kilobytes = 22;
  std::map<unsigned, double> metrics = {{2, 90.5}, {3, 41.25}, {20, 1.5}, {21, 2}};
  std::string last_bus_id;

  int Note(const char* name) {
    ++calls[name];
    const auto found = results.find(name);
    return found == results.end() ? 0 : found->second;
  }

  static scheduler::NvmlApi Api() {
    scheduler::NvmlApi api;
    api.nvmlErrorString = [](int result) { return result == 4 ? "Insufficient Permissions" : "Unknown Error"; };
    api.nvmlInit_v2 = [] {
      const int result = current->Note("nvmlInit");
      current->num_initialised += result == 0 ? 1 : 0;
      return result;
    };
    api.nvmlShutdown = [] {
      --current->num_initialised;
      return current->Note("nvmlShutdown");
    };
    api.nvmlDeviceGetHandleByPciBusId_v2 = [](const char* bus_id, void** device) {
      current->last_bus_id = bus_id;
      *device = current;
      return current->Note(bus_id);
    };
    api.nvmlDeviceGetMemoryInfo = [](void*, void* memory) {
      *static_cast<scheduler::NvmlMemory*>(memory) = {100, 95, current->used_bytes};
      return current->Note("memory");
    };
    api.nvmlDeviceGetUtilizationRates = [](void*, void* rates) {
      *static_cast<scheduler::NvmlUtilization*>(rates) = {current->gpu_percent, 1};
      return current->Note("utilization");
    };
    api.nvmlDeviceGetPcieThroughput = [](void*, int counter, unsigned* kilobytes) {
      *kilobytes = counter == scheduler::kNvmlPcieSent ? current->sent_kilobytes : current->received_kilobytes;
      return current->Note("pcie");
    };
    api.nvmlDeviceGetClockInfo = [](void*, int clock, unsigned* megahertz) {
      *megahertz = clock == scheduler::kNvmlClockSm ? current->sm_megahertz : current->memory_megahertz;
      return current->Note("clock");
    };
    api.nvmlGpmQueryDeviceSupport = [](void*, void* support) {
      auto* asked = static_cast<scheduler::NvmlGpmSupport*>(support);
      if (asked->version != 1) return 25;  // NVML_ERROR_ARGUMENT_VERSION_MISMATCH
      asked->is_supported = current->gpm ? 1 : 0;
      return current->Note("support");
    };
    api.nvmlGpmSampleAlloc = [](void** sample) {
      const int result = current->Note("alloc");
      if (result != 0) return result;
      *sample = new double(0);
      ++current->num_samples;
      return 0;
    };
    api.nvmlGpmSampleFree = [](void* sample) {
      delete static_cast<double*>(sample);
      --current->num_samples;
      return current->Note("free");
    };
    // A sample knows when it was taken.
    api.nvmlGpmSampleGet = [](void*, void* sample) {
      const int result = current->Note("sample");
      if (result == 0) *static_cast<double*>(sample) = ++current->clock;
      return result;
    };
    api.nvmlGpmMetricsGet = [](void* asked) {
      auto* metrics = static_cast<scheduler::NvmlGpmMetrics*>(asked);
      const bool in_order = *static_cast<double*>(metrics->earlier) < *static_cast<double*>(metrics->later);
      if (metrics->version != 1 || !in_order) return 2;  // NVML_ERROR_INVALID_ARGUMENT
      for (unsigned i = 0; i < metrics->count; ++i) {
        const auto found = current->metrics.find(metrics->metrics[i].id);
        metrics->metrics[i].result = found == current->metrics.end() ? 3 : 0;  // NVML_ERROR_NOT_SUPPORTED
        if (found != current->metrics.end()) metrics->metrics[i].value = found->second;
      }
      return current->Note("metrics");
    };
    return api;
  }

 private:
  double clock = 0;
  static inline FakeNvml* current = nullptr;
};

}  // namespace cuvil::testing
