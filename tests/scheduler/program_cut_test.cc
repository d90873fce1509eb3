#include "scheduler/program_cut.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "jit/cir/text.h"
#include "scheduler/part_sequence.h"
#include "scheduler/plan_executor.h"
#include "tests/testing/torch_library.h"

namespace cuvil::scheduler {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using torch_abi::OwnedTensor;
using torch_abi::TensorRef;

constexpr cir::Device kCpu{cir::DeviceType::kCpu, -1};

// %0 the input, %1 the weight; every result is of the same type.
std::string Unary(int op, const char* name, int from, int to, int storage) {
  return absl::StrCat("#", op, " aten::", name, "(Tensor %", from, ") -> (%", to, " : float32[2]{1} cpu @", storage,
                      ") source 0\n");
}
std::string Mul(int op, int a, int b, int to) {
  return absl::StrCat("#", op, " aten::mul.Tensor(Tensor %", a, ", Tensor %", b, ") -> (%", to,
                      " : float32[2]{1} cpu @", to, ") source 0\n");
}

cir::Graph Parse(const std::string& body) {
  auto graph = cir::Parse(
      "cir 1\nsource 0 \"model.py:7 in forward\"\n"
      "%0 : float32[2]{1} cpu @0 = input 0\n"
      "%1 : float32[2]{1} cpu @1 = captured 0\n" +
      body);
  EXPECT_TRUE(graph.ok()) << graph.status();
  return *std::move(graph);
}

std::vector<std::tuple<uint32_t, size_t, bool>> Shape(const std::vector<ProgramPart>& parts) {
  std::vector<std::tuple<uint32_t, size_t, bool>> shape;
  for (const ProgramPart& part : parts) shape.emplace_back(part.first_op, part.graph.ops.size(), part.on_graph);
  return shape;
}

TEST(ProgramCutTest, OneStretchIsTheProgramWithAllThatItHas) {
  const cir::Graph program = Parse(Unary(0, "neg", 0, 2, 2) + "return %2, %0, %2\n");
  const auto parts = CutProgram(program, {false});
  ASSERT_TRUE(parts.ok()) << parts.status();
  ASSERT_EQ(parts->size(), 1u);
  EXPECT_EQ(parts->front().graph, program);
  EXPECT_TRUE(parts->front().on_graph);
  EXPECT_THAT(parts->front().captured, ElementsAre(0));  // though nothing uses it
  EXPECT_EQ(parts->front().outputs, program.outputs);
}

TEST(ProgramCutTest, PartsTakeWhatTheyUseAndMakeWhatIsWanted) {
  const cir::Graph program =
      Parse(Unary(0, "neg", 0, 2, 2) + Unary(1, "exp", 2, 3, 3) + Mul(2, 2, 1, 4) + Mul(3, 4, 3, 5) + "return %5\n");
  const auto parts = CutProgram(program, {false, false, true, false});
  ASSERT_TRUE(parts.ok()) << parts.status();
  ASSERT_THAT(Shape(*parts),
              ElementsAre(std::tuple(0u, 2u, true), std::tuple(2u, 1u, false), std::tuple(3u, 1u, true)));
  EXPECT_THAT((*parts)[0].inputs, ElementsAre(cir::ValueId{0}));
  EXPECT_THAT((*parts)[0].captured, IsEmpty());
  EXPECT_THAT((*parts)[0].outputs, ElementsAre(cir::ValueId{2}, cir::ValueId{3}));
  EXPECT_THAT((*parts)[0].versioned, IsEmpty());
  EXPECT_THAT((*parts)[1].inputs, ElementsAre(cir::ValueId{2}));
  EXPECT_THAT((*parts)[1].captured, ElementsAre(0));
  EXPECT_THAT((*parts)[2].inputs, ElementsAre(cir::ValueId{4}, cir::ValueId{3}));
  EXPECT_EQ((*parts)[2].versioned.size(), 1u);  // what the caller gets
  EXPECT_EQ((*parts)[2].graph.sources.back(), "model.py:7 in forward");
}

TEST(ProgramCutTest, ViewsOfAnEarlierPartShareItsStorage) {
  const cir::Graph program = Parse(Unary(0, "neg", 0, 2, 2) +
                                   "#1 aten::view(Tensor %2, SymInt[] ints[2, 1]) -> (%3 : float32[2,1]{1,1} cpu @2) "
                                   "view source 0\n"
                                   "#2 aten::neg_(Tensor ! %2) -> (& same %2) source 0\n"
                                   "return %3\n");
  const auto parts = CutProgram(program, {false, false, true});
  ASSERT_TRUE(parts.ok()) << parts.status();
  EXPECT_THAT((*parts)[0].outputs, ElementsAre(cir::ValueId{2}, cir::ValueId{3}));
  EXPECT_EQ((*parts)[0].versioned.size(), 1u);  // one memory, seen through the view
  EXPECT_THAT((*parts)[1].inputs, ElementsAre(cir::ValueId{2}));
  EXPECT_THAT((*parts)[1].outputs, IsEmpty());
}

constexpr char kConstant[] = "%2 : float32[2]{1} cpu @2 = constant 0\n";

TEST(ProgramCutTest, PartsDoNotShareAConstantThatIsWritten) {
  const std::string write = "#0 aten::neg_(Tensor ! %2) -> (& same %2) source 0\n";
  const auto shared = CutProgram(Parse(kConstant + write + Mul(1, 0, 2, 3) + "return %3\n"), {false, true});
  EXPECT_EQ(shared.status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(shared.status().message()), HasSubstr("share a constant"));
  // One that is only read is each part's own.
  const auto read = CutProgram(Parse(kConstant + Mul(0, 0, 2, 3) + Mul(1, 3, 2, 4) + "return %4\n"), {false, true});
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_THAT((*read)[0].constants, ElementsAre(0));
  EXPECT_THAT((*read)[1].constants, ElementsAre(0));
}

TEST(ProgramCutTest, SizesThatDependOnDataAreNotCut) {
  const auto parts =
      CutProgram(Parse("#0 aten::nonzero(Tensor %0) -> (%2 : int64[1,1]{1,1} cpu @2 dynamic) source 0\n" +
                       std::string("#1 aten::neg(Tensor %0) -> (%3 : float32[2]{1} cpu @3) source 0\nreturn %2, %3\n")),
                 {true, false});
  EXPECT_EQ(parts.status().code(), absl::StatusCode::kUnimplemented);
}

class CutForGraphsTest : public testing::TorchTest {
 protected:
  absl::StatusOr<std::vector<ProgramPart>> Cut(const cir::Graph& program, const std::vector<uint32_t>& on_host,
                                               const GraphCutOptions& options = {1, 100}) {
    std::vector<std::string> reasons(program.ops.size());
    for (const uint32_t op : on_host) reasons[op] = "asked for";
    return CutForGraphs(
        program, kCpu, reasons,
        [&](const ProgramPart&, GraphSplit split) {
          BuildOptions build;
          build.left_out_ops = std::move(split.left_out_ops);
          return ExecutionPlan::Build(std::move(split.body), api_, std::move(build));
        },
        options);
  }
  // c10::intrusive_ptr_target keeps the number behind its vtable.
  static uint32_t NumOwners(const OwnedTensor& tensor) {
    uint32_t number = 0;
    std::memcpy(&number, static_cast<const char*>(tensor.ref().impl()) + sizeof(void*), sizeof number);
    return number;
  }
  std::string Chain(int length) {
    std::string body;
    for (int i = 0; i < length; ++i) body += Unary(i, "neg", i == 0 ? 0 : i + 1, i + 2, i + 2);
    return absl::StrCat(body, "return %", length + 1, "\n");
  }
};

TEST_F(CutForGraphsTest, ShortStretchesAreNoGraphs) {
  const cir::Graph program = Parse(Chain(12));
  const auto parts = Cut(program, {2}, {4, 100});
  ASSERT_TRUE(parts.ok()) << parts.status();
  EXPECT_THAT(Shape(*parts), ElementsAre(std::tuple(0u, 3u, false), std::tuple(3u, 9u, true)));
  EXPECT_EQ((*parts)[0].reason, "asked for");
  const auto none = Cut(program, {3, 7}, {5, 100});
  ASSERT_TRUE(none.ok()) << none.status();
  EXPECT_THAT(Shape(*none), ElementsAre(std::tuple(0u, 12u, false)));
}

TEST_F(CutForGraphsTest, MoreGraphsThanAreWorthItAreNone) {
  EXPECT_EQ(Cut(Parse(Chain(12)), {3, 7}, {1, 2}).status().code(), absl::StatusCode::kUnimplemented);
}

TEST_F(CutForGraphsTest, AnOutputThatIsWrittenInPlaceIsMadeOutsideOfGraphs) {
  const cir::Graph program = Parse(Unary(0, "neg", 0, 2, 2) + Unary(1, "exp", 2, 3, 3) +
                                   "#2 aten::relu_(Tensor ! %3) -> (& same %3) source 0\nreturn %3\n");
  const auto parts = Cut(program, {});
  ASSERT_TRUE(parts.ok()) << parts.status();
  EXPECT_THAT(Shape(*parts), ElementsAre(std::tuple(0u, 1u, true), std::tuple(1u, 2u, false)));
  EXPECT_EQ((*parts)[1].reason, "an output is written in place");
  // What nobody but the next part sees has no version that matters.
  const auto hidden = Cut(Parse(Unary(0, "neg", 0, 2, 2) + "#1 aten::relu_(Tensor ! %2) -> (& same %2) source 0\n" +
                                Unary(2, "exp", 2, 3, 3) + "return %3\n"),
                          {2});
  ASSERT_TRUE(hidden.ok()) << hidden.status();
  EXPECT_THAT(Shape(*hidden), ElementsAre(std::tuple(0u, 2u, true), std::tuple(2u, 1u, false)));
}

TEST_F(CutForGraphsTest, WhatACutMakesImpossibleIsCutAgain) {
  // The graph's own memory may be written and addressed by offset; that of an earlier part may not.
  const cir::Graph program =
      Parse(Unary(0, "neg", 0, 2, 2) + Unary(1, "exp", 2, 3, 3) +
            "#2 aten::as_strided(Tensor %2, SymInt[] ints[2], SymInt[] ints[1], SymInt? 0) -> (%4 : float32[2]{1} cpu "
            "@2) view source 0\n" +
            Mul(3, 4, 3, 5) + "return %5\n");
  const auto whole = Cut(program, {});
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_EQ(whole->size(), 1u);
  const auto parts = Cut(program, {1});
  ASSERT_TRUE(parts.ok()) << parts.status();
  EXPECT_THAT(Shape(*parts),
              ElementsAre(std::tuple(0u, 1u, true), std::tuple(1u, 2u, false), std::tuple(3u, 1u, true)));
}

TEST_F(CutForGraphsTest, OneWriteOfAnOutputKeepsItsMakerOutsideTooWhereverThatIs) {
  // A copy would count its writes from 0: the part of the maker knows of no write, that of the write of no copy.
  const auto parts =
      Cut(Parse(Unary(0, "neg", 0, 2, 2) + Unary(1, "exp", 2, 3, 3) + Unary(2, "sin", 2, 4, 4) +
                "#3 aten::relu_(Tensor ! %3) -> (& same %3) source 0\n" + Mul(4, 3, 4, 5) + "return %3, %5\n"),
          {2});
  ASSERT_TRUE(parts.ok()) << parts.status();
  EXPECT_THAT(Shape(*parts),
              ElementsAre(std::tuple(0u, 1u, true), std::tuple(1u, 3u, false), std::tuple(4u, 1u, true)));
}

TEST_F(CutForGraphsTest, WhatReadsMemoryBesideTheDeviceIsOutside) {
  const auto parts = Cut(Parse("%2 : float32[2]{1} meta @2 = input 1\n" + Unary(0, "neg", 0, 3, 3) + Mul(1, 3, 2, 4) +
                               Unary(2, "exp", 4, 5, 5) + "return %5\n"),
                         {});
  ASSERT_TRUE(parts.ok()) << parts.status();
  EXPECT_THAT(Shape(*parts),
              ElementsAre(std::tuple(0u, 1u, true), std::tuple(1u, 1u, false), std::tuple(2u, 1u, true)));
  EXPECT_THAT((*parts)[1].reason, HasSubstr("reads memory of meta"));
}

TEST_F(CutForGraphsTest, PartsRunAsTheProgramAndReleaseWhatNobodyTakes) {
  const cir::Graph program = Parse(Unary(0, "neg", 0, 2, 2) + Unary(1, "exp", 2, 3, 3) + Mul(2, 2, 1, 4) +
                                   Mul(3, 4, 3, 5) + "return %5, %0, %3, %5, %1\n");
  auto parts = CutProgram(program, {false, true, false, true});
  ASSERT_TRUE(parts.ok()) << parts.status();
  ASSERT_EQ(parts->size(), 4u);
  const PartSequence sequence(program, *std::move(parts));
  const OwnedTensor x = Floats({0, -1}), weight = Floats({2, 3});
  std::vector<OwnedTensor> outputs;
  OwnedTensor handed_on;  // %2, which part 2 takes last
  std::vector<uint32_t> num_owners;
  const auto run_part = [&](size_t index, absl::Span<const TensorRef> inputs, absl::Span<const TensorRef> captured,
                            std::vector<OwnedTensor>* made) {
    if (handed_on) num_owners.push_back(NumOwners(handed_on));
    const auto plan = ExecutionPlan::Build(sequence.part(index).graph, api_, {});
    if (!plan.ok()) return plan.status();
    absl::Status ran = PlanExecutor::Run(**plan, inputs, captured, made);
    if (index == 0) handed_on = api_->NewReference((*made)[0].ref());
    return ran;
  };
  const absl::Status status = sequence.Run(*api_, {x.ref()}, {weight.ref()}, &outputs, run_part);
  EXPECT_THAT(num_owners, ElementsAre(2, 2, 1));  // when parts 1, 2 and 3 begin
  ASSERT_TRUE(status.ok()) << status;
  ASSERT_EQ(outputs.size(), 5u);
  EXPECT_FLOAT_EQ(Read(outputs[0])[1], 1.0f * 3.0f * std::exp(1.0f));
  EXPECT_EQ(outputs[0].ref().impl(), outputs[3].ref().impl());
  EXPECT_EQ(outputs[1].ref().impl(), x.ref().impl());
  EXPECT_EQ(outputs[4].ref().impl(), weight.ref().impl());
  EXPECT_FLOAT_EQ(Read(outputs[2])[0], 1.0f);
}

TEST_F(CutForGraphsTest, AnErrorOfAPartIsTheSequences) {
  const cir::Graph program = Parse(Unary(0, "neg", 0, 2, 2) + Unary(1, "exp", 2, 3, 3) + "return %3\n");
  const PartSequence sequence(program, *CutProgram(program, {false, true}));
  const OwnedTensor x = Floats({0, -1});
  std::vector<OwnedTensor> outputs;
  EXPECT_EQ(sequence
                .Run(*api_, {x.ref()}, {x.ref()}, &outputs,
                     [&](size_t index, auto, auto, std::vector<OwnedTensor>* made) {
                       if (index == 1) return absl::AbortedError("no");
                       made->push_back(Floats({1, 2}));
                       return absl::OkStatus();
                     })
                .code(),
            absl::StatusCode::kAborted);
  EXPECT_EQ(sequence
                .Run(*api_, {x.ref()}, {x.ref()}, &outputs,
                     [&](size_t, auto, auto, std::vector<OwnedTensor>*) { return absl::OkStatus(); })
                .code(),
            absl::StatusCode::kInternal);
}

}  // namespace
}  // namespace cuvil::scheduler
