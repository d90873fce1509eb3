#include "scheduler/partition.h"

#include <gtest/gtest.h>

#include <numeric>

#include "jit/cir/text.h"

namespace cuvil::scheduler {
namespace {

Partition PartitionText(const std::string& ops, cir::Graph* graph) {
  auto parsed = cir::Parse("cir 1\nsource 0 \"\"\n%0 : float32[8,8]{8,1} cpu @0 = input 0\n" + ops + "return\n");
  EXPECT_TRUE(parsed.ok()) << parsed.status();
  *graph = *std::move(parsed);
  std::vector<uint32_t> all(graph->ops.size());
  std::iota(all.begin(), all.end(), 0u);
  return PartitionGraph(*graph, all);
}

std::vector<std::vector<uint32_t>> Chains(const Partition& partition) {
  std::vector<std::vector<uint32_t>> chains;
  for (const Subgraph& subgraph : partition.subgraphs) chains.push_back(subgraph.ops);
  return chains;
}

constexpr char kType[] = " : float32[8,8]{8,1} cpu @";

std::string Unary(int op, const char* name, int from, int to, int storage) {
  return "#" + std::to_string(op) + " aten::" + name + "(Tensor %" + std::to_string(from) + ") -> (%" +
         std::to_string(to) + kType + std::to_string(storage) + ") source 0\n";
}

TEST(PartitionTest, BranchesAreIndependentUntilTheyJoin) {
  cir::Graph graph;
  const Partition partition = PartitionText(
      Unary(0, "relu", 0, 1, 1) + Unary(1, "sin", 1, 2, 2) + Unary(2, "cos", 1, 3, 3) + Unary(3, "exp", 2, 4, 4) +
          "#4 aten::add.Tensor(Tensor %4, Tensor %3, Scalar 1) -> (%5 : float32[8,8]{8,1} cpu @5) source 0\n",
      &graph);
  EXPECT_EQ(Chains(partition), (std::vector<std::vector<uint32_t>>{{0}, {1, 3}, {2}, {4}}));
  EXPECT_EQ(partition.max_width, 2u);
  EXPECT_EQ(partition.subgraphs[3].predecessors, (std::vector<uint32_t>{1, 2}));
  EXPECT_LT(partition.critical_path_ns, partition.total_ns);
}

TEST(PartitionTest, InPlaceWritesOrderReadersOfTheSameMemory) {
  cir::Graph graph;
  const std::string view =
      "#1 aten::view(Tensor %1, SymInt[] ints[64]) -> (%2 : float32[64]{1} cpu @1) view source 0\n";
  const Partition partition =
      PartitionText(Unary(0, "relu", 0, 1, 1) + view + Unary(2, "sin", 1, 3, 2) +
                        "#3 aten::zero_(Tensor ! %2) -> (& same %2) source 0\n" + Unary(4, "cos", 1, 4, 3),
                    &graph);
  // zero_ writes what sin reads: it waits for sin; cos reads what zero_ wrote: it waits for zero_.
  for (const Subgraph& subgraph : partition.subgraphs) {
    if (subgraph.ops.front() != 3) continue;
    EXPECT_EQ(subgraph.predecessors.size(), 2u);  // the view and sin
  }
  const auto chains = Chains(partition);
  EXPECT_EQ(chains.back().back(), 4u);
  EXPECT_EQ(partition.max_width, 2u);
}

TEST(PartitionTest, RandomOperatorsKeepTheirOrder) {
  cir::Graph graph;
  const std::string rand =
      " aten::rand(SymInt[] ints[8, 8], ScalarType? none, Layout? none, Device? none, bool? none) -> (%";
  const Partition partition = PartitionText(
      "#0" + rand + "1" + kType + "1) random source 0\n#1" + rand + "2" + kType + "2) random source 0\n", &graph);
  EXPECT_EQ(Chains(partition), (std::vector<std::vector<uint32_t>>{{0, 1}}));
}

TEST(PartitionTest, CountsTheFlopsOfContractions) {
  cir::Graph graph;
  PartitionText(
      "#0 aten::linear(Tensor %0, Tensor %0, Tensor? none) -> (%1 : float32[8,8]{8,1} cpu @1) source 0\n"
      "#1 aten::view(Tensor %1, SymInt[] ints[1, 1, 8, 8]) -> (%2 : float32[1,1,8,8]{64,64,8,1} cpu @1) view source 0\n"
      "#2 aten::conv2d(Tensor %2, Tensor %2, Tensor? none, SymInt[] ints[1, 1], SymInt[] ints[0, 0], SymInt[] "
      "ints[1, 1], SymInt 1) -> (%3 : float32[1,1,1,1]{1,1,1,1} cpu @2) source 0\n",
      &graph);
  EXPECT_EQ(EstimateCost(graph, graph.ops[0]).flops, 2.0 * 8 * 8 * 8);
  EXPECT_EQ(EstimateCost(graph, graph.ops[0]).bytes, 3.0 * 64 * 4);
  EXPECT_EQ(EstimateCost(graph, graph.ops[1]).bytes, 0.0);
  EXPECT_EQ(EstimateCost(graph, graph.ops[2]).flops, 2.0 * 64);
}

}  // namespace
}  // namespace cuvil::scheduler
