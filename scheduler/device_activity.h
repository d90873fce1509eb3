// What a device did while a profile was taken: kernels, copies and fills, each with the site that asked for it.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "scheduler/profile_recorder.h"

namespace cuvil::scheduler {

enum class DeviceActivityKind : uint8_t { kKernel, kCopy, kFill };

// Plain data without gaps: it goes to Python as bytes.
struct DeviceActivity {
  uint64_t start_ns = 0;  // of scheduler/monotonic_clock.h
  uint64_t end_ns = 0;
  uint64_t site = ProfileRecorder::kNoSite;  // position in Profile::sites
  uint64_t bytes = 0;                        // of copies and fills
  uint32_t name = 0;                         // position in DeviceProfile::names
  uint32_t stream = 0;                       // as CUPTI numbers a device's streams
  std::array<uint32_t, 3> grid{}, block{};   // of kernels
  uint32_t device = 0;
  DeviceActivityKind kind{};
  uint8_t from_graph = 0;  // one node of a CUDA graph's launch
  uint16_t padding = 0;
};
static_assert(sizeof(DeviceActivity) == 72);

struct DeviceProfile {
  std::vector<DeviceActivity> activities;  // by start
  std::vector<std::string> names;          // of kernels, readable; of copies, as "copy host to device"
  uint64_t recorded_ns = 0;                // all kernels' durations by CUPTI's clock, before anything was made of them
  uint64_t num_dropped = 0;                // records that found no room
  std::vector<std::string> notes;          // sentences on what is missing
};

}  // namespace cuvil::scheduler
