#include "scheduler/device_health.h"

#include <utility>

namespace cuvil::scheduler {

void DeviceHealth::Note(const absl::Status& status) {
  if (!absl::IsDataLoss(status)) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!status_.ok()) return;
  status_ = status;
  broken_.store(true, std::memory_order_relaxed);
}

absl::Status DeviceHealth::status() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return status_;
}

bool DeviceHealth::TakeReport() {
  if (ok()) return false;
  const std::lock_guard<std::mutex> lock(mutex_);
  return !std::exchange(reported_, true);
}

}  // namespace cuvil::scheduler
