#include "jit/cir/text.h"

#include <gtest/gtest.h>

#include <bit>
#include <limits>

#include "jit/cir/verifier.h"

namespace cuvil::cir {
namespace {

constexpr char kProgram[] = R"(cir 1
source 0 ""
source 1 "model.py:12 in \"forward\""
%0 : float32[1,64]{64,1} cpu @0 = input 0
%1 : float32[64,64]{64,1} cpu @1 requires_grad = captured 0
%2 : int64[]{} cpu @2 = constant 0
#0 aten::linear(Tensor %0, Tensor %1, Tensor? none) -> (%3 : float32[1,64]{64,1} cpu @3) source 1
#1 aten::relu_(Tensor ! %3) -> (& same %3) source 1
#2 aten::chunk(Tensor %3, int 2, int 1) -> ([%4 : float32[1,32]{64,1} cpu @3, %5 : float32[1,32]{64,1} cpu @3]) view source 1
#3 aten::index.Tensor(Tensor %4, Tensor?[] [none, %2]) -> (%6 : float32[1,32]{32,1} cuda:1 @4 inference) source 0
#4 aten::max.dim(Tensor %5, int 0, bool false) -> (%7 : float32[32]{1} cpu @5 dynamic, _) source 0
#5 aten::bernoulli_.float(Tensor ! %7, float 0.5, Generator? none) -> (& same %7) random source 0
#6 aten::contiguous(Tensor %6, MemoryFormat format(contiguous)) -> (same %6) source 0
return %6, %7, %0
)";

TEST(TextTest, PrintsWhatItParsed) {
  const auto graph = Parse(kProgram);
  ASSERT_TRUE(graph.ok()) << graph.status();
  EXPECT_EQ(Print(*graph), kProgram);
  EXPECT_TRUE(Verify(*graph).ok()) << Verify(*graph);
  EXPECT_EQ(graph->ops[1].effects.writes, 1u);
  EXPECT_EQ(graph->sources[1], "model.py:12 in \"forward\"");
  EXPECT_EQ(graph->value(ValueId{6}).type.device_index, 1);
}

TEST(TextTest, KeepsEveryKindOfConstantBitForBit) {
  const std::vector<Attr> attrs = {
      NoneAttr{},
      true,
      false,
      int64_t{-7},
      std::numeric_limits<int64_t>::min(),
      1.0,
      -0.0,
      0.1,
      1e300,
      5e-324,
      std::numeric_limits<double>::infinity(),
      -std::numeric_limits<double>::infinity(),
      std::bit_cast<double>(uint64_t{0xfff8000000000123}),
      std::complex<double>(1.5, -0.0),
      std::string("a \"quoted\"\n\\ text, [with] signs"),
      std::string(),
      std::vector<int64_t>{},
      std::vector<int64_t>{1, -2},
      std::vector<double>{1.0, 0.5},
      std::vector<bool>{true, false},
      DType::kBFloat16,
      static_cast<DType>(12),
      Layout::kStrided,
      MemoryFormat::kChannelsLast,
      Device{DeviceType::kCuda, 3},
      Device{static_cast<DeviceType>(20), -1},
      DefaultGenerator{},
      std::vector<Attr>{int64_t{1}, 2.0, true},
  };
  Graph graph;
  graph.sources.emplace_back();
  Op op;
  op.name = "x::y";
  for (const Attr& attr : attrs) {
    op.kinds.push_back(ArgKind::kScalar);
    op.operands.emplace_back(attr);
  }
  graph.ops.push_back(op);
  const std::string text = Print(graph);
  const auto parsed = Parse(text);
  ASSERT_TRUE(parsed.ok()) << parsed.status() << "\n" << text;
  EXPECT_EQ(*parsed, graph) << text;
}

TEST(TextTest, TellsTheLineOfAnError) {
  const auto error = [](const char* text) { return std::string(Parse(text).status().message()); };
  EXPECT_EQ(error("nonsense"), "line 1: expected 'cir 1'");
  EXPECT_EQ(error("cir 1\nsource 1 \"a\"\n"), "line 2: sources must count from 0");
  EXPECT_EQ(error("cir 1\n%0 : float33[]{} cpu @0 = input 0\n"), "line 2: unknown dtype");
  EXPECT_EQ(error("cir 1\n"), "line 1: no 'return'");
  EXPECT_EQ(error("cir 1\nreturn\nreturn\n"), "line 3: text after 'return'");
  EXPECT_EQ(error("cir 1\n#0 a::b(Dimname 3) -> () source 0\nreturn\n"),
            "line 2: no kind for arguments of type Dimname");
}

TEST(TextTest, EveryPrefixIsRefusedOrParsedWithoutHarm) {
  const std::string text = kProgram;
  for (size_t n = 0; n + 2 < text.size(); ++n) {
    const auto graph = Parse(std::string_view(text).substr(0, n));
    if (graph.ok()) Verify(*graph).IgnoreError();
  }
}

}  // namespace
}  // namespace cuvil::cir
