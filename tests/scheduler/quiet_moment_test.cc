#include "scheduler/quiet_moment.h"

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

// How often the device has to be found idle before CUPTI is asked of calls.
constexpr int kIdleWaits = 3;

class QuietMomentTest : public ::testing::Test {
 protected:
  absl::Status AtMoment(std::function<void()> during_wait = nullptr) {
    return AtQuietMoment(
        api_,
        [this, during_wait] {
          ++num_waits_;
          if (during_wait) during_wait();
          return wait_error_.empty() ? absl::OkStatus() : absl::UnavailableError(wait_error_);
        },
        [this] {
          fake_.log.push_back("action");
          return action_status_;
        },
        options_);
  }
  void CallElsewhere(int domain, int site) {
    std::thread([&] { fake_.TellCall(domain, site); }).join();
  }

  testing::FakeCupti fake_;
  const CuptiApi api_ = testing::FakeCupti::Api();
  QuietMomentOptions options_{std::chrono::microseconds(100), std::chrono::milliseconds(500), 60};
  std::atomic<int> num_waits_{0};
  std::string wait_error_;
  absl::Status action_status_;
};

TEST_F(QuietMomentTest, InAQuietProcessTheActionRunsWhenNobodySubscribes) {
  EXPECT_TRUE(AtMoment().ok());
  EXPECT_EQ(fake_.log, (Log{"subscribe", "domain 1 1", "domain 2 1", "unsubscribe", "action"}));
  EXPECT_GE(num_waits_, kIdleWaits + 1);
}

TEST_F(QuietMomentTest, TheActionsStatusIsTheResult) {
  action_status_ = absl::UnavailableError("no");
  EXPECT_EQ(AtMoment(), action_status_);
}

TEST_F(QuietMomentTest, ABusyDeviceIsLeftAlone) {
  options_.num_rounds = 3;
  const auto busy = [] { std::this_thread::sleep_for(std::chrono::milliseconds(1)); };
  EXPECT_EQ(AtMoment(busy).message(), "other threads keep using the device");
  EXPECT_TRUE(fake_.log.empty());  // CUPTI has not been asked for anything
}

TEST_F(QuietMomentTest, ACallMakesItTryAgain) {
  bool called = false;
  const auto once = [&] {
    if (!called && fake_.callback != nullptr) CallElsewhere(1, 0), called = true;
  };
  EXPECT_TRUE(AtMoment(once).ok());
  EXPECT_TRUE(called);
  EXPECT_GE(num_waits_, kIdleWaits + 2);
  EXPECT_EQ(fake_.log.back(), "action");
}

TEST_F(QuietMomentTest, WhileOtherThreadsCallNothingIsDone) {
  for (const int domain : {1, 2}) {
    fake_.log.clear();
    const absl::Status status = AtMoment([&] {
      if (fake_.callback != nullptr) CallElsewhere(domain, 0);
    });
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(fake_.log.back(), "unsubscribe");
  }
}

TEST_F(QuietMomentTest, TheWaitsOwnCallsAndTheEndsOfOthersDoNotCount) {
  const auto calls = [this] {
    if (fake_.callback == nullptr) return;
    fake_.TellCall(1, 0);  // the wait itself
    CallElsewhere(1, 1);   // a call comes to its end
    CallElsewhere(3, 0);   // not a call
  };
  EXPECT_TRUE(AtMoment(calls).ok());
}

TEST_F(QuietMomentTest, ADeviceThatCannotBeWaitedForIsLeftAlone) {
  wait_error_ = "cuCtxSynchronize: capturing";
  EXPECT_EQ(AtMoment(), absl::UnavailableError(wait_error_));
  EXPECT_TRUE(fake_.log.empty());
}

TEST_F(QuietMomentTest, AWaitThatDoesNotEndIsGivenUpAndMayEndLater) {
  static std::atomic<bool> go_on{false}, ended{false};
  go_on = ended = false;
  options_.wait_limit = std::chrono::milliseconds(5);
  const absl::Status status = AtQuietMoment(
      api_,
      [] {
        while (!go_on) std::this_thread::yield();
        ended = true;
        return absl::OkStatus();
      },
      [] { return absl::OkStatus(); }, options_);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  go_on = true;
  while (!ended) std::this_thread::yield();
}

TEST_F(QuietMomentTest, AnotherToolsCuptiIsLeftAlone) {
  fake_.failing = "subscribe";
  fake_.error = 39;
  fake_.real_time = true;
  EXPECT_EQ(AtMoment().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(fake_.log, (Log{"subscribe"}));
}

TEST_F(QuietMomentTest, WhatTorchHasLeftIsNoOtherTool) {
  fake_.failing = "subscribe";
  fake_.error = 39;
  EXPECT_TRUE(AtMoment().ok());
  EXPECT_EQ(fake_.log, (Log{"subscribe", "action"}));
}

TEST_F(QuietMomentTest, WithoutWordOfCallsNothingIsDone) {
  fake_.failing = "domain 2 1";
  EXPECT_EQ(AtMoment().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(fake_.log.back(), "unsubscribe");
  EXPECT_THAT(fake_.log, Not(Contains("action")));
}

TEST_F(QuietMomentTest, TorchIsKnownByItsClock) {
  EXPECT_TRUE(TorchLeftCupti(api_));
  fake_.real_time = true;
  EXPECT_FALSE(TorchLeftCupti(api_));
  fake_.real_time = false;
  fake_.failing = "cuptiGetTimestamp";
  EXPECT_FALSE(TorchLeftCupti(api_));
}

}  // namespace
}  // namespace cuvil::scheduler
