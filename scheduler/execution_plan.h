// A tensor program as a fixed list of prepared calls with the cells they read and fill, and when each cell is emptied.
//
// What is decided here: the way each operator is called; operators that need not run at all (they hand an argument
// back, make a view nobody uses, or compute the same constant every time); constants of the call that must be made anew
// for each run because the program writes or returns them; when each tensor is released; how the memory of the
// intermediate tensors would be packed; which operators are independent.
//
// Threads:   immutable after Build; any number of threads run it at once.
// Ownership: holds its constants and the library; borrows nothing.
// Errors:    Build: InvalidArgument  the graph does not verify, or the constants do not fit it
//                   Unimplemented    an operator that no way can call, if Python steps are not allowed
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "jit/cir/graph.h"
#include "memory/memory_plan.h"
#include "scheduler/partition.h"
#include "scheduler/python_step.h"
#include "scheduler/torch/prepared_call.h"
#include "scheduler/torch/torch_api.h"

namespace cuvil::scheduler {

enum class Mechanism : uint8_t {
  kUnboxed,     // torch's C++ entry point
  kDispatcher,  // torch's boxed C shim
  kClone,       // a constant is made anew
  kPython,      // the callback
};

struct BuildOptions {
  std::vector<torch_abi::OwnedTensor> constants;  // one for each of Graph::constants
  ConstantMaterializer* materializer = nullptr;   // borrowed for Build
  bool allow_python_steps = true;
  bool allow_unboxed = true;
  bool fold_constants = true;
  std::vector<uint32_t> left_out_ops;  // somebody else runs them; nothing that stays may need their results
  bool write_in_place = true;          // let operators write over operands that nobody else looks at
  // Number of the dispatch key that tracks views and versions; factories run without it, as torch's Python functions
  // do (cir::IsUntrackedFactory). Negative: they run with it.
  int32_t view_tracking_key = -1;
  // FloatingPointMode() of the traced thread: constants are computed in it, whichever thread builds.
  uint32_t floating_point_mode = 0;
  size_t max_folded_bytes = size_t{16} << 20;  // of one folded result; larger ones are cheap to make compared to keep
};

struct PlanStep {
  Mechanism mechanism{};
  uint32_t op = 0;                       // position in Graph::ops; for kClone the position of the first user
  uint32_t call = 0;                     // position in the plan's calls
  bool untracked = false;                // run without the key that tracks views and versions
  std::vector<uint32_t> operand_cells;   // kPython: in the order of OperandValues
  std::vector<uint32_t> result_cells;    // kPython
  std::vector<uint32_t> released_cells;  // emptied after the step
};

struct PlanCounts {
  uint32_t unboxed = 0, dispatcher = 0, clones = 0, python = 0;  // steps
  uint32_t linear = 0;                                           // of the unboxed ones: LinearCall
  uint32_t elided = 0;    // operators that hand an argument back, or make something that nobody uses
  uint32_t folded = 0;    // operators whose results are constants
  uint32_t in_place = 0;  // operators that write over their operand, though the program did not ask for it
};

// Steps are numbered by position; last_step == number of steps means "returned".
struct StorageLifetime {
  cir::StorageId storage;
  uint32_t first_step = 0;
  uint32_t last_step = 0;
  size_t size_bytes = 0;
};

class ExecutionPlan {
 public:
  static absl::StatusOr<std::shared_ptr<const ExecutionPlan>> Build(cir::Graph graph,
                                                                    std::shared_ptr<const torch_abi::TorchApi> api,
                                                                    BuildOptions options);

  const cir::Graph& graph() const { return graph_; }
  const torch_abi::TorchApi& api() const { return *api_; }
  absl::Span<const PlanStep> steps() const { return steps_; }
  const torch_abi::PreparedCall& call(const PlanStep& step) const { return calls_[step.call]; }
  const PlanCounts& counts() const { return counts_; }
  uint16_t view_tracking_key() const { return view_tracking_key_; }

  // Memory that steps make: when it lives, and how it would be packed into one arena.
  absl::Span<const StorageLifetime> lifetimes() const { return lifetimes_; }
  const memory::MemoryPlan& memory_plan() const { return memory_plan_; }
  const Partition& partition() const { return partition_; }

  // The cells a run starts with: constants are filled, the rest is null. Values have their own index.
  absl::Span<void* const> initial_cells() const { return initial_cells_; }
  // Cells that a run may own when it is interrupted.
  absl::Span<const uint32_t> owned_cells() const { return owned_cells_; }

  struct Output {
    uint32_t cell;
    bool moves;  // the last use of a cell that the run owns; otherwise a new reference is made
  };
  absl::Span<const Output> outputs() const { return outputs_; }

  // "#3 aten::view (model.py:12 in forward)"
  std::string DescribeOp(uint32_t op) const;
  // Steps, releases, memory, subgraphs.
  std::string Dump() const;

 private:
  friend class PlanBuilder;
  ExecutionPlan() = default;

  cir::Graph graph_;
  std::shared_ptr<const torch_abi::TorchApi> api_;
  std::vector<PlanStep> steps_;
  std::vector<torch_abi::PreparedCall> calls_;
  PlanCounts counts_;
  std::vector<StorageLifetime> lifetimes_;
  memory::MemoryPlan memory_plan_;
  Partition partition_;
  uint16_t view_tracking_key_ = 0;
  std::vector<void*> initial_cells_;
  std::vector<torch_abi::OwnedTensor> constants_;
  std::vector<uint32_t> owned_cells_;
  std::vector<Output> outputs_;
};

}  // namespace cuvil::scheduler
