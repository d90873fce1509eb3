#include "memory/device/driver_api.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace cuvil::device {
namespace {

const char* FakeErrorName() { return "CUDA_ERROR_OUT_OF_MEMORY"; }

TEST(DriverApiTest, StatusNamesTheCallAndTheError) {
  DriverApi api;
  api.cuGetErrorName = [](int, const char** name) {
    *name = FakeErrorName();
    return 0;
  };
  EXPECT_TRUE(api.ToStatus("cuInit", 0).ok());
  EXPECT_EQ(api.ToStatus("cuInit", 2).message(), "cuInit: CUDA_ERROR_OUT_OF_MEMORY (2)");
}

TEST(DriverApiTest, StatusOfAnErrorWithoutNameHasItsNumber) {
  DriverApi api;
  api.cuGetErrorName = [](int, const char**) { return 1; };
  EXPECT_EQ(api.ToStatus("cuInit", 4242).message(), "cuInit: CUresult (4242)");
}

TEST(DriverApiTest, WantOfMemoryAndALostContextHaveCodesOfTheirOwn) {
  DriverApi api;
  api.cuGetErrorName = [](int, const char**) { return 1; };
  EXPECT_EQ(api.ToStatus("f", 2).code(), absl::StatusCode::kResourceExhausted);
  for (const int lost : {4, 214, 700, 710, 715, 719}) {
    EXPECT_EQ(api.ToStatus("f", lost).code(), absl::StatusCode::kDataLoss) << lost;
  }
  for (const int other : {1, 100, 400, 600, 900, 999}) {
    EXPECT_EQ(api.ToStatus("f", other).code(), absl::StatusCode::kUnavailable) << other;
  }
}

TEST(DriverApiTest, ActiveGpusAreThoseWithAContext) {
  DriverApi api;
  api.cuGetErrorName = [](int, const char**) { return 1; };
  EXPECT_EQ(ActiveGpus(api).status().code(), absl::StatusCode::kUnavailable);  // an old driver
  api.cuInit = [](unsigned) { return 0; };
  api.cuDeviceGetCount = [](int* count) {
    *count = 3;
    return 0;
  };
  api.cuDeviceGet = [](int* device, int ordinal) {
    *device = 10 + ordinal;
    return 0;
  };
  api.cuDevicePrimaryCtxGetState = [](int device, unsigned*, int* active) {
    *active = device == 11;
    return 0;
  };
  api.cuDeviceGetPCIBusId = [](char* bus_id, int, int device) {
    bus_id[0] = static_cast<char>('a' + device - 10);
    return 0;
  };
  const auto gpus = ActiveGpus(api);
  ASSERT_TRUE(gpus.ok()) << gpus.status();
  ASSERT_EQ(gpus->size(), 1u);
  EXPECT_EQ(gpus->front().ordinal, 1);
  EXPECT_EQ(gpus->front().bus_id, "b");
}

TEST(DriverApiTest, ProbeDescribesDevicesOrIsUnavailable) {
  auto report = ProbeDriver();
  if (!report.ok()) {
    EXPECT_EQ(report.status().code(), absl::StatusCode::kUnavailable);
    EXPECT_FALSE(report.status().message().empty());
    return;
  }
  EXPECT_GE(report->cuda_version, 11000);
  for (const Gpu& gpu : report->gpus) EXPECT_FALSE(gpu.name.empty());
}

}  // namespace
}  // namespace cuvil::device
