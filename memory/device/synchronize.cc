#include "memory/device/synchronize.h"

#include "memory/device/capture_mode.h"

namespace cuvil::device {
namespace {

absl::Status SynchronizePrimaryContext(const DriverApi& api, int device) {
  void* context = nullptr;
  const int retained = api.cuDevicePrimaryCtxRetain(&context, device);
  if (auto s = api.ToStatus("cuDevicePrimaryCtxRetain", retained); !s.ok()) return s;
  absl::Status status = api.ToStatus("cuCtxPushCurrent", api.cuCtxPushCurrent_v2(context));
  if (status.ok()) {
    status = api.ToStatus("cuCtxSynchronize", api.cuCtxSynchronize());
    void* popped = nullptr;
    api.cuCtxPopCurrent_v2(&popped);
  }
  api.cuDevicePrimaryCtxRelease_v2(device);
  return status;
}

}  // namespace

absl::Status SynchronizeDevices(const DriverApi& api) {
  if (api.cuDevicePrimaryCtxGetState == nullptr || api.cuDevicePrimaryCtxRetain == nullptr ||
      api.cuDevicePrimaryCtxRelease_v2 == nullptr || api.cuCtxPushCurrent_v2 == nullptr ||
      api.cuCtxPopCurrent_v2 == nullptr || api.cuCtxSynchronize == nullptr ||
      api.cuThreadExchangeStreamCaptureMode == nullptr) {
    return absl::UnavailableError("the CUDA driver lacks the functions of primary contexts");
  }
  const RelaxedCaptureMode relaxed(api);
  int count = 0;
  if (auto s = api.ToStatus("cuDeviceGetCount", api.cuDeviceGetCount(&count)); !s.ok()) return s;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    int device = 0, active = 0;
    unsigned flags = 0;
    if (auto s = api.ToStatus("cuDeviceGet", api.cuDeviceGet(&device, ordinal)); !s.ok()) return s;
    const int asked = api.cuDevicePrimaryCtxGetState(device, &flags, &active);
    if (auto s = api.ToStatus("cuDevicePrimaryCtxGetState", asked); !s.ok()) return s;
    if (active == 0) continue;
    if (auto s = SynchronizePrimaryContext(api, device); !s.ok()) return s;
  }
  return absl::OkStatus();
}

}  // namespace cuvil::device
