#include "scheduler/kernel_profile.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "jit/cir/text.h"
#include "scheduler/graph_split.h"
#include "tests/testing/fake_cupti.h"
#include "tests/testing/fake_driver.h"
#include "tests/testing/fake_streams.h"
#include "tests/testing/torch_library.h"

namespace cuvil::scheduler {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using torch_abi::OwnedTensor;

class NoPool : public AllocationPool {
 public:
  absl::Status Enter() override { return absl::OkStatus(); }
  void Leave() override {}
  absl::StatusOr<uint64_t> ReservedBytes() override { return 0; }
};

class NoAllocator : public DeviceAllocator {
 public:
  absl::StatusOr<std::unique_ptr<AllocationPool>> MakePool() override { return std::make_unique<NoPool>(); }
  absl::Status MakeWorkspaces() override { return absl::OkStatus(); }
  absl::StatusOr<DeviceRoom> Room() override { return DeviceRoom{}; }
};

constexpr char kProgram[] =
    "cir 1\nsource 0 \"model.py:7 in forward\"\n"
    "%0 : float32[2]{1} cpu @0 = input 0\n"
    "%1 : float32[2]{1} cpu @1 = captured 0\n"
    "#0 aten::mul.Tensor(Tensor %0, Tensor %1) -> (%2 : float32[2]{1} cpu @2) source 0\n"
    "return %2\n";

// A plan of one step, whose graph has two kernels that the fake driver knows: the copies of its input and its output.
class KernelProfileTest : public testing::TorchTest {
 protected:
  void SetUp() override {
    testing::TorchTest::SetUp();
    if (api_ == nullptr) return;
    testing::FakeStreams::current = nullptr;
    auto copy = device::CopyKernel::Load(driver_);
    ASSERT_TRUE(copy.ok()) << copy.status();
    copy_.emplace(*std::move(copy));
    auto arena =
        GraphArena::Create(driver_, streams_, cir::Device{cir::DeviceType::kCpu, -1}, std::make_unique<NoAllocator>(),
                           {shelf_, budget_, health_, GraphArena::Kernels{&*copy_, nullptr}});
    ASSERT_TRUE(arena.ok()) << arena.status();
    weight_ = Floats({1, 2});
    input_ = Floats({3, 4});
    auto graph = cir::Parse(kProgram);
    ASSERT_TRUE(graph.ok()) << graph.status();
    auto split = SplitForGraph(*graph, {});
    ASSERT_TRUE(split.ok()) << split.status();
    auto body = ExecutionPlan::Build(std::move(split->body), api_, {});
    auto tail = ExecutionPlan::Build(std::move(split->tail), api_, {});
    ASSERT_TRUE(body.ok() && tail.ok());
    driver_fake_.node_types.clear();
    auto plan = GraphPlan::Create({*body, *tail, std::move(split->tail_captured), split->num_copies}, {input_.ref()},
                                  {weight_.ref()}, *arena);
    ASSERT_TRUE(plan.ok()) << plan.status();
    plan_ = *std::move(plan);
    ASSERT_EQ(plan_->nodes().size(), 2u);
    for (size_t i = 0; i < 2; ++i) cupti_fake_.node_ids[&clones_[i]] = 100 + i;
    driver_fake_.on_instantiate = [this] {
      for (size_t i = 0; i < 2; ++i) cupti_fake_.TellClone(&clones_[i], plan_->nodes()[i].node);
    };
    driver_fake_.on_launch = [this] {
      ++num_launches_;
      cupti_fake_.Launch("input", 10, 20, 100);
      cupti_fake_.Launch("output", 30, 40, 101);
    };
  }

  std::shared_ptr<KernelProfile> Start() {
    auto started = KernelProfile::Start(cupti_, driver_);
    EXPECT_TRUE(started.ok()) << started.status();
    return started.ok() ? *std::move(started) : nullptr;
  }
  static DeviceProfile Finish(KernelProfile& profile) {
    profile.Close();
    auto finished = profile.Finish();
    EXPECT_TRUE(finished.ok()) << finished.status();
    return finished.ok() ? *std::move(finished) : DeviceProfile();
  }
  void Run(const GraphPlan::Watch* watch) {
    std::vector<OwnedTensor> outputs;
    ASSERT_TRUE(plan_->Run({input_.ref()}, {weight_.ref()}, &outputs, watch).ok());
  }
  static std::vector<std::pair<std::string, uint64_t>> Sites(const DeviceProfile& profile) {
    std::vector<std::pair<std::string, uint64_t>> sites;
    for (const DeviceActivity& each : profile.activities) sites.emplace_back(profile.names[each.name], each.site);
    return sites;
  }

  testing::FakeDriver driver_fake_;
  testing::FakeCupti cupti_fake_;
  const device::DriverApi driver_ = testing::FakeDriver::Api();
  const CuptiApi cupti_ = testing::FakeCupti::Api();
  const torch_abi::CudaStreams streams_ = testing::FakeStreams::Api();
  std::optional<device::CopyKernel> copy_;
  StreamShelf shelf_;
  GraphBudget budget_;
  DeviceHealth health_;
  OwnedTensor weight_, input_;
  std::shared_ptr<GraphPlan> plan_;
  int clones_[2] = {};
  int num_launches_ = 0;
};

TEST_F(KernelProfileTest, ALaunchOfAPlansGraphIsAttributedToItsStepsAndTheCall) {
  const auto profile = Start();
  const uint64_t call = profile->EnterCall();
  const auto executable = profile->ExecutableOf(plan_);
  ASSERT_NE(executable, nullptr);
  const GraphPlan::Watch watch{executable.get(), nullptr};
  ASSERT_TRUE(profile->EnterLaunch(50, call));
  Run(&watch);
  profile->Leave();
  cupti_fake_.Launch("beside", 50, 60);
  profile->LeaveCall(call, 7);
  cupti_fake_.Launch("outside", 70, 80);
  EXPECT_EQ(KernelProfile::NumSites(*plan_), 2u);  // the step, and the copy of the output
  const DeviceProfile result = Finish(*profile);
  EXPECT_THAT(Sites(result), ElementsAre(std::pair("input", 7), std::pair("output", 51), std::pair("beside", 7),
                                         std::pair("outside", ProfileRecorder::kNoSite)));
  EXPECT_THAT(result.notes, IsEmpty());
}

TEST_F(KernelProfileTest, TheSecondExecutableIsMadeOnceAndGoesWithTheProfile) {
  const int live = driver_fake_.num_live;
  const auto profile = Start();
  const auto executable = profile->ExecutableOf(plan_);
  EXPECT_EQ(profile->ExecutableOf(plan_), executable);
  EXPECT_EQ(driver_fake_.num_live, live + 1);
  static_cast<void>(Finish(*profile));
  EXPECT_EQ(profile->ExecutableOf(plan_), nullptr);  // too late
  EXPECT_EQ(driver_fake_.num_live, live + 1);        // somebody still has it
  const_cast<std::shared_ptr<const device::ExecutableGraph>&>(executable).reset();
  EXPECT_EQ(driver_fake_.num_live, live);
}

TEST_F(KernelProfileTest, AWatchedRunGivesTheSameOutputsAndLeavesThePlansOwnExecutableAsItWas) {
  driver_fake_.on_launch = nullptr;
  Run(nullptr);
  const size_t updates = driver_fake_.Count("cuGraphExecKernelNodeSetParams");
  const auto profile = Start();
  const auto executable = profile->ExecutableOf(plan_);
  const GraphPlan::Watch watch{executable.get(), nullptr};
  std::vector<OwnedTensor> outputs;
  ASSERT_TRUE(plan_->Run({input_.ref()}, {weight_.ref()}, &outputs, &watch).ok());
  EXPECT_EQ(Read(outputs[0]), (std::vector<float>{3, 8}));
  // Both of its copy nodes have been told, because nothing is known of them.
  EXPECT_EQ(driver_fake_.Count("cuGraphExecKernelNodeSetParams"), updates + 2);
  static_cast<void>(Finish(*profile));
}

TEST_F(KernelProfileTest, AGraphThatCannotBeInstantiatedAgainIsAttributedToItsCall) {
  const auto profile = Start();
  driver_fake_.failing = "cuGraphInstantiate";
  const uint64_t call = profile->EnterCall();
  EXPECT_EQ(profile->ExecutableOf(plan_), nullptr);
  driver_fake_.failing.clear();
  ASSERT_TRUE(profile->EnterLaunch(50, call));
  Run(nullptr);
  profile->Leave();
  profile->LeaveCall(call, 7);
  EXPECT_THAT(Sites(Finish(*profile)), ElementsAre(std::pair("input", 7), std::pair("output", 7)));
}

TEST_F(KernelProfileTest, StepsThatRunOneByOneHaveTheirSites) {
  const auto profile = Start();
  const uint64_t call = profile->EnterCall();
  EXPECT_FALSE(profile->EnterStep(ProfileRecorder::kNoSite));
  ASSERT_TRUE(profile->EnterStep(12));
  cupti_fake_.Launch("step", 10, 20);
  profile->Leave();
  profile->LeaveCall(call, 7);
  EXPECT_THAT(Sites(Finish(*profile)), ElementsAre(std::pair("step", 12)));
}

TEST_F(KernelProfileTest, TheDeviceIsIdleBeforeCuptiComesAndBeforeItGoes) {
  const auto profile = Start();
  const size_t waits = driver_fake_.Count("cuCtxSynchronize");
  EXPECT_GE(waits, 3u);
  static_cast<void>(Finish(*profile));
  EXPECT_GE(driver_fake_.Count("cuCtxSynchronize"), waits + 3);
  EXPECT_EQ(cupti_fake_.log.back(), "finalize");
}

TEST_F(KernelProfileTest, WhereASecondThreadCallsThereAreNoMoreExecutablesAndCuptiStays) {
  const auto profile = Start();
  const auto first = profile->ExecutableOf(plan_);
  ASSERT_NE(first, nullptr);
  std::thread([&] { profile->LeaveCall(profile->EnterCall(), 7); }).join();
  EXPECT_EQ(profile->ExecutableOf(plan_), first);
  testing::FakeStreams::current = &num_launches_;  // of no executable yet
  EXPECT_EQ(profile->ExecutableOf(plan_), nullptr);
  const auto subscriptions = std::count(cupti_fake_.log.begin(), cupti_fake_.log.end(), "subscribe");
  const DeviceProfile result = Finish(*profile);
  EXPECT_THAT(cupti_fake_.log, Contains("disable 10"));
  EXPECT_THAT(cupti_fake_.log, Not(Contains("finalize")));
  EXPECT_EQ(std::count(cupti_fake_.log.begin(), cupti_fake_.log.end(), "subscribe"), subscriptions);
  ASSERT_EQ(result.notes.size(), 1u);
  EXPECT_THAT(result.notes[0], HasSubstr("CUPTI is still attached"));
}

TEST_F(KernelProfileTest, WhereASecondThreadLaunchesBesideCallsCuptiStaysToo) {
  const auto profile = Start();
  cupti_fake_.thread = 1;
  cupti_fake_.Launch("mine", 10, 20);
  cupti_fake_.thread = 2;
  cupti_fake_.Launch("another thread's", 30, 40);
  const DeviceProfile result = Finish(*profile);
  EXPECT_EQ(result.activities.size(), 2u);
  EXPECT_THAT(cupti_fake_.log, Not(Contains("finalize")));
}

TEST_F(KernelProfileTest, EachStreamHasAnExecutableOfItsOwn) {
  const auto profile = Start();
  const auto first = profile->ExecutableOf(plan_);
  testing::FakeStreams::current = &num_launches_;
  const auto second = profile->ExecutableOf(plan_);
  EXPECT_NE(second, nullptr);
  EXPECT_NE(first, second);
  testing::FakeStreams::current = nullptr;
  EXPECT_EQ(profile->ExecutableOf(plan_), first);
  static_cast<void>(Finish(*profile));
}

TEST_F(KernelProfileTest, WithoutAQuietMomentTheEndCanBeTriedAgain) {
  const auto profile = Start();
  cupti_fake_.Launch("k", 10, 20);
  profile->Close();
  driver_fake_.failing = "cuCtxSynchronize";
  EXPECT_EQ(profile->Finish().status().code(), absl::StatusCode::kUnavailable);
  driver_fake_.failing.clear();
  const auto finished = profile->Finish();
  ASSERT_TRUE(finished.ok()) << finished.status();
  EXPECT_EQ(finished->activities.size(), 1u);
}

TEST_F(KernelProfileTest, GivenUpItLeavesCuptiAsItIs) {
  const auto profile = Start();
  cupti_fake_.Launch("early", 10, 20);
  cupti_fake_.Deliver();
  const size_t length = cupti_fake_.log.size();
  const size_t waits = driver_fake_.Count("cuCtxSynchronize");
  profile->Close();
  const DeviceProfile result = profile->GiveUp();
  EXPECT_EQ(driver_fake_.Count("cuCtxSynchronize"), waits);
  EXPECT_EQ(cupti_fake_.log.size(), length);
  EXPECT_EQ(result.activities.size(), 1u);
}

TEST_F(KernelProfileTest, CuptiThatTorchHasLeftIsTakenOver) {
  cupti_fake_.failing = "subscribe";
  cupti_fake_.error = 39;
  cupti_fake_.finalize_mends = true;
  EXPECT_NE(Start(), nullptr);  // its clock is not the system's
  EXPECT_THAT(cupti_fake_.log, Contains("finalize"));
  EXPECT_GE(driver_fake_.Count("cuCtxSynchronize"), 3u);
}

TEST_F(KernelProfileTest, CuptiThatAnotherToolHoldsIsNotTaken) {
  cupti_fake_.failing = "subscribe";
  cupti_fake_.error = 39;
  cupti_fake_.real_time = true;
  const auto started = KernelProfile::Start(cupti_, driver_);
  EXPECT_EQ(started.status().message(), "another tool holds CUPTI (a profiler or a debugger)");
  EXPECT_EQ(cupti_fake_.log.size(), 1u);
}

TEST_F(KernelProfileTest, WhatIsMissingIsSaid) {
  const auto profile = Start();
  cupti_fake_.Launch("early", 10, 20);
  cupti_fake_.truncated_bytes = 8;
  cupti_fake_.Deliver();
  cupti_fake_.truncated_bytes = 0;
  cupti_fake_.num_dropped = 4;
  cupti_fake_.Launch("late", 30, 40);
  cupti_fake_.failing = "disable 10";
  const DeviceProfile result = Finish(*profile);
  EXPECT_EQ(result.num_dropped, 4u);
  EXPECT_THAT(result.notes,
              ElementsAre("Some kernels are missing: 1 of CUPTI's buffers could not be read to their end.",
                          "Some kernels may be missing: cuptiActivityDisable: CUPTI_ERROR_UNKNOWN (999)."));
}

TEST_F(KernelProfileTest, CuptiThatIsTakenOverIsSaid) {
  const auto profile = Start();
  cupti_fake_.gives_buffers_back = false;
  cupti_fake_.Launch("lost", 10, 20);
  const DeviceProfile result = Finish(*profile);
  EXPECT_THAT(result.notes,
              ElementsAre("Some kernels are missing: another tool took CUPTI over inside of the profile."));
}

}  // namespace
}  // namespace cuvil::scheduler
