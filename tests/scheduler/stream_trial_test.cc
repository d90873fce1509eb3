#include "scheduler/stream_trial.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "jit/cir/text.h"
#include "scheduler/graph_split.h"
#include "scheduler/stream_problem.h"
#include "tests/testing/fake_driver.h"
#include "tests/testing/fake_streams.h"
#include "tests/testing/torch_library.h"

namespace cuvil::scheduler {
namespace {

using ::testing::HasSubstr;
using torch_abi::OwnedTensor;
using torch_abi::TensorRef;

int g_num_pools = 0;
uint64_t g_pool_bytes = 0;

// The first pools are the arena's and its workspaces', the next one the trial's first.
class CountingPool : public AllocationPool {
 public:
  CountingPool() : number_(g_num_pools++) {}
  ~CountingPool() override { --g_num_pools; }
  absl::Status Enter() override { return absl::OkStatus(); }
  void Leave() override {}
  absl::StatusOr<uint64_t> ReservedBytes() override { return number_ < 2 ? 1000 : number_ == 2 ? g_pool_bytes : 1500; }

 private:
  const int number_;
};

class CountingAllocator : public DeviceAllocator {
 public:
  absl::StatusOr<std::unique_ptr<AllocationPool>> MakePool() override { return std::make_unique<CountingPool>(); }
  absl::Status MakeWorkspaces() override { return absl::OkStatus(); }
  absl::StatusOr<DeviceRoom> Room() override { return DeviceRoom{}; }
};

std::string Type(int storage) { return " : float32[2]{1} cpu @" + std::to_string(storage); }

std::string Unary(int op, const char* name, int from, int to) {
  return "#" + std::to_string(op) + " aten::" + name + "(Tensor %" + std::to_string(from) + ") -> (%" +
         std::to_string(to) + Type(to) + ") source 0\n";
}

// Three branches of three operators each, which meet. Everything is returned: the CPU's allocator, which stands in for
// the device's, keeps no free lists by stream, so nothing may be given back.
std::string Branches() {
  std::string text = Unary(0, "neg", 0, 2);
  int op = 1;
  for (const int first : {3, 6, 9}) {
    text += Unary(op, "cos", 2, first) + Unary(op + 1, "exp", first, first + 1);
    text += Unary(op + 2, "sin", first + 1, first + 2);
    op += 3;
  }
  text += "#10 aten::add.Tensor(Tensor %5, Tensor %8, Scalar 1) -> (%12" + Type(12) + ") source 0\n";
  text += "#11 aten::add.Tensor(Tensor %12, Tensor %11, Scalar 1) -> (%13" + Type(13) + ") source 0\n";
  return text + "return %13, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12\n";
}

class StreamTrialTest : public testing::TorchTest {
 protected:
  void SetUp() override {
    testing::TorchTest::SetUp();
    if (api_ == nullptr) return;
    testing::FakeStreams::current = nullptr;
    g_num_pools = 0;
    g_pool_bytes = 1500;
    fake_.node_types.clear();
    fake_.working_stream = [] { return testing::FakeStreams::current; };
    fake_.launch_ms = [](size_t num_side_streams) { return num_side_streams == 1 ? 0.7 : 1.0; };
    auto copy = device::CopyKernel::Load(driver_);
    ASSERT_TRUE(copy.ok()) << copy.status();
    copy_.emplace(*std::move(copy));
    auto arena = MakeArena();
    ASSERT_TRUE(arena.ok()) << arena.status();
    arena_ = *std::move(arena);
    x_ = Floats({1, 2});
  }

  absl::StatusOr<std::shared_ptr<GraphArena>> MakeArena() {
    return GraphArena::Create(driver_, streams_, cir::Device{cir::DeviceType::kCpu, -1},
                              std::make_unique<CountingAllocator>(),
                              {shelf_, budget_, health_, GraphArena::Kernels{&*copy_, nullptr}});
  }

  void MakeSerial(const std::string& body = Branches()) {
    auto graph = cir::Parse("cir 1\nsource 0 \"model.py:7 in forward\"\n%0" + Type(0) + " = input 0\n" + "%1" +
                            Type(1) + " = captured 0\n" + body);
    ASSERT_TRUE(graph.ok()) << graph.status();
    auto split = SplitForGraph(*graph, {});
    ASSERT_TRUE(split.ok()) << split.status();
    auto made = ExecutionPlan::Build(std::move(split->body), api_, {});
    ASSERT_TRUE(made.ok()) << made.status();
    auto tail = ExecutionPlan::Build(std::move(split->tail), api_, {});
    ASSERT_TRUE(tail.ok()) << tail.status();
    parts_ = {*made, *tail, std::move(split->tail_captured), split->num_copies};
    auto plan = GraphPlan::Create(parts_, {x_.ref()}, {x_.ref()}, arena_);
    ASSERT_TRUE(plan.ok()) << plan.status();
    serial_ = *std::move(plan);
  }

  StreamTrialOutcome Try(const StreamTrialOptions& options = {}) {
    return TryStreams(*serial_, parts_, {x_.ref()}, {x_.ref()}, arena_, options);
  }

  // Nothing of the trial is left but what serves.
  void ExpectGone(size_t num_plans) {
    EXPECT_EQ(g_num_pools, 2);  // of the arena and of its stream
    EXPECT_EQ(testing::FakeStreams::current, nullptr);
    EXPECT_EQ(fake_.Count("cuGraphInstantiate") - fake_.Count("cuGraphExecDestroy"), num_plans);
    EXPECT_EQ(fake_.Count("cuStreamBeginCapture"), fake_.Count("cuStreamEndCapture"));
  }

  testing::FakeDriver fake_;
  const device::DriverApi driver_ = testing::FakeDriver::Api();
  const torch_abi::CudaStreams streams_ = testing::FakeStreams::Api();
  std::optional<device::CopyKernel> copy_;
  StreamShelf shelf_;
  GraphBudget budget_;
  DeviceHealth health_;
  std::shared_ptr<GraphArena> arena_;
  OwnedTensor x_;
  GraphPlan::Parts parts_;
  std::unique_ptr<GraphPlan> serial_;
};

TEST_F(StreamTrialTest, TheFastestIsUsedAndComputesTheSame) {
  MakeSerial();
  StreamTrialOutcome outcome = Try();
  const StreamReport& report = outcome.report;
  EXPECT_EQ(report.skipped, "");
  ASSERT_NE(outcome.plan, nullptr);
  ASSERT_GE(report.candidates.size(), 3u);
  EXPECT_EQ(report.candidates[report.chosen].name, "2 streams");
  EXPECT_EQ(report.candidates[report.chosen].num_streams, 2u);
  EXPECT_NEAR(report.candidates[0].replay_ns, 1.0e6, 1e3);
  EXPECT_NEAR(report.candidates[report.chosen].replay_ns, 0.7e6, 1e3);
  EXPECT_LE(report.num_launches, 30u);
  EXPECT_EQ(report.num_launches, fake_.Count("cuGraphLaunch"));
  EXPECT_THAT(report.timeline, HasSubstr("stream 1 |"));
  EXPECT_EQ(outcome.schedule->num_streams, 2u);
  for (size_t i = 0; i < 12; ++i) EXPECT_EQ(Read(outcome.plan->kept()[i]), Read(serial_->kept()[i])) << i;
  ExpectGone(2);
  // Every node of it is known, and the plan serves.
  EXPECT_EQ(outcome.plan->nodes().size(), 14u);
  std::vector<OwnedTensor> outputs;
  ASSERT_TRUE(outcome.plan->Run({x_.ref()}, {x_.ref()}, &outputs).ok());
  EXPECT_EQ(Read(outputs[0]), Read(serial_->kept().back()));
}

TEST_F(StreamTrialTest, SerialStaysUnlessAnotherIsClearlyFaster) {
  MakeSerial();
  fake_.launch_ms = [](size_t num_side_streams) { return num_side_streams > 0 ? 0.98 : 1.0; };
  const StreamTrialOutcome outcome = Try();
  EXPECT_EQ(outcome.plan, nullptr);
  EXPECT_EQ(outcome.schedule, nullptr);
  EXPECT_EQ(outcome.report.chosen, 0u);
  EXPECT_NEAR(outcome.report.candidates[1].replay_ns, 0.98e6, 1e3);
  ExpectGone(1);
}

TEST_F(StreamTrialTest, WhatIsNotFasterWhenMeasuredAgainIsNotUsed) {
  MakeSerial();
  size_t num_parallel = 0;
  fake_.launch_ms = [&](size_t num_side_streams) {
    if (num_side_streams != 1) return 1.0;
    return ++num_parallel > 6 ? 1.0 : 0.5;
  };
  const StreamTrialOutcome outcome = Try({.max_streams = 2});
  EXPECT_EQ(outcome.plan, nullptr);
  EXPECT_EQ(outcome.report.chosen, 0u);
  EXPECT_THAT(outcome.report.candidates[1].rejected, HasSubstr("measured again"));
  ExpectGone(1);
}

TEST_F(StreamTrialTest, TooMuchMemoryIsRejected) {
  MakeSerial();
  g_pool_bytes = 1100 + (uint64_t{40} << 20) + 1;
  StreamTrialOutcome outcome = Try({.max_streams = 2});
  EXPECT_EQ(outcome.plan, nullptr);
  EXPECT_THAT(outcome.report.candidates[1].rejected, HasSubstr("memory"));
  EXPECT_EQ(outcome.report.candidates[1].replay_ns, 0);
  ExpectGone(1);
  // What one candidate took does not count for the next.
  outcome = Try();
  EXPECT_THAT(outcome.report.candidates[1].rejected, HasSubstr("memory"));
  EXPECT_EQ(outcome.report.candidates[outcome.report.chosen].name, "2 streams");
  outcome.plan.reset();
  ExpectGone(1);
  --g_pool_bytes;
  EXPECT_NE(Try({.max_streams = 2}).plan, nullptr);
}

TEST_F(StreamTrialTest, AGraphThatDoesNotVerifyIsRejectedWithTheReason) {
  MakeSerial();
  fake_.hidden_edge = 4;
  const StreamTrialOutcome outcome = Try();
  EXPECT_EQ(outcome.plan, nullptr);
  for (size_t i = 1; i < outcome.report.candidates.size(); ++i) {
    EXPECT_THAT(outcome.report.candidates[i].rejected, HasSubstr("in no order")) << i;
  }
  ExpectGone(1);
  // A serial graph neither.
  const auto plan = GraphPlan::Create(parts_, {x_.ref()}, {x_.ref()}, arena_);
  EXPECT_EQ(plan.status().code(), absl::StatusCode::kInternal);
}

TEST_F(StreamTrialTest, ProgramsWithoutBranchesAreNotTried) {
  MakeSerial(Unary(0, "neg", 0, 2) + Unary(1, "cos", 2, 3) + Unary(2, "exp", 3, 4) + "return %4\n");
  const size_t captures = fake_.Count("cuStreamBeginCapture");
  const StreamTrialOutcome outcome = Try();
  EXPECT_EQ(outcome.plan, nullptr);
  EXPECT_THAT(outcome.report.skipped, HasSubstr("no gain to expect"));
  EXPECT_EQ(fake_.Count("cuStreamBeginCapture"), captures);
  EXPECT_NEAR(outcome.report.candidates[0].replay_ns, 1e6, 1e3);  // what a launch costs is told anyway
  EXPECT_EQ(outcome.report.num_launches, 2u);
  EXPECT_EQ(fake_.Count("cuGraphLaunch"), 2u);
  EXPECT_THAT(outcome.report.timeline, HasSubstr("stream 0 |"));
}

TEST_F(StreamTrialTest, CanBeTurnedOff) {
  MakeSerial();
  const StreamTrialOutcome outcome = Try({.max_streams = 1});
  EXPECT_EQ(outcome.plan, nullptr);
  EXPECT_THAT(outcome.report.skipped, HasSubstr("one stream"));
  EXPECT_EQ(fake_.Count("cuGraphLaunch"), 0u);
}

TEST_F(StreamTrialTest, LongLaunchesAreNotTriedOut) {
  MakeSerial();
  fake_.launch_ms = [](size_t) { return 30.0; };
  const StreamTrialOutcome outcome = Try();
  EXPECT_THAT(outcome.report.skipped, HasSubstr("too long"));
  EXPECT_EQ(fake_.Count("cuGraphLaunch"), 2u);
}

TEST_F(StreamTrialTest, AGraphsFirstLaunchDoesNotCount) {
  MakeSerial();
  fake_.launch_ms = [&](size_t num_side_streams) {
    return fake_.Count("cuGraphLaunch") == 1 ? 30.0 : num_side_streams == 1 ? 0.7 : 1.0;
  };
  const StreamTrialOutcome outcome = Try();
  EXPECT_EQ(outcome.report.skipped, "");
  EXPECT_NE(outcome.plan, nullptr);
}

TEST_F(StreamTrialTest, AnErrorLeavesTheSerialGraph) {
  MakeSerial();
  for (const char* name : {"cuStreamCreate", "cuStreamBeginCapture", "cuStreamEndCapture", "cuGraphGetEdges",
                           "cuGraphInstantiate", "cuEventElapsedTime", "cuGraphLaunch"}) {
    fake_.failing = name;
    const StreamTrialOutcome outcome = Try();
    EXPECT_EQ(outcome.plan, nullptr) << name;
    std::string reasons = outcome.report.skipped;
    for (const StreamCandidate& candidate : outcome.report.candidates) reasons += candidate.rejected;
    EXPECT_THAT(reasons, HasSubstr(name));
    EXPECT_EQ(testing::FakeStreams::current, nullptr) << name;
    EXPECT_EQ(g_num_pools, 2) << name;
  }
  fake_.failing = "";
  EXPECT_NE(Try().plan, nullptr);
}

TEST_F(StreamTrialTest, NobodysGraphHasToGoForATrial) {
  MakeSerial();
  ASSERT_TRUE(arena_->Measure().ok());
  budget_.SetLimit(uint64_t{80} << 20);
  EXPECT_THAT(Try().report.skipped, HasSubstr("no room"));
  budget_.SetLimit(uint64_t{81} << 20);
  EXPECT_NE(Try().plan, nullptr);
}

TEST_F(StreamTrialTest, ALostDeviceIsNoted) {
  MakeSerial();
  size_t num_launches = 0;
  fake_.launch_ms = [&](size_t) {
    if (++num_launches == 3) fake_.failing = "cuGraphLaunch";
    return 1.0;
  };
  fake_.error = 700;  // CUDA_ERROR_ILLEGAL_ADDRESS
  EXPECT_EQ(Try().plan, nullptr);
  EXPECT_FALSE(health_.ok());
}

TEST_F(StreamTrialTest, MemoryForSideStreamsIsTakenInOrder) {
  const std::string conv =
      "#2 aten::conv1d(Tensor %2, Tensor %3, Tensor? none, SymInt[] ints[1], SymInt[] ints[0], SymInt[] ints[1], "
      "SymInt "
      "1) -> (%4 : float32[1,2,2]{4,2,1} cpu @2) source 0\n";
  MakeSerial(
      "#0 aten::view(Tensor %0, SymInt[] ints[1, 1, 2]) -> (%2 : float32[1,1,2]{2,2,1} cpu @0) view source 0\n"
      "#1 aten::view(Tensor %1, SymInt[] ints[2, 1, 1]) -> (%3 : float32[2,1,1]{1,1,1} cpu @1) view source 0\n" +
      conv + Unary(3, "neg", 0, 5) + "return %4, %5\n");
  auto schedule = CompleteSchedule(DescribeSteps(*parts_.body, {}), {0, 0, 1, 0}, 0);
  ASSERT_TRUE(schedule.ok()) << schedule.status();
  ASSERT_EQ(schedule->num_streams, 2u);
  fake_.log.clear();
  const auto plan = GraphPlan::Create(parts_, {x_.ref()}, {x_.ref()}, arena_,
                                      {std::make_shared<const StreamSchedule>(*std::move(schedule)), nullptr});
  ASSERT_TRUE(plan.ok()) << plan.status();
  // A block that is taken beside the capture: behind the main stream, and before whatever the main stream does next.
  const auto side_streams = arena_->SideStreams(1);
  ASSERT_TRUE(side_streams.ok());
  const std::string main = testing::FakeDriver::Text(arena_->capture_stream().handle());
  const std::string side = testing::FakeDriver::Text(side_streams->front());
  std::vector<std::string> before;
  for (const std::string& entry : fake_.log) {
    if (entry.starts_with("cuStreamBeginCapture")) break;
    if (entry.starts_with("cuEventRecord") || entry.starts_with("cuStreamWaitEvent")) before.push_back(entry);
  }
  EXPECT_EQ(before, (std::vector<std::string>{"cuEventRecord " + main, "cuStreamWaitEvent " + side,
                                              "cuEventRecord " + side, "cuStreamWaitEvent " + main}));
  EXPECT_EQ(testing::FakeStreams::current, nullptr);
}

TEST_F(StreamTrialTest, SideStreamsAreUsedAgain) {
  MakeSerial();
  for (int i = 0; i < 3; ++i) EXPECT_NE(Try({.max_streams = 2}).plan, nullptr);
  EXPECT_EQ(fake_.Count("cuStreamCreate"), 2u);
  serial_.reset();
  arena_.reset();
  auto arena = MakeArena();
  ASSERT_TRUE(arena.ok());
  ASSERT_TRUE((*arena)->SideStreams(1).ok());
  EXPECT_EQ(fake_.Count("cuStreamCreate"), 2u);
}

TEST(ChooseFastestTest, TakesTheSmallestMedianBeyondTheMargin) {
  const std::vector<double> serial = {100, 101, 99};
  EXPECT_EQ(ChooseFastest({serial}, 0.03), 0u);
  EXPECT_EQ(ChooseFastest({serial, {98, 98, 1}}, 0.03), 0u);
  EXPECT_EQ(ChooseFastest({serial, {96, 96, 200}}, 0.03), 1u);
  EXPECT_EQ(ChooseFastest({serial, {96, 96, 96}, {}, {90, 90, 90}}, 0.03), 3u);
  EXPECT_EQ(ChooseFastest({{}, {1, 1, 1}}, 0.03), 0u);
  EXPECT_EQ(ChooseFastest({}, 0.03), 0u);
}

}  // namespace
}  // namespace cuvil::scheduler
