#include "agent/lifecycle/adoption.h"

#include <algorithm>

namespace cuvil::agent {
namespace {

// Chosen, not tuned: three pairs whose times do not overlap are as good a witness as twelve whose times do.
constexpr uint32_t kFirstRoundPairs = 3;
constexpr uint32_t kLaterRoundPairs = 4;
constexpr uint32_t kDecisivePairs = 12;

// A round costs at most 24 eager calls; 4 of 2,000 in the usual case.
constexpr uint64_t kFirstInterval = 2'000;
constexpr uint64_t kLastInterval = 1 << 18;

}  // namespace

Adoption::Adoption(Policy policy) : policy_(policy), min_pairs_(kFirstRoundPairs), interval_(kFirstInterval) {
  if (policy_ == Policy::kAlways) {
    state_ = State::kAdopted;
    round_open_ = false;
  }
}

Adoption::Choice Adoption::Next() {
  if (!round_open_) {
    const Path settled = state_ == State::kRetired ? Path::kEager : Path::kPlan;
    if (policy_ == Policy::kAlways || --calls_until_round_ != 0) return {settled, false};
    OpenRound();
  }
  const Path path = next_;
  next_ = path == Path::kPlan ? Path::kEager : Path::kPlan;
  return {path, true};
}

uint32_t Adoption::Skip(uint32_t calls) {
  if (round_open_ || policy_ == Policy::kAlways) return 0;
  const uint64_t skipped = std::min<uint64_t>(calls, calls_until_round_ - 1);
  calls_until_round_ -= skipped;
  return static_cast<uint32_t>(skipped);
}

bool Adoption::Record(Path path, uint64_t duration_ns) {
  // A call chosen before the round closed, on another thread.
  if (!round_open_) return false;
  if (path == Path::kPlan) {
    if (num_plan_ < kMaxPairs) plan_times_[num_plan_++] = duration_ns;
  } else {
    if (num_eager_ < kMaxPairs) eager_times_[num_eager_++] = duration_ns;
  }
  const uint32_t pairs = std::min(num_plan_, num_eager_);
  if (pairs < min_pairs_ || num_plan_ != num_eager_) return false;

  const auto [plan_min, plan_max] = std::minmax_element(plan_times_.begin(), plan_times_.begin() + num_plan_);
  const auto [eager_min, eager_max] = std::minmax_element(eager_times_.begin(), eager_times_.begin() + num_eager_);
  const State before = rounds_ == 0 ? State::kMeasuring : state_;
  if (*plan_max < *eager_min) {
    CloseRound(State::kAdopted);
  } else if (*plan_min > *eager_max) {
    CloseRound(State::kRetired);
  } else if (pairs >= kDecisivePairs) {
    const uint64_t plan = Median(Path::kPlan);
    const uint64_t eager = Median(Path::kEager);
    if (plan <= eager) {
      CloseRound(State::kAdopted);
    } else if (pairs == kMaxPairs) {
      // Within two percent nobody can be shown to be slower; the plan at least leaves the GIL to others.
      CloseRound(plan - eager > eager / 50 ? State::kRetired : State::kAdopted);
    }
  }
  return !round_open_ && state_ != before;
}

void Adoption::Decide(State state) { CloseRound(state); }

void Adoption::OpenRound() {
  round_open_ = true;
  next_ = Path::kPlan;
  num_plan_ = num_eager_ = 0;
  min_pairs_ = kLaterRoundPairs;
}

void Adoption::CloseRound(State verdict) {
  if (num_plan_ != 0) plan_ns_ = Median(Path::kPlan);
  if (num_eager_ != 0) eager_ns_ = Median(Path::kEager);
  if (rounds_ != 0) interval_ = verdict == state_ ? std::min(interval_ * 2, kLastInterval) : kFirstInterval;
  ++rounds_;
  state_ = verdict;
  round_open_ = false;
  calls_until_round_ = interval_;
}

uint64_t Adoption::Median(Path path) const {
  const auto& times = path == Path::kPlan ? plan_times_ : eager_times_;
  const uint32_t count = path == Path::kPlan ? num_plan_ : num_eager_;
  std::array<uint64_t, kMaxPairs> sorted = times;
  std::nth_element(sorted.begin(), sorted.begin() + count / 2, sorted.begin() + count);
  return sorted[count / 2];
}

}  // namespace cuvil::agent
