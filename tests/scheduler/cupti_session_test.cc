#include "scheduler/cupti_session.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "scheduler/monotonic_clock.h"
#include "tests/testing/fake_cupti.h"

namespace cuvil::scheduler {
namespace {

using ::testing::Contains;
using Log = std::vector<std::string>;

class CuptiSessionTest : public ::testing::Test {
 protected:
  std::unique_ptr<CuptiSession> Attach(CuptiSession::Limits limits = {}) {
    auto session = CuptiSession::Attach(api_, limits);
    EXPECT_TRUE(session.ok()) << session.status();
    return session.ok() ? *std::move(session) : nullptr;
  }
  void Read(absl::Span<const CuptiBufferView> buffers, const CuptiBufferCounts& counts) {
    fake_.log.push_back("read");
    buffers_.assign(buffers.size(), 0);
    for (size_t i = 0; i < buffers.size(); ++i) buffers_[i] = buffers[i].size();
    counts_ = counts;
  }
  absl::Status Stop(CuptiSession& session) {
    session.StopCorrelation();
    return session.Stop([this](const auto& buffers, const auto& counts) { Read(buffers, counts); });
  }

  testing::FakeCupti fake_;
  const CuptiApi api_ = testing::FakeCupti::Api();
  std::vector<size_t> buffers_;
  CuptiBufferCounts counts_;
};

TEST_F(CuptiSessionTest, CorrelationIsOnBeforeTheFirstKernelCanBeRecorded) {
  const auto session = Attach();
  EXPECT_EQ(fake_.log, (Log{"subscribe", "unsubscribe", "register", "enable 39", "enable 4", "enable 5", "enable 10",
                            "enable 1", "enable 22", "enable 2"}));
}

TEST_F(CuptiSessionTest, TheEndDisablesFlushesAndReads) {
  const auto session = Attach();
  fake_.log.clear();
  EXPECT_TRUE(Stop(*session).ok());
  EXPECT_EQ(fake_.log, (Log{"disable 2", "disable 22", "disable 1", "disable 10", "disable 5", "disable 4",
                            "disable 39", "flush 1", "read"}));
  fake_.log.clear();
  EXPECT_EQ(Stop(*session).code(), absl::StatusCode::kFailedPrecondition);  // once
  EXPECT_TRUE(fake_.log.empty());
}

TEST_F(CuptiSessionTest, AnotherToolsCuptiIsLeftAlone) {
  fake_.failing = "subscribe";
  fake_.error = 39;
  const auto session = CuptiSession::Attach(api_);
  EXPECT_EQ(session.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(fake_.log, (Log{"subscribe"}));
}

TEST_F(CuptiSessionTest, WhatCannotBeEnabledIsUndone) {
  fake_.failing = "enable 10";
  const auto session = CuptiSession::Attach(api_);
  EXPECT_EQ(session.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(session.status().message(), "cuptiActivityEnable: CUPTI_ERROR_UNKNOWN (999)");
  EXPECT_EQ(fake_.log, (Log{"subscribe", "unsubscribe", "register", "enable 39", "enable 4", "enable 5", "enable 10",
                            "disable 5", "disable 4", "disable 39"}));
  fake_.failing.clear();
  fake_.log.clear();
  EXPECT_NE(Attach(), nullptr);  // and may be tried again
}

TEST_F(CuptiSessionTest, AFailureAtTheEndIsReportedAndTheEndGoesOn) {
  const auto session = Attach();
  fake_.failing = "disable 10";
  EXPECT_EQ(Stop(*session).message(), "cuptiActivityDisable: CUPTI_ERROR_UNKNOWN (999)");
  EXPECT_THAT(fake_.log, Contains("disable 39"));
  EXPECT_EQ(fake_.log.back(), "read");
}

TEST_F(CuptiSessionTest, AnAbandonedSessionLeavesWhatAnotherToolUses) {
  const auto session = Attach();
  fake_.log.clear();
  session->Abandon([this](const auto& buffers, const auto& counts) { Read(buffers, counts); });
  EXPECT_EQ(fake_.log, (Log{"read"}));
}

TEST_F(CuptiSessionTest, NumbersArePushedAndPoppedUntilTheEnd) {
  const auto session = Attach();
  EXPECT_TRUE(session->Push(5));
  EXPECT_TRUE(session->Push(6));
  EXPECT_EQ(fake_.pushed[5], (std::vector<uint64_t>{5, 6}));
  EXPECT_TRUE(session->Pop());
  EXPECT_EQ(fake_.pushed[5], (std::vector<uint64_t>{5}));
  EXPECT_TRUE(Stop(*session).ok());
  EXPECT_FALSE(session->Pop());  // any call now would attach CUPTI again
  EXPECT_FALSE(session->Push(7));
  EXPECT_EQ(fake_.pushed[5], (std::vector<uint64_t>{5}));
}

TEST_F(CuptiSessionTest, AForkedChildCallsNothing) {
  auto session = Attach();
  EXPECT_TRUE(session->Push(5));
  fake_.log.clear();
  session->AfterForkInChild();
  EXPECT_FALSE(session->Pop());
  EXPECT_FALSE(session->Push(6));
  session.reset();
  EXPECT_TRUE(fake_.log.empty());
  EXPECT_EQ(fake_.pushed[5].size(), 1u);
}

TEST_F(CuptiSessionTest, ThreadsMayPushWhileItEnds) {
  auto api = api_;
  static std::atomic<bool> ended{false}, too_late{false};
  ended = too_late = false;
  api.cuptiActivityPushExternalCorrelationId = [](int, uint64_t) {
    if (ended) too_late = true;
    return 0;
  };
  api.cuptiActivityPopExternalCorrelationId = [](int, uint64_t*) {
    if (ended) too_late = true;
    return 0;
  };
  api.cuptiActivityDisable = [](int) {
    ended = true;
    return 0;
  };
  auto attached = CuptiSession::Attach(api);
  ASSERT_TRUE(attached.ok());
  CuptiSession& session = **attached;
  std::atomic<int> pushes{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      while (session.Push(1)) {
        pushes.fetch_add(1);
        session.Pop();
      }
    });
  }
  while (pushes.load() < 100) std::this_thread::yield();
  EXPECT_TRUE(Stop(session).ok());
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(ended);
  EXPECT_FALSE(too_late);
}

TEST_F(CuptiSessionTest, BuffersBeyondTheLimitAreNotGivenAndWhatIsDroppedIsCounted) {
  const auto session = Attach({.buffer_bytes = 1024, .max_bytes = 2048});
  for (int i = 0; i < 2; ++i) {
    fake_.Launch("k", 10, 20);
    EXPECT_TRUE(fake_.Deliver());
  }
  fake_.Launch("k", 10, 20);
  EXPECT_FALSE(fake_.Deliver());
  fake_.pending.clear();
  fake_.num_dropped = 3;
  EXPECT_TRUE(Stop(*session).ok());
  EXPECT_EQ(buffers_.size(), 2u);
  EXPECT_EQ(counts_.dropped, 3u);
  EXPECT_EQ(counts_.missing, 0u);
}

TEST_F(CuptiSessionTest, DroppedRecordsAreCounted) {
  const auto session = Attach();
  fake_.num_dropped = 3;
  fake_.Launch("k", 10, 20);
  EXPECT_TRUE(Stop(*session).ok());
  EXPECT_EQ(counts_.dropped, 3u);
}

TEST_F(CuptiSessionTest, BuffersThatCuptiKeepsAreCountedAndMayComeLate) {
  const auto session = Attach();
  fake_.gives_buffers_back = false;
  fake_.Launch("k", 10, 20);
  EXPECT_TRUE(Stop(*session).ok());
  EXPECT_EQ(buffers_.size(), 0u);
  EXPECT_EQ(counts_.missing, 1u);
  fake_.GiveBack();  // freed now; the next session does not see it
  const auto next = Attach();
  EXPECT_TRUE(Stop(*next).ok());
  EXPECT_EQ(counts_.missing, 0u);
  EXPECT_EQ(buffers_.size(), 0u);
}

TEST_F(CuptiSessionTest, BuffersOfOthersAreNotTouched) {
  const auto session = Attach();
  uint8_t foreign[64] = {};
  fake_.completed(nullptr, 0, foreign, sizeof(foreign), sizeof(foreign));
  EXPECT_TRUE(Stop(*session).ok());
  EXPECT_EQ(buffers_.size(), 0u);
}

TEST_F(CuptiSessionTest, CuptiGetsNoBufferAfterTheEnd) {
  const auto session = Attach();
  const auto requested = fake_.requested;
  EXPECT_TRUE(Stop(*session).ok());
  uint8_t* buffer = nullptr;
  size_t size_bytes = 1, max_records = 1;
  requested(&buffer, &size_bytes, &max_records);
  EXPECT_EQ(buffer, nullptr);
  EXPECT_EQ(size_bytes, 0u);
}

TEST_F(CuptiSessionTest, ClonesAreCollectedOnTheAskingThreadOnly) {
  const auto session = Attach();
  int captured[2] = {}, made[3] = {};
  fake_.node_ids = {{&captured[0], 1}, {&made[0], 11}, {&made[1], 12}, {&made[2], 13}};
  fake_.TellClone(&made[2], &captured[0]);  // nobody asks
  const auto clones = session->CollectClones(2, [&] {
    std::thread([&] { fake_.TellClone(&made[2], &captured[0]); }).join();
    fake_.TellClone(&made[0], &captured[0]);
    fake_.TellClone(&made[1], &captured[1]);  // an original of which CUPTI knows no number
    fake_.TellClone(&made[2], &captured[0]);  // beyond the limit
  });
  ASSERT_EQ(clones.size(), 2u);
  EXPECT_EQ(clones[0].id, 11u);
  EXPECT_EQ(clones[0].original, &captured[0]);
  EXPECT_EQ(clones[0].original_id, 1u);
  EXPECT_EQ(clones[1].id, 12u);
  EXPECT_EQ(clones[1].original_id, 0u);
}

TEST_F(CuptiSessionTest, TheSubscribersPlaceIsTakenForMomentsOnly) {
  const auto session = Attach();
  EXPECT_EQ(fake_.callback, nullptr);
  fake_.log.clear();
  session->CollectClones(1, [&] { fake_.log.push_back("instantiate"); });
  EXPECT_EQ(fake_.log, (Log{"subscribe", "callback 1", "instantiate", "unsubscribe"}));
  fake_.failing = "subscribe";
  fake_.log.clear();
  session->CollectClones(1, [&] { fake_.log.push_back("instantiate"); });
  EXPECT_EQ(fake_.log, (Log{"subscribe", "instantiate"}));
}

TEST(CuptiClockTest, MapsBothReadingsOntoThemselvesWhateverItsRate) {
  CuptiClock clock;
  clock.first = {1000, 50'000};
  clock.last = {4000, 51'000};  // three of its units are one nanosecond
  EXPECT_EQ(clock.ToMonotonicNs(1000), 50'000u);
  EXPECT_EQ(clock.ToMonotonicNs(4000), 51'000u);
  EXPECT_EQ(clock.ToMonotonicNs(2500), 50'500u);
  EXPECT_EQ(clock.ToMonotonicNs(7000), 52'000u);
}

TEST(CuptiClockTest, ARealTimeClockIsShiftedOnly) {
  CuptiClock clock;
  constexpr uint64_t kNow = 1'900'000'000'000'000'000;
  clock.first = {kNow, 77'000};
  clock.last = {kNow + 5'000'000, 77'000 + 5'000'000};
  EXPECT_EQ(clock.ToMonotonicNs(kNow + 1'234'567), 77'000u + 1'234'567u);
}

TEST_F(CuptiSessionTest, TheClocksAreReadAtBothEnds) {
  const uint64_t before = MonotonicNs();
  const auto session = Attach();
  EXPECT_TRUE(Stop(*session).ok());
  const CuptiClock& clock = session->clock();
  EXPECT_LE(before, clock.first.monotonic_ns);
  EXPECT_LT(clock.first.monotonic_ns, clock.last.monotonic_ns);
  EXPECT_LE(clock.last.monotonic_ns, MonotonicNs());
  EXPECT_LT(clock.first.cupti, clock.last.cupti);
}

}  // namespace
}  // namespace cuvil::scheduler
