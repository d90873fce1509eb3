// Says which site of a profile a device's activity belongs to.
//
// What is launched by itself carries the number that was pushed around the call (CUPTI's external correlation). A node
// of a graph's launch carries CUPTI's number of the executable's node, which is known to be a clone of a captured node
// of a plan's step; the launch's own number says where that plan's sites begin. What is known of neither is attributed
// to the call that launched it, and what no call launched to nothing.
//
// Threads:   thread-safe.
// Source:    CUPTI API reference: CUpti_ActivityKernel9::graphNodeId, CUPTI_CBID_RESOURCE_GRAPHNODE_CLONED,
//            cuptiActivityPushExternalCorrelationId
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "absl/types/span.h"
#include "scheduler/cupti_reader.h"
#include "scheduler/cupti_session.h"
#include "scheduler/device_activity.h"

namespace cuvil::scheduler {

class KernelAttribution {
 public:
  // A node of a captured graph, and which of its plan's sites it belongs to.
  struct Node {
    static constexpr uint32_t kOfTheCall = ~uint32_t{0};
    void* node = nullptr;  // CUgraphNode
    uint32_t site_offset = kOfTheCall;
  };

  // What to push around what one thread does, as a number. Step: one site, a step of a plan that runs by itself.
  static uint64_t IdOfStep(uint64_t site) { return site << kTagBits | kStep; }
  // A call of a module, whose site is known when it ends. kNoRoom if there are too many.
  uint64_t IdOfCall();
  void EndCall(uint64_t id, uint64_t site);
  // A launch of a plan's graph, whose sites begin at `first_site`, by the call with that id.
  uint64_t IdOfLaunch(uint64_t first_site, uint64_t call);

  // Notes which nodes of an executable are made of which captured ones.
  void AddClones(absl::Span<const Node> nodes, absl::Span<const CuptiSession::Clone> clones);

  // The site, or ProfileRecorder::kNoSite.
  uint64_t SiteOf(const CuptiActivity& activity, const CuptiActivities& all) const;

  static constexpr uint64_t kNoRoom = ~uint64_t{0};

 private:
  static constexpr int kTagBits = 2;
  static constexpr uint64_t kTagMask = 3, kStep = 0, kCall = 1, kLaunch = 2;
  static constexpr size_t kMaxEntries = size_t{1} << 22;  // of calls, and of launches
  struct Launch {
    uint64_t first_site, call;
  };
  uint64_t SiteOfCall(uint64_t id) const;

  mutable std::mutex mutex_;  // of all below; nothing is called under it
  std::vector<uint64_t> call_sites_;
  std::vector<Launch> launches_;
  std::unordered_map<uint64_t, uint32_t> offset_by_clone_;
};

// All that a profile says of the device, with times of the host's clock. What began after `end_ns` is left out, unless
// a site asked for it before.
DeviceProfile Attribute(const CuptiActivities& all, const CuptiClock& clock, const KernelAttribution& attribution,
                        uint64_t end_ns);

}  // namespace cuvil::scheduler
