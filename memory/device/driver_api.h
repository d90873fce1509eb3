#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "memory/device/shared_library.h"

namespace cuvil::device {

// The CUDA driver's functions, resolved once from libcuda.so.1.
//
// Threads:   immutable; any thread.
struct DriverApi {
  // Errors:    Unavailable  no driver on this machine, or one without a required function
  static absl::StatusOr<DriverApi> Load();

  // Whether this driver has all that CUDA graphs need.
  bool HasGraphs() const;

  // `call` with the driver's name for `result`; OK for CUDA_SUCCESS.
  //
  // Errors: ResourceExhausted  the device has no memory for it
  //         DataLoss           the device's context is beyond use: an earlier kernel failed; every later call will fail
  //         Unavailable        anything else
  absl::Status ToStatus(const char* call, int result) const;

#define CUVIL_DRIVER_FUNCTION(presence, name, ...) int (*name)(__VA_ARGS__) = nullptr;
#include "memory/device/driver_api.def"
};

struct Gpu {
  std::string name;
  int compute_capability_major = 0;
  int compute_capability_minor = 0;
  int num_multiprocessors = 0;
  uint64_t memory_bytes = 0;
};

struct DriverReport {
  int cuda_version = 0;  // 13000 for CUDA 13.0: the newest the driver serves
  std::vector<Gpu> gpus;
};

// Initialises the driver and describes its devices. Creates no context.
//
// Errors:    Unavailable  no driver, or it finds no device
absl::StatusOr<DriverReport> ProbeDriver();

// A device on which this process has torch's context, and where it is plugged in: "0000:18:00.0".
struct ActiveGpu {
  int ordinal = 0;
  std::string bus_id;
};

// Creates no context.
//
// Errors:    Unavailable  the driver refused, or lacks a function
absl::StatusOr<std::vector<ActiveGpu>> ActiveGpus(const DriverApi& api);

}  // namespace cuvil::device
