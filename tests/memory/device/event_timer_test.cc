#include "memory/device/event_timer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "memory/device/cuda_graph.h"
#include "tests/testing/fake_driver.h"

namespace cuvil::device {
namespace {

using testing::FakeDriver;

TEST(EventTimerTest, GivesDeviceTimeInNanoseconds) {
  FakeDriver fake;
  fake.launch_ms = [](size_t) { return 1.5; };
  const DriverApi api = FakeDriver::Api();
  {
    auto stream = Stream::Create(api);
    auto capture = StreamCapture::Begin(api, *stream);
    auto graph = capture->Finish();
    auto executable = graph->Instantiate();
    ASSERT_TRUE(executable.ok()) << executable.status();
    const auto timer = EventTimer::Create(api);
    ASSERT_TRUE(timer.ok()) << timer.status();
    ASSERT_TRUE(timer->Start(stream->handle()).ok());
    ASSERT_TRUE(executable->Launch(stream->handle()).ok());
    ASSERT_TRUE(executable->Launch(stream->handle()).ok());
    ASSERT_TRUE(timer->Stop(stream->handle()).ok());
    const auto elapsed = timer->ElapsedNs();
    ASSERT_TRUE(elapsed.ok()) << elapsed.status();
    EXPECT_NEAR(*elapsed, 3e6, 1);
  }
  EXPECT_EQ(fake.num_live, 0);
}

TEST(EventTimerTest, FailuresAreNamedAndLeakNothing) {
  FakeDriver fake;
  DriverApi api = FakeDriver::Api();
  for (const char* name : {"cuEventCreate", "cuEventRecord", "cuEventSynchronize", "cuEventElapsedTime"}) {
    fake.failing = name;
    const absl::Status status = [&]() -> absl::Status {
      const auto timer = EventTimer::Create(api);
      if (!timer.ok()) return timer.status();
      if (auto s = timer->Start(nullptr); !s.ok()) return s;
      if (auto s = timer->Stop(nullptr); !s.ok()) return s;
      return timer->ElapsedNs().status();
    }();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << name;
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(name));
  }
  EXPECT_EQ(fake.num_live, 0);
  api.cuEventElapsedTime = nullptr;
  EXPECT_EQ(EventTimer::Create(api).status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace cuvil::device
