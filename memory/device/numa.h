#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace cuvil::device {

// One memory node of the machine and the CPUs next to it.
struct NumaNode {
  int id = 0;
  std::vector<int> cpus;
};

// The machine's nodes in ascending order of id, read from the kernel; one node without CPUs where the kernel shows
// none.
//
// Threads:   any.
std::vector<NumaNode> ReadNumaNodes();

// "0-2,5" -> {0, 1, 2, 5}, the kernel's list format.
//
// Errors:    InvalidArgument  malformed, or a range that ends before it starts
absl::StatusOr<std::vector<int>> ParseCpuList(absl::string_view text);

}  // namespace cuvil::device
