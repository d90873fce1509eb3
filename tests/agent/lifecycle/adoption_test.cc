#include "agent/lifecycle/adoption.h"

#include <gtest/gtest.h>

#include <functional>

namespace cuvil::agent {
namespace {

using Path = Adoption::Path;
using State = Adoption::State;

// Plays real calls whose times come from the two functions; returns how many went to eager.
uint64_t Play(Adoption& adoption, int num_calls, const std::function<uint64_t(int)>& plan_ns,
              const std::function<uint64_t(int)>& eager_ns) {
  uint64_t num_eager = 0;
  for (int i = 0; i < num_calls; ++i) {
    const Adoption::Choice choice = adoption.Next();
    num_eager += choice.path == Path::kEager;
    if (choice.timed) adoption.Record(choice.path, choice.path == Path::kPlan ? plan_ns(i) : eager_ns(i));
  }
  return num_eager;
}

std::function<uint64_t(int)> Constant(uint64_t ns) {
  return [ns](int) { return ns; };
}

TEST(AdoptionTest, AlternatesAndStartsWithThePlan) {
  Adoption adoption(Adoption::Policy::kMeasure);
  for (int i = 0; i < 4; ++i) {
    const Adoption::Choice choice = adoption.Next();
    EXPECT_TRUE(choice.timed);
    EXPECT_EQ(choice.path, i % 2 == 0 ? Path::kPlan : Path::kEager);
    EXPECT_FALSE(adoption.Record(choice.path, choice.path == Path::kPlan ? 10 : 20));
  }
}

TEST(AdoptionTest, AdoptsAClearlyFasterPlanAfterThreePairs) {
  Adoption adoption(Adoption::Policy::kMeasure);
  Play(adoption, 6, Constant(50), Constant(100));
  EXPECT_EQ(adoption.state(), State::kAdopted);
  EXPECT_EQ(adoption.plan_ns(), 50u);
  EXPECT_EQ(adoption.eager_ns(), 100u);
}

TEST(AdoptionTest, RetiresAClearlySlowerPlan) {
  Adoption adoption(Adoption::Policy::kMeasure);
  Play(adoption, 6, Constant(120), Constant(100));
  EXPECT_EQ(adoption.state(), State::kRetired);
  EXPECT_EQ(adoption.Next().path, Path::kEager);
}

TEST(AdoptionTest, ReportsEachChangeOfTheVerdictOnce) {
  Adoption adoption(Adoption::Policy::kMeasure);
  int changes = 0;
  for (int i = 0; i < 10'000; ++i) {
    const Adoption::Choice choice = adoption.Next();
    if (choice.timed) changes += adoption.Record(choice.path, choice.path == Path::kPlan ? 50 : 100);
  }
  EXPECT_EQ(changes, 1);
}

TEST(AdoptionTest, NoiseAroundATieIsAdopted) {
  Adoption adoption(Adoption::Policy::kMeasure);
  // Both jitter over the same range; eager's median is a hair lower.
  Play(
      adoption, 48, [](int i) { return 1000 + (i * 7) % 100; }, [](int i) { return 995 + (i * 11) % 100; });
  EXPECT_EQ(adoption.state(), State::kAdopted);
}

TEST(AdoptionTest, OneSlowOutlierDoesNotRetireAFasterPlan) {
  Adoption adoption(Adoption::Policy::kMeasure);
  Play(
      adoption, 48, [](int i) { return i == 0 ? 100'000 : 60; }, Constant(100));
  EXPECT_EQ(adoption.state(), State::kAdopted);
}

TEST(AdoptionTest, RetiresAPlanThatBecomesSlowerAndTakesItBack) {
  Adoption adoption(Adoption::Policy::kMeasure);
  Play(adoption, 6, Constant(50), Constant(100));
  ASSERT_EQ(adoption.state(), State::kAdopted);
  Play(adoption, 10'000, Constant(150), Constant(100));
  EXPECT_EQ(adoption.state(), State::kRetired);
  Play(adoption, 100'000, Constant(50), Constant(100));
  EXPECT_EQ(adoption.state(), State::kAdopted);
}

TEST(AdoptionTest, LookingAgainCostsLessThanOnePercentOfTheCalls) {
  Adoption adoption(Adoption::Policy::kMeasure);
  const uint64_t num_eager = Play(adoption, 100'000, Constant(50), Constant(100));
  EXPECT_LT(num_eager, 100u);
  EXPECT_GT(adoption.rounds(), 3u);
}

TEST(AdoptionTest, AlwaysNeverMeasures) {
  Adoption adoption(Adoption::Policy::kAlways);
  for (int i = 0; i < 10'000; ++i) {
    const Adoption::Choice choice = adoption.Next();
    ASSERT_EQ(choice.path, Path::kPlan);
    ASSERT_FALSE(choice.timed);
  }
  EXPECT_EQ(adoption.state(), State::kAdopted);
}

TEST(AdoptionTest, ADecisionFromOutsideHoldsUntilTheNextRound) {
  Adoption adoption(Adoption::Policy::kMeasure);
  adoption.Decide(State::kAdopted);
  EXPECT_FALSE(adoption.Next().timed);
  Play(adoption, 5'000, Constant(150), Constant(100));
  EXPECT_EQ(adoption.state(), State::kRetired);
}

TEST(AdoptionTest, SkippedCallsCountAndEndBeforeTheNextRound) {
  Adoption adoption(Adoption::Policy::kMeasure);
  EXPECT_EQ(adoption.Skip(100), 0u) << "a round is open";
  Play(adoption, 6, Constant(120), Constant(100));
  ASSERT_EQ(adoption.state(), State::kRetired);
  uint64_t calls = 0;
  while (!adoption.Next().timed) calls += 1 + adoption.Skip(100);
  EXPECT_EQ(calls, 1'999u);
}

TEST(AdoptionTest, CallsOfOtherThreadsThatEndLateAreIgnored) {
  Adoption adoption(Adoption::Policy::kMeasure);
  Play(adoption, 6, Constant(50), Constant(100));
  EXPECT_FALSE(adoption.Record(Path::kPlan, 1'000'000));
  EXPECT_EQ(adoption.plan_ns(), 50u);
}

}  // namespace
}  // namespace cuvil::agent
