#include "memory/device/cuda_graph.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "memory/device/capture_mode.h"
#include "tests/testing/fake_driver.h"

namespace cuvil::device {
namespace {

using testing::FakeDriver;

class CudaGraphTest : public ::testing::Test {
 protected:
  FakeDriver fake_;
  const DriverApi api_ = FakeDriver::Api();
};

TEST_F(CudaGraphTest, CapturesInThreadLocalModeAndCountsNodes) {
  {
    auto stream = Stream::Create(api_);
    ASSERT_TRUE(stream.ok());
    auto capture = StreamCapture::Begin(api_, *stream);
    ASSERT_TRUE(capture.ok());
    auto graph = capture->Finish();
    ASSERT_TRUE(graph.ok()) << graph.status();
    const auto counts = graph->CountNodes();
    ASSERT_TRUE(counts.ok()) << counts.status();
    EXPECT_EQ(counts->kernels, 2u);
    EXPECT_EQ(counts->memsets, 1u);
    EXPECT_EQ(counts->total(), 3u);
    auto executable = graph->Instantiate();
    ASSERT_TRUE(executable.ok()) << executable.status();
    ASSERT_TRUE(executable->Launch(nullptr).ok());
  }
  EXPECT_EQ(fake_.Count("cuStreamBeginCapture 1"), 1u);  // CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
  EXPECT_EQ(fake_.Count("cuGraphLaunch 0"), 1u);
  EXPECT_EQ(fake_.num_live, 0);
}

TEST_F(CudaGraphTest, ACaptureGivenUpIsEndedAndItsGraphDestroyed) {
  {
    auto stream = Stream::Create(api_);
    auto capture = StreamCapture::Begin(api_, *stream);
    ASSERT_TRUE(capture.ok());
  }
  EXPECT_EQ(fake_.Count("cuStreamEndCapture"), 1u);
  EXPECT_EQ(fake_.Count("cuGraphDestroy"), 1u);
  EXPECT_EQ(fake_.num_live, 0);
}

TEST_F(CudaGraphTest, TheRelaxedModeLastsAsLongAsItsScope) {
  fake_.capture_mode = 1;
  {
    const RelaxedCaptureMode relaxed(api_);
    EXPECT_EQ(fake_.capture_mode, 2);
  }
  EXPECT_EQ(fake_.capture_mode, 1);
  DriverApi old = api_;
  old.cuThreadExchangeStreamCaptureMode = nullptr;
  const RelaxedCaptureMode without(old);
  EXPECT_EQ(fake_.capture_mode, 1);
}

TEST_F(CudaGraphTest, EveryFailureIsNamedAndLeaksNothing) {
  fake_.error = 700;
  for (const char* name : {"cuStreamCreate", "cuStreamBeginCapture", "cuStreamEndCapture", "cuGraphGetNodes",
                           "cuGraphInstantiate", "cuGraphLaunch"}) {
    fake_.failing = name;
    const absl::Status status = [&]() -> absl::Status {
      auto stream = Stream::Create(api_);
      if (!stream.ok()) return stream.status();
      auto capture = StreamCapture::Begin(api_, *stream);
      if (!capture.ok()) return capture.status();
      auto graph = capture->Finish();
      if (!graph.ok()) return graph.status();
      if (auto counts = graph->CountNodes(); !counts.ok()) return counts.status();
      auto executable = graph->Instantiate();
      if (!executable.ok()) return executable.status();
      return executable->Launch(stream->handle());
    }();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << name;
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(name));
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("CUDA_ERROR_ILLEGAL_ADDRESS"));
    EXPECT_EQ(fake_.num_live, 0) << name;
  }
}

TEST_F(CudaGraphTest, TellsWhichNodesAreNew) {
  auto stream = Stream::Create(api_);
  auto capture = StreamCapture::Begin(api_, *stream);
  ASSERT_TRUE(capture.ok());
  EXPECT_EQ(capture->NewNodes()->size(), 3u);
  EXPECT_EQ(capture->NewNodes()->size(), 0u);
  fake_.node_types.push_back(0);
  EXPECT_EQ(*capture->NewNodes(), std::vector<void*>{&fake_.node_types.back()});
  // Also where the driver lists it among the old ones.
  fake_.node_types.push_front(0);
  EXPECT_EQ(*capture->NewNodes(), std::vector<void*>{&fake_.node_types.front()});

  fake_.capture_breaks = true;
  EXPECT_THAT(std::string(capture->NewNodes().status().message()), ::testing::HasSubstr("ended by an error"));
  fake_.failing = "cuStreamGetCaptureInfo";
  EXPECT_THAT(std::string(capture->NewNodes().status().message()), ::testing::HasSubstr("cuStreamGetCaptureInfo"));
}

TEST_F(CudaGraphTest, AStreamThatCannotBeAskedCountsAsCaptured) {
  EXPECT_FALSE(IsCapturing(api_, nullptr));
  fake_.capture_status = 1;
  EXPECT_TRUE(IsCapturing(api_, nullptr));
  fake_.capture_status = 0;
  fake_.failing = "cuStreamIsCapturing";
  EXPECT_TRUE(IsCapturing(api_, nullptr));
}

TEST_F(CudaGraphTest, ADriverWithoutOneFunctionHasNoGraphs) {
  EXPECT_TRUE(api_.HasGraphs());
  DriverApi old = api_;
  old.cuGraphLaunch = nullptr;
  EXPECT_FALSE(old.HasGraphs());
  EXPECT_FALSE(DriverApi().HasGraphs());
}

}  // namespace
}  // namespace cuvil::device
