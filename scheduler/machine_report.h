#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "memory/device/driver_api.h"
#include "memory/device/numa.h"
#include "memory/device/vendor_library.h"

namespace cuvil::scheduler {

// What plans can use on this machine.
struct MachineReport {
  absl::StatusOr<device::DriverReport> driver;
  std::vector<device::VendorLibrary> libraries;
  std::vector<device::NumaNode> numa_nodes;
};

// Probes the CUDA driver, the optional libraries and the memory nodes. Takes up to a second where a GPU wakes up.
//
// Threads:   any; nothing of Python is touched.
MachineReport ProbeMachine();

}  // namespace cuvil::scheduler
