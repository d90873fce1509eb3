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
