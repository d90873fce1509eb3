#include "scheduler/graph_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "jit/cir/text.h"
#include "scheduler/device_share.h"
#include "scheduler/graph_split.h"
#include "scheduler/plan_executor.h"
#include "tests/testing/fake_driver.h"
#include "tests/testing/fake_streams.h"
#include "tests/testing/torch_library.h"

namespace cuvil::scheduler {
namespace {

using ::testing::HasSubstr;
using torch_abi::OwnedTensor;
using torch_abi::TensorRef;

std::vector<std::string> g_events;
uint64_t g_pool_bytes = 0;

class LoggingPool : public AllocationPool {
 public:
  explicit LoggingPool(const bool* failing) : failing_(failing) {}
  absl::Status Enter() override {
    g_events.push_back("enter");
    return *failing_ ? absl::InternalError("no pool") : absl::OkStatus();
  }
  void Leave() override { g_events.push_back("leave"); }
  absl::StatusOr<uint64_t> ReservedBytes() override { return g_pool_bytes; }

 private:
  const bool* failing_;
};

class LoggingAllocator : public DeviceAllocator {
 public:
  explicit LoggingAllocator(const bool* failing) : failing_(failing) {}
  absl::StatusOr<std::unique_ptr<AllocationPool>> MakePool() override {
    return std::make_unique<LoggingPool>(failing_);
  }
  absl::Status MakeWorkspaces() override {
    g_events.push_back("workspaces");
    return absl::OkStatus();
  }
  absl::StatusOr<DeviceRoom> Room() override { return DeviceRoom{1 << 20, 1 << 20}; }

 private:
  const bool* failing_;
};

// Programs run on the CPU: a captured one runs at once, and a launch runs it again over the same memory.
class GraphPlanTest : public testing::TorchTest {
 protected:
  void SetUp() override {
    testing::TorchTest::SetUp();
    if (api_ == nullptr) return;
    testing::FakeStreams::current = nullptr;
    g_events.clear();
    g_pool_bytes = 0;
    auto copy = device::CopyKernel::Load(driver_);
    ASSERT_TRUE(copy.ok()) << copy.status();
    copy_.emplace(*std::move(copy));
    auto arena = MakeArena();
    ASSERT_TRUE(arena.ok()) << arena.status();
    arena_ = *std::move(arena);
    weight_ = Floats({1, 2});
  }

  absl::StatusOr<std::shared_ptr<GraphArena>> MakeArena() {
    return GraphArena::Create(driver_, streams_, device_, std::make_unique<LoggingAllocator>(&pool_fails_),
                              {shelf_, budget_, health_, GraphArena::Kernels{&*copy_, nullptr}});
  }

  // x * w, then its double, both returned.
  absl::StatusOr<std::unique_ptr<GraphPlan>> Make(const std::string& body = "", const std::string& cpu = "cpu",
                                                  std::optional<uint32_t>* failed_op = nullptr) {
    std::string text =
        "cir 1\nsource 0 \"model.py:7 in forward\"\n"
        "%0 : float32[2]{1} cpu @0 = input 0\n"
        "%1 : float32[2]{1} cpu @1 = captured 0\n" +
        (body.empty() ? "#0 aten::mul.Tensor(Tensor %0, Tensor %1) -> (%2 : float32[2]{1} cpu @2) source 0\n"
                        "#1 aten::mul.Tensor(Tensor %2, Tensor 2.0) -> (%3 : float32[2]{1} cpu @3) source 0\n"
                        "return %2, %3, %0\n"
                      : body);
    for (size_t at = 0; cpu != "cpu" && (at = text.find(" cpu ", at)) != std::string::npos; at += cpu.size()) {
      text.replace(at + 1, 3, cpu);
    }
    auto graph = cir::Parse(text);
    if (!graph.ok()) return graph.status();
    auto split = SplitForGraph(*graph, {});
    if (!split.ok()) return split.status();
    auto made = ExecutionPlan::Build(std::move(split->body), api_, {});
    if (!made.ok()) return made.status();
    auto tail = ExecutionPlan::Build(std::move(split->tail), api_, {});
    if (!tail.ok()) return tail.status();
    const OwnedTensor x = Floats({0, 0});
    fake_.node_types.clear();  // of the last capture; operators of the CPU make none
    return GraphPlan::Create({*made, *tail, std::move(split->tail_captured), split->num_copies}, {x.ref()},
                             {weight_.ref()}, arena_, {nullptr, nullptr, failed_op});
  }

  // A launch computes from the input copy into the kept tensors, as the device would.
  void EmulateLaunches(GraphPlan& plan) {
    fake_.on_launch = [this, &plan] {
      const float* x = static_cast<const float*>(Data(plan.input_copy(0)));
      const float* w = static_cast<const float*>(Data(weight_.ref()));
      for (size_t i = 0; i < 2; ++i) {
        static_cast<float*>(Data(plan.kept()[0].ref()))[i] = x[i] * w[i];
        static_cast<float*>(Data(plan.kept()[1].ref()))[i] = x[i] * w[i] * 2;
      }
    };
  }

  testing::FakeDriver fake_;
  const device::DriverApi driver_ = testing::FakeDriver::Api();
  const torch_abi::CudaStreams streams_ = testing::FakeStreams::Api();
  std::optional<device::CopyKernel> copy_;
  cir::Device device_{cir::DeviceType::kCpu, -1};
  StreamShelf shelf_;
  GraphBudget budget_;
  DeviceHealth health_;
  bool pool_fails_ = false;
  std::shared_ptr<GraphArena> arena_;
  OwnedTensor weight_;
};

TEST_F(GraphPlanTest, OutputsAreFreshAndNeverOverwritten) {
  auto plan = Make();
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(g_events, (std::vector<std::string>{"enter", "workspaces", "leave", "enter", "leave"}));
  EXPECT_EQ(testing::FakeStreams::current, nullptr);  // the caller's stream is current again
  EmulateLaunches(**plan);
  const OwnedTensor a = Floats({3, 4});
  const OwnedTensor b = Floats({5, 6});
  std::vector<OwnedTensor> first, second;
  ASSERT_TRUE((*plan)->Run({a.ref()}, {weight_.ref()}, &first).ok());
  ASSERT_TRUE((*plan)->Run({b.ref()}, {weight_.ref()}, &second).ok());
  EXPECT_EQ(Read(first[0]), (std::vector<float>{3, 8}));
  EXPECT_EQ(Read(first[1]), (std::vector<float>{6, 16}));
  EXPECT_EQ(Read(second[0]), (std::vector<float>{5, 12}));
  EXPECT_EQ(first[2].ref().impl(), a.ref().impl());  // an input that is returned is that input
  EXPECT_EQ(fake_.Count("cuGraphLaunch 0"), 2u);
  EXPECT_EQ(fake_.Count("cuLaunchKernel"), 2u);  // while it was captured
}

TEST_F(GraphPlanTest, NodesAreChangedOnlyForOtherAddresses) {
  auto plan = Make();
  ASSERT_TRUE(plan.ok()) << plan.status();
  EmulateLaunches(**plan);
  ASSERT_EQ((*plan)->nodes().size(), 2u);
  EXPECT_EQ((*plan)->nodes()[0].step, GraphPlan::Node::kInputCopy);
  EXPECT_EQ((*plan)->nodes()[1].step, GraphPlan::Node::kOutputCopy);
  const OwnedTensor x = Floats({1, 2});
  std::vector<OwnedTensor> outputs;
  ASSERT_TRUE((*plan)->Run({x.ref()}, {weight_.ref()}, &outputs).ok());
  const size_t before = fake_.Count("cuGraphExecKernelNodeSetParams");
  std::vector<OwnedTensor> held;
  ASSERT_TRUE((*plan)->Run({x.ref()}, {weight_.ref()}, &held).ok());
  EXPECT_EQ(fake_.Count("cuGraphExecKernelNodeSetParams"), before + 1);  // new outputs, the same input
  EXPECT_EQ(Read(outputs[0]), (std::vector<float>{1, 4}));
  EXPECT_EQ(Read(held[0]), (std::vector<float>{1, 4}));
}

TEST_F(GraphPlanTest, AThreadWithoutAContextIsLentOne) {
  void* const context = reinterpret_cast<void*>(500);
  auto arena = GraphArena::Create(driver_, streams_, device_, std::make_unique<LoggingAllocator>(&pool_fails_),
                                  {shelf_, budget_, health_, GraphArena::Kernels{&*copy_, nullptr}, context});
  ASSERT_TRUE(arena.ok()) << arena.status();
  arena_ = *std::move(arena);
  auto plan = Make();
  ASSERT_TRUE(plan.ok()) << plan.status();
  EmulateLaunches(**plan);
  fake_.needs_context = true;
  testing::FakeStreams::current = reinterpret_cast<void*>(77);
  const OwnedTensor x = Floats({1, 2});
  std::vector<OwnedTensor> outputs;
  const absl::Status lent = (*plan)->Run({x.ref()}, {weight_.ref()}, &outputs);
  ASSERT_TRUE(lent.ok()) << lent;
  EXPECT_EQ(Read(outputs[1]), (std::vector<float>{2, 8}));
  EXPECT_TRUE(fake_.contexts.empty());  // the thread is as it was
  EXPECT_EQ(fake_.Count("cuCtxPushCurrent"), fake_.Count("cuCtxPopCurrent"));
  // A thread that has it is left alone.
  fake_.contexts = {context};
  const size_t pushes = fake_.Count("cuCtxPushCurrent");
  ASSERT_TRUE((*plan)->Run({x.ref()}, {weight_.ref()}, &outputs).ok());
  EXPECT_EQ(fake_.Count("cuCtxPushCurrent"), pushes);
  fake_.contexts.clear();
  plan->reset();
  fake_.needs_context = false;
}

TEST_F(GraphPlanTest, AChangeThatFailsIsTriedAgain) {
  auto plan = Make();
  ASSERT_TRUE(plan.ok()) << plan.status();
  EmulateLaunches(**plan);
  const OwnedTensor x = Floats({1, 2});
  std::vector<OwnedTensor> outputs;
  fake_.failing = "cuGraphExecKernelNodeSetParams";
  EXPECT_EQ((*plan)->Run({x.ref()}, {weight_.ref()}, &outputs).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(fake_.Count("cuGraphLaunch"), 0u);
  fake_.failing = "";
  ASSERT_TRUE((*plan)->Run({x.ref()}, {weight_.ref()}, &outputs).ok());
  EXPECT_EQ(Read(outputs[1]), (std::vector<float>{2, 8}));
}

TEST_F(GraphPlanTest, WeightsAreReadInPlaceAndTheirAddressesKnown) {
  auto plan = Make();
  ASSERT_TRUE(plan.ok()) << plan.status();
  EmulateLaunches(**plan);
  ASSERT_EQ((*plan)->captured_data().size(), 1u);
  EXPECT_EQ((*plan)->captured_data()[0], Data(weight_.ref()));
  static_cast<float*>(Data(weight_.ref()))[0] = 10;
  const OwnedTensor x = Floats({1, 1});
  std::vector<OwnedTensor> outputs;
  ASSERT_TRUE((*plan)->Run({x.ref()}, {weight_.ref()}, &outputs).ok());
  EXPECT_EQ(Read(outputs[0]), (std::vector<float>{10, 2}));
}

TEST_F(GraphPlanTest, Trap18AnotherStreamWaitsForTheLastUse) {
  auto plan = Make();
  ASSERT_TRUE(plan.ok()) << plan.status();
  EmulateLaunches(**plan);
  const OwnedTensor x = Floats({1, 1});
  std::vector<OwnedTensor> outputs;
  for (const uintptr_t stream : {0, 0, 77, 77, 0}) {
    testing::FakeStreams::current = reinterpret_cast<void*>(stream);
    ASSERT_TRUE((*plan)->Run({x.ref()}, {weight_.ref()}, &outputs).ok());
  }
  // The first launch follows the capture, which had a stream of its own.
  EXPECT_EQ(fake_.Count("cuStreamWaitEvent 0"), 2u);
  EXPECT_EQ(fake_.Count("cuStreamWaitEvent 77"), 1u);
  EXPECT_EQ(fake_.Count("cuEventRecord 77"), 2u);
}

TEST_F(GraphPlanTest, Trap17StandsAsideWhileTheStreamIsCaptured) {
  auto plan = Make();
  ASSERT_TRUE(plan.ok()) << plan.status();
  testing::FakeStreams::current = reinterpret_cast<void*>(77);  // the legacy default stream cannot be captured
  fake_.capture_status = 1;
  const OwnedTensor x = Floats({1, 1});
  std::vector<OwnedTensor> outputs;
  EXPECT_EQ((*plan)->Run({x.ref()}, {weight_.ref()}, &outputs).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(fake_.Count("cuGraphLaunch"), 0u);
}

TEST_F(GraphPlanTest, Trap17AFailedCaptureLeavesTheStreamAndThePoolAsTheyWere) {
  for (const char* name : {"cuStreamBeginCapture", "cuStreamGetCaptureInfo", "cuLaunchKernel", "cuStreamEndCapture",
                           "cuGraphGetNodes", "cuGraphInstantiate"}) {
    g_events.clear();
    fake_.failing = name;
    const auto plan = Make();
    EXPECT_EQ(plan.status().code(), absl::StatusCode::kUnavailable) << name;
    EXPECT_EQ(g_events, (std::vector<std::string>{"enter", "workspaces", "leave", "enter", "leave"})) << name;
    EXPECT_EQ(testing::FakeStreams::current, nullptr) << name;
  }
  fake_.failing = "";
  pool_fails_ = true;
  g_events.clear();
  EXPECT_FALSE(Make().ok());
  EXPECT_EQ(g_events, (std::vector<std::string>{"enter"}));
  pool_fails_ = false;
  EXPECT_TRUE(Make().ok());
}

TEST_F(GraphPlanTest, AFailedCaptureNamesItsOperator) {
  std::optional<uint32_t> failed_op;
  // The second operator fails when it runs: two elements have no view of three.
  auto plan = Make(
      "#0 aten::mul.Tensor(Tensor %0, Tensor %1) -> (%2 : float32[2]{1} cpu @2) source 0\n"
      "#1 aten::view(Tensor %2, SymInt[] ints[3]) -> (%3 : float32[3]{1} cpu @2) view source 0\n"
      "#2 aten::mul.Tensor(Tensor %3, Tensor 2.0) -> (%4 : float32[3]{1} cpu @4) source 0\n"
      "return %4\n",
      "cpu", &failed_op);
  EXPECT_EQ(plan.status().code(), absl::StatusCode::kUnavailable) << plan.status();
  EXPECT_EQ(failed_op, 1u);
  // What the driver refuses is no operator's fault.
  failed_op.reset();
  fake_.failing = "cuStreamEndCapture";
  EXPECT_FALSE(Make("", "cpu", &failed_op).ok());
  EXPECT_EQ(failed_op, std::nullopt);
}

TEST_F(GraphPlanTest, AnErrorOfTheDeviceIsReportedAndStays) {
  auto plan = Make();
  ASSERT_TRUE(plan.ok()) << plan.status();
  const OwnedTensor x = Floats({1, 1});
  std::vector<OwnedTensor> outputs;
  for (const char* name : {"cuGraphExecKernelNodeSetParams", "cuGraphLaunch"}) {
    fake_.failing = name;
    const absl::Status status = (*plan)->Run({x.ref()}, {weight_.ref()}, &outputs);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(std::string(status.message()), HasSubstr(name));
    EXPECT_TRUE(outputs.empty());
  }
  // An end that cannot be marked leaves the next use without an order.
  fake_.failing = "cuEventRecord";
  EmulateLaunches(**plan);
  (void)(*plan)->Run({x.ref()}, {weight_.ref()}, &outputs);
  fake_.failing = "";
  EXPECT_EQ((*plan)->Run({x.ref()}, {weight_.ref()}, &outputs).code(), absl::StatusCode::kUnavailable);
}

TEST_F(GraphPlanTest, AnErrorThatLosesTheContextIsForTheWholeDevice) {
  auto plan = Make();
  ASSERT_TRUE(plan.ok()) << plan.status();
  auto other_arena = MakeArena();
  ASSERT_TRUE(other_arena.ok());
  const OwnedTensor x = Floats({1, 1});
  std::vector<OwnedTensor> outputs;
  fake_.failing = "cuGraphLaunch";
  fake_.error = 700;
  const absl::Status first = (*plan)->Run({x.ref()}, {weight_.ref()}, &outputs);
  EXPECT_EQ(first.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(first.message()), HasSubstr("cuGraphLaunch: CUDA_ERROR_ILLEGAL_ADDRESS"));
  EXPECT_FALSE(health_.ok());
  EXPECT_TRUE(health_.TakeReport());
  EXPECT_FALSE(health_.TakeReport());  // one line, whoever is next
  fake_.failing = "";
  const size_t launches = fake_.Count("cuGraphLaunch");
  const absl::Status later = (*plan)->Run({x.ref()}, {weight_.ref()}, &outputs);
  EXPECT_EQ(later.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(later.message(), first.message());
  // Models that have nothing to do with the one that failed.
  arena_ = *other_arena;
  EXPECT_EQ(Make().status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(fake_.Count("cuGraphLaunch"), launches);
}

TEST_F(GraphPlanTest, AnErrorThatShowsWhenMemoryIsFreedIsNoticed) {
  auto plan = Make();
  ASSERT_TRUE(plan.ok()) << plan.status();
  fake_.failing = "cuEventSynchronize";
  fake_.error = 719;
  plan->reset();
  arena_.reset();
  EXPECT_FALSE(health_.ok());
}

TEST_F(GraphPlanTest, DiesWithoutAWordWhileSomebodyCaptures) {
  auto plan = Make();
  ASSERT_TRUE(plan.ok()) << plan.status();
  int mode_at_the_wait = -1;
  fake_.on_synchronize = [&] { mode_at_the_wait = fake_.capture_mode; };
  fake_.modes_at_destruction.clear();
  plan->reset();
  EXPECT_EQ(mode_at_the_wait, 2);  // relaxed: waiting in any other ends captures
  arena_.reset();
  EXPECT_EQ(fake_.modes_at_destruction, (std::vector<int>{2, 2, 2}));  // executable, graph, event
  EXPECT_EQ(fake_.capture_mode, 0);
  fake_.on_synchronize = nullptr;
}

TEST_F(GraphPlanTest, WantOfMemoryIsNoErrorOfTheDevice) {
  fake_.failing = "cuGraphInstantiate";
  fake_.error = 2;
  EXPECT_EQ(Make().status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(health_.ok());
  EXPECT_EQ(budget_.usage().num_graphs, 0u);
}

TEST_F(GraphPlanTest, RunsOnItsTensorsDeviceWhateverIsCurrent) {
  arena_.reset();
  device_.index = 0;
  fake_.current_device = 1;
  {
    const torch_abi::CurrentDeviceScope scope(streams_, 0);
    arena_ = *MakeArena();
  }
  EXPECT_EQ(fake_.current_device, 1);
  auto plan = Make("", "cpu:0");
  ASSERT_TRUE(plan.ok()) << plan.status();
  EmulateLaunches(**plan);
  const OwnedTensor x = Floats({3, 4});
  std::vector<OwnedTensor> outputs;
  const absl::Status ran = (*plan)->Run({x.ref()}, {weight_.ref()}, &outputs);
  ASSERT_TRUE(ran.ok()) << ran;
  EXPECT_EQ(Read(outputs[0]), (std::vector<float>{3, 8}));
  EXPECT_EQ(fake_.current_device, 1);
  for (const auto& [name, device] : fake_.made) EXPECT_EQ(device, 0) << name;
  // The fake would notice: in another context the handles mean nothing.
  fake_.current_device = 1;
  EXPECT_EQ(driver_.cuGraphLaunch(reinterpret_cast<void*>(uintptr_t{1000} + fake_.made.size()), nullptr),
            testing::FakeDriver::kInvalidContext);
}

TEST_F(GraphPlanTest, ArenasOfTwoDevicesShareNothing) {
  DeviceShare shares[2];
  fake_.made.clear();
  const auto make = [&](int8_t index) {
    auto made = shares[index].MakeArena(driver_, streams_, cir::Device{cir::DeviceType::kCpu, index},
                                        std::make_unique<LoggingAllocator>(&pool_fails_));
    EXPECT_TRUE(made.ok()) << made.status();
    EXPECT_EQ(fake_.current_device, 0);
    return made.ok() ? *std::move(made) : nullptr;
  };
  const auto count = [&](const std::string& name, int device) {
    return std::count(fake_.made.begin(), fake_.made.end(), std::pair(name, device));
  };
  const std::shared_ptr<GraphArena> arenas[2] = {make(0), make(1)};
  for (const int device : {0, 1}) {
    EXPECT_EQ(count("cuModuleLoadData", device), 2) << device;  // kernels that copy and that fill
    EXPECT_EQ(count("cuStreamCreate", device), 1) << device;
    EXPECT_EQ(count("cuEventCreate", device), 1) << device;
  }
  EXPECT_NE(arenas[0]->kernels().copy, arenas[1]->kernels().copy);
  EXPECT_NE(arenas[0]->context(), arenas[1]->context());
  // Another model on the second device: the kernels are there, the stream of the first device's is not for it.
  const std::shared_ptr<GraphArena> third = make(1);
  EXPECT_EQ(third->kernels().copy, arenas[1]->kernels().copy);
  EXPECT_EQ(count("cuModuleLoadData", 1), 2);
  EXPECT_EQ(count("cuStreamCreate", 1), 2);

  fake_.failing = "cuEventRecord";
  fake_.error = 700;
  {
    const torch_abi::CurrentDeviceScope scope(streams_, 1);
    GraphArena::Use use(*arenas[1], nullptr);
    ASSERT_TRUE(use.Begin().ok());
  }
  fake_.failing = "";
  EXPECT_FALSE(shares[1].health().ok());
  EXPECT_TRUE(shares[0].health().ok());
  GraphArena::Use use(*arenas[0], nullptr);
  EXPECT_TRUE(GraphArena::IsInUseByThisThread());
  EXPECT_TRUE(use.Begin().ok());
}

// Holds one plan, as whoever runs it does.
struct PlanHolder : GraphBudget::Holder {
  std::shared_ptr<GraphPlan> plan;
  std::shared_ptr<void> GiveUpGraph() override { return std::move(plan); }
};

TEST_F(GraphPlanTest, IsCountedAndGivenUpForAnother) {
  budget_.SetLimit(100);
  PlanHolder holder;
  {
    auto plan = Make();
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_EQ((*plan)->own_bytes(), 8u + 16u);  // one input, two results
    EXPECT_GE(GraphPlan::EstimateBytes((*plan)->body()), (*plan)->own_bytes());
    holder.plan = *std::move(plan);
    holder.plan->SetHolder(&holder);
  }
  g_pool_bytes = 60;
  ASSERT_TRUE(arena_->Measure().ok());
  EXPECT_EQ(budget_.usage().pool_bytes, 60u);
  EXPECT_EQ(budget_.usage().workspace_bytes, 60u);
  EXPECT_EQ(budget_.usage().num_graphs, 1u);
  // In flight on another thread: it is given up, and stays alive until that call is over.
  std::shared_ptr<GraphPlan> in_flight = holder.plan;
  GraphBudget::GivenUp given_up = budget_.GiveUpAll();
  EXPECT_EQ(given_up.size(), 1u);
  EXPECT_EQ(holder.plan, nullptr);
  given_up.clear();
  EXPECT_EQ(fake_.Count("cuGraphExecDestroy"), 0u);
  EmulateLaunches(*in_flight);
  const OwnedTensor x = Floats({1, 1});
  std::vector<OwnedTensor> outputs;
  ASSERT_TRUE(in_flight->Run({x.ref()}, {weight_.ref()}, &outputs).ok());
  EXPECT_EQ(in_flight->num_launches(), 1u);
  in_flight.reset();
  EXPECT_EQ(fake_.Count("cuGraphExecDestroy"), 1u);
  EXPECT_EQ(fake_.Count("cuEventSynchronize"), 1u);
  EXPECT_EQ(budget_.usage().num_graphs, 0u);
  arena_.reset();
  EXPECT_EQ(budget_.usage().pool_bytes, 0u);
  EXPECT_EQ(budget_.usage().workspace_bytes, 60u);  // the stream's, which is on the shelf
}

TEST_F(GraphPlanTest, FreesEverythingOnceTheDeviceIsIdle) {
  {
    auto plan = Make();
    ASSERT_TRUE(plan.ok()) << plan.status();
    EmulateLaunches(**plan);
    const OwnedTensor x = Floats({1, 1});
    std::vector<OwnedTensor> outputs;
    ASSERT_TRUE((*plan)->Run({x.ref()}, {weight_.ref()}, &outputs).ok());
    EXPECT_EQ(fake_.Count("cuEventSynchronize"), 0u);  // never while it serves
  }
  EXPECT_EQ(fake_.Count("cuEventSynchronize"), 1u);
  arena_.reset();
  EXPECT_EQ(fake_.num_live, 2);  // the capture stream is kept for the next arena, the kernel for good
  {
    auto arena = MakeArena();
    ASSERT_TRUE(arena.ok());
    EXPECT_EQ(fake_.Count("cuStreamCreate"), 1u);
  }
  EXPECT_EQ(fake_.num_live, 2);
}

// The fakes' device is called cpu here, and the memory beside it meta. What a kernel would read of it at launch (5),
// and what a copy would read after the allocator of pinned memory has been told that nobody does (19), stays outside.
TEST_F(GraphPlanTest, Trap05And19MemoryBesideTheDeviceIsReadOutsideOfTheGraph) {
  const std::string beside = "#0 aten::neg(Tensor %0) -> (%2 : float32[2]{1} meta @2) source 0\n";
  const std::string programs[] = {
      beside + "#1 aten::mul.Tensor(Tensor %0, Tensor %2) -> (%3 : float32[2]{1} cpu @3) source 0\nreturn %3\n",
      beside +
          "#1 aten::to.device(Tensor %2, Device device(cpu), ScalarType dtype(float32), bool true, bool false, "
          "MemoryFormat? none) -> (%3 : float32[2]{1} cpu @3) source 0\nreturn %3\n"};
  for (const std::string& program : programs) {
    EXPECT_EQ(Make(program).status().code(), absl::StatusCode::kUnimplemented) << program;
    const auto graph = cir::Parse(
        "cir 1\nsource 0 \"model.py:7 in forward\"\n%0 : float32[2]{1} cpu @0 = input 0\n"
        "%1 : float32[2]{1} cpu @1 = captured 0\n" +
        program);
    ASSERT_TRUE(graph.ok()) << graph.status();
    const auto body = ExecutionPlan::Build(*graph, api_, {});
    ASSERT_TRUE(body.ok()) << body.status();
    // The first operator makes a tensor elsewhere; the second reads it.
    EXPECT_THAT(WhyNotCapturable(**body, device_)[1], HasSubstr("reads memory of meta")) << program;
  }
}

TEST_F(GraphPlanTest, RefusesWhatAGraphCannotHold) {
  const std::map<std::string, std::string> programs = {
      {"#0 aten::neg_(Tensor ! %0) -> (& same %0) source 0\n"
       "#1 aten::neg(Tensor %0) -> (%2 : float32[2]{1} cpu @2) source 0\nreturn %2\n",
       "writes to an argument or a weight"},
      {"#0 aten::rand_like(Tensor %0, ScalarType? none, Layout? none, Device? none, bool? none, MemoryFormat? none) -> "
       "(%2 : float32[2]{1} cpu @2) random source 0\nreturn %2\n",
       "random numbers"},
      {"#0 aten::as_strided(Tensor %0, SymInt[] ints[2], SymInt[] ints[1], SymInt? none) -> (%2 : float32[2]{1} cpu "
       "@0) view source 0\n#1 aten::neg(Tensor %2) -> (%3 : float32[2]{1} cpu @3) source 0\nreturn %3\n",
       "addresses memory by offset"},
      {"#0 aten::neg(Tensor %0) -> (%2 : float32[2]{1} meta @2) source 0\n"
       "#1 aten::neg(Tensor %0) -> (%3 : float32[2]{1} cpu @3) source 0\nreturn %3\n",
       "another device"},
  };
  for (const auto& [program, reason] : programs) {
    const auto plan = Make(program);
    EXPECT_EQ(plan.status().code(), absl::StatusCode::kUnimplemented) << program;
    EXPECT_THAT(std::string(plan.status().message()), HasSubstr(reason));
    EXPECT_THAT(std::string(plan.status().message()), HasSubstr("model.py:7"));
  }
}

}  // namespace
}  // namespace cuvil::scheduler
