#include "memory/device/event_timer.h"

namespace cuvil::device {
namespace {

// cuda.h: CU_EVENT_DEFAULT, which keeps time.
constexpr unsigned kTimed = 0;

}  // namespace

absl::StatusOr<EventTimer> EventTimer::Create(const DriverApi& api) {
  if (api.cuEventElapsedTime == nullptr) return absl::UnavailableError("the CUDA driver does not time events");
  EventTimer timer(&api);
  if (auto s = api.ToStatus("cuEventCreate", api.cuEventCreate(&timer.start_, kTimed)); !s.ok()) return s;
  if (auto s = api.ToStatus("cuEventCreate", api.cuEventCreate(&timer.end_, kTimed)); !s.ok()) return s;
  return timer;
}

EventTimer::~EventTimer() {
  if (start_ != nullptr) api_->cuEventDestroy_v2(start_);
  if (end_ != nullptr) api_->cuEventDestroy_v2(end_);
}

absl::Status EventTimer::Start(void* stream) const {
  return api_->ToStatus("cuEventRecord", api_->cuEventRecord(start_, stream));
}

absl::Status EventTimer::Stop(void* stream) const {
  return api_->ToStatus("cuEventRecord", api_->cuEventRecord(end_, stream));
}

absl::StatusOr<double> EventTimer::ElapsedNs() const {
  if (auto s = api_->ToStatus("cuEventSynchronize", api_->cuEventSynchronize(end_)); !s.ok()) return s;
  float milliseconds = 0;
  const int read = api_->cuEventElapsedTime(&milliseconds, start_, end_);
  if (auto s = api_->ToStatus("cuEventElapsedTime", read); !s.ok()) return s;
  return static_cast<double>(milliseconds) * 1e6;
}

}  // namespace cuvil::device
