#include "jit/cir/op_traits.h"

#include <gtest/gtest.h>

#include "jit/cir/text.h"

namespace cuvil::cir {
namespace {

Graph ParseOps(const std::string& ops) {
  auto graph = Parse(
      "cir 1\nsource 0 \"\"\n%0 : float32[4]{1} cpu @0 = input 0\n%1 : bool[4]{1} cpu @1 = input 1\n"
      "%2 : int64[4]{1} cpu @2 = input 2\n" +
      ops + "return\n");
  EXPECT_TRUE(graph.ok()) << graph.status();
  return *std::move(graph);
}

absl::Status Allowed(const char* schema) {
  const auto parsed = ParseSchema(schema);
  EXPECT_TRUE(parsed.ok()) << parsed.status();
  return CheckAllowed(*parsed);
}

TEST(OpTraitsTest, AllowsTensorOperatorsAndDeniesTheRest) {
  EXPECT_TRUE(Allowed("aten::relu(Tensor self) -> Tensor").ok());
  EXPECT_TRUE(Allowed("torchvision::nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor").ok());
  EXPECT_EQ(Allowed("aten::item(Tensor self) -> Scalar").message(),
            "the operator aten::item moves tensor data into Python");
  EXPECT_EQ(Allowed("mine::op(Tensor self) -> Tensor").message(),
            "the operator mine::op is from a namespace whose operators may hide state");
  EXPECT_EQ(Allowed("aten::size.int(Tensor self, int dim) -> int").message(),
            "the operator aten::size.int returns something else than tensors");
  EXPECT_EQ(Allowed("aten::resize_(Tensor(a!) self, SymInt[] size, *, MemoryFormat? memory_format=None) -> Tensor(a!)")
                .code(),
            absl::StatusCode::kUnimplemented);
}

TEST(OpTraitsTest, DropoutIsRandomOnlyInTraining) {
  const Graph graph = ParseOps(
      "#0 aten::dropout(Tensor %0, float 0.5, bool true) -> (_) source 0\n"
      "#1 aten::dropout(Tensor %0, float 0.5, bool false) -> (same %0) source 0\n"
      "#2 aten::dropout(Tensor %0, float 0.0, bool true) -> (same %0) source 0\n"
      "#3 aten::rand(SymInt[] ints[4], ScalarType? none, Layout? none, Device? none, bool? none) -> (_) source 0\n");
  EXPECT_TRUE(IsRandom(graph.ops[0]));
  EXPECT_FALSE(IsRandom(graph.ops[1]));
  EXPECT_FALSE(IsRandom(graph.ops[2]));
  EXPECT_TRUE(IsRandom(graph.ops[3]));
  EXPECT_FALSE(IsDeterministicFactory(graph.ops[3]));
}

TEST(OpTraitsTest, MasksMakeIndexingDynamic) {
  const Graph graph = ParseOps(
      "#0 aten::index.Tensor(Tensor %0, Tensor?[] [%1]) -> (_) source 0\n"
      "#1 aten::index.Tensor(Tensor %0, Tensor?[] [%2]) -> (_) source 0\n"
      "#2 aten::one_hot(Tensor %2, int -1) -> (_) source 0\n"
      "#3 aten::one_hot(Tensor %2, int 5) -> (_) source 0\n"
      "#4 aten::repeat_interleave.self_Tensor(Tensor %0, Tensor %2, int? none, SymInt? none) -> (_) source 0\n"
      "#5 aten::repeat_interleave.self_Tensor(Tensor %0, Tensor %2, int? none, SymInt? 9) -> (_) source 0\n"
      "#6 aten::where(Tensor %1) -> ([_]) source 0\n"
      "#7 aten::where.self(Tensor %1, Tensor %0, Tensor %0) -> (_) source 0\n");
  for (size_t i = 0; i < graph.ops.size(); ++i) {
    EXPECT_EQ(HasDynamicShape(graph, graph.ops[i]), i % 2 == 0) << i;
  }
}

TEST(OpTraitsTest, BatchNormWritesItsStatisticsOnlyInTraining) {
  const Graph graph = ParseOps(
      "#0 aten::batch_norm(Tensor %0, Tensor? none, Tensor? none, Tensor? %0, Tensor? none, bool true, float 0.1, "
      "float "
      "1e-05, bool true) -> (_) source 0\n"
      "#1 aten::batch_norm(Tensor %0, Tensor? none, Tensor? none, Tensor? %0, Tensor? none, bool false, float 0.1, "
      "float "
      "1e-05, bool true) -> (_) source 0\n");
  const auto schema = ParseSchema(
      "aten::batch_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor? running_mean, Tensor? running_var, bool "
      "training, float momentum, float eps, bool cudnn_enabled) -> Tensor");
  ASSERT_TRUE(schema.ok());
  EXPECT_EQ(DeriveEffects(*schema, graph.ops[0]).writes, 0b01000u);
  EXPECT_EQ(DeriveEffects(*schema, graph.ops[1]).writes, 0u);
}

TEST(OpTraitsTest, FactoriesAreDeterministicUnlessRandomOrUninitialized) {
  const Graph graph = ParseOps(
      "#0 aten::arange(Scalar 4, ScalarType? none, Layout? none, Device? none, bool? none) -> (_) source 0\n"
      "#1 aten::empty.memory_format(SymInt[] ints[4], ScalarType? none, Layout? none, Device? none, bool? none, "
      "MemoryFormat? none) -> (_) source 0\n"
      "#2 aten::relu(Tensor %0) -> (_) source 0\n");
  EXPECT_TRUE(IsDeterministicFactory(graph.ops[0]));
  EXPECT_FALSE(IsDeterministicFactory(graph.ops[1]));
  EXPECT_TRUE(IsUninitialized(graph.ops[1]));
  EXPECT_FALSE(IsDeterministicFactory(graph.ops[2]));
  EXPECT_TRUE(IsPure(graph.ops[2]));
}

}  // namespace
}  // namespace cuvil::cir
