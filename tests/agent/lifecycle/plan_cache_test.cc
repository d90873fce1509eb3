#include "agent/lifecycle/plan_cache.h"

#include <gtest/gtest.h>

#include <thread>

namespace cuvil::agent {
namespace {

struct Entry {
  explicit Entry(int value) : value(value) {}
  const int value;
  std::atomic<uint64_t> last_used{0};
};
using Cache = PlanCache<Entry>;

TEST(PlanCacheTest, DropsTheLeastRecentlyUsed) {
  Cache cache(3);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(cache.Insert(std::make_shared<Entry>(i)).empty());
  const auto list = cache.Snapshot();
  cache.Touch((*list)[0], 0);
  const Cache::List dropped = cache.Insert(std::make_shared<Entry>(3));
  ASSERT_EQ(dropped.size(), 1u);
  EXPECT_EQ(dropped[0]->value, 1);
  EXPECT_EQ(cache.size(), 3u);
}

TEST(PlanCacheTest, ReadersKeepTheListTheyTook) {
  Cache cache(1);
  EXPECT_TRUE(cache.Insert(std::make_shared<Entry>(1)).empty());
  const auto before = cache.Snapshot();
  EXPECT_EQ(cache.Insert(std::make_shared<Entry>(2)).size(), 1u);
  ASSERT_EQ(before->size(), 1u);
  EXPECT_EQ(before->front()->value, 1);
  EXPECT_EQ(cache.Clear()->size(), 1u);
  EXPECT_EQ(cache.size(), 0u);
}

TEST(PlanCacheTest, ReplacesOnlyWhatIsStillThere) {
  Cache cache(2);
  const auto first = std::make_shared<Entry>(1), second = std::make_shared<Entry>(2),
             other = std::make_shared<Entry>(3);
  EXPECT_TRUE(cache.Insert(first).empty());
  EXPECT_TRUE(cache.Insert(second).empty());
  cache.Replace(first.get(), other);
  EXPECT_EQ(*cache.Snapshot(), (Cache::List{other, second}));
  cache.Remove(other.get());
  cache.Replace(other.get(), first);
  EXPECT_EQ(*cache.Snapshot(), Cache::List{second});
}

TEST(PlanCacheTest, KnowsWhichEntryWasUsedLast) {
  Cache cache(4);
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(cache.Insert(std::make_shared<Entry>(i)).empty());
  EXPECT_EQ(cache.most_recent(), 3u);
  cache.Touch((*cache.Snapshot())[2], 2);
  EXPECT_EQ(cache.most_recent(), 2u);
}

TEST(PlanCacheTest, SurvivesReadersAndWritersOnManyThreads) {
  Cache cache(8);
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&cache, t] {
      for (int i = 0; i < 2'000; ++i) {
        if (t < 2 && i % 4 == 0) {
          Cache::List dropped = cache.Insert(std::make_shared<Entry>(i));
          EXPECT_LE(dropped.size(), 1u);
        } else if (t == 2 && i % 500 == 0) {
          EXPECT_LE(cache.Clear()->size(), 8u);
        } else {
          const auto list = cache.Snapshot();
          for (size_t k = 0; k < list->size(); ++k) cache.Touch((*list)[k], k);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(cache.size(), 8u);
}

}  // namespace
}  // namespace cuvil::agent
