// Whether a device can still be used. A kernel that reads where it may not, and its like, leave the device's context
// beyond use: every later call of CUDA fails, whoever makes it.
//
// Threads:   any; ok() is one relaxed load.
#pragma once

#include <atomic>
#include <mutex>

#include "absl/status/status.h"

namespace cuvil::scheduler {

class DeviceHealth {
 public:
  bool ok() const { return !broken_.load(std::memory_order_relaxed); }

  // Notes a status of the driver; only DataLoss is for ever (DriverApi::ToStatus).
  void Note(const absl::Status& status);
  // The first such status, or OK.
  absl::Status status() const;
  // True for the one caller that is to tell of it.
  bool TakeReport();

 private:
  // Set after what it tells of; whoever reads true and wants the text takes the mutex.
  std::atomic<bool> broken_{false};
  mutable std::mutex mutex_;
  absl::Status status_;  // under the mutex, as below
  bool reported_ = false;
};

}  // namespace cuvil::scheduler
