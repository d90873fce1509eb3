#include "scheduler/nvml_counters.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "tests/testing/fake_nvml.h"

namespace cuvil::scheduler {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kMs = 1'000'000;

class NvmlCountersTest : public ::testing::Test {
 protected:
  std::unique_ptr<NvmlCounters> Make(std::vector<NvmlCounters::Device> devices = {{3, "0000:18:00.0"}}) {
    auto counters = NvmlCounters::Create(testing::FakeNvml::Api(), devices);
    EXPECT_TRUE(counters.ok()) << counters.status();
    return counters.ok() ? *std::move(counters) : nullptr;
  }

  std::map<LiveCounter, double> Read(NvmlCounters& counters, uint64_t now_ns) {
    std::vector<LiveSample> samples;
    counters.Read(now_ns, &samples);
    std::map<LiveCounter, double> values;
    for (const LiveSample& sample : samples) {
      EXPECT_EQ(sample.time_ns, now_ns);
      EXPECT_EQ(sample.device, 3);
      EXPECT_TRUE(values.emplace(sample.counter, sample.value).second);
    }
    return values;
  }

  testing::FakeNvml fake_;
};

TEST_F(NvmlCountersTest, ReadsOccupancyAndRatesBetweenTwoSamplesOfGpm) {
  auto counters = Make();
  EXPECT_EQ(fake_.last_bus_id, "0000:18:00.0");
  const std::map<LiveCounter, double> always = {
      {LiveCounter::kMemoryUsed, 5}, {LiveCounter::kSmClock, 1980e6}, {LiveCounter::kMemoryClock, 3201e6}};
  EXPECT_EQ(Read(*counters, 1000 * kMs), always);
  EXPECT_EQ(Read(*counters, 1050 * kMs), always);  // too early for another
  auto all = always;
  all.insert({{LiveCounter::kSmBusy, 90.5},
              {LiveCounter::kSmOccupancy, 41.25},
              {LiveCounter::kPcieReceived, 2 * 1048576.0},
              {LiveCounter::kPcieSent, 1.5 * 1048576.0}});
  EXPECT_EQ(Read(*counters, 1100 * kMs), all);
  EXPECT_EQ(Read(*counters, 1150 * kMs), always);
  fake_.metrics[3] = 12;
  all[LiveCounter::kSmOccupancy] = 12;
  EXPECT_EQ(Read(*counters, 1200 * kMs), all);
  EXPECT_EQ(fake_.calls["pcie"], 0);  // 20 ms each
  EXPECT_EQ(fake_.calls["sample"], 3);
}

TEST_F(NvmlCountersTest, WithoutGpmPcieIsReadRarelyAndInTurns) {
  fake_.gpm = false;
  auto counters = Make();
  auto first = Read(*counters, 1000 * kMs);
  EXPECT_EQ(first.at(LiveCounter::kSmBusy), 37);
  EXPECT_EQ(first.at(LiveCounter::kPcieReceived), 22e3);
  EXPECT_EQ(first.count(LiveCounter::kSmOccupancy), 0u);
  EXPECT_EQ(Read(*counters, 1450 * kMs).count(LiveCounter::kPcieSent), 0u);
  EXPECT_EQ(Read(*counters, 1500 * kMs).at(LiveCounter::kPcieSent), 11e3);
  EXPECT_EQ(fake_.calls["pcie"], 2);
}

TEST_F(NvmlCountersTest, AGpuThatRefusesGpmIsReadByItsOlderCounters) {
  fake_.results["sample"] = 4;
  auto counters = Make();
  EXPECT_EQ(Read(*counters, 1000 * kMs).count(LiveCounter::kSmBusy), 0u);
  EXPECT_EQ(fake_.num_samples, 0);
  EXPECT_EQ(Read(*counters, 1100 * kMs).at(LiveCounter::kSmBusy), 37);
  EXPECT_EQ(fake_.calls["sample"], 1);
}

TEST_F(NvmlCountersTest, ACounterThatTheGpuLacksIsLeftOut) {
  fake_.metrics.erase(3);
  fake_.results["clock"] = 3;
  auto counters = Make();
  (void)Read(*counters, 1000 * kMs);
  const auto values = Read(*counters, 1200 * kMs);
  EXPECT_EQ(values.count(LiveCounter::kSmOccupancy), 0u);
  EXPECT_EQ(values.count(LiveCounter::kSmClock), 0u);
  EXPECT_EQ(values.count(LiveCounter::kSmBusy), 1u);
}

TEST_F(NvmlCountersTest, GivesEverythingBack) {
  Make();
  EXPECT_EQ(fake_.num_initialised, 0);
  EXPECT_EQ(fake_.num_samples, 0);
  fake_.results["alloc"] = 1;
  Make();
  EXPECT_EQ(fake_.num_samples, 0);
}

TEST_F(NvmlCountersTest, SaysWhyThereIsNothingToRead) {
  fake_.results["nvmlInit"] = 4;
  auto counters = NvmlCounters::Create(testing::FakeNvml::Api(), {});
  EXPECT_EQ(counters.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(counters.status().message()), HasSubstr("nvmlInit_v2: Insufficient Permissions"));
  EXPECT_EQ(fake_.num_initialised, 0);
  fake_.results.clear();
  fake_.results["0000:01:00.0"] = 6;
  counters = NvmlCounters::Create(testing::FakeNvml::Api(), {{0, "0000:01:00.0"}});
  EXPECT_THAT(std::string(counters.status().message()), HasSubstr("nvmlDeviceGetHandleByPciBusId"));
  EXPECT_EQ(fake_.num_initialised, 0);
  // One of two is enough.
  counters = NvmlCounters::Create(testing::FakeNvml::Api(), {{0, "0000:01:00.0"}, {3, "0000:18:00.0"}});
  ASSERT_TRUE(counters.ok());
  EXPECT_EQ(Read(**counters, 5).size(), 3u);
}

}  // namespace
}  // namespace cuvil::scheduler
