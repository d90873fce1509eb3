#include "agent/fault_injection.h"

#include <gtest/gtest.h>

#include <atomic>
#include <set>
#include <thread>
#include <vector>

namespace cuvil::agent {
namespace {

class FaultInjectionTest : public testing::Test {
 protected:
  void TearDown() override { DisarmFaults(); }
};

TEST_F(FaultInjectionTest, NothingFailsUnlessAsked) { EXPECT_FALSE(FaultInjected(FaultPoint::kRun)); }

TEST_F(FaultInjectionTest, FailsAsOftenAsAskedAndOnlyThere) {
  ASSERT_TRUE(InjectFault("run", 2).ok());
  EXPECT_FALSE(FaultInjected(FaultPoint::kGuard));
  EXPECT_TRUE(FaultInjected(FaultPoint::kRun));
  EXPECT_TRUE(FaultInjected(FaultPoint::kRun));
  EXPECT_FALSE(FaultInjected(FaultPoint::kRun));
}

TEST_F(FaultInjectionTest, ANegativeCountLastsUntilDisarmed) {
  ASSERT_TRUE(InjectFault("guard", -1).ok());
  for (int i = 0; i < 100; ++i) EXPECT_TRUE(FaultInjected(FaultPoint::kGuard));
  ASSERT_TRUE(InjectFault("guard", 0).ok());
  EXPECT_FALSE(FaultInjected(FaultPoint::kGuard));
}

TEST_F(FaultInjectionTest, EveryNameIsDistinctAndKnown) {
  std::set<std::string> seen;
  for (const std::string& name : FaultPointNames()) {
    EXPECT_TRUE(seen.insert(name).second) << name;
    EXPECT_TRUE(InjectFault(name, 1).ok()) << name;
  }
  EXPECT_EQ(seen.size(), static_cast<size_t>(FaultPoint::kNumPoints));
  EXPECT_FALSE(InjectFault("no-such-point", 1).ok());
}

TEST_F(FaultInjectionTest, ReadsTheEnvironmentsForm) {
  ASSERT_TRUE(InjectFaults("run:1,guard").ok());
  EXPECT_TRUE(FaultInjected(FaultPoint::kRun));
  EXPECT_FALSE(FaultInjected(FaultPoint::kRun));
  EXPECT_TRUE(FaultInjected(FaultPoint::kGuard));
}

TEST_F(FaultInjectionTest, ABadTextArmsNothing) {
  EXPECT_FALSE(InjectFaults("run,nonsense").ok());
  EXPECT_FALSE(InjectFaults("run:many").ok());
  EXPECT_FALSE(FaultInjected(FaultPoint::kRun));
}

TEST_F(FaultInjectionTest, ThreadsShareOneCount) {
  ASSERT_TRUE(InjectFault("run", 1'000).ok());
  std::atomic<int> failed{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&failed] {
      for (int i = 0; i < 1'000; ++i) failed += FaultInjected(FaultPoint::kRun);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failed, 1'000);
  EXPECT_FALSE(FaultInjected(FaultPoint::kRun));
}

}  // namespace
}  // namespace cuvil::agent
