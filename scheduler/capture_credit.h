// Says when a graph that was given up is worth capturing again.
//
// A capture costs milliseconds, and its graph may be given up again at once when models take turns in a budget that is
// too small for them. So a program first runs operator by operator for as long as its capture takes: whatever the
// future holds, captures then cost no more time than what runs without them, which is within twice the best that one
// could have done. A graph that is given up before it has answered kWorthwhileLaunches calls doubles the wait, up to
// 2^kMaxDoublings times; one that has answered more starts anew.
//
// Threads:   thread-compatible.
// Source:    the ski rental argument (Karlin et al., Competitive Snoopy Caching, 1988)
#pragma once

#include <cstdint>

namespace cuvil::scheduler {

class CaptureCredit {
 public:
  // A capture takes about twenty calls' time; a graph that has answered more has paid for itself.
  static constexpr uint64_t kWorthwhileLaunches = 64;
  static constexpr uint32_t kMaxDoublings = 10;

  // The graph is gone, or could not be had for want of memory; `capture_ns` is what capturing took or would take.
  void GivenUp(uint64_t capture_ns, uint64_t num_launches);
  // The program ran operator by operator.
  void Ran(uint64_t duration_ns) { earned_ns_ += duration_ns; }
  bool IsWorthIt() const { return earned_ns_ >= owed_ns_; }
  uint64_t owed_ns() const { return owed_ns_; }

 private:
  uint64_t owed_ns_ = 0;
  uint64_t earned_ns_ = 0;
  uint32_t num_doublings_ = 0;
  bool gave_up_before_ = false;
};

}  // namespace cuvil::scheduler
