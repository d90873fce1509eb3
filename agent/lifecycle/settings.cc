#include "agent/lifecycle/settings.h"

#include <charconv>
#include <cstdlib>
#include <optional>
#include <string_view>

#include "absl/strings/str_cat.h"

namespace cuvil::agent {
namespace {

constexpr size_t kMaxPlansLimit = 4096;
constexpr size_t kMaxStreamsLimit = 8;

std::string_view View(const char* value) { return value == nullptr ? std::string_view() : std::string_view(value); }

std::string Problem(const char* name, std::string_view value, const char* expected) {
  return absl::StrCat(name, "=", std::string(value), " is ignored: expected ", expected);
}

// "0.1" is a share, "512M" and "536870912" are bytes.
bool ParseGraphMemory(std::string_view value, GraphMemorySetting* setting) {
  const char* const end = value.data() + value.size();
  if (value.find('.') != std::string_view::npos) {
    double share = 0;
    const auto [rest, error] = std::from_chars(value.data(), end, share);
    if (error != std::errc() || rest != end || !(share >= 0 && share <= 1)) return false;
    setting->share = share;
    return true;
  }
  uint64_t bytes = 0;
  const auto [rest, error] = std::from_chars(value.data(), end, bytes);
  if (error != std::errc()) return false;
  const std::string_view unit(rest, static_cast<size_t>(end - rest));
  const int shift = unit.empty() ? 0 : unit == "K" ? 10 : unit == "M" ? 20 : unit == "G" ? 30 : -1;
  if (shift < 0 || bytes > (~uint64_t{0} >> shift)) return false;
  setting->bytes = bytes << shift;
  setting->is_bytes = true;
  return true;
}

// The whole text as a number from 1 to `limit`.
std::optional<size_t> NumberUpTo(size_t limit, std::string_view value) {
  size_t number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  const bool is_number = error == std::errc() && end == value.data() + value.size();
  return is_number && number >= 1 && number <= limit ? std::optional<size_t>(number) : std::nullopt;
}

}  // namespace

Settings Settings::From(const char* (*lookup)(const char* name)) {
  Settings settings;

  std::string_view value = View(lookup("CUVIL_PREPARE"));
  if (value == "sync") {
    settings.prepare = PrepareMode::kSync;
  } else if (!value.empty() && value != "background") {
    settings.problems.push_back(Problem("CUVIL_PREPARE", value, "background or sync"));
  }

  value = View(lookup("CUVIL_ADOPT"));
  if (value == "always") {
    settings.adopt = AdoptMode::kAlways;
  } else if (!value.empty() && value != "measure") {
    settings.problems.push_back(Problem("CUVIL_ADOPT", value, "measure or always"));
  }

  value = View(lookup("CUVIL_LOG"));
  if (value == "info") {
    settings.log_level = LogLevel::kInfo;
  } else if (value == "debug") {
    settings.log_level = LogLevel::kDebug;
  } else if (!value.empty() && value != "warning") {
    settings.problems.push_back(Problem("CUVIL_LOG", value, "warning, info or debug"));
  }

  value = View(lookup("CUVIL_DISABLE"));
  settings.disabled = !value.empty() && value != "0";

  value = View(lookup("CUVIL_PLANS"));
  if (const auto plans = NumberUpTo(kMaxPlansLimit, value); plans.has_value()) {
    settings.max_plans = *plans;
  } else if (!value.empty()) {
    settings.problems.push_back(Problem("CUVIL_PLANS", value, "a number from 1 to 4096"));
  }

  value = View(lookup("CUVIL_STREAMS"));
  if (const auto streams = NumberUpTo(kMaxStreamsLimit, value); streams.has_value()) {
    settings.max_streams = static_cast<uint32_t>(*streams);
  } else if (!value.empty()) {
    settings.problems.push_back(Problem("CUVIL_STREAMS", value, "a number from 1 to 8"));
  }

  value = View(lookup("CUVIL_GRAPH_MEMORY"));
  if (!value.empty() && !ParseGraphMemory(value, &settings.graph_memory)) {
    settings.problems.push_back(
        Problem("CUVIL_GRAPH_MEMORY", value, "bytes, such as 512M, or a share of the device's memory, such as 0.1"));
  }

  settings.faults = std::string(View(lookup("CUVIL_FAULT")));
  return settings;
}

Settings Settings::FromEnvironment() {
  return From([](const char* name) -> const char* { return std::getenv(name); });
}

}  // namespace cuvil::agent
