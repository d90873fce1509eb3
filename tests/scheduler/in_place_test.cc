#include "scheduler/in_place.h"

#include <gtest/gtest.h>

#include <string>

#include "jit/cir/text.h"

namespace cuvil::scheduler {
namespace {

constexpr char kX[] = "%0 : float32[2,3]{3,1} cpu @0 = input 0\n";

// The operators after the rewrite, one a line, and what is returned.
std::string Rewritten(const std::string& body, uint32_t expected_count) {
  auto graph = cir::Parse("cir 1\nsource 0 \"\"\n" + body);
  if (!graph.ok()) return std::string(graph.status().message());
  EXPECT_EQ(WriteInPlace(&*graph), expected_count);
  std::string text;
  for (uint32_t i = 0; i < graph->ops.size(); ++i) text += cir::PrintOp(*graph, i) + "\n";
  for (const cir::ValueId id : graph->outputs) text += "return %" + std::to_string(id.index) + "\n";
  return text;
}

std::string Value(int index, int storage, const std::string& shape = "[2,3]{3,1}") {
  return "%" + std::to_string(index) + " : float32" + shape + " cpu @" + std::to_string(storage);
}

std::string Line(int i, const std::string& op) { return "#" + std::to_string(i) + " " + op + " source 0\n"; }

TEST(WriteInPlaceTest, WritesOverAFreshOperandAndRenamesItsUses) {
  const std::string text = Rewritten(kX + Line(0, "aten::neg(Tensor %0) -> (" + Value(1, 1) + ")") +
                                         Line(1, "aten::relu(Tensor %1) -> (" + Value(2, 2) + ")") +
                                         Line(2, "aten::exp(Tensor %2) -> (" + Value(3, 3) + ")") + "return %3\n",
                                     1);
  EXPECT_NE(text.find("aten::relu_(Tensor ! %1) -> (& same %1)"), std::string::npos) << text;
  EXPECT_NE(text.find("aten::exp(Tensor %1)"), std::string::npos) << text;
}

TEST(WriteInPlaceTest, ChainsAndViewsOfTheResultFollow) {
  const std::string text =
      Rewritten(kX + Line(0, "aten::neg(Tensor %0) -> (" + Value(1, 1) + ")") +
                    Line(1, "aten::sigmoid(Tensor %1) -> (" + Value(2, 2) + ")") +
                    Line(2, "aten::tanh(Tensor %2) -> (" + Value(3, 3) + ")") +
                    Line(3, "aten::view(Tensor %3, SymInt[] ints[6]) -> (" + Value(4, 3, "[6]{1}") + ") view") +
                    Line(4, "aten::exp(Tensor %4) -> (" + Value(5, 4, "[6]{1}") + ")") + "return %5\n",
                2);
  EXPECT_NE(text.find("aten::tanh_(Tensor ! %1) -> (& same %1)"), std::string::npos) << text;
  EXPECT_NE(text.find("aten::view(Tensor %1"), std::string::npos) << text;
  // The view shares memory with what it is a view of.
  EXPECT_NE(text.find("%4 : float32[6]{1} cpu @1"), std::string::npos) << text;
}

TEST(WriteInPlaceTest, LeavesAnArgumentAlone) {
  Rewritten(kX + Line(0, "aten::relu(Tensor %0) -> (" + Value(1, 1) + ")") +
                Line(1, "aten::exp(Tensor %1) -> (" + Value(2, 2) + ")") + "return %2\n",
            0);
}

TEST(WriteInPlaceTest, LeavesAResultAloneThatIsReturned) {
  Rewritten(kX + Line(0, "aten::neg(Tensor %0) -> (" + Value(1, 1) + ")") +
                Line(1, "aten::relu(Tensor %1) -> (" + Value(2, 2) + ")") + "return %2\n",
            0);
}

TEST(WriteInPlaceTest, LeavesAResultAloneOfWhichAViewIsReturned) {
  Rewritten(kX + Line(0, "aten::neg(Tensor %0) -> (" + Value(1, 1) + ")") +
                Line(1, "aten::relu(Tensor %1) -> (" + Value(2, 2) + ")") +
                Line(2, "aten::view(Tensor %2, SymInt[] ints[6]) -> (" + Value(3, 2, "[6]{1}") + ") view") +
                "return %3\n",
            0);
}

TEST(WriteInPlaceTest, LeavesAnOperandAloneThatIsReturnedOrUsedAgainOrViewed) {
  const std::string head = kX + Line(0, "aten::neg(Tensor %0) -> (" + Value(1, 1) + ")");
  const std::string relu = "aten::relu(Tensor %1) -> (" + Value(2, 2) + ")";
  const std::string exp = "aten::exp(Tensor %2) -> (" + Value(3, 3) + ")";
  Rewritten(head + Line(1, relu) + Line(2, exp) + "return %3, %1\n", 0);
  Rewritten(head + Line(1, relu) +
                Line(2, "aten::add.Tensor(Tensor %2, Tensor %1, Scalar 1) -> (" + Value(3, 3) + ")") + "return %3\n",
            0);
  Rewritten(head + Line(1, "aten::view(Tensor %1, SymInt[] ints[6]) -> (" + Value(4, 1, "[6]{1}") + ") view") +
                Line(2, relu) + Line(3, exp) + Line(4, "aten::exp(Tensor %4) -> (" + Value(5, 5, "[6]{1}") + ")") +
                "return %3, %5\n",
            0);
}

TEST(WriteInPlaceTest, LeavesAViewAndOtherGeometriesAlone) {
  Rewritten(kX + Line(0, "aten::t(Tensor %0) -> (" + Value(1, 0, "[3,2]{1,3}") + ") view") +
                Line(1, "aten::relu(Tensor %1) -> (" + Value(2, 2, "[3,2]{1,3}") + ")") +
                Line(2, "aten::exp(Tensor %2) -> (" + Value(3, 3, "[3,2]{1,3}") + ")") + "return %3\n",
            0);
  Rewritten(kX + Line(0, "aten::neg(Tensor %0) -> (" + Value(1, 1, "[2,3]{1,2}") + ")") +
                Line(1, "aten::relu(Tensor %1) -> (" + Value(2, 2) + ")") +
                Line(2, "aten::exp(Tensor %2) -> (" + Value(3, 3) + ")") + "return %3\n",
            0);
}

TEST(WriteInPlaceTest, LeavesWhatDependsOnConstantsOnlyToBeFolded) {
  Rewritten(Line(0, "aten::ones(SymInt[] ints[2, 3], ScalarType? none, Layout? none, Device? none, bool? none) -> (" +
                        Value(0, 0) + ")") +
                Line(1, "aten::relu(Tensor %0) -> (" + Value(1, 1) + ")") +
                Line(2, "aten::exp(Tensor %1) -> (" + Value(2, 2) + ")") + "return %2\n",
            0);
}

}  // namespace
}  // namespace cuvil::scheduler
