// Cuts a tensor program into parts that run one after the other, so that what a CUDA graph can hold and what it cannot
// become parts of their own: graph, operators, graph.
//
// A part is a stretch of the program as a program of its own. What an earlier part made is an input of it, the same
// tensor object; so views, writes and identities across parts are what they were. Tensors are handed on, never copied,
// by whoever runs the parts.
//
// Threads:   pure, but for the plans that CutForGraphs asks for.
// Errors:    Unimplemented  constants that parts would have to share, sizes that depend on data
//            Internal       a part does not verify
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "jit/cir/graph.h"
#include "scheduler/execution_plan.h"
#include "scheduler/graph_split.h"

namespace cuvil::scheduler {

struct ProgramPart {
  // Operator i is the program's operator first_op + i; inputs, captured values and constants are those that it uses.
  cir::Graph graph;
  uint32_t first_op = 0;
  bool on_graph = true;              // otherwise its operators run one by one
  std::vector<cir::ValueId> inputs;  // the program's, for graph.inputs
  std::vector<uint32_t> captured;    // positions in the program's, for graph.captured
  std::vector<uint32_t> constants;   // likewise
  std::vector<cir::ValueId>
      outputs;  // the program's, for graph.outputs: what it makes and later parts or the caller use
  std::set<cir::StorageId> versioned;  // of `graph`: memory that the caller sees, with its version counter
  std::string reason;                  // CutForGraphs: why it is not on a graph, of its first operator that is not
};

// One part for each stretch of operators of which `on_host` says the same. Where that is all of them, the part is the
// program, with everything that it has.
absl::StatusOr<std::vector<ProgramPart>> CutProgram(const cir::Graph& program, const std::vector<bool>& on_host);

struct GraphCutOptions {
  // A launch and its copies cost about as much as eager needs for two or three operators.
  uint32_t min_graph_ops = 8;
  // More graphs than this are worth nothing: the host is busy between them.
  uint32_t max_graphs = 16;
};
// Makes the plan of a part's body.
using BodyPlanner =
    std::function<absl::StatusOr<std::shared_ptr<const ExecutionPlan>>(const ProgramPart& part, GraphSplit split)>;

// Cuts such that every part that is meant for a graph can be divided, and captured as far as can be told beforehand.
// `host_reasons`: by operator of the program, what is known to keep it out of a graph; empty otherwise. OK with no part
// on a graph: there is nothing to be had.
absl::StatusOr<std::vector<ProgramPart>> CutForGraphs(const cir::Graph& program, cir::Device device,
                                                      std::vector<std::string> host_reasons,
                                                      const BodyPlanner& plan_body,
                                                      const GraphCutOptions& options = GraphCutOptions());

}  // namespace cuvil::scheduler
