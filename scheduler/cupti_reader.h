// Takes CUPTI's buffers apart.
//
// Threads:   any one thread; before CUPTI is finalized, because records point to names that are CUPTI's.
// Ownership: the result holds copies.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/types/span.h"
#include "scheduler/cupti_api.h"
#include "scheduler/cupti_session.h"
#include "scheduler/device_activity.h"

namespace cuvil::scheduler {

struct CuptiActivity {
  DeviceActivityKind kind{};
  uint64_t start = 0, end = 0;  // of CUPTI's clock; both 0 if the device has not told
  uint64_t bytes = 0;
  uint64_t graph_node = 0;   // of an executable graph; 0: launched by itself
  uint32_t correlation = 0;  // of the call that asked for it
  uint32_t device = 0, stream = 0;
  uint32_t name = 0;  // position in CuptiActivities::names
  std::array<uint32_t, 3> grid{}, block{};
};

struct CuptiActivities {
  std::vector<CuptiActivity> activities;
  std::vector<std::string> names;
  absl::flat_hash_map<uint32_t, uint64_t> external_ids;  // what was pushed, by correlation
  absl::flat_hash_map<uint32_t, uint32_t> threads;       // that made a call, by correlation
  uint64_t num_unreadable = 0;                           // buffers whose rest could not be read

  // How many threads asked for the activities.
  size_t CountThreads() const;
};

CuptiActivities ReadCuptiBuffers(const CuptiApi& api, absl::Span<const CuptiBufferView> buffers);

}  // namespace cuvil::scheduler
