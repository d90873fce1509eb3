#include "scheduler/kernel_attribution.h"

#include <algorithm>

namespace cuvil::scheduler {

uint64_t KernelAttribution::IdOfCall() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (call_sites_.size() >= kMaxEntries) return kNoRoom;
  call_sites_.push_back(ProfileRecorder::kNoSite);
  return (call_sites_.size() - 1) << kTagBits | kCall;
}

void KernelAttribution::EndCall(uint64_t id, uint64_t site) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (id >> kTagBits < call_sites_.size()) call_sites_[id >> kTagBits] = site;
}

uint64_t KernelAttribution::IdOfLaunch(uint64_t first_site, uint64_t call) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (launches_.size() >= kMaxEntries) return kNoRoom;
  launches_.push_back({first_site, call});
  return (launches_.size() - 1) << kTagBits | kLaunch;
}

void KernelAttribution::AddClones(absl::Span<const Node> nodes, absl::Span<const CuptiSession::Clone> clones) {
  std::unordered_map<void*, uint32_t> offsets;
  for (const Node& node : nodes) offsets.emplace(node.node, node.site_offset);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const CuptiSession::Clone& clone : clones) {
    if (const auto found = offsets.find(clone.original); found != offsets.end()) {
      offset_by_clone_[clone.id] = found->second;
    }
  }
}

uint64_t KernelAttribution::SiteOfCall(uint64_t id) const {
  const uint64_t number = id >> kTagBits;
  return (id & kTagMask) == kCall && number < call_sites_.size() ? call_sites_[number] : ProfileRecorder::kNoSite;
}

uint64_t KernelAttribution::SiteOf(const CuptiActivity& activity, const CuptiActivities& all) const {
  const auto pushed = all.external_ids.find(activity.correlation);
  if (pushed == all.external_ids.end()) return ProfileRecorder::kNoSite;
  const uint64_t id = pushed->second;
  if ((id & kTagMask) == kStep) return id >> kTagBits;
  const std::lock_guard<std::mutex> lock(mutex_);
  if ((id & kTagMask) == kCall) return SiteOfCall(id);
  if (id >> kTagBits >= launches_.size()) return ProfileRecorder::kNoSite;
  const Launch& launch = launches_[id >> kTagBits];
  const auto node = activity.graph_node == 0 ? offset_by_clone_.end() : offset_by_clone_.find(activity.graph_node);
  if (node == offset_by_clone_.end() || node->second == Node::kOfTheCall ||
      launch.first_site == ProfileRecorder::kNoSite) {
    return SiteOfCall(launch.call);
  }
  return launch.first_site + node->second;
}

DeviceProfile Attribute(const CuptiActivities& all, const CuptiClock& clock, const KernelAttribution& attribution,
                        uint64_t end_ns) {
  DeviceProfile profile;
  profile.names = all.names;
  profile.activities.reserve(all.activities.size());
  uint64_t num_untimed = 0, recorded = 0;
  for (const CuptiActivity& from : all.activities) {
    // The device had not said when the buffer was taken, or the work never ran.
    if (from.start == 0 || from.end < from.start) {
      ++num_untimed;
      continue;
    }
    const uint64_t site = attribution.SiteOf(from, all);
    const uint64_t start_ns = clock.ToMonotonicNs(from.start);
    if (site == ProfileRecorder::kNoSite && start_ns > end_ns) continue;
    DeviceActivity& to = profile.activities.emplace_back();
    to.start_ns = start_ns;
    to.end_ns = std::max(to.start_ns, clock.ToMonotonicNs(from.end));
    to.site = site;
    to.bytes = from.bytes;
    to.name = from.name;
    to.stream = from.stream;
    to.grid = from.grid;
    to.block = from.block;
    to.device = from.device;
    to.kind = from.kind;
    to.from_graph = from.graph_node != 0;
    if (from.kind == DeviceActivityKind::kKernel) recorded += from.end - from.start;
  }
  profile.num_dropped = num_untimed;
  const uint64_t begin = clock.first.cupti;
  profile.recorded_ns = clock.ToMonotonicNs(begin + recorded) - clock.ToMonotonicNs(begin);
  std::stable_sort(profile.activities.begin(), profile.activities.end(),
                   [](const DeviceActivity& a, const DeviceActivity& b) { return a.start_ns < b.start_ns; });
  return profile;
}

}  // namespace cuvil::scheduler
