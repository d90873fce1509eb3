#pragma once

#include <array>
#include <cstdint>

namespace cuvil::agent {

// Decides from interleaved timings of real calls whether a plan serves; eager wins only if it is shown to be faster.
//
// A measuring round alternates plan and eager, plan first. It ends early when the two do not overlap, and otherwise
// goes on until the medians tell. A decided plan is measured again after a number of calls that doubles while the
// verdict stands, so that a plan that became slower is retired, a retired one can come back, and the calls spent on
// looking stay below one percent.
//
// Units:   nanoseconds; a round counts pairs of one planned and one eager call.
// Threads: thread-compatible (the agent uses it under the GIL).
class Adoption {
 public:
  enum class Path { kPlan, kEager };
  enum class State { kMeasuring, kAdopted, kRetired };

  // `kAlways` adopts at once and never measures.
  enum class Policy { kMeasure, kAlways };
  explicit Adoption(Policy policy);

  // What the next call should do; `timed` tells whether to report it through Record().
  struct Choice {
    Path path = Path::kEager;
    bool timed = false;
  };
  Choice Next();

  // Counts calls that are made without asking, at most `calls` and never past the next round; returns how many.
  uint32_t Skip(uint32_t calls);

  // Reports one timed call. Returns true iff the verdict changed or was reached for the first time.
  bool Record(Path path, uint64_t duration_ns);

  // Forces a verdict until the next measuring round, with the usual interval before it.
  void Decide(State state);

  State state() const { return state_; }
  bool measuring() const { return round_open_; }
  // Medians of the last finished round; 0 before the first.
  uint64_t plan_ns() const { return plan_ns_; }
  uint64_t eager_ns() const { return eager_ns_; }
  uint64_t rounds() const { return rounds_; }

 private:
  static constexpr uint32_t kMaxPairs = 24;

  void OpenRound();
  void CloseRound(State verdict);
  uint64_t Median(Path path) const;

  Policy policy_;
  State state_ = State::kMeasuring;
  bool round_open_ = true;
  Path next_ = Path::kPlan;
  uint32_t min_pairs_;
  uint32_t num_plan_ = 0;
  uint32_t num_eager_ = 0;
  uint64_t calls_until_round_ = 0;
  uint64_t interval_;
  uint64_t rounds_ = 0;
  uint64_t plan_ns_ = 0;
  uint64_t eager_ns_ = 0;
  std::array<uint64_t, kMaxPairs> plan_times_{};
  std::array<uint64_t, kMaxPairs> eager_times_{};
};

}  // namespace cuvil::agent
