// Splits a tensor program into chains of operators and tells which of them are independent of each other.
//
// An operator depends on another by value (it uses its result) or by memory (one of them writes storage that the other
// reads or writes; random operators all write the generator). A subgraph is a maximal chain: every operator but the
// first depends on its predecessor in the chain only, and is the only one that depends on it.
//
// Threads:   pure; any thread.
// Units:     flops and bytes of one call, from the traced sizes; nanoseconds are estimates to compare subgraphs by.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "jit/cir/graph.h"

namespace cuvil::scheduler {

struct OpCost {
  double flops = 0;
  double bytes = 0;  // read and written; zero for views
  double estimate_ns() const;
};

OpCost EstimateCost(const cir::Graph& graph, const cir::Op& op);

struct Subgraph {
  std::vector<uint32_t> ops;           // positions in Graph::ops, in program order
  std::vector<uint32_t> predecessors;  // subgraphs that must have finished
  OpCost cost;
};

struct Partition {
  std::vector<Subgraph> subgraphs;  // in an order that respects the predecessors
  uint32_t max_width = 0;           // most subgraphs that are ready at one time if all take equally long
  double total_ns = 0;
  double critical_path_ns = 0;  // total_ns / critical_path_ns bounds what running them side by side can gain
};

// Looks at the listed operators only (ascending); the others are taken as done beforehand.
Partition PartitionGraph(const cir::Graph& graph, absl::Span<const uint32_t> ops);

std::string PrintPartition(const cir::Graph& graph, const Partition& partition);

}  // namespace cuvil::scheduler
