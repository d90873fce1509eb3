#include "scheduler/capture_credit.h"

#include <algorithm>
#include <utility>

namespace cuvil::scheduler {

void CaptureCredit::GivenUp(uint64_t capture_ns, uint64_t num_launches) {
  const bool was_short = num_launches < kWorthwhileLaunches;
  // The first time proves nothing: another model may have needed the room once.
  if (!std::exchange(gave_up_before_, true) || !was_short) {
    num_doublings_ = 0;
  } else {
    num_doublings_ = std::min(num_doublings_ + 1, kMaxDoublings);
  }
  owed_ns_ = capture_ns << num_doublings_;
  earned_ns_ = 0;
}

}  // namespace cuvil::scheduler
