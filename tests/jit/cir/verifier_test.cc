#include "jit/cir/verifier.h"

#include <gtest/gtest.h>

#include "jit/cir/text.h"

namespace cuvil::cir {
namespace {

std::string Complaint(const std::string& body) {
  const auto graph = Parse("cir 1\nsource 0 \"\"\n" + body);
  if (!graph.ok()) return "unparsable: " + std::string(graph.status().message());
  return std::string(Verify(*graph).message());
}

constexpr char kX[] = "%0 : float32[2]{1} cpu @0 = input 0\n";

TEST(VerifierTest, AcceptsInPlaceOperatorsAndViews) {
  EXPECT_EQ(Complaint(std::string(kX) +
                      "#0 aten::relu(Tensor %0) -> (%1 : float32[2]{1} cpu @1) source 0\n"
                      "#1 aten::add_.Tensor(Tensor ! %1, Tensor 2.0, Scalar 1) -> (& same %1) source 0\n"
                      "#2 aten::view(Tensor %1, SymInt[] ints[2]) -> (%2 : float32[2]{1} cpu @1) view source 0\n"
                      "return %2, %0\n"),
            "");
}

TEST(VerifierTest, RefusesUseBeforeDefinition) {
  EXPECT_EQ(Complaint("#0 aten::relu(Tensor %1) -> (%0 : float32[2]{1} cpu @1) source 0\n"
                      "#1 aten::relu(Tensor %0) -> (%1 : float32[2]{1} cpu @2) source 0\nreturn %1\n"),
            "op 0 aten::relu: operand 0: %1 is used before it is defined");
}

TEST(VerifierTest, RefusesAValueThatNobodyDefines) {
  EXPECT_EQ(Complaint("%1 : float32[2]{1} cpu @0 = input 0\nreturn %1\n"), "value %0 is never defined");
}

TEST(VerifierTest, RefusesOperandsThatDoNotFitTheirKind) {
  EXPECT_EQ(Complaint(std::string(kX) + "#0 a::b(Tensor none) -> () source 0\nreturn\n"),
            "op 0 a::b: operand 0 does not fit Tensor");
  EXPECT_EQ(Complaint(std::string(kX) + "#0 a::b(float 1) -> () source 0\nreturn\n"),
            "op 0 a::b: operand 0 does not fit float");
  EXPECT_EQ(Complaint(std::string(kX) + "#0 a::b(int %0) -> () source 0\nreturn\n"),
            "op 0 a::b: operand 0 is a tensor, int expected");
  EXPECT_EQ(Complaint(std::string(kX) + "#0 a::b(Tensor[] [%0, none]) -> () source 0\nreturn\n"),
            "op 0 a::b: operand 0 has an absent element");
  EXPECT_EQ(Complaint(std::string(kX) + "#0 a::b(bool[3] bools[true]) -> () source 0\nreturn\n"),
            "op 0 a::b: operand 0 does not fit bool[3]");
}

TEST(VerifierTest, RefusesAnAliasOfSomethingUnwritten) {
  EXPECT_EQ(Complaint(std::string(kX) + "#0 aten::relu_(Tensor %0) -> (& same %0) source 0\nreturn\n"),
            "op 0 aten::relu_: result 0: %0 is no written operand");
}

TEST(VerifierTest, RefusesSharedStorageWithoutAView) {
  EXPECT_EQ(Complaint(std::string(kX) + "#0 aten::t(Tensor %0) -> (%1 : float32[2]{1} cpu @0) source 0\nreturn\n"),
            "op 0 aten::t: result 0: %1 shares an operand's storage, but the operator is no view");
}

TEST(VerifierTest, RefusesIdentityThatDependsOnData) {
  EXPECT_EQ(Complaint(std::string(kX) +
                      "#0 aten::nonzero(Tensor %0) -> (%1 : int64[2,1]{1,2} cpu @1 dynamic) source 0\n"
                      "#1 aten::contiguous(Tensor %1, MemoryFormat format(contiguous)) -> (same %1) source 0\n"
                      "return %1\n"),
            "op 1 aten::contiguous: result 0 is an argument itself, but sizes depend on tensor data");
}

TEST(VerifierTest, RefusesBrokenTables) {
  Graph graph;
  graph.sources.emplace_back();
  graph.outputs.push_back(ValueId{3});
  EXPECT_EQ(Verify(graph).message(), "output %3 is not defined");
  graph.outputs.clear();
  graph.inputs.push_back(ValueId{0});
  EXPECT_EQ(Verify(graph).message(), "input 0: no value %0");
}

TEST(GraphBuilderTest, BuildsWhatTheVerifierAccepts) {
  GraphBuilder builder;
  const StorageId s0 = builder.NewStorage();
  const StorageId s1 = builder.NewStorage();
  const TensorType type{DType::kFloat32, DeviceType::kCpu, -1, {2}, {1}};
  const ValueId x = builder.AddInput(type, s0);
  const ValueId y = builder.AddResultValue(type, s1);
  Op relu;
  relu.name = "aten::relu";
  relu.kinds = {ArgKind::kTensor};
  relu.operands = {x};
  relu.results = {Result{ReturnKind::kTensor, ResultForm::kNew, {y}}};
  relu.source = builder.AddSource("a.py:1");
  EXPECT_EQ(builder.AddSource("a.py:1"), relu.source);
  EXPECT_EQ(builder.AddOp(relu), 0u);
  const ValueId z = builder.AddResultValue(type, s1);
  Op view;
  view.name = "aten::view";
  view.kinds = {ArgKind::kTensor, ArgKind::kSymIntList};
  view.operands = {y, Attr(std::vector<int64_t>{2})};
  view.results = {Result{ReturnKind::kTensor, ResultForm::kNew, {z}}};
  builder.AddOp(view);
  builder.AddOutput(z);
  const auto graph = std::move(builder).Build();
  ASSERT_TRUE(graph.ok()) << graph.status();
  EXPECT_FALSE(graph->ops[0].effects.is_view);
  EXPECT_TRUE(graph->ops[1].effects.is_view);
}

}  // namespace
}  // namespace cuvil::cir
