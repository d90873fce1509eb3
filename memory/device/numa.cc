#include "memory/device/numa.h"

#include <fstream>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace cuvil::device {
namespace {

constexpr char kNodeDirectory[] = "/sys/devices/system/node/";

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  std::string text;
  std::getline(file, text);
  return text;
}

}  // namespace

absl::StatusOr<std::vector<int>> ParseCpuList(absl::string_view text) {
  std::vector<int> numbers;
  text = absl::StripAsciiWhitespace(text);
  if (text.empty()) return numbers;
  for (absl::string_view range : absl::StrSplit(text, ',')) {
    const std::pair<absl::string_view, absl::string_view> ends = absl::StrSplit(range, absl::MaxSplits('-', 1));
    int first = 0, last = 0;
    const bool single = range.find('-') == absl::string_view::npos;
    if (!absl::SimpleAtoi(ends.first, &first) || !absl::SimpleAtoi(single ? ends.first : ends.second, &last) ||
        first < 0 || last < first) {
      return absl::InvalidArgumentError(absl::StrCat("CPU list \"", text, "\": bad range \"", range, "\""));
    }
    for (int number = first; number <= last; ++number) numbers.push_back(number);
  }
  return numbers;
}

std::vector<NumaNode> ReadNumaNodes() {
  std::vector<NumaNode> nodes;
  auto ids = ParseCpuList(ReadFile(absl::StrCat(kNodeDirectory, "online")));
  if (ids.ok()) {
    for (int id : *ids) {
      auto cpus = ParseCpuList(ReadFile(absl::StrCat(kNodeDirectory, "node", id, "/cpulist")));
      nodes.push_back({id, cpus.ok() ? *std::move(cpus) : std::vector<int>()});
    }
  }
  if (nodes.empty()) nodes.push_back({0, {}});
  return nodes;
}

}  // namespace cuvil::device
