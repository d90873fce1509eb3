// Lets the calling thread allocate and free while other threads capture: in the default mode such a call would end the
// captures that they make in global mode (CUDA Driver API, cuThreadExchangeStreamCaptureMode).
//
// Threads:   concerns the calling thread, for as long as it lives.
// Errors:    a driver without the function, or that refuses: the mode stays
#pragma once

#include "memory/device/driver_api.h"

namespace cuvil::device {

class RelaxedCaptureMode {
 public:
  explicit RelaxedCaptureMode(const DriverApi& api) : api_(api) { Exchange(); }
  ~RelaxedCaptureMode() { Exchange(); }
  RelaxedCaptureMode(const RelaxedCaptureMode&) = delete;
  RelaxedCaptureMode& operator=(const RelaxedCaptureMode&) = delete;

 private:
  // `mode_` is the other mode: the one to come, then the one to go back to.
  void Exchange() {
    if (api_.cuThreadExchangeStreamCaptureMode == nullptr || refused_) return;
    refused_ = api_.cuThreadExchangeStreamCaptureMode(&mode_) != 0;
  }

  static constexpr int kRelaxed = 2;  // cuda.h: CU_STREAM_CAPTURE_MODE_RELAXED
  const DriverApi& api_;
  int mode_ = kRelaxed;
  bool refused_ = false;
};

}  // namespace cuvil::device
