#include "scheduler/kernel_attribution.h"

#include <gtest/gtest.h>

namespace cuvil::scheduler {
namespace {

constexpr uint64_t kNoSite = ProfileRecorder::kNoSite;
constexpr uint64_t kNoEnd = ~uint64_t{0};

CuptiActivity Kernel(uint32_t correlation, uint64_t graph_node = 0, uint64_t start = 10, uint64_t end = 20) {
  CuptiActivity kernel;
  kernel.correlation = correlation;
  kernel.graph_node = graph_node;
  kernel.start = start;
  kernel.end = end;
  return kernel;
}

TEST(KernelAttributionTest, AStepsKernelBelongsToItsSite) {
  const KernelAttribution attribution;
  CuptiActivities all;
  all.external_ids[1] = KernelAttribution::IdOfStep(42);
  EXPECT_EQ(attribution.SiteOf(Kernel(1), all), 42u);
  EXPECT_EQ(attribution.SiteOf(Kernel(2), all), kNoSite);  // nobody pushed anything
}

TEST(KernelAttributionTest, ACallsKernelsBelongToTheSiteThatTheCallHadInTheEnd) {
  KernelAttribution attribution;
  CuptiActivities all;
  const uint64_t outer = attribution.IdOfCall();
  const uint64_t inner = attribution.IdOfCall();
  attribution.EndCall(inner, 8);
  attribution.EndCall(outer, 7);
  const uint64_t open = attribution.IdOfCall();
  all.external_ids = {{1, outer}, {2, inner}, {3, open}};
  EXPECT_EQ(attribution.SiteOf(Kernel(1), all), 7u);
  EXPECT_EQ(attribution.SiteOf(Kernel(2), all), 8u);
  EXPECT_EQ(attribution.SiteOf(Kernel(3), all), kNoSite);  // did not end inside of the profile
}

class GraphAttributionTest : public ::testing::Test {
 protected:
  GraphAttributionTest() {
    call_ = attribution_.IdOfCall();
    attribution_.EndCall(call_, 5);
    const KernelAttribution::Node nodes[] = {
        {&captured_[0], 0}, {&captured_[1], 3}, {&captured_[2], KernelAttribution::Node::kOfTheCall}};
    const CuptiSession::Clone clones[] = {
        {100, &captured_[0], 0}, {101, &captured_[1], 0}, {102, &captured_[2], 0}, {103, &captured_[3], 0}};
    attribution_.AddClones(nodes, clones);
  }

  int captured_[4] = {};
  KernelAttribution attribution_;
  uint64_t call_ = 0;
  CuptiActivities all_;
};

TEST_F(GraphAttributionTest, ANodeBelongsToItsStepOfThePlanThatWasLaunched) {
  // One plan under two module paths.
  all_.external_ids = {{1, attribution_.IdOfLaunch(20, call_)}, {2, attribution_.IdOfLaunch(60, call_)}};
  EXPECT_EQ(attribution_.SiteOf(Kernel(1, 100), all_), 20u);
  EXPECT_EQ(attribution_.SiteOf(Kernel(1, 101), all_), 23u);
  EXPECT_EQ(attribution_.SiteOf(Kernel(2, 101), all_), 63u);
}

TEST_F(GraphAttributionTest, WhatIsNoStepBelongsToTheCall) {
  all_.external_ids = {{1, attribution_.IdOfLaunch(20, call_)}};
  EXPECT_EQ(attribution_.SiteOf(Kernel(1, 102), all_), 5u);  // the copy of inputs
  EXPECT_EQ(attribution_.SiteOf(Kernel(1, 103), all_), 5u);  // a node of no step
  EXPECT_EQ(attribution_.SiteOf(Kernel(1, 999), all_), 5u);  // a node of another executable
  EXPECT_EQ(attribution_.SiteOf(Kernel(1, 0), all_), 5u);    // beside the graph
}

TEST_F(GraphAttributionTest, APlanWhoseSitesFoundNoRoomBelongsToTheCall) {
  all_.external_ids = {{1, attribution_.IdOfLaunch(kNoSite, call_)}};
  EXPECT_EQ(attribution_.SiteOf(Kernel(1, 100), all_), 5u);
}

TEST_F(GraphAttributionTest, AGraphOfTheProgramsOwnBelongsToTheCallThatLaunchesIt) {
  all_.external_ids = {{1, call_}};
  EXPECT_EQ(attribution_.SiteOf(Kernel(1, 100), all_), 5u);
}

TEST(AttributeTest, PutsActivitiesOnTheHostsClockByStartAndKeepsCuptisTotal) {
  CuptiClock clock;
  clock.first = {1000, 11'000};
  clock.last = {2000, 12'000};
  CuptiActivities all;
  all.names = {"a"};
  all.activities = {Kernel(2, 0, 1500, 1700), Kernel(1, 7, 1100, 1200)};
  all.activities.push_back(Kernel(3, 0, 0, 0));        // the device has not told
  all.activities.push_back(Kernel(4, 0, 1300, 1200));  // nonsense
  all.activities.push_back(Kernel(5, 0, 1900, 1950));
  all.activities.back().kind = DeviceActivityKind::kCopy;
  all.external_ids[1] = KernelAttribution::IdOfStep(3);
  const DeviceProfile profile = Attribute(all, clock, KernelAttribution(), kNoEnd);
  ASSERT_EQ(profile.activities.size(), 3u);
  EXPECT_EQ(profile.activities[0].start_ns, 11'100u);
  EXPECT_EQ(profile.activities[0].end_ns, 11'200u);
  EXPECT_EQ(profile.activities[0].site, 3u);
  EXPECT_EQ(profile.activities[0].from_graph, 1);
  EXPECT_EQ(profile.activities[1].start_ns, 11'500u);
  EXPECT_EQ(profile.activities[1].site, kNoSite);
  EXPECT_EQ(profile.activities[1].from_graph, 0);
  EXPECT_EQ(profile.recorded_ns, 300u);  // kernels only
  EXPECT_EQ(profile.num_dropped, 2u);
}

TEST(AttributeTest, WhatBeganBehindTheEndIsLeftOutUnlessASiteAskedForIt) {
  CuptiClock clock;
  clock.first = {0, 0};
  clock.last = {1000, 1000};
  CuptiActivities all;
  all.names = {"a"};
  all.activities = {Kernel(1, 0, 100, 200), Kernel(2, 0, 600, 700), Kernel(3, 0, 800, 900)};
  all.external_ids[3] = KernelAttribution::IdOfStep(3);
  const DeviceProfile profile = Attribute(all, clock, KernelAttribution(), 500);
  ASSERT_EQ(profile.activities.size(), 2u);
  EXPECT_EQ(profile.activities[0].start_ns, 100u);
  EXPECT_EQ(profile.activities[1].site, 3u);
  EXPECT_EQ(profile.recorded_ns, 200u);
}

TEST(AttributeTest, TotalsAreNanosecondsWhateverClockCuptiHas) {
  CuptiClock clock;
  clock.first = {1000, 11'000};
  clock.last = {5000, 12'000};  // four of its units are one nanosecond
  CuptiActivities all;
  all.names = {"a"};
  all.activities = {Kernel(1, 0, 2000, 2400), Kernel(2, 0, 3000, 3080)};
  const DeviceProfile profile = Attribute(all, clock, KernelAttribution(), kNoEnd);
  EXPECT_EQ(profile.activities[0].end_ns - profile.activities[0].start_ns, 100u);
  EXPECT_EQ(profile.recorded_ns, 120u);
}

}  // namespace
}  // namespace cuvil::scheduler
