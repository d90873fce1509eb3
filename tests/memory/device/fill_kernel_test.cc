#include "memory/device/fill_kernel.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "memory/device/cuda_graph.h"
#include "tests/testing/fake_driver.h"

namespace cuvil::device {
namespace {

using testing::FakeDriver;

class FillKernelTest : public ::testing::Test {
 protected:
  absl::StatusOr<uint32_t> Replace(const FakeDriver::MemsetParams& memset) {
    fake_.node_types = {0, 0, 2};
    fake_.memset = memset;
    auto kernel = FillKernel::Load(api_);
    if (!kernel.ok()) return kernel.status();
    const auto replaced = kernel->ReplaceMemsets(nullptr);
    if (!replaced.ok()) return replaced.status();
    for (const FillKernel::Replacement& each : *replaced) EXPECT_EQ(each.memset, &fake_.node_types[2]);
    return static_cast<uint32_t>(replaced->size());
  }

  FakeDriver fake_;
  const DriverApi api_ = FakeDriver::Api();
};

TEST_F(FillKernelTest, AKernelTakesTheNodesPlace) {
  auto replaced = Replace({4096, 0, 0, 1, 1000, 1});
  ASSERT_TRUE(replaced.ok()) << replaced.status();
  EXPECT_EQ(*replaced, 1u);
  EXPECT_EQ(fake_.kernel_name, "cuvil_fill_words");
  EXPECT_EQ(fake_.kernel_to, 4096u);
  EXPECT_EQ(fake_.kernel_count, 250u);
  EXPECT_EQ(fake_.kernel_blocks, 1u);
  EXPECT_EQ(fake_.Count("cuGraphAddKernelNode behind the first"), 1u);
  EXPECT_EQ(fake_.Count("cuGraphAddDependencies before the second"), 1u);
  EXPECT_EQ(fake_.Count("cuGraphDestroyNode"), 1u);
  EXPECT_EQ(fake_.num_live, 0);
}

TEST_F(FillKernelTest, RepeatsSmallElementsAndFallsBackToBytes) {
  ASSERT_EQ(*Replace({4096, 0, 0x1ab, 1, 8, 1}), 1u);
  EXPECT_EQ(fake_.kernel_value, 0xababababu);
  ASSERT_EQ(*Replace({4096, 0, 0x3c00, 2, 8, 1}), 1u);
  EXPECT_EQ(fake_.kernel_value, 0x3c003c00u);
  EXPECT_EQ(fake_.kernel_count, 4u);
  ASSERT_EQ(*Replace({4096, 0, 0x12345678, 4, 8, 1}), 1u);
  EXPECT_EQ(fake_.kernel_value, 0x12345678u);
  ASSERT_EQ(*Replace({4097, 0, 7, 1, 8, 1}), 1u);
  EXPECT_EQ(fake_.kernel_name, "cuvil_fill_bytes");
  EXPECT_EQ(fake_.kernel_value & 0xff, 7u);
  EXPECT_EQ(fake_.kernel_count, 8u);
  // Rows without gaps are one span; a large one keeps a bounded grid.
  ASSERT_EQ(*Replace({4096, 16, 0, 4, 4, 1 << 20}), 1u);
  EXPECT_EQ(fake_.kernel_count, uint64_t{1} << 22);
  EXPECT_EQ(fake_.kernel_blocks, 1024u);
}

TEST_F(FillKernelTest, LeavesWhatOneSpanCannotSay) {
  EXPECT_EQ(*Replace({4096, 64, 0, 4, 4, 2}), 0u);      // rows with gaps
  EXPECT_EQ(*Replace({4098, 0, 0x3c00, 2, 3, 1}), 0u);  // two-byte pattern, not in words
  EXPECT_EQ(fake_.Count("cuGraphDestroyNode"), 0u);
}

TEST_F(FillKernelTest, FailuresAreNamed) {
  for (const char* name : {"cuModuleLoadData", "cuModuleGetFunction", "cuGraphGetNodes", "cuGraphMemsetNodeGetParams",
                           "cuGraphAddKernelNode", "cuGraphAddDependencies", "cuGraphDestroyNode"}) {
    fake_.failing = name;
    const auto replaced = Replace({4096, 0, 0, 1, 1000, 1});
    EXPECT_EQ(replaced.status().code(), absl::StatusCode::kUnavailable) << name;
    EXPECT_THAT(std::string(replaced.status().message()), ::testing::HasSubstr(name));
    EXPECT_EQ(fake_.num_live, 0) << name;
  }
  DriverApi old = api_;
  old.cuGraphDestroyNode = nullptr;
  EXPECT_EQ(FillKernel::Load(old).status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(FillKernelTest, ACaptureEndsWithoutMemsetNodes) {
  fake_.memset = {4096, 0, 0, 1, 1000, 1};
  auto kernel = FillKernel::Load(api_);
  ASSERT_TRUE(kernel.ok());
  auto stream = Stream::Create(api_);
  auto capture = StreamCapture::Begin(api_, *stream);
  auto graph = capture->Finish();
  ASSERT_TRUE(graph.ok()) << graph.status();
  ASSERT_TRUE(kernel->ReplaceMemsets(graph->handle()).ok());
  EXPECT_EQ(graph->CountNodes()->memsets, 0u);
}

}  // namespace
}  // namespace cuvil::device
