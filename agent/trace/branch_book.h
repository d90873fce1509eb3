#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "absl/types/span.h"
#include "agent/trace/trace.h"

namespace cuvil::trace {

// Which way each conditional jump went, added up over many traces: branch probabilities.
//
// A place is a file, line, column and instruction. So two jumps of one line are two, and code that is compiled anew, as
// a lambda that every call makes, stays one.
//
// Threads: plain data.
class BranchBook {
 public:
  static constexpr size_t kMaxPlaces = 4096;

  // The outcomes of one place over all traces.
  struct Total {
    const std::string* file = nullptr;  // valid until the book changes
    int line = 0;
    int column = 0;
    int instruction = 0;
    BranchKind kind = BranchKind::kTruth;
    uint64_t num_true = 0;
    uint64_t num_false = 0;
  };

  explicit BranchBook(size_t max_places = kMaxPlaces) : max_places_(max_places) {}

  // Adds what one trace has counted.
  void Add(absl::Span<const BranchCount> counts);

  // Sorted by file, line, column and instruction.
  std::vector<Total> Totals() const;
  // Outcomes at places that found no room.
  uint64_t num_dropped() const { return num_dropped_; }

 private:
  // Line, column, instruction, kind.
  using Place = std::tuple<int, int, int, BranchKind>;
  struct Outcomes {
    uint64_t num_true = 0;
    uint64_t num_false = 0;
  };

  size_t max_places_;
  size_t num_places_ = 0;
  uint64_t num_dropped_ = 0;
  std::map<std::string, std::map<Place, Outcomes>> files_;
};

}  // namespace cuvil::trace
