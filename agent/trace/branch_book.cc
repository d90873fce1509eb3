#include "agent/trace/branch_book.h"

namespace cuvil::trace {

void BranchBook::Add(absl::Span<const BranchCount> counts) {
  for (const BranchCount& count : counts) {
    const Place place{count.line, count.column, count.instruction, count.kind};
    auto file = files_.find(count.file);
    const bool known = file != files_.end() && file->second.contains(place);
    if (!known) {
      // The first places say more than the last: code that is made anew with ever new names would push them out.
      if (num_places_ >= max_places_) {
        num_dropped_ += uint64_t{count.num_true} + count.num_false;
        continue;
      }
      ++num_places_;
      if (file == files_.end()) file = files_.try_emplace(count.file).first;
    }
    Outcomes& outcomes = file->second[place];
    outcomes.num_true += count.num_true;
    outcomes.num_false += count.num_false;
  }
}

std::vector<BranchBook::Total> BranchBook::Totals() const {
  std::vector<Total> totals;
  totals.reserve(num_places_);
  for (const auto& [file, places] : files_) {
    for (const auto& [place, outcomes] : places) {
      const auto& [line, column, instruction, kind] = place;
      totals.push_back({&file, line, column, instruction, kind, outcomes.num_true, outcomes.num_false});
    }
  }
  return totals;
}

}  // namespace cuvil::trace
