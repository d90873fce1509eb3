#include "memory/device/synchronize.h"

#include <gtest/gtest.h>

#include "tests/testing/fake_driver.h"

namespace cuvil::device {
namespace {

using Log = std::vector<std::string>;

TEST(SynchronizeDevicesTest, WaitsForActiveDevicesAndLeavesTheThreadAsItWas) {
  testing::FakeDriver fake;
  fake.primary_contexts = {0, 1, 0, 1};
  const DriverApi api = testing::FakeDriver::Api();
  EXPECT_TRUE(SynchronizeDevices(api).ok());
  EXPECT_EQ(fake.log, (Log{"cuDevicePrimaryCtxRetain 1", "cuCtxPushCurrent", "cuCtxSynchronize", "cuCtxPopCurrent",
                           "cuDevicePrimaryCtxRelease 1", "cuDevicePrimaryCtxRetain 3", "cuCtxPushCurrent",
                           "cuCtxSynchronize", "cuCtxPopCurrent", "cuDevicePrimaryCtxRelease 3"}));
  EXPECT_EQ(fake.capture_mode, 0);
}

TEST(SynchronizeDevicesTest, ACaptureIsNotEndedByTheWaitAndIsReported) {
  testing::FakeDriver fake;
  fake.failing = "cuCtxSynchronize";
  fake.error = 900;
  const DriverApi api = testing::FakeDriver::Api();
  const absl::Status status = SynchronizeDevices(api);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(fake.log.back(), "cuDevicePrimaryCtxRelease 1");  // what was taken has been given back
  EXPECT_EQ(fake.Count("cuCtxPopCurrent"), 1u);
  EXPECT_EQ(fake.capture_mode, 0);
}

TEST(SynchronizeDevicesTest, ADriverWithoutTheFunctionsIsRefused) {
  testing::FakeDriver fake;
  DriverApi api = testing::FakeDriver::Api();
  api.cuCtxSynchronize = nullptr;
  EXPECT_EQ(SynchronizeDevices(api).code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(fake.log.empty());
}

}  // namespace
}  // namespace cuvil::device
