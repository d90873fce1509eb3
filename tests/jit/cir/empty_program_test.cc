#include "jit/cir/empty_program.h"

#include <gtest/gtest.h>

#include "jit/cir/text.h"
#include "jit/cir/verifier.h"

namespace cuvil::cir {
namespace {

TEST(EmptyProgramTest, KeepsTensorsAndTheFormOfTheResult) {
  const auto graph = Parse(R"(cir 1
source 0 ""
%0 : float32[1,64]{64,1} cpu @0 = input 0
%1 : float32[64,64]{64,1} cpu @1 requires_grad = captured 0
%2 : int64[]{} cpu @2 = constant 0
#0 aten::linear(Tensor %0, Tensor %1, Tensor? none) -> (%3 : float32[1,64]{64,1} cpu @3) source 0
#1 aten::relu_(Tensor ! %3) -> (& same %3) source 0
return %3, %0, %2
)");
  ASSERT_TRUE(graph.ok()) << graph.status();

  const auto empty = EmptyProgram(*graph);

  ASSERT_TRUE(empty.ok()) << empty.status();
  EXPECT_TRUE(Verify(*empty).ok()) << Verify(*empty);
  EXPECT_EQ(Print(*empty), R"(cir 1
source 0 ""
%0 : float32[1,64]{64,1} cpu @0 = input 0
%1 : float32[64,64]{64,1} cpu @1 requires_grad = captured 0
%2 : int64[]{} cpu @2 = constant 0
#0 aten::detach(Tensor %1) -> (%3 : float32[64,64]{64,1} cpu @1) view source 0
return %3, %0, %2
)");
}

TEST(EmptyProgramTest, MakesEachOutputByAsManyOperatorsAsAskedFor) {
  const auto graph = Parse(R"(cir 1
source 0 ""
%0 : float32[4]{1} cpu @0 = input 0
#0 aten::relu(Tensor %0) -> (%1 : float32[4]{1} cpu @1) source 0
#1 aten::neg(Tensor %0) -> (%2 : float32[4]{1} cpu @2) source 0
return %1, %2
)");
  ASSERT_TRUE(graph.ok()) << graph.status();

  const auto empty = EmptyProgram(*graph, 2);

  ASSERT_TRUE(empty.ok()) << empty.status();
  EXPECT_TRUE(Verify(*empty).ok()) << Verify(*empty);
  EXPECT_EQ(Print(*empty), R"(cir 1
source 0 ""
%0 : float32[4]{1} cpu @0 = input 0
#0 aten::detach(Tensor %0) -> (%1 : float32[4]{1} cpu @0) view source 0
#1 aten::detach(Tensor %1) -> (%2 : float32[4]{1} cpu @0) view source 0
#2 aten::detach(Tensor %0) -> (%3 : float32[4]{1} cpu @0) view source 0
#3 aten::detach(Tensor %3) -> (%4 : float32[4]{1} cpu @0) view source 0
return %2, %4
)");
}

TEST(EmptyProgramTest, NeedsATensorForWhatItReturns) {
  const auto graph = Parse(R"(cir 1
source 0 ""
%0 : int64[]{} cpu @0 = constant 0
#0 aten::relu(Tensor %0) -> (%1 : int64[]{} cpu @1) source 0
return %1
)");
  ASSERT_TRUE(graph.ok()) << graph.status();

  EXPECT_EQ(EmptyProgram(*graph).status().code(), absl::StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace cuvil::cir
