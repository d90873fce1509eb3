#include "scheduler/live_sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "scheduler/monotonic_clock.h"

namespace cuvil::scheduler {
namespace {

constexpr uint64_t kForever = ~uint64_t{0};

// What the readers of one test have in common with it.
struct Shared {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t rounds = 0;
  int alive = 0;
  int made = 0;

  void WaitForRounds(uint64_t count) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return rounds >= count; });
  }
  uint64_t Rounds() {
    const std::lock_guard<std::mutex> lock(mutex);
    return rounds;
  }
};

class FakeReader : public CounterReader {
 public:
  explicit FakeReader(Shared* shared) : shared_(shared) {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    ++shared_->alive;
    ++shared_->made;
  }
  ~FakeReader() override {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    --shared_->alive;
  }
  void Read(uint64_t now_ns, std::vector<LiveSample>* samples) override {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    samples->push_back({now_ns, static_cast<double>(shared_->rounds), 0, LiveCounter::kSmOccupancy});
    samples->push_back({now_ns, 7, 0, LiveCounter::kMemoryUsed});
    ++shared_->rounds;
    shared_->changed.notify_all();
  }

 private:
  Shared* const shared_;
};

LiveSamplerOptions Fast() {
  LiveSamplerOptions options;
  options.period_ns = 100'000;
  options.max_period_ns = 1'000'000;
  return options;
}

class LiveSamplerTest : public ::testing::Test {
 protected:
  LiveSampler::MakeReader Maker() {
    return
        [this]() -> absl::StatusOr<std::unique_ptr<CounterReader>> { return std::make_unique<FakeReader>(&shared_); };
  }
  Shared shared_;
};

TEST_F(LiveSamplerTest, SamplesWhileItIsUsedAndAtNoOtherTime) {
  LiveSampler sampler(Maker(), Fast());
  EXPECT_EQ(shared_.made, 0);
  const uint64_t begin_ns = MonotonicNs();
  {
    LiveSampler::Use use = sampler.Start();
    {
      const LiveSampler::Use second = sampler.Start();
      shared_.WaitForRounds(3);
    }
    shared_.WaitForRounds(shared_.Rounds() + 3);  // the first one's use goes on
  }
  EXPECT_EQ(shared_.alive, 0);  // the thread has been joined
  EXPECT_EQ(shared_.made, 1);
  const uint64_t rounds = shared_.Rounds();
  const LiveSampler::Report report = sampler.Samples(begin_ns, kForever);
  EXPECT_TRUE(report.status.ok()) << report.status;
  EXPECT_EQ(report.num_rounds, rounds);
  EXPECT_GT(report.wall_ns, 0u);
  EXPECT_FALSE(report.overwritten);
  ASSERT_EQ(report.samples.size(), 2 * rounds);
  for (uint64_t i = 0; i < rounds; ++i) {
    EXPECT_EQ(report.samples[2 * i].value, static_cast<double>(i));
    EXPECT_EQ(report.samples[2 * i].counter, LiveCounter::kSmOccupancy);
    EXPECT_GE(report.samples[2 * i].time_ns, begin_ns);
  }
  {
    const LiveSampler::Use again = sampler.Start();
    shared_.WaitForRounds(rounds + 2);
  }
  EXPECT_EQ(shared_.made, 2);
  EXPECT_EQ(shared_.alive, 0);
}

TEST_F(LiveSamplerTest, GivesTheSamplesOfTheTimeThatIsAskedFor) {
  LiveSampler sampler(Maker(), Fast());
  {
    const LiveSampler::Use use = sampler.Start();
    shared_.WaitForRounds(6);
  }
  const auto all = sampler.Samples(0, kForever).samples;
  const uint64_t from = all[4].time_ns, to = all[6].time_ns;
  const auto some = sampler.Samples(from, to).samples;
  ASSERT_GE(some.size(), 4u);
  for (const LiveSample& sample : some) {
    EXPECT_GE(sample.time_ns, from);
    EXPECT_LE(sample.time_ns, to);
  }
  EXPECT_TRUE(sampler.Samples(1, 2).samples.empty());
}

TEST_F(LiveSamplerTest, KeepsTheLatestInAFixedSize) {
  LiveSamplerOptions options = Fast();
  options.capacity = 8;
  LiveSampler sampler(Maker(), options);
  {
    const LiveSampler::Use use = sampler.Start();
    shared_.WaitForRounds(20);
  }
  const LiveSampler::Report report = sampler.Samples(0, kForever);
  ASSERT_EQ(report.samples.size(), 8u);
  EXPECT_TRUE(report.overwritten);
  EXPECT_EQ(report.samples[6].value, static_cast<double>(shared_.Rounds() - 1));
  EXPECT_FALSE(sampler.Samples(report.samples[0].time_ns, kForever).overwritten);
}

TEST_F(LiveSamplerTest, AMachineWithoutCountersHasNoSamplesAndAReason) {
  LiveSampler sampler([] { return absl::UnavailableError("no NVML"); }, Fast());
  LiveSampler::Use use = sampler.Start();
  LiveSampler::Report report = sampler.Samples(0, kForever);
  // Made by the thread, some time after the start.
  for (int i = 0; i < 2000 && report.status.ok(); ++i) {
    usleep(1000);
    report = sampler.Samples(0, kForever);
  }
  EXPECT_EQ(report.status.message(), "no NVML");
  EXPECT_TRUE(report.samples.empty());
}

TEST_F(LiveSamplerTest, StopIsForGoodAndUsesMayOutliveIt) {
  LiveSampler sampler(Maker(), Fast());
  LiveSampler::Use use = sampler.Start();
  shared_.WaitForRounds(2);
  sampler.Stop();
  EXPECT_EQ(shared_.alive, 0);
  const LiveSampler::Use late = sampler.Start();
  EXPECT_EQ(shared_.made, 1);
  EXPECT_FALSE(sampler.Samples(0, kForever).samples.empty());
}

TEST_F(LiveSamplerTest, ThreadsStartReadAndEndAtOnce) {
  LiveSampler sampler(Maker(), Fast());
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int j = 0; j < 25; ++j) {
        const LiveSampler::Use use = sampler.Start();
        shared_.WaitForRounds(shared_.Rounds() + 2);  // a round is stored before the next begins
        EXPECT_FALSE(sampler.Samples(0, kForever).samples.empty());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(shared_.alive, 0);
  EXPECT_EQ(sampler.Samples(0, 0).samples.size(), 0u);
}

TEST_F(LiveSamplerTest, AForkedChildHasNoSamplerAndDoesNotHang) {
  LiveSampler sampler(Maker(), Fast());
  LiveSampler::Use use = sampler.Start();
  shared_.WaitForRounds(2);
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    use = LiveSampler::Use();
    const LiveSampler::Use other = sampler.Start();
    const LiveSampler::Report report = sampler.Samples(0, kForever);
    sampler.Stop();
    _exit(report.status.code() == absl::StatusCode::kFailedPrecondition && report.samples.empty() ? 0 : 1);
  }
  ASSERT_GT(child, 0);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  shared_.WaitForRounds(shared_.Rounds() + 2);  // the parent's goes on
}

TEST(RateControlTest, RoundsBecomeRarerWhenTheyCostTooMuch) {
  RateControl rate(10'000'000, 1'000'000'000, 0.01);
  rate.Observe(50'000);
  EXPECT_EQ(rate.period_ns(), 10'000'000u);  // half of what is allowed
  for (int i = 0; i < 100; ++i) rate.Observe(1'000'000);
  EXPECT_NEAR(static_cast<double>(rate.period_ns()), 100e6, 1e6);
  for (int i = 0; i < 100; ++i) rate.Observe(200'000'000);
  EXPECT_EQ(rate.period_ns(), 1'000'000'000u);
  for (int i = 0; i < 200; ++i) rate.Observe(50'000);
  EXPECT_EQ(rate.period_ns(), 10'000'000u);
}

TEST(RateControlTest, AFirstRoundThatIsDearIsAnsweredAtOnce) {
  RateControl rate(10'000'000, 1'000'000'000, 0.01);
  rate.Observe(5'000'000);
  EXPECT_EQ(rate.period_ns(), 500'000'000u);
}

TEST(LiveCounterTest, EveryCounterHasANameAndAUnit) {
  for (size_t i = 0; i < kNumLiveCounters; ++i) {
    EXPECT_STRNE(LiveCounterName(static_cast<LiveCounter>(i)), "unknown");
    EXPECT_STRNE(LiveCounterUnit(static_cast<LiveCounter>(i)), "");
  }
}

}  // namespace
}  // namespace cuvil::scheduler
