#include "scheduler/graph_split.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "jit/cir/text.h"

namespace cuvil::scheduler {
namespace {

using ::testing::HasSubstr;

constexpr char kHead[] =
    "cir 1\nsource 0 \"model.py:7 in forward\"\n"
    "%0 : float32[2,3]{3,1} cuda:0 @0 = input 0\n"
    "%1 : float32[3,3]{3,1} cuda:0 @1 = captured 0\n";

cir::Graph Parse(const std::string& body) {
  auto graph = cir::Parse(kHead + body);
  EXPECT_TRUE(graph.ok()) << graph.status();
  return *std::move(graph);
}

std::string Why(const std::string& body, const std::set<cir::ValueId>& hidden_views = {}) {
  const auto split = SplitForGraph(Parse(body), {hidden_views, nullptr});
  return split.ok() ? "" : std::string(split.status().message());
}

constexpr char kMatmul[] = "#0 aten::mm(Tensor %0, Tensor %1) -> (%2 : float32[2,3]{3,1} cuda:0 @2) source 0\n";

TEST(GraphSplitTest, OutputsAreCopiedOnceAndViewedAnew) {
  const auto split = SplitForGraph(
      Parse(std::string(kMatmul) + "#1 aten::t(Tensor %2) -> (%3 : float32[3,2]{1,3} cuda:0 @2) view source 0\n"
                                   "#2 aten::t(Tensor %0) -> (%4 : float32[3,2]{1,3} cuda:0 @0) view source 0\n"
                                   "return %3, %2, %4, %0, %1\n"),
      {});
  ASSERT_TRUE(split.ok()) << split.status();
  EXPECT_EQ(split->body.outputs, (std::vector<cir::ValueId>{{2}}));
  EXPECT_TRUE(split->left_out_ops.empty());
  const std::string tail = cir::Print(split->tail);
  EXPECT_THAT(tail, HasSubstr("captured 1"));
  ASSERT_EQ(split->tail.ops.size(), 2u);
  EXPECT_EQ(split->num_copies, 1u);
  EXPECT_EQ(split->tail.outputs[1], split->tail.captured[1]);  // the copy itself
  // Views of the copy and of the caller's own input; input and weight as they are.
  EXPECT_EQ(split->tail.value(split->tail.outputs[0]).storage, split->tail.value(split->tail.outputs[1]).storage);
  EXPECT_EQ(split->tail.value(split->tail.outputs[2]).storage, split->tail.value(split->tail.inputs[0]).storage);
  EXPECT_EQ(split->tail.outputs[3], split->tail.inputs[0]);
  EXPECT_EQ(split->tail.outputs[4], split->tail.captured[0]);
  EXPECT_EQ(split->tail_captured, (std::vector<uint32_t>{0}));
}

TEST(GraphSplitTest, AHiddenViewIsMadeByItsOperatorInTheTail) {
  const std::string program = std::string(kMatmul) +
                              "#1 aten::linear(Tensor %2, Tensor %1, Tensor? none) -> (%3 : float32[2,3]{3,1} cuda:0 "
                              "@3) source 0\n";
  const auto split = SplitForGraph(Parse(program + "return %3\n"), {{cir::ValueId{3}}, nullptr});
  ASSERT_TRUE(split.ok()) << split.status();
  EXPECT_EQ(split->body.outputs, (std::vector<cir::ValueId>{{2}}));
  EXPECT_EQ(split->left_out_ops, (std::vector<uint32_t>{1}));
  EXPECT_EQ(split->num_copies, 0u);
  ASSERT_EQ(split->tail.ops.size(), 1u);
  EXPECT_EQ(split->tail.ops[0].name, "aten::linear");
  EXPECT_EQ(split->tail_captured, (std::vector<uint32_t>{0}));
  // What the body uses as well stays there too.
  const auto used = SplitForGraph(
      Parse(program + "#2 aten::neg(Tensor %3) -> (%4 : float32[2,3]{3,1} cuda:0 @4) source 0\nreturn %3, %4\n"),
      {{cir::ValueId{3}}, nullptr});
  ASSERT_TRUE(used.ok()) << used.status();
  EXPECT_TRUE(used->left_out_ops.empty());
  // An operand that is written afterwards is not what the operator read.
  EXPECT_THAT(Why(program + "#2 aten::neg_(Tensor ! %2) -> (& same %2) source 0\nreturn %3\n", {cir::ValueId{3}}),
              HasSubstr("is written by"));
}

TEST(GraphSplitTest, SaysWhatCannotBe) {
  const auto split = SplitForGraph(Parse(std::string(kMatmul) + "return %2\n"), {});
  ASSERT_TRUE(split.ok()) << split.status();
  EXPECT_TRUE(split->tail_captured.empty());  // the weight is the body's alone
  EXPECT_THAT(Why("#0 aten::expand(Tensor %0, SymInt[] ints[2, 3], bool false) -> (%2 : float32[2,3]{3,0} cuda:0 @2) "
                  "source 0\nreturn %2\n"),
              HasSubstr("gaps or overlaps"));
}

}  // namespace
}  // namespace cuvil::scheduler
