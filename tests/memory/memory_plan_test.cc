#include "memory/memory_plan.h"

#include <gtest/gtest.h>

#include <random>

#include "memory/plan_verifier.h"

namespace cuvil::memory {
namespace {

TEST(MemoryPlanTest, ReusesMemoryOfIntervalsThatHaveEnded) {
  const std::vector<LiveInterval> intervals = {{0, 1, 256}, {1, 2, 256}, {2, 3, 256}};
  const auto plan = PlanMemory(intervals);
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->sum_bytes, 768u);
  EXPECT_EQ(plan->high_water_bytes, 512u);
  EXPECT_EQ(plan->live_peak_bytes, 512u);
  EXPECT_EQ(plan->offsets_bytes[0], plan->offsets_bytes[2]);
}

TEST(MemoryPlanTest, BothEndsOfAnIntervalAreLive) {
  const auto plan = PlanMemory(std::vector<LiveInterval>{{0, 5, 64}, {5, 6, 64}});
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->high_water_bytes, 128u);
}

TEST(MemoryPlanTest, FillsTheTightestHole) {
  // Around a long-lived block in the middle, two holes of different size stay; the small one fits the small buffer.
  const std::vector<LiveInterval> intervals = {{0, 9, 1024}, {0, 4, 512}, {0, 9, 448}, {5, 9, 512}, {5, 6, 64}};
  const auto plan = PlanMemory(intervals);
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->high_water_bytes, 1024u + 512u + 448u + 64u);
}

TEST(MemoryPlanTest, AlignsAndSkipsEmptyBuffers) {
  const auto plan = PlanMemory(std::vector<LiveInterval>{{0, 1, 1}, {0, 1, 65}, {0, 1, 0}}, {.alignment_bytes = 64});
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->high_water_bytes, 192u);
  EXPECT_EQ(plan->sum_bytes, 192u);
  EXPECT_TRUE(PlanMemory({}).ok());
}

TEST(MemoryPlanTest, RefusesWhatMakesNoSense) {
  EXPECT_EQ(PlanMemory(std::vector<LiveInterval>{{3, 2, 1}}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(PlanMemory({}, {.alignment_bytes = 48}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(PlanMemory(std::vector<LiveInterval>{{0, 0, 65}}, {.limit_bytes = 127}).status().code(),
            absl::StatusCode::kResourceExhausted);
}

TEST(MemoryPlanTest, RandomPlansPassTheVerifier) {
  std::mt19937 random(1);
  for (int round = 0; round < 2000; ++round) {
    std::vector<LiveInterval> intervals(random() % 60);
    for (LiveInterval& interval : intervals) {
      interval.first = random() % 40;
      interval.last = interval.first + random() % (round % 2 == 0 ? 4 : 40);
      interval.size_bytes = random() % 5 == 0 ? 0 : random() % 5000;
    }
    const size_t alignment = size_t{1} << (random() % 9);
    const auto plan = PlanMemory(intervals, {.alignment_bytes = alignment});
    ASSERT_TRUE(plan.ok());
    EXPECT_GE(plan->high_water_bytes, plan->live_peak_bytes);
    EXPECT_LE(plan->high_water_bytes, plan->sum_bytes);
    const absl::Status verified = VerifyMemoryPlan(intervals, *plan, alignment);
    ASSERT_TRUE(verified.ok()) << verified << " in round " << round;
  }
}

TEST(PlanVerifierTest, FindsEveryKindOfFault) {
  const std::vector<LiveInterval> intervals = {{0, 2, 100}, {2, 4, 100}, {5, 6, 100}};
  MemoryPlan plan;
  plan.high_water_bytes = 256;
  plan.offsets_bytes = {0, 128, 0};
  EXPECT_TRUE(VerifyMemoryPlan(intervals, plan, 64).ok());
  plan.offsets_bytes = {0, 64, 0};
  EXPECT_EQ(VerifyMemoryPlan(intervals, plan, 64).message(), "memory plan: intervals 0 and 1 share bytes at step 2");
  plan.offsets_bytes = {64, 0, 0};
  EXPECT_FALSE(VerifyMemoryPlan(intervals, plan, 64).ok());
  plan.offsets_bytes = {0, 0, 0};
  EXPECT_FALSE(VerifyMemoryPlan(intervals, plan, 64).ok());
  plan.offsets_bytes = {0, 192, 0};
  EXPECT_EQ(VerifyMemoryPlan(intervals, plan, 64).message(), "memory plan: interval 1 ends beyond the arena");
  plan.offsets_bytes = {0, 130, 0};
  EXPECT_EQ(VerifyMemoryPlan(intervals, plan, 64).message(), "memory plan: interval 1 is not aligned");
  plan.offsets_bytes = {0, 128};
  EXPECT_FALSE(VerifyMemoryPlan(intervals, plan, 64).ok());
}

}  // namespace
}  // namespace cuvil::memory
