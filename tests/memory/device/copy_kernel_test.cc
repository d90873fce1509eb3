#include "memory/device/copy_kernel.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "tests/testing/fake_driver.h"

namespace cuvil::device {
namespace {

using testing::FakeDriver;

uint64_t AddressOf(const void* data) { return reinterpret_cast<uintptr_t>(data); }

class CopyKernelTest : public ::testing::Test {
 protected:
  FakeDriver fake_;
  const DriverApi api_ = FakeDriver::Api();
};

TEST_F(CopyKernelTest, DoesAllItsCopies) {
  auto kernel = CopyKernel::Load(api_);
  ASSERT_TRUE(kernel.ok()) << kernel.status();
  const std::vector<int> a = {1, 2, 3}, b = {4};
  std::vector<int> to_a(3), to_b(1);
  ASSERT_TRUE(kernel
                  ->Launch({{AddressOf(to_a.data()), AddressOf(a.data()), 12},
                            {AddressOf(to_b.data()), AddressOf(b.data()), 4}},
                           nullptr)
                  .ok());
  EXPECT_EQ(to_a, a);
  EXPECT_EQ(to_b, b);
  EXPECT_EQ(fake_.Count("cuLaunchKernel cuvil_copy"), 1u);
}

TEST_F(CopyKernelTest, TheGridFitsTheLargestCopy) {
  auto kernel = CopyKernel::Load(api_);
  std::vector<char> from(100'000), to(100'000);
  ASSERT_TRUE(kernel->Launch({{AddressOf(to.data()), AddressOf(from.data()), 1}}, nullptr).ok());
  EXPECT_EQ(fake_.copy_nodes.back().grid_x, 1u);
  ASSERT_TRUE(kernel
                  ->Launch({{AddressOf(to.data()), AddressOf(from.data()), 1},
                            {AddressOf(to.data()), AddressOf(from.data()), 100'000}},
                           nullptr)
                  .ok());
  EXPECT_EQ(fake_.copy_nodes.back().grid_x, 25u);  // 6,250 units of 16 bytes, 256 threads a block
  EXPECT_EQ(fake_.copy_nodes.back().grid_y, 2u);
}

TEST_F(CopyKernelTest, ANodeCanBeToldToDoOthers) {
  auto kernel = CopyKernel::Load(api_);
  const int first = 1, second = 2;
  int to = 0;
  ASSERT_TRUE(kernel->Launch({{AddressOf(&to), AddressOf(&first), 4}}, nullptr).ok());
  ASSERT_TRUE(
      kernel->Update(nullptr, fake_.copy_nodes[0].node, {{AddressOf(&to), AddressOf(&second), sizeof(int)}}).ok());
  fake_.copy_nodes[0].Run();
  EXPECT_EQ(to, 2);
}

TEST_F(CopyKernelTest, FailuresAreNamed) {
  for (const char* name :
       {"cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel", "cuGraphExecKernelNodeSetParams"}) {
    fake_.failing = name;
    const absl::Status status = [&]() -> absl::Status {
      auto kernel = CopyKernel::Load(api_);
      if (!kernel.ok()) return kernel.status();
      if (absl::Status s = kernel->Launch({}, nullptr); !s.ok()) return s;
      return kernel->Update(nullptr, nullptr, {});
    }();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << name;
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(name));
    EXPECT_EQ(fake_.num_live, 0) << name;
  }
  fake_.failing = "";
  auto kernel = CopyKernel::Load(api_);
  const std::vector<DeviceCopy> many(CopyKernel::kMaxCopies + 1);
  EXPECT_EQ(kernel->Launch(many, nullptr).code(), absl::StatusCode::kInvalidArgument);
  DriverApi old = api_;
  old.cuLaunchKernel = nullptr;
  EXPECT_EQ(CopyKernel::Load(old).status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace cuvil::device
