#include "scheduler/capture_credit.h"

#include <gtest/gtest.h>

namespace cuvil::scheduler {
namespace {

TEST(CaptureCreditTest, ACaptureIsPaidForBeforeItIsMadeAgain) {
  CaptureCredit credit;
  EXPECT_TRUE(credit.IsWorthIt());  // the first is free
  credit.GivenUp(1000, 5);
  EXPECT_FALSE(credit.IsWorthIt());
  credit.Ran(600);
  EXPECT_FALSE(credit.IsWorthIt());
  credit.Ran(400);
  EXPECT_TRUE(credit.IsWorthIt());
}

TEST(CaptureCreditTest, GraphsThatAreGivenUpSoonWaitTwiceAsLongEachTime) {
  CaptureCredit credit;
  for (const uint64_t owed : {1000, 2000, 4000, 8000}) {
    credit.GivenUp(1000, 3);
    EXPECT_EQ(credit.owed_ns(), owed);
  }
  for (int i = 0; i < 100; ++i) credit.GivenUp(1000, 3);
  EXPECT_EQ(credit.owed_ns(), uint64_t{1000} << CaptureCredit::kMaxDoublings);
}

TEST(CaptureCreditTest, AGraphThatHasServedBeginsAnew) {
  CaptureCredit credit;
  for (int i = 0; i < 5; ++i) credit.GivenUp(1000, 3);
  credit.GivenUp(1000, CaptureCredit::kWorthwhileLaunches);
  EXPECT_EQ(credit.owed_ns(), 1000u);
  credit.GivenUp(1000, 3);
  EXPECT_EQ(credit.owed_ns(), 2000u);
}

// Models that take turns in a budget for one: the time of all captures stays below that of all other runs.
TEST(CaptureCreditTest, TakingTurnsNeverCostsMoreThanTwiceAsMuch) {
  constexpr uint64_t kCaptureNs = 20'000, kRunNs = 4'000;
  CaptureCredit credits[5];
  int resident = -1;
  uint64_t launches = 0, captures_ns = 0, runs_ns = 0, num_captures = 0;
  for (int call = 0; call < 100'000; ++call) {
    const int model = call % 5;
    if (model == resident) {
      ++launches;
      continue;
    }
    if (!credits[model].IsWorthIt()) {
      credits[model].Ran(kRunNs);
      runs_ns += kRunNs;
      continue;
    }
    if (resident >= 0) credits[resident].GivenUp(kCaptureNs, launches);
    resident = model;
    launches = 1;
    captures_ns += kCaptureNs;
    ++num_captures;
  }
  EXPECT_LE(captures_ns, runs_ns + 5 * kCaptureNs);
  EXPECT_GT(num_captures, 5u);
}

}  // namespace
}  // namespace cuvil::scheduler
