#include "scheduler/plan_executor.h"

#include <gtest/gtest.h>

#include <cstring>
#include <thread>

#include "jit/cir/text.h"
#include "scheduler/floating_point_mode.h"
#include "tests/testing/torch_library.h"

namespace cuvil::scheduler {
namespace {

using torch_abi::OwnedTensor;
using torch_abi::TensorRef;

class PlanExecutorTest : public testing::TorchTest {
 protected:
  absl::StatusOr<std::shared_ptr<const ExecutionPlan>> Build(const std::string& body, BuildOptions options = {}) {
    auto graph = cir::Parse("cir 1\nsource 0 \"model.py:7 in forward\"\n" + body);
    if (!graph.ok()) return graph.status();
    return ExecutionPlan::Build(*std::move(graph), api_, std::move(options));
  }
};

constexpr char kX[] = "%0 : float32[2]{1} cpu @0 = input 0\n";

TEST_F(PlanExecutorTest, ReleasesAfterTheLastUseAndReturnsEachOutput) {
  const auto plan =
      Build(std::string(kX) +
            "#0 aten::neg(Tensor %0) -> (%1 : float32[2]{1} cpu @1) source 0\n"
            "#1 aten::exp(Tensor %1) -> (%2 : float32[2]{1} cpu @2) source 0\n"
            "#2 aten::add.Tensor(Tensor %2, Tensor %1, Scalar 1) -> (%3 : float32[2]{1} cpu @3) source 0\n"
            "#3 aten::mul.Tensor(Tensor %3, Tensor 2.0) -> (%4 : float32[2]{1} cpu @4) source 0\n"
            "return %4, %3, %4, %0\n");
  ASSERT_TRUE(plan.ok()) << plan.status();
  ASSERT_EQ((*plan)->steps().size(), 4u);
  EXPECT_EQ((*plan)->steps()[2].released_cells, (std::vector<uint32_t>{1, 2}));
  EXPECT_TRUE((*plan)->steps()[3].released_cells.empty());
  const OwnedTensor x = Floats({0, -1});
  std::vector<OwnedTensor> outputs;
  ASSERT_TRUE(PlanExecutor::Run(**plan, {x.ref()}, {}, &outputs).ok());
  ASSERT_EQ(outputs.size(), 4u);
  EXPECT_EQ(outputs[0].ref().impl(), outputs[2].ref().impl());
  EXPECT_EQ(outputs[3].ref().impl(), x.ref().impl());
  EXPECT_FLOAT_EQ(Read(outputs[1], 2)[0], 1.0f);
  EXPECT_FLOAT_EQ(Read(outputs[0], 2)[0], 2.0f);
}

TEST_F(PlanExecutorTest, LeavesOutWhatNeedNotRun) {
  const auto plan =
      Build(std::string(kX) +
            "#0 aten::dropout(Tensor %0, float 0.5, bool false) -> (same %0) source 0\n"
            "#1 aten::view(Tensor %0, SymInt[] ints[2, 1]) -> (%1 : float32[2,1]{1,1} cpu @0) view source 0\n"
            "#2 aten::ones(SymInt[] ints[2], ScalarType? none, Layout? none, Device? none, bool? none) -> (%2 : "
            "float32[2]{1} cpu @1) source 0\n"
            "#3 aten::add.Tensor(Tensor %0, Tensor %2, Scalar 1) -> (%3 : float32[2]{1} cpu @2) source 0\n"
            "return %3\n");
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ((*plan)->counts().elided, 2u);
  EXPECT_EQ((*plan)->counts().folded, 1u);
  EXPECT_EQ((*plan)->counts().unboxed, 1u);
  const OwnedTensor x = Floats({1, 2});
  std::vector<OwnedTensor> outputs;
  ASSERT_TRUE(PlanExecutor::Run(**plan, {x.ref()}, {}, &outputs).ok());
  EXPECT_EQ(Read(outputs[0], 2), (std::vector<float>{2, 3}));
}

#if defined(__x86_64__)
constexpr uint32_t kFlushDenormals = 0x8040;
#else
constexpr uint32_t kFlushDenormals = 1u << 24;
#endif

TEST_F(PlanExecutorTest, ComputesConstantsInTheModeOfTheTracedThread) {
  const std::string body =
      std::string(kX) +
      "#0 aten::full(SymInt[] ints[2], Scalar 1e-40, ScalarType? none, Layout? none, Device? none, bool? none) -> (%1 "
      ": float32[2]{1} cpu @1) source 0\n"
      "#1 aten::mul.Tensor(Tensor %1, Tensor 1e38) -> (%2 : float32[2]{1} cpu @2) source 0\n"
      "#2 aten::add.Tensor(Tensor %0, Tensor %2, Scalar 1) -> (%3 : float32[2]{1} cpu @3) source 0\n"
      "return %3\n";
  for (const uint32_t traced : {uint32_t{0}, kFlushDenormals}) {
    for (const uint32_t building : {uint32_t{0}, kFlushDenormals}) {
      const FloatingPointModeScope mode(building);
      const auto plan = Build(body, {.floating_point_mode = traced});
      EXPECT_EQ(FloatingPointMode(), building);
      ASSERT_TRUE(plan.ok()) << plan.status();
      EXPECT_EQ((*plan)->counts().folded, 2u);
      const OwnedTensor x = Floats({0, 0});
      std::vector<OwnedTensor> outputs;
      ASSERT_TRUE(PlanExecutor::Run(**plan, {x.ref()}, {}, &outputs).ok());
      EXPECT_NEAR(Read(outputs[0], 2)[1], traced == 0 ? 0.01f : 0.0f, 1e-4f) << traced << " " << building;
    }
  }
}

TEST_F(PlanExecutorTest, ComputesNoConstantsThatSwitchesDecideAbout) {
  const auto plan = Build(
      "#0 aten::ones(SymInt[] ints[2,2], ScalarType? none, Layout? none, Device? none, bool? none) -> (%0 : "
      "float32[2,2]{2,1} cpu @0) source 0\n"
      "#1 aten::mm(Tensor %0, Tensor %0) -> (%1 : float32[2,2]{2,1} cpu @1) source 0\n"
      "#2 aten::neg(Tensor %1) -> (%2 : float32[2,2]{2,1} cpu @2) source 0\n"
      "return %2\n");
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ((*plan)->counts().folded, 1u);
}

TEST_F(PlanExecutorTest, PlansTheArenaOverSharedStorage) {
  const auto plan =
      Build(std::string(kX) +
            "#0 aten::neg(Tensor %0) -> (%1 : float32[2]{1} cpu @1) source 0\n"
            "#1 aten::view(Tensor %1, SymInt[] ints[2, 1]) -> (%2 : float32[2,1]{1,1} cpu @1) view source 0\n"
            "#2 aten::neg(Tensor %0) -> (%3 : float32[2]{1} cpu @2) source 0\n"
            "#3 aten::exp(Tensor %2) -> (%4 : float32[2,1]{1,1} cpu @3) source 0\n"
            "return %3, %4\n");
  ASSERT_TRUE(plan.ok()) << plan.status();
  ASSERT_EQ((*plan)->lifetimes().size(), 3u);
  // The view keeps the first buffer alive until step 3.
  EXPECT_EQ((*plan)->lifetimes()[0].first_step, 0u);
  EXPECT_EQ((*plan)->lifetimes()[0].last_step, 3u);
  EXPECT_EQ((*plan)->lifetimes()[1].last_step, 4u);
  EXPECT_EQ((*plan)->memory_plan().high_water_bytes, 192u);
}

TEST_F(PlanExecutorTest, AnErrorNamesTheOperatorAndReleasesEverything) {
  const auto plan =
      Build(std::string(kX) +
            "%1 : float32[2]{1} cpu @1 = input 1\n"
            "#0 aten::neg(Tensor %0) -> (%2 : float32[2]{1} cpu @2) source 0\n"
            "#1 aten::add.Tensor(Tensor %2, Tensor %1, Scalar 1) -> (%3 : float32[2]{1} cpu @3) source 0\n"
            "return %3, %2\n");
  ASSERT_TRUE(plan.ok()) << plan.status();
  const OwnedTensor x = Floats({1, 2});
  const OwnedTensor wrong = Floats({1, 2, 3});
  std::vector<OwnedTensor> outputs;
  const absl::Status status = PlanExecutor::Run(**plan, {x.ref(), wrong.ref()}, {}, &outputs);
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(
      status.message(),
      "#1 aten::add.Tensor (model.py:7 in forward): The size of tensor a (2) must match the size of tensor b (3) at "
      "non-singleton dimension 0");
  EXPECT_TRUE(outputs.empty());
  EXPECT_EQ(PlanExecutor::Run(**plan, {x.ref()}, {}, &outputs).code(), absl::StatusCode::kInvalidArgument);
}

// Makes tensors of its own, or fails.
class FakePythonSteps : public PythonStepCallback {
 public:
  explicit FakePythonSteps(const torch_abi::TorchApi& api) : api_(api) {}
  absl::Status Run(const cir::Op& op, absl::Span<const TensorRef> operands,
                   std::vector<OwnedTensor>* results) override {
    ++calls;
    if (fail) return absl::AbortedError("raised");
    EXPECT_EQ(op.name, "mine::op");
    results->push_back(api_.NewReference(operands[0]));
    return absl::OkStatus();
  }
  int calls = 0;
  bool fail = false;

 private:
  const torch_abi::TorchApi& api_;
};

TEST_F(PlanExecutorTest, AWarningIsLeftToEager) {
  // The deviation of one element warns, also when its result is unused.
  const auto plan = Build(
      "%0 : float32[1]{1} cpu @0 = input 0\n"
      "#0 aten::std(Tensor %0, bool true) -> (%1 : float32[]{} cpu @1) source 0\n"
      "#1 aten::neg(Tensor %0) -> (%2 : float32[1]{1} cpu @2) source 0\n"
      "return %2\n");
  ASSERT_TRUE(plan.ok()) << plan.status();
  void* const handler = api_->get_warning_handler();
  const OwnedTensor x = Floats({1});
  std::vector<OwnedTensor> outputs;
  ::testing::internal::CaptureStderr();
  const absl::Status status = PlanExecutor::Run(**plan, {x.ref()}, {}, &outputs);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_NE(status.message().find("aten::std"), absl::string_view::npos) << status;
  EXPECT_TRUE(outputs.empty());
  EXPECT_EQ(api_->get_warning_handler(), handler);
}

TEST_F(PlanExecutorTest, WhatWarnsIsNotFolded) {
  const auto plan = Build(
      "#0 aten::ones(SymInt[] ints[1], ScalarType? none, Layout? none, Device? none, bool? none) -> (%0 : "
      "float32[1]{1} cpu @0) source 0\n"
      "#1 aten::std(Tensor %0, bool true) -> (%1 : float32[]{} cpu @1) source 0\n"
      "#2 aten::isnan(Tensor %1) -> (%2 : bool[]{} cpu @2) source 0\n"
      "return %2\n");
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ((*plan)->counts().folded, 1u);
  std::vector<OwnedTensor> outputs;
  EXPECT_EQ(PlanExecutor::Run(**plan, {}, {}, &outputs).code(), absl::StatusCode::kUnimplemented);
}

TEST_F(PlanExecutorTest, PythonStepsRunThroughTheCallback) {
  const std::string body = std::string(kX) +
                           "#0 aten::neg(Tensor %0) -> (%1 : float32[2]{1} cpu @1) source 0\n"
                           "#1 mine::op(Tensor %1, Scalar 3) -> (%2 : float32[2]{1} cpu @2) source 0\n"
                           "return %2\n";
  EXPECT_EQ(Build(body, {.allow_python_steps = false}).status().code(), absl::StatusCode::kUnimplemented);
  const auto plan = Build(body);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ((*plan)->counts().python, 1u);
  const OwnedTensor x = Floats({1, 2});
  std::vector<OwnedTensor> outputs;
  FakePythonSteps callback(*api_);
  ASSERT_TRUE(PlanExecutor::Run(**plan, {x.ref()}, {}, &outputs, &callback).ok());
  EXPECT_EQ(Read(outputs[0], 2), (std::vector<float>{-1, -2}));
  callback.fail = true;
  EXPECT_EQ(PlanExecutor::Run(**plan, {x.ref()}, {}, &outputs, &callback).message(),
            "#1 mine::op (model.py:7 in forward): raised");
  EXPECT_EQ(PlanExecutor::Run(**plan, {x.ref()}, {}, &outputs).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(callback.calls, 2);
}

// Writes down what it is told.
class FakeObserver : public StepObserver {
 public:
  void OnStep(uint32_t index, uint64_t start_ns, uint64_t end_ns) noexcept override {
    EXPECT_LE(last_ns, start_ns);
    EXPECT_LE(start_ns, end_ns);
    last_ns = end_ns;
    steps.push_back(index);
  }
  std::vector<uint32_t> steps;
  uint64_t last_ns = 0;
};

TEST_F(PlanExecutorTest, AnObserverHearsOfEveryStepAndOfTheOneThatFails) {
  const auto plan =
      Build(std::string(kX) +
            "%1 : float32[2]{1} cpu @1 = input 1\n"
            "#0 aten::neg(Tensor %0) -> (%2 : float32[2]{1} cpu @2) source 0\n"
            "#1 aten::add.Tensor(Tensor %2, Tensor %1, Scalar 1) -> (%3 : float32[2]{1} cpu @3) source 0\n"
            "#2 aten::exp(Tensor %3) -> (%4 : float32[2]{1} cpu @4) source 0\n"
            "return %4\n");
  ASSERT_TRUE(plan.ok()) << plan.status();
  const OwnedTensor x = Floats({1, 2});
  const OwnedTensor y = Floats({-1, -2});
  std::vector<OwnedTensor> outputs;
  FakeObserver observer;
  ASSERT_TRUE(PlanExecutor::Run(**plan, {x.ref(), y.ref()}, {}, &outputs, nullptr, &observer).ok());
  EXPECT_EQ(observer.steps, (std::vector<uint32_t>{0, 1, 2}));
  std::vector<OwnedTensor> unobserved;
  ASSERT_TRUE(PlanExecutor::Run(**plan, {x.ref(), y.ref()}, {}, &unobserved).ok());
  EXPECT_EQ(Read(outputs[0], 2), Read(unobserved[0], 2));
  observer.steps.clear();
  const OwnedTensor wrong = Floats({1, 2, 3});
  EXPECT_FALSE(PlanExecutor::Run(**plan, {x.ref(), wrong.ref()}, {}, &outputs, nullptr, &observer).ok());
  EXPECT_EQ(observer.steps, (std::vector<uint32_t>{0, 1}));
}

TEST_F(PlanExecutorTest, MissingConstantsAreRefused) {
  const std::string body = "%0 : float32[2]{1} cpu @0 = constant 0\nreturn %0\n";
  EXPECT_EQ(Build(body).status().code(), absl::StatusCode::kInvalidArgument);
  BuildOptions options;
  options.constants.push_back(Floats({4, 5}));
  const auto plan = Build(body, std::move(options));
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ((*plan)->counts().clones, 1u);
  std::vector<OwnedTensor> first;
  std::vector<OwnedTensor> second;
  ASSERT_TRUE(PlanExecutor::Run(**plan, {}, {}, &first).ok());
  ASSERT_TRUE(PlanExecutor::Run(**plan, {}, {}, &second).ok());
  EXPECT_NE(first[0].ref().impl(), second[0].ref().impl());
  EXPECT_EQ(Read(second[0], 2), (std::vector<float>{4, 5}));
}

// Keeps every tensor to the end, and says what it saw.
class HoldingDirector : public StepDirector {
 public:
  explicit HoldingDirector(const ExecutionPlan& plan, int failing_step = -1) : failing_(failing_step) {
    for (const PlanStep& step : plan.steps()) {
      all_.insert(all_.end(), step.released_cells.begin(), step.released_cells.end());
    }
    last_ = static_cast<uint32_t>(plan.steps().size()) - 1;
  }
  absl::Status Before(uint32_t step) override {
    seen.push_back("before " + std::to_string(step));
    return absl::OkStatus();
  }
  absl::Status After(uint32_t step, void** cells) override {
    seen.push_back("after " + std::to_string(step));
    if (step == last_) {
      for (const uint32_t cell : all_) num_held += cells[cell] != nullptr ? 1 : 0;
    }
    return static_cast<int>(step) == failing_ ? absl::UnavailableError("as asked") : absl::OkStatus();
  }
  absl::Span<const uint32_t> released(uint32_t step) const override {
    return step == last_ ? absl::MakeConstSpan(all_) : absl::Span<const uint32_t>();
  }

  std::vector<std::string> seen;
  size_t num_held = 0;

 private:
  const int failing_;
  uint32_t last_ = 0;
  std::vector<uint32_t> all_;
};

TEST_F(PlanExecutorTest, ADirectorSurroundsEachStepAndSaysWhatIsReleased) {
  const auto plan = Build(std::string(kX) +
                          "#0 aten::neg(Tensor %0) -> (%1 : float32[2]{1} cpu @1) source 0\n"
                          "#1 aten::exp(Tensor %1) -> (%2 : float32[2]{1} cpu @2) source 0\n"
                          "#2 aten::neg(Tensor %2) -> (%3 : float32[2]{1} cpu @3) source 0\n"
                          "return %3\n");
  ASSERT_TRUE(plan.ok()) << plan.status();
  const OwnedTensor x = Floats({0, 0});
  std::vector<OwnedTensor> outputs;
  HoldingDirector director(**plan);
  ASSERT_TRUE(PlanExecutor::RunDirected(**plan, {x.ref()}, {}, &outputs, director).ok());
  EXPECT_EQ(director.seen,
            (std::vector<std::string>{"before 0", "after 0", "before 1", "after 1", "before 2", "after 2"}));
  EXPECT_EQ(director.num_held, 2u);
  EXPECT_EQ(Read(outputs[0]), (std::vector<float>{-1, -1}));
  HoldingDirector failing(**plan, 1);
  EXPECT_EQ(PlanExecutor::RunDirected(**plan, {x.ref()}, {}, &outputs, failing).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(failing.seen.size(), 4u);
  EXPECT_TRUE(outputs.empty());
}

TEST_F(PlanExecutorTest, ManyThreadsRunOnePlan) {
  const auto plan =
      Build(std::string(kX) +
            "%1 : float32[2]{1} cpu @1 = captured 0\n"
            "#0 aten::add.Tensor(Tensor %0, Tensor %1, Scalar 2) -> (%2 : float32[2]{1} cpu @2) source 0\n"
            "#1 aten::mul_.Tensor(Tensor ! %2, Tensor 0.5) -> (& same %2) source 0\n"
            "#2 aten::cat(Tensor[] [%2, %0], int 0) -> (%3 : float32[4]{1} cpu @3) source 0\n"
            "#3 aten::chunk(Tensor %3, int 2, int 0) -> ([%4 : float32[2]{1} cpu @3, %5 : float32[2]{1} cpu "
            "@3]) view source 0\n"
            "return %4, %5\n");
  ASSERT_TRUE(plan.ok()) << plan.status();
  const OwnedTensor weight = Floats({10, 20});
  std::vector<std::thread> threads;
  std::vector<int> wrong(16, 0);
  for (int t = 0; t < 16; ++t) {
    threads.emplace_back([&, t] {
      const auto value = static_cast<float>(t);
      const OwnedTensor x = Floats({value, -value});
      for (int i = 0; i < 200; ++i) {
        std::vector<OwnedTensor> outputs;
        if (!PlanExecutor::Run(**plan, {x.ref()}, {weight.ref()}, &outputs).ok()) ++wrong[t];
        if (outputs.size() != 2 || Read(outputs[0], 2)[0] != (value + 20) / 2) ++wrong[t];
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, std::vector<int>(16, 0));
}

TEST_F(PlanExecutorTest, LargePlansKeepTheirCellsOnTheHeap) {
  std::string body = kX;
  for (int i = 0; i < 1500; ++i) {
    body += "#" + std::to_string(i) + " aten::add.Tensor(Tensor %" + std::to_string(i) +
            ", Tensor 1.0, Scalar 1) -> (%" + std::to_string(i + 1) + " : float32[2]{1} cpu @" + std::to_string(i + 1) +
            ") source 0\n";
  }
  const auto plan = Build(body + "return %1500\n");
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ((*plan)->memory_plan().high_water_bytes, 128u);
  const OwnedTensor x = Floats({0, 1});
  std::vector<OwnedTensor> outputs;
  ASSERT_TRUE(PlanExecutor::Run(**plan, {x.ref()}, {}, &outputs).ok());
  EXPECT_EQ(Read(outputs[0], 2), (std::vector<float>{1500, 1501}));
  EXPECT_NE((*plan)->Dump().find("step 1499 unboxed #1499 aten::add.Tensor"), std::string::npos);
}

}  // namespace
}  // namespace cuvil::scheduler
