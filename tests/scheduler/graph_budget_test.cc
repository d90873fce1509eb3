#include "scheduler/graph_budget.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace cuvil::scheduler {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Verdict = GraphBudget::Verdict;

constexpr uint64_t kMiB = uint64_t{1} << 20;
// A device that has all the room there is.
constexpr DeviceRoom kWide = {uint64_t{100} << 30, uint64_t{100} << 30};

struct Arena {
  explicit Arena(GraphBudget& budget) : account(budget) {}
  GraphBudget::Account account;
};

// A graph in an arena, which lives as long as one of its graphs.
struct Graph {
  Graph(std::shared_ptr<Arena> home, uint64_t own_bytes) : arena(std::move(home)), entry(arena->account, own_bytes) {}
  std::shared_ptr<Arena> arena;
  GraphBudget::Entry entry;
};

class Runner : public GraphBudget::Holder {
 public:
  Runner(std::string name, GraphBudget& budget, std::vector<std::string>* given_up)
      : name_(std::move(name)), budget_(budget), given_up_(given_up) {}
  ~Runner() override { budget_.Forget(this); }
  std::shared_ptr<void> GiveUpGraph() override {
    if (graph != nullptr) given_up_->push_back(name_);
    return std::move(graph);
  }
  void Hold(std::shared_ptr<Graph> made, uint64_t used_ns) {
    graph = std::move(made);
    graph->entry.SetHolder(this);
    graph->entry.Touch(used_ns);
  }
  std::shared_ptr<Graph> graph;

 private:
  const std::string name_;
  GraphBudget& budget_;
  std::vector<std::string>* const given_up_;
};

class GraphBudgetTest : public ::testing::Test {
 protected:
  // A model whose pool has `pool_bytes`.
  std::shared_ptr<Arena> NewArena(uint64_t pool_bytes, uint64_t workspace_bytes = 0) {
    auto arena = std::make_shared<Arena>(budget_);
    arena->account.Set(pool_bytes, workspace_bytes);
    return arena;
  }
  Runner& NewRunner(const std::string& name, const std::shared_ptr<Arena>& arena, uint64_t own_bytes,
                    uint64_t used_ns) {
    runners_.push_back(std::make_unique<Runner>(name, budget_, &given_up_));
    runners_.back()->Hold(std::make_shared<Graph>(arena, own_bytes), used_ns);
    return *runners_.back();
  }
  std::vector<std::string> TakeGivenUp() { return std::exchange(given_up_, {}); }

  GraphBudget budget_{100 * kMiB};
  std::vector<std::string> given_up_;
  std::vector<std::unique_ptr<Runner>> runners_;
};

TEST_F(GraphBudgetTest, NothingGoesWhileThereIsRoom) {
  NewRunner("a", NewArena(40 * kMiB), 10 * kMiB, 1);
  const auto admission = budget_.Admit(nullptr, 60 * kMiB, kWide);
  EXPECT_EQ(admission.verdict, Verdict::kAdmitted);
  EXPECT_THAT(TakeGivenUp(), IsEmpty());
  EXPECT_EQ(admission.reservation.bytes(), 60 * kMiB);
  EXPECT_EQ(budget_.usage().used_bytes(), 100 * kMiB);
}

TEST_F(GraphBudgetTest, ReservedRoomIsNobodyElses) {
  {
    const auto first = budget_.Admit(nullptr, 60 * kMiB, kWide);
    EXPECT_EQ(budget_.Admit(nullptr, 60 * kMiB, kWide).verdict, Verdict::kLater);
  }
  EXPECT_EQ(budget_.usage().reserved_bytes, 0u);
  EXPECT_EQ(budget_.Admit(nullptr, 60 * kMiB, kWide).verdict, Verdict::kAdmitted);
}

TEST_F(GraphBudgetTest, TheModelThatWasUsedLongestAgoGoesAsAWhole) {
  const auto old = NewArena(30 * kMiB);
  NewRunner("old 1", old, kMiB, 1);
  NewRunner("old 2", old, kMiB, 5);
  NewRunner("new", NewArena(30 * kMiB), kMiB, 6);
  NewRunner("middle", NewArena(30 * kMiB), kMiB, 4);  // older than one graph of `old`, so it goes first
  {
    const auto admission = budget_.Admit(nullptr, 40 * kMiB, kWide);
    EXPECT_EQ(admission.verdict, Verdict::kAdmitted);
    EXPECT_THAT(TakeGivenUp(), ElementsAre("middle"));
  }
  const auto admission = budget_.Admit(nullptr, 70 * kMiB, kWide);
  EXPECT_THAT(TakeGivenUp(), ElementsAre("old 1", "old 2"));
  EXPECT_EQ(budget_.usage().num_given_up, 3u);
}

TEST_F(GraphBudgetTest, GraphsOfOneModelMakeRoomInsideOfItsPool) {
  const auto arena = NewArena(100 * kMiB);
  NewRunner("a", arena, 30 * kMiB, 3);
  NewRunner("b", arena, 30 * kMiB, 1);
  NewRunner("c", arena, 30 * kMiB, 2);
  // Ten are free; what all graphs work in is there already.
  EXPECT_EQ(budget_.Admit(&arena->account, 10 * kMiB, kWide).reservation.bytes(), 0u);
  EXPECT_THAT(TakeGivenUp(), IsEmpty());
  const auto admission = budget_.Admit(&arena->account, 40 * kMiB, kWide);
  EXPECT_EQ(admission.verdict, Verdict::kAdmitted);
  EXPECT_THAT(TakeGivenUp(), ElementsAre("b"));
  EXPECT_FALSE(admission.arena_is_empty);
}

TEST_F(GraphBudgetTest, AModelThatLosesAllItsGraphsBeginsWithANewPool) {
  const auto arena = NewArena(90 * kMiB);
  NewRunner("a", arena, 10 * kMiB, 1);
  NewRunner("b", arena, 10 * kMiB, 2);
  const auto admission = budget_.Admit(&arena->account, 95 * kMiB, kWide);
  EXPECT_EQ(admission.verdict, Verdict::kAdmitted);
  EXPECT_THAT(TakeGivenUp(), ElementsAre("a", "b"));
  EXPECT_TRUE(admission.arena_is_empty);
  EXPECT_EQ(admission.reservation.bytes(), 95 * kMiB);
}

TEST_F(GraphBudgetTest, OthersAndOnesOwnGoInTheOrderOfTheirUse) {
  const auto arena = NewArena(50 * kMiB);
  NewRunner("own old", arena, 20 * kMiB, 1);
  NewRunner("own new", arena, 20 * kMiB, 9);
  NewRunner("other", NewArena(50 * kMiB), kMiB, 5);
  const auto admission = budget_.Admit(&arena->account, 40 * kMiB, kWide);
  EXPECT_THAT(TakeGivenUp(), ElementsAre("own old", "other"));
  EXPECT_FALSE(admission.arena_is_empty);
  EXPECT_EQ(admission.reservation.bytes(), 10 * kMiB);  // forty less the ten that were free and the twenty
}

TEST_F(GraphBudgetTest, WhatCannotFitAloneIsRefusedAndNothingGoesForIt) {
  NewRunner("a", NewArena(90 * kMiB), kMiB, 1);
  const auto admission = budget_.Admit(nullptr, 101 * kMiB, kWide);
  EXPECT_EQ(admission.verdict, Verdict::kTooBig);
  EXPECT_THAT(admission.reason, HasSubstr("about 101 MiB"));
  EXPECT_THAT(admission.reason, HasSubstr("budget of 100 MiB (CUVIL_GRAPH_MEMORY)"));
  EXPECT_THAT(TakeGivenUp(), IsEmpty());
  budget_.SetLimit(0);
  EXPECT_EQ(budget_.Admit(nullptr, 1, kWide).verdict, Verdict::kTooBig);
}

TEST_F(GraphBudgetTest, WorkspacesCountAndStayWithTheirStreams) {
  {
    const auto first = NewArena(10 * kMiB, 32 * kMiB);
    const auto second = NewArena(10 * kMiB, 32 * kMiB);
    EXPECT_EQ(budget_.usage().used_bytes(), 84 * kMiB);
  }
  EXPECT_EQ(budget_.usage().used_bytes(), 64 * kMiB);
  // Streams are used again.
  const auto third = NewArena(0, 32 * kMiB);
  EXPECT_EQ(budget_.usage().used_bytes(), 64 * kMiB);
  EXPECT_EQ(budget_.Admit(nullptr, 40 * kMiB, kWide).verdict, Verdict::kTooBig);
  EXPECT_EQ(budget_.Admit(nullptr, 36 * kMiB, kWide).verdict, Verdict::kAdmitted);
}

TEST_F(GraphBudgetTest, GraphsGoEarlyWhenTheDeviceIsShort) {
  NewRunner("a", NewArena(20 * kMiB), kMiB, 1);
  NewRunner("b", NewArena(20 * kMiB), kMiB, 2);
  // A sixty-fourth of 640 is left to others.
  const DeviceRoom room = {30 * kMiB, 640 * kMiB};
  EXPECT_EQ(budget_.Admit(nullptr, 20 * kMiB, room).verdict, Verdict::kAdmitted);
  EXPECT_THAT(TakeGivenUp(), IsEmpty());
  EXPECT_EQ(budget_.Admit(nullptr, 30 * kMiB, room).verdict, Verdict::kAdmitted);
  EXPECT_THAT(TakeGivenUp(), ElementsAre("a"));
}

TEST_F(GraphBudgetTest, NothingGoesForAGraphThatTheDeviceHasNoRoomFor) {
  NewRunner("a", NewArena(20 * kMiB), kMiB, 1);
  const auto admission = budget_.Admit(nullptr, 60 * kMiB, {30 * kMiB, 640 * kMiB});
  EXPECT_EQ(admission.verdict, Verdict::kLater);
  EXPECT_THAT(admission.reason, HasSubstr("30 MiB free"));
  EXPECT_THAT(TakeGivenUp(), IsEmpty());
}

TEST_F(GraphBudgetTest, APoolThatHasTheRoomAsksNothingOfTheDevice) {
  const auto arena = NewArena(50 * kMiB);
  NewRunner("a", arena, kMiB, 1);
  EXPECT_EQ(budget_.Admit(&arena->account, 49 * kMiB, {0, 640 * kMiB}).verdict, Verdict::kAdmitted);
  EXPECT_THAT(TakeGivenUp(), IsEmpty());
}

TEST_F(GraphBudgetTest, ACaptureThatTookMoreThanWasThoughtPushesOthersOut) {
  NewRunner("old", NewArena(40 * kMiB), kMiB, 1);
  NewRunner("new", NewArena(40 * kMiB), kMiB, 2);
  const auto arena = NewArena(50 * kMiB);
  const Graph graph(arena, kMiB);
  const auto settled = budget_.Settle(arena->account);
  EXPECT_THAT(TakeGivenUp(), ElementsAre("old"));
  EXPECT_FALSE(settled.arena_is_empty);
}

TEST_F(GraphBudgetTest, AModelWhoseGraphsTookTooMuchLosesThem) {
  NewRunner("other", NewArena(10 * kMiB), kMiB, 1);
  const auto arena = NewArena(101 * kMiB);
  NewRunner("own", arena, kMiB, 2);
  const Graph graph(arena, kMiB);  // the new one, which its runner drops
  const auto settled = budget_.Settle(arena->account);
  EXPECT_TRUE(settled.arena_is_empty);
  EXPECT_THAT(settled.reason, HasSubstr("hold 101 MiB"));
  EXPECT_THAT(TakeGivenUp(), ElementsAre("own"));  // the other has done nothing
  arena->account.Set(100 * kMiB, 0);
}

TEST_F(GraphBudgetTest, KnowsWhatAGraphNeedsAtMost) {
  const auto arena = NewArena(80 * kMiB, 10 * kMiB);
  NewRunner("other", arena, 30 * kMiB, 1);
  const Graph graph(arena, 20 * kMiB);
  EXPECT_EQ(budget_.NeedAtMost(arena->account, 20 * kMiB), 50 * kMiB);
  arena->account.Set(150 * kMiB, 10 * kMiB);
  EXPECT_EQ(budget_.NeedAtMost(arena->account, 20 * kMiB), 90 * kMiB);  // so that it can be tried alone
}

TEST_F(GraphBudgetTest, SettlesQuietlyWithinTheLimit) {
  NewRunner("a", NewArena(50 * kMiB), kMiB, 1);
  const auto arena = NewArena(50 * kMiB);
  EXPECT_FALSE(budget_.Settle(arena->account).arena_is_empty);
  EXPECT_THAT(TakeGivenUp(), IsEmpty());
}

TEST_F(GraphBudgetTest, AGraphThatIsNotPublishedOrIsDyingIsNobodysToGive) {
  const auto arena = NewArena(60 * kMiB);
  auto graph = std::make_shared<Graph>(arena, kMiB);
  EXPECT_EQ(budget_.Admit(nullptr, 60 * kMiB, kWide).verdict, Verdict::kLater);
  Runner runner("a", budget_, &given_up_);
  runner.Hold(graph, 1);
  budget_.Forget(&runner);  // its death
  EXPECT_EQ(budget_.Admit(nullptr, 60 * kMiB, kWide).verdict, Verdict::kLater);
  EXPECT_THAT(TakeGivenUp(), IsEmpty());
}

TEST_F(GraphBudgetTest, PoolsThatAreGoneAreCachedUntilTorchEmptiesItsCaches) {
  constexpr DeviceRoom room = {64 * kMiB, 640 * kMiB};
  { const auto arena = NewArena(60 * kMiB); }
  EXPECT_EQ(budget_.usage().cached_bytes, 60 * kMiB);
  EXPECT_EQ(budget_.usage().used_bytes(), 0u);
  EXPECT_FALSE(budget_.WantsEmptyCaches(40 * kMiB, room));
  EXPECT_TRUE(budget_.WantsEmptyCaches(41 * kMiB, room));                     // for the limit
  EXPECT_TRUE(budget_.WantsEmptyCaches(40 * kMiB, {49 * kMiB, 640 * kMiB}));  // for the device
  const auto other = NewArena(50 * kMiB);
  EXPECT_TRUE(budget_.WantsEmptyCaches(0, room));
  budget_.AddCached(5 * kMiB);
  EXPECT_EQ(budget_.usage().cached_bytes, 65 * kMiB);
  budget_.CachesAreEmpty();
  EXPECT_EQ(budget_.usage().cached_bytes, 0u);
  EXPECT_FALSE(budget_.WantsEmptyCaches(1000 * kMiB, {0, 640 * kMiB}));
}

TEST_F(GraphBudgetTest, GivesEverythingUpAtOnce) {
  NewRunner("a", NewArena(10 * kMiB), kMiB, 1);
  NewRunner("b", NewArena(10 * kMiB), kMiB, 2);
  auto given_up = budget_.GiveUpAll();
  EXPECT_EQ(given_up.size(), 2u);
  EXPECT_EQ(budget_.usage().num_graphs, 2u);  // they die with the list
  given_up.clear();
  EXPECT_EQ(budget_.usage().num_graphs, 0u);
  EXPECT_EQ(budget_.usage().pool_bytes, 0u);
  EXPECT_THAT(budget_.GiveUpAll(), IsEmpty());
}

// One model in twenty shapes, in turns, as its runner does it: never above the limit.
TEST_F(GraphBudgetTest, TwentyShapesStayInsideOfTheLimit) {
  std::mt19937 random(1);
  std::shared_ptr<Arena> arena;
  std::vector<std::unique_ptr<Runner>> shapes;
  for (int i = 0; i < 20; ++i) shapes.push_back(std::make_unique<Runner>(std::to_string(i), budget_, &given_up_));
  uint64_t now = 0;
  for (int call = 0; call < 2000; ++call) {
    const size_t number = random() % 20;
    Runner& shape = *shapes[number];
    const uint64_t own = (2 + number % 7) * kMiB, work = 20 * kMiB;
    if (shape.graph != nullptr) {
      shape.graph->entry.Touch(++now);
      continue;
    }
    // The arena of whatever graph is left.
    for (const auto& other : shapes) {
      if (other->graph != nullptr) arena = other->graph->arena;
    }
    auto admission = budget_.Admit(arena == nullptr ? nullptr : &arena->account, own + work, kWide);
    admission.given_up.clear();
    ASSERT_EQ(admission.verdict, Verdict::kAdmitted) << admission.reason;
    if (admission.arena_is_empty || arena == nullptr) arena = NewArena(0);
    uint64_t owned = own + work;
    for (const auto& other : shapes) {
      if (other->graph != nullptr && other->graph->arena == arena) owned += other->graph->entry.own_bytes();
    }
    arena->account.Set(std::max(arena->account.pool_bytes(), owned), 0);
    shape.Hold(std::make_shared<Graph>(arena, own), ++now);
    arena.reset();
    admission.reservation = {};
    ASSERT_LE(budget_.usage().used_bytes(), 100 * kMiB) << call;
  }
  EXPECT_GT(budget_.usage().num_given_up, 100u);
}

TEST_F(GraphBudgetTest, ThreadsUseGiveUpAndDieAtOnce) {
  std::vector<std::thread> threads;
  std::vector<std::string> logs[4];
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([this, &log = logs[t]] {
      for (int i = 0; i < 200; ++i) {
        // Held by this thread only once it is published; what another thread takes is dropped there.
        struct Locked : GraphBudget::Holder {
          std::mutex mutex;
          std::shared_ptr<Graph> graph;
          std::shared_ptr<void> GiveUpGraph() override {
            const std::lock_guard<std::mutex> lock(mutex);
            return std::move(graph);
          }
        } holder;
        auto admission = budget_.Admit(nullptr, 40 * kMiB, kWide);
        admission.given_up.clear();
        if (admission.verdict != Verdict::kAdmitted) continue;
        auto arena = std::make_shared<Arena>(budget_);
        auto graph = std::make_shared<Graph>(arena, kMiB);
        arena->account.Set(40 * kMiB, 0);
        admission.reservation = {};
        {
          const std::lock_guard<std::mutex> lock(holder.mutex);
          holder.graph = graph;
        }
        graph->entry.SetHolder(&holder);
        graph->entry.Touch(static_cast<uint64_t>(i));
        graph.reset();
        arena.reset();
        if (i % 3 == 0) budget_.GiveUpAll().clear();
        (void)budget_.usage();
        budget_.Forget(&holder);
        log.push_back("done");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(budget_.usage().num_graphs, 0u);
  EXPECT_EQ(budget_.usage().used_bytes(), 0u);
}

TEST(CoarseNsTest, NeverGoesBack) {
  uint64_t last = CoarseNs();
  for (int i = 0; i < 1000; ++i) {
    const uint64_t now = CoarseNs();
    EXPECT_GE(now, last);
    last = now;
  }
}

}  // namespace
}  // namespace cuvil::scheduler
