#include "memory/memory_plan.h"

#include <algorithm>
#include <numeric>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace cuvil::memory {
namespace {

size_t AlignUp(size_t value, size_t alignment) { return (value + alignment - 1) & ~(alignment - 1); }

bool OverlapInTime(const LiveInterval& a, const LiveInterval& b) { return a.first <= b.last && b.first <= a.last; }

size_t LivePeak(absl::Span<const LiveInterval> intervals, size_t alignment) {
  struct Event {
    uint64_t time;  // 2 * step for a start, 2 * step + 1 for an end: a buffer is live through its last step
    size_t size_bytes;
    bool starts;
  };
  std::vector<Event> events;
  events.reserve(intervals.size() * 2);
  for (const LiveInterval& interval : intervals) {
    const size_t size = AlignUp(interval.size_bytes, alignment);
    events.push_back({uint64_t{2} * interval.first, size, true});
    events.push_back({uint64_t{2} * interval.last + 1, size, false});
  }
  std::sort(events.begin(), events.end(), [](const Event& a, const Event& b) { return a.time < b.time; });
  size_t live = 0;
  size_t peak = 0;
  for (const Event& event : events) {
    live = event.starts ? live + event.size_bytes : live - event.size_bytes;
    peak = std::max(peak, live);
  }
  return peak;
}

}  // namespace

absl::StatusOr<MemoryPlan> PlanMemory(absl::Span<const LiveInterval> intervals, const MemoryPlanOptions& options) {
  const size_t alignment = options.alignment_bytes;
  if (alignment == 0 || (alignment & (alignment - 1)) != 0) {
    return absl::InvalidArgumentError(absl::StrCat("PlanMemory: alignment ", alignment, " is no power of two"));
  }
  MemoryPlan plan;
  plan.offsets_bytes.resize(intervals.size(), 0);
  for (size_t i = 0; i < intervals.size(); ++i) {
    if (intervals[i].last < intervals[i].first) {
      return absl::InvalidArgumentError(
          absl::StrCat("PlanMemory: interval ", i, " ends at ", intervals[i].last, ", before ", intervals[i].first));
    }
    plan.sum_bytes += AlignUp(intervals[i].size_bytes, alignment);
  }
  plan.live_peak_bytes = LivePeak(intervals, alignment);

  std::vector<size_t> order(intervals.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    if (intervals[a].size_bytes != intervals[b].size_bytes) return intervals[a].size_bytes > intervals[b].size_bytes;
    if (intervals[a].first != intervals[b].first) return intervals[a].first < intervals[b].first;
    return a < b;
  });

  // Placed intervals, by offset. Each interval takes the tightest hole among those that live at the same time.
  std::vector<size_t> placed;
  placed.reserve(intervals.size());
  for (const size_t current : order) {
    const size_t size = AlignUp(intervals[current].size_bytes, alignment);
    if (size == 0) continue;
    size_t previous_end = 0;
    size_t best_offset = SIZE_MAX;
    size_t best_gap = SIZE_MAX;
    for (const size_t other : placed) {
      if (!OverlapInTime(intervals[current], intervals[other])) continue;
      const size_t offset = plan.offsets_bytes[other];
      if (offset >= previous_end + size && offset - previous_end < best_gap) {
        best_offset = previous_end;
        best_gap = offset - previous_end;
      }
      previous_end = std::max(previous_end, offset + AlignUp(intervals[other].size_bytes, alignment));
    }
    if (best_offset == SIZE_MAX) best_offset = previous_end;
    plan.offsets_bytes[current] = best_offset;
    plan.high_water_bytes = std::max(plan.high_water_bytes, best_offset + size);
    placed.insert(std::upper_bound(placed.begin(), placed.end(), current,
                                   [&](size_t a, size_t b) { return plan.offsets_bytes[a] < plan.offsets_bytes[b]; }),
                  current);
  }
  if (plan.high_water_bytes > options.limit_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("PlanMemory: ", plan.high_water_bytes, " bytes needed, ", options.limit_bytes, " allowed"));
  }
  return plan;
}

}  // namespace cuvil::memory
