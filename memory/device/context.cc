#include "memory/device/context.h"

namespace cuvil::device {

absl::StatusOr<ContextHandle> RetainPrimaryContext(const DriverApi& api, int device_index) {
  if (api.cuDevicePrimaryCtxRetain == nullptr || api.cuCtxGetCurrent == nullptr || api.cuCtxPushCurrent_v2 == nullptr ||
      api.cuCtxPopCurrent_v2 == nullptr) {
    return absl::UnavailableError("the CUDA driver has no contexts; update it");
  }
  int device = 0;
  if (auto s = api.ToStatus("cuDeviceGet", api.cuDeviceGet(&device, device_index)); !s.ok()) return s;
  ContextHandle context = nullptr;
  const int retained = api.cuDevicePrimaryCtxRetain(&context, device);
  if (auto s = api.ToStatus("cuDevicePrimaryCtxRetain", retained); !s.ok()) return s;
  return context;
}

}  // namespace cuvil::device
