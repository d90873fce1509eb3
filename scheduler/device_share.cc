#include "scheduler/device_share.h"

#include "memory/device/capture_mode.h"

namespace cuvil::scheduler {

absl::StatusOr<device::ContextHandle> DeviceShare::Context(const device::DriverApi& driver, int device_index) {
  const absl::MutexLock lock(&mutex_);
  if (context_ == nullptr) {
    const absl::StatusOr<device::ContextHandle> retained = device::RetainPrimaryContext(driver, device_index);
    if (!retained.ok()) return retained.status();
    context_ = *retained;
  }
  return context_;
}

absl::StatusOr<GraphArena::Kernels> DeviceShare::Kernels(const device::DriverApi& driver) {
  const absl::MutexLock lock(&mutex_);
  if (!std::exchange(tried_, true)) {
    absl::StatusOr<device::CopyKernel> copies = device::CopyKernel::Load(driver);
    status_ = copies.status();
    if (copies.ok()) copy_ = std::make_unique<const device::CopyKernel>(*std::move(copies));
    // Without it memset nodes stay, which is only slower.
    absl::StatusOr<device::FillKernel> fills = device::FillKernel::Load(driver);
    if (fills.ok()) fill_ = std::make_unique<const device::FillKernel>(*std::move(fills));
  }
  if (!status_.ok()) return status_;
  return GraphArena::Kernels{copy_.get(), fill_.get()};
}

absl::StatusOr<std::shared_ptr<GraphArena>> DeviceShare::MakeArena(const device::DriverApi& driver,
                                                                   const torch_abi::CudaStreams& streams,
                                                                   cir::Device device,
                                                                   std::unique_ptr<DeviceAllocator> allocator) {
  // Modules, streams and events belong to the context that is current when they are made.
  const torch_abi::CurrentDeviceScope current(streams, device.index);
  const absl::StatusOr<device::ContextHandle> context = Context(driver, device.index);
  if (!context.ok()) return context.status();
  const device::ContextScope in_context(driver, *context);
  const device::RelaxedCaptureMode relaxed(driver);
  const absl::StatusOr<GraphArena::Kernels> kernels = Kernels(driver);
  if (!kernels.ok()) return kernels.status();
  return GraphArena::Create(driver, streams, device, std::move(allocator),
                            {shelf_, budget_, health_, *kernels, *context});
}

}  // namespace cuvil::scheduler
