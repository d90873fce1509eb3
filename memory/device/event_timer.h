// Device time between two points of a stream.
//
// Threads:   thread-compatible.
// Errors:    Create: Unavailable as the driver says, or without the functions for it
//            the others: Unavailable as the driver says
// Source:    CUDA Driver API, cuEventElapsedTime: half a microsecond of resolution.
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "memory/device/driver_api.h"

namespace cuvil::device {

class EventTimer {
 public:
  static absl::StatusOr<EventTimer> Create(const DriverApi& api);
  EventTimer(EventTimer&& other) noexcept
      : api_(other.api_), start_(std::exchange(other.start_, nullptr)), end_(std::exchange(other.end_, nullptr)) {}
  EventTimer& operator=(EventTimer&&) = delete;
  ~EventTimer();

  // Into a stream (CUstream), before and behind what is to be timed.
  absl::Status Start(void* stream) const;
  absl::Status Stop(void* stream) const;
  // Blocks until the end has been reached.
  absl::StatusOr<double> ElapsedNs() const;

 private:
  explicit EventTimer(const DriverApi* api) : api_(api) {}
  const DriverApi* api_;
  void* start_ = nullptr;
  void* end_ = nullptr;
};

}  // namespace cuvil::device
