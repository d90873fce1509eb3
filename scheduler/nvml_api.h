// NVML's functions, resolved at run time from the library that the GPU driver brings.
//
// Threads:   immutable; any thread.
// Errors:    Load: Unavailable  no NVML on this machine, or one without a required function
// Source:    NVML API reference; the structs are declared as its binary interface has them
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace cuvil::scheduler {

struct NvmlApi {
  static absl::StatusOr<NvmlApi> Load();

  // Unavailable with the name of the call and NVML's words for `result`; OK for NVML_SUCCESS.
  absl::Status ToStatus(const char* call, int result) const;

  // Whether all of GPM's functions are there.
  bool HasGpm() const;

  const char* (*nvmlErrorString)(int result) = nullptr;
#define CUVIL_NVML_FUNCTION(presence, name, ...) int (*name)(__VA_ARGS__) = nullptr;
#include "scheduler/nvml_api.def"
};

struct NvmlMemory {
  uint64_t total_bytes, free_bytes, used_bytes;
};

// Percent of NVML's own window, between a sixth of a second and one, in which a kernel or the memory was at work.
struct NvmlUtilization {
  unsigned gpu, memory;
};

enum NvmlPcieCounter : int { kNvmlPcieSent = 0, kNvmlPcieReceived = 1 };
enum NvmlClock : int { kNvmlClockSm = 1, kNvmlClockMemory = 2 };

struct NvmlGpmSupport {
  unsigned version, is_supported;
};
inline constexpr unsigned kNvmlGpmSupportVersion = 1;

enum NvmlGpmMetricId : unsigned {
  kNvmlGpmSmUtilization = 2,  // percent of the SMs' time with at least one warp
  kNvmlGpmSmOccupancy = 3,    // percent of the warps that the SMs could hold
  kNvmlGpmPcieSent = 20,      // MiB/s, from the GPU
  kNvmlGpmPcieReceived = 21,  // MiB/s, to the GPU
};

struct NvmlGpmMetric {
  unsigned id;
  int result;  // nvmlReturn_t
  double value;
  const char *short_name, *long_name, *unit;
};

// NVML's struct ends in an array for all metrics there are, which grows from release to release; it reads and writes
// the first `count` only.
struct NvmlGpmMetrics {
  unsigned version, count;
  void *earlier, *later;  // samples
  NvmlGpmMetric metrics[4];
};
inline constexpr unsigned kNvmlGpmMetricsVersion = 1;

}  // namespace cuvil::scheduler
