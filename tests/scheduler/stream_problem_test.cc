#include "scheduler/stream_problem.h"

#include <gtest/gtest.h>

#include <string>

#include "jit/cir/text.h"
#include "tests/testing/torch_library.h"

namespace cuvil::scheduler {
namespace {

class StreamProblemTest : public testing::TorchTest {
 protected:
  ScheduleProblem Describe(const std::string& body, std::vector<uint32_t> num_kernels = {}) {
    auto graph = cir::Parse("cir 1\nsource 0 \"\"\n%0 : float32[2,4]{4,1} cpu @0 = input 0\n" + body);
    EXPECT_TRUE(graph.ok()) << graph.status();
    BuildOptions options;
    options.write_in_place = false;
    auto plan = ExecutionPlan::Build(*std::move(graph), api_, std::move(options));
    EXPECT_TRUE(plan.ok()) << plan.status();
    return DescribeSteps(**plan, num_kernels);
  }
};

TEST_F(StreamProblemTest, StepsReadAndWriteStorages) {
  const ScheduleProblem problem = Describe(
      "#0 aten::neg(Tensor %0) -> (%1 : float32[2,4]{4,1} cpu @1) source 0\n"
      "#1 aten::view(Tensor %1, SymInt[] ints[8]) -> (%2 : float32[8]{1} cpu @1) view source 0\n"
      "#2 aten::relu_(Tensor ! %2) -> (& same %2) source 0\n"
      "#3 aten::mm(Tensor %1, Tensor %0) -> (%3 : float32[2,4]{4,1} cpu @2) source 0\n"
      "return %3\n");
  ASSERT_EQ(problem.steps.size(), 4u);
  EXPECT_EQ(problem.num_storages, 3u);
  EXPECT_EQ(problem.steps[0].reads, (std::vector<uint32_t>{0}));
  EXPECT_EQ(problem.steps[0].writes, (std::vector<uint32_t>{1}));
  EXPECT_FALSE(problem.steps[1].touches_memory());
  EXPECT_EQ(problem.steps[1].viewed, 1u);
  EXPECT_EQ(problem.steps[2].writes, (std::vector<uint32_t>{1}));
  EXPECT_EQ(problem.steps[3].reads, (std::vector<uint32_t>{1, 0}));
  EXPECT_FALSE(problem.steps[0].on_main_stream);
  EXPECT_TRUE(problem.steps[3].on_main_stream);
  ASSERT_EQ(problem.cells.size(), 2u);
  EXPECT_EQ(problem.cells[0].storage, 1u);
  EXPECT_EQ(problem.cells[0].last_step, 2u);
}

TEST_F(StreamProblemTest, ConvolutionsAndLargeTensorsWantLargeBlocks) {
  auto graph = cir::Parse(
      "cir 1\nsource 0 \"\"\n%0 : float32[1,1,600,600]{360000,360000,600,1} cpu @0 = input 0\n"
      "%1 : float32[1,1,1,1]{1,1,1,1} cpu @1 = captured 0\n"
      "#0 aten::neg(Tensor %0) -> (%2 : float32[1,1,600,600]{360000,360000,600,1} cpu @2) source 0\n"
      "#1 aten::neg(Tensor %1) -> (%3 : float32[1,1,1,1]{1,1,1,1} cpu @3) source 0\n"
      "#2 aten::conv2d(Tensor %3, Tensor %1, Tensor? none, SymInt[] ints[1, 1], SymInt[] ints[0, 0], SymInt[] ints[1, "
      "1], SymInt 1) -> (%4 : float32[1,1,1,1]{1,1,1,1} cpu @4) source 0\n"
      "return %2, %4\n");
  ASSERT_TRUE(graph.ok()) << graph.status();
  const auto plan = ExecutionPlan::Build(*std::move(graph), api_, {});
  ASSERT_TRUE(plan.ok()) << plan.status();
  StreamSchedule schedule;
  schedule.num_streams = 4;
  schedule.stream = {1, 2, 3};
  EXPECT_EQ(StreamsOfLargeBlocks(**plan, schedule), (std::vector<bool>{false, true, false, true}));
}

TEST_F(StreamProblemTest, MoreWorkCostsMore) {
  const std::string body =
      "#0 aten::neg(Tensor %0) -> (%1 : float32[2,4]{4,1} cpu @1) source 0\n"
      "#1 aten::neg(Tensor %1) -> (%2 : float32[2,4]{4,1} cpu @2) source 0\nreturn %2\n";
  const ScheduleProblem problem = Describe(body, {0, 3});
  EXPECT_EQ(problem.steps[0].cost_ns, 0);  // put nothing into the graph
  EXPECT_GT(problem.steps[1].cost_ns, 2 * Describe(body).steps[1].cost_ns);
}

TEST(RunsWithoutBlasTest, KnowsConvolutionsAndPointwiseOperators) {
  cir::Op op;
  for (const char* name : {"aten::conv2d", "aten::relu_", "aten::cat", "aten::where", "aten::_softmax"}) {
    op.name = name;
    EXPECT_TRUE(RunsWithoutBlas(op)) << name;
  }
  for (const char* name :
       {"aten::linear", "aten::bmm", "aten::lstm", "aten::scaled_dot_product_attention", "mine::op"}) {
    op.name = name;
    EXPECT_FALSE(RunsWithoutBlas(op)) << name;
  }
}

}  // namespace
}  // namespace cuvil::scheduler
