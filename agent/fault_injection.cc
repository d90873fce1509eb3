#include "agent/fault_injection.h"

#include <array>
#include <charconv>
#include <utility>

#include "absl/strings/str_cat.h"

namespace cuvil::agent {
namespace {

constexpr size_t kNumPoints = static_cast<size_t>(FaultPoint::kNumPoints);

constexpr std::string_view kNames[] = {
#define CUVIL_FAULT_POINT(enumerator, name, description) name,
#include "agent/fault_points.def"
#undef CUVIL_FAULT_POINT
};

// Failures still asked for at each point; negative: without end.
constinit std::array<std::atomic<int64_t>, kNumPoints> remaining{};

void Arm(size_t point, int64_t count) {
  const int64_t before = remaining[point].exchange(count, std::memory_order_relaxed);
  const int change = (count != 0) - (before != 0);
  if (change != 0) fault_internal::num_armed.fetch_add(change, std::memory_order_relaxed);
}

size_t Find(std::string_view name) {
  for (size_t i = 0; i < kNumPoints; ++i) {
    if (kNames[i] == name) return i;
  }
  return kNumPoints;
}

absl::Status NoSuchPoint(std::string_view name) {
  return absl::InvalidArgumentError(absl::StrCat("no fault point is called '", std::string(name), "'"));
}

}  // namespace

bool fault_internal::Take(FaultPoint point) {
  std::atomic<int64_t>& left = remaining[static_cast<size_t>(point)];
  int64_t seen = left.load(std::memory_order_relaxed);
  while (seen > 0) {
    if (left.compare_exchange_weak(seen, seen - 1, std::memory_order_relaxed)) {
      if (seen == 1) num_armed.fetch_sub(1, std::memory_order_relaxed);
      return true;
    }
  }
  return seen < 0;
}

std::string_view FaultPointName(FaultPoint point) { return kNames[static_cast<size_t>(point)]; }

std::vector<std::string> FaultPointNames() { return std::vector<std::string>(std::begin(kNames), std::end(kNames)); }

absl::Status InjectFault(std::string_view name, int64_t count) {
  const size_t point = Find(name);
  if (point == kNumPoints) return NoSuchPoint(name);
  Arm(point, count < 0 ? -1 : count);
  return absl::OkStatus();
}

absl::Status InjectFaults(std::string_view text) {
  std::vector<std::pair<size_t, int64_t>> wanted;
  while (!text.empty()) {
    const size_t comma = text.find(',');
    std::string_view item = text.substr(0, comma);
    text = comma == std::string_view::npos ? std::string_view() : text.substr(comma + 1);
    if (item.empty()) continue;
    int64_t count = -1;
    if (const size_t colon = item.find(':'); colon != std::string_view::npos) {
      const std::string_view digits = item.substr(colon + 1);
      item = item.substr(0, colon);
      const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), count);
      if (error != std::errc() || end != digits.data() + digits.size()) {
        return absl::InvalidArgumentError(
            absl::StrCat("'", std::string(digits), "' is no count for fault point '", std::string(item), "'"));
      }
    }
    const size_t point = Find(item);
    if (point == kNumPoints) return NoSuchPoint(item);
    wanted.emplace_back(point, count < 0 ? -1 : count);
  }
  for (const auto& [point, count] : wanted) Arm(point, count);
  return absl::OkStatus();
}

absl::StatusOr<int64_t> FaultsLeft(std::string_view name) {
  const size_t point = Find(name);
  if (point == kNumPoints) return NoSuchPoint(name);
  return remaining[point].load(std::memory_order_relaxed);
}

void DisarmFaults() {
  for (size_t i = 0; i < kNumPoints; ++i) Arm(i, 0);
}

}  // namespace cuvil::agent
