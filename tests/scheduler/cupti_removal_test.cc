#include "scheduler/cupti_removal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "tests/testing/fake_cupti.h"

namespace cuvil::scheduler {
namespace {

using ::testing::Contains;
using ::testing::Not;
using Log = std::vector<std::string>;

class CuptiRemovalTest : public ::testing::Test {
 protected:
  // What the device's queue looks like: `during` happens while it is waited for.
  SynchronizeFunction Wait(std::function<void()> during = nullptr) {
    return [this, during] {
      ++num_waits_;
      if (during) during();
      return wait_status_;
    };
  }

  testing::FakeCupti fake_;
  const CuptiApi api_ = testing::FakeCupti::Api();
  const CuptiRemovalOptions options_{std::chrono::microseconds(100), std::chrono::milliseconds(500), 3};
  std::atomic<int> num_waits_{0};
  absl::Status wait_status_;
};

TEST_F(CuptiRemovalTest, InAQuietProcessItIsFinalizedBehindOneWait) {
  EXPECT_TRUE(RemoveCupti(api_, Wait(), options_).ok());
  EXPECT_EQ(fake_.log, (Log{"subscribe", "domain 1 1", "domain 2 1", "unsubscribe", "finalize"}));
  EXPECT_EQ(num_waits_, 1);
}

TEST_F(CuptiRemovalTest, ACallDuringTheWaitMakesItTryAgain) {
  const auto once = [this] {
    if (num_waits_ == 1) std::thread([this] { fake_.TellCall(1, 0); }).join();
  };
  EXPECT_TRUE(RemoveCupti(api_, Wait(once), options_).ok());
  EXPECT_EQ(num_waits_, 2);
  EXPECT_EQ(fake_.log.back(), "finalize");
}

TEST_F(CuptiRemovalTest, WhileOtherThreadsCallCuptiStays) {
  for (const int domain : {1, 2}) {
    const auto always = [this, domain] { std::thread([this, domain] { fake_.TellCall(domain, 0); }).join(); };
    fake_.log.clear();
    const absl::Status status = RemoveCupti(api_, Wait(always), options_);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(status.message(), "other threads keep using the device");
    EXPECT_EQ(fake_.log.back(), "unsubscribe");
    EXPECT_THAT(fake_.log, Not(Contains("finalize")));
  }
}

TEST_F(CuptiRemovalTest, TheWaitsOwnCallsAndTheEndsOfOthersDoNotCount) {
  const auto calls = [this] {
    fake_.TellCall(1, 0);                                  // cuCtxSynchronize
    std::thread([this] { fake_.TellCall(1, 1); }).join();  // a call comes to its end
    std::thread([this] { fake_.TellCall(3, 0); }).join();  // not a call
  };
  EXPECT_TRUE(RemoveCupti(api_, Wait(calls), options_).ok());
  EXPECT_EQ(num_waits_, 1);
}

TEST_F(CuptiRemovalTest, ADeviceThatCannotBeWaitedForKeepsCupti) {
  wait_status_ = absl::UnavailableError("cuCtxSynchronize: capturing");
  EXPECT_EQ(RemoveCupti(api_, Wait(), options_), wait_status_);
  EXPECT_EQ(fake_.log.back(), "unsubscribe");
  fake_.log.clear();
  EXPECT_EQ(RemoveCuptiThatTorchLeft(api_, Wait(), options_), wait_status_);
  EXPECT_TRUE(fake_.log.empty());
}

TEST_F(CuptiRemovalTest, AWaitThatDoesNotEndIsGivenUpAndMayEndLater) {
  static std::atomic<bool> go_on{false}, ended{false};
  go_on = ended = false;
  const SynchronizeFunction stuck = [] {
    while (!go_on) std::this_thread::yield();
    ended = true;
    return absl::OkStatus();
  };
  const CuptiRemovalOptions options{std::chrono::microseconds(100), std::chrono::milliseconds(5), 3};
  EXPECT_EQ(RemoveCupti(api_, stuck, options).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(fake_.log.back(), "unsubscribe");
  go_on = true;
  while (!ended) std::this_thread::yield();
}

TEST_F(CuptiRemovalTest, AnotherToolsCuptiStays) {
  fake_.failing = "subscribe";
  fake_.error = 39;
  EXPECT_EQ(RemoveCupti(api_, Wait(), options_).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(fake_.log, (Log{"subscribe"}));
}

TEST_F(CuptiRemovalTest, CallsThatCannotBeWatchedKeepCupti) {
  fake_.failing = "domain 2 1";
  EXPECT_EQ(RemoveCupti(api_, Wait(), options_).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(fake_.log.back(), "unsubscribe");
  EXPECT_EQ(num_waits_, 0);
}

TEST_F(CuptiRemovalTest, TorchsLeftoverIsKnownByItsClock) {
  EXPECT_TRUE(TorchLeftCupti(api_));
  fake_.real_time = true;
  EXPECT_FALSE(TorchLeftCupti(api_));
  fake_.real_time = false;
  fake_.failing = "cuptiGetTimestamp";
  EXPECT_FALSE(TorchLeftCupti(api_));
}

TEST_F(CuptiRemovalTest, TorchsLeftoverGoesWhenTheDeviceIsIdleSeveralTimes) {
  EXPECT_TRUE(RemoveCuptiThatTorchLeft(api_, Wait(), {std::chrono::microseconds(100), options_.wait_limit, 50}).ok());
  EXPECT_GE(num_waits_, 3);
  EXPECT_EQ(fake_.log, (Log{"finalize"}));
}

TEST_F(CuptiRemovalTest, TorchsLeftoverStaysWhileTheDeviceIsBusy) {
  const auto busy = [] { std::this_thread::sleep_for(std::chrono::milliseconds(1)); };
  EXPECT_EQ(RemoveCuptiThatTorchLeft(api_, Wait(busy), options_).code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(fake_.log.empty());
}

}  // namespace
}  // namespace cuvil::scheduler
