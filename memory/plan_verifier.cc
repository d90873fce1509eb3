#include "memory/plan_verifier.h"

#include <map>
#include <vector>

#include "absl/strings/str_cat.h"

namespace cuvil::memory {

absl::Status VerifyMemoryPlan(absl::Span<const LiveInterval> intervals, const MemoryPlan& plan,
                              size_t alignment_bytes) {
  if (plan.offsets_bytes.size() != intervals.size()) {
    return absl::InternalError(
        absl::StrCat("memory plan: ", plan.offsets_bytes.size(), " offsets for ", intervals.size(), " intervals"));
  }
  // Starts and ends by step. Ends of a step come after its starts, because intervals include both ends.
  std::map<uint32_t, std::vector<size_t>> starts;
  std::map<uint32_t, std::vector<size_t>> ends;
  for (size_t i = 0; i < intervals.size(); ++i) {
    if (intervals[i].size_bytes == 0) continue;
    if (plan.offsets_bytes[i] % alignment_bytes != 0) {
      return absl::InternalError(absl::StrCat("memory plan: interval ", i, " is not aligned"));
    }
    if (plan.offsets_bytes[i] + intervals[i].size_bytes > plan.high_water_bytes) {
      return absl::InternalError(absl::StrCat("memory plan: interval ", i, " ends beyond the arena"));
    }
    starts[intervals[i].first].push_back(i);
    ends[intervals[i].last].push_back(i);
  }
  std::map<size_t, size_t> live;  // offset -> interval
  auto next_end = ends.begin();
  for (const auto& [step, starting] : starts) {
    for (; next_end != ends.end() && next_end->first < step; ++next_end) {
      for (const size_t i : next_end->second) live.erase(plan.offsets_bytes[i]);
    }
    for (const size_t i : starting) {
      const size_t begin = plan.offsets_bytes[i];
      const size_t end = begin + intervals[i].size_bytes;
      const auto after = live.lower_bound(begin);
      size_t clash = SIZE_MAX;
      if (after != live.end() && after->first < end) clash = after->second;
      if (after != live.begin()) {
        const auto before = std::prev(after);
        if (before->first + intervals[before->second].size_bytes > begin) clash = before->second;
      }
      if (clash != SIZE_MAX) {
        return absl::InternalError(
            absl::StrCat("memory plan: intervals ", clash, " and ", i, " share bytes at step ", step));
      }
      live.emplace(begin, i);
    }
  }
  return absl::OkStatus();
}

}  // namespace cuvil::memory
