#include "scheduler/execution_plan.h"

#include <algorithm>
#include <limits>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "jit/cir/op_traits.h"
#include "jit/cir/reproducible.h"
#include "jit/cir/text.h"
#include "jit/cir/verifier.h"
#include "memory/plan_verifier.h"
#include "scheduler/floating_point_mode.h"
#include "scheduler/in_place.h"
#include "scheduler/torch/warning_notice.h"

namespace cuvil::scheduler {
namespace {

using cir::Op;
using cir::Origin;
using cir::Result;
using cir::ResultForm;
using cir::ValueId;
using torch_abi::OwnedTensor;
using torch_abi::TensorRef;

constexpr uint32_t kNever = std::numeric_limits<uint32_t>::max();
constexpr size_t kAlignmentBytes = 64;

std::vector<ValueId> NewValues(const Op& op) {
  std::vector<ValueId> values;
  for (const Result& result : op.results) {
    if (cir::MakesValues(result)) values.insert(values.end(), result.values.begin(), result.values.end());
  }
  return values;
}

// Changes nothing but autograd metadata, of which a tensor that requires no gradient has none that matters. Factories
// like torch.tensor end with it, and it must not make their constants look written.
bool IsIdleDetach(const cir::Graph& graph, const Op& op) {
  if (op.name != "aten::detach_" || op.operands.size() != 1) return false;
  const auto* value = std::get_if<ValueId>(&op.operands[0]);
  return value != nullptr && !graph.value(*value).type.requires_grad;
}

Op CloneOp(uint32_t from_cell, uint32_t to_cell) {
  Op op;
  op.name = "aten::clone";
  op.kinds = {cir::ArgKind::kTensor, cir::ArgKind::kOptionalMemoryFormat};
  op.operands = {ValueId{from_cell}, cir::Attr(cir::NoneAttr{})};
  op.results = {Result{cir::ReturnKind::kTensor, ResultForm::kNew, {ValueId{to_cell}}}};
  return op;
}

}  // namespace

class PlanBuilder {
 public:
  PlanBuilder(cir::Graph graph, std::shared_ptr<const torch_abi::TorchApi> api, BuildOptions options)
      : plan_(new ExecutionPlan()), options_(std::move(options)) {
    plan_->graph_ = std::move(graph);
    plan_->api_ = std::move(api);
    if (options_.allow_unboxed) features_ = plan_->api_->abi();
  }

  absl::StatusOr<std::shared_ptr<const ExecutionPlan>> Build() {
    const FloatingPointModeScope mode(options_.floating_point_mode);
    if (absl::Status s = cir::Verify(graph()); !s.ok()) return s;
    // Whoever runs the left out operators may look at anything.
    if (options_.write_in_place && options_.left_out_ops.empty()) {
      plan_->counts_.in_place = WriteInPlace(&plan_->graph_);
    }
    plan_->initial_cells_.assign(graph().values.size(), nullptr);
    is_constant_.assign(graph().values.size(), false);
    owned_by_run_.assign(graph().values.size(), false);
    FindIdleOps();
    FindStorageUse();
    if (absl::Status s = PlaceConstants(); !s.ok()) return s;
    FindDeadOps();
    for (uint32_t i = 0; i < graph().ops.size(); ++i) {
      if (absl::Status s = PlaceOp(i); !s.ok()) return s;
    }
    for (const ValueId id : graph().outputs) {
      if (absl::Status s = MakeConstantAnew(id, static_cast<uint32_t>(graph().ops.size())); !s.ok()) return s;
    }
    PlaceOutputs();
    PlaceReleases();
    if (absl::Status s = PlanArena(); !s.ok()) return s;
    std::vector<uint32_t> ops;
    for (const PlanStep& step : plan_->steps_) {
      if (step.mechanism != Mechanism::kClone) ops.push_back(step.op);
    }
    plan_->partition_ = PartitionGraph(graph(), ops);
    return std::shared_ptr<const ExecutionPlan>(std::move(plan_));
  }

 private:
  const cir::Graph& graph() const { return plan_->graph_; }
  const torch_abi::TorchApi& api() const { return *plan_->api_; }

  uint32_t AddConstantCell(OwnedTensor tensor) {
    plan_->initial_cells_.push_back(tensor.ref().impl());
    plan_->constants_.push_back(std::move(tensor));
    return static_cast<uint32_t>(plan_->initial_cells_.size() - 1);
  }
  void SetConstant(ValueId id, OwnedTensor tensor) {
    plan_->initial_cells_[id.index] = tensor.ref().impl();
    plan_->constants_.push_back(std::move(tensor));
    is_constant_[id.index] = true;
  }

  // Operators that only hand an argument back: the value has its tensor already.
  void FindIdleOps() {
    idle_.assign(graph().ops.size(), false);
    for (size_t i = 0; i < graph().ops.size(); ++i) {
      const Op& op = graph().ops[i];
      if (IsIdleDetach(graph(), op)) {
        idle_[i] = true;
        continue;
      }
      if (op.results.empty() || op.effects.writes != 0 || op.effects.is_random) continue;
      bool same = false;
      bool makes_values = false;
      for (const Result& result : op.results) {
        same |= result.form == ResultForm::kSame;
        makes_values |= cir::MakesValues(result);
      }
      idle_[i] = same && !makes_values;
    }
  }

  void FindStorageUse() {
    for (size_t i = 0; i < graph().ops.size(); ++i) {
      if (idle_[i]) continue;
      const Op& op = graph().ops[i];
      for (size_t operand = 0; operand < op.operands.size(); ++operand) {
        if (((op.effects.writes >> operand) & 1) == 0) continue;
        if (const auto* id = std::get_if<ValueId>(&op.operands[operand])) {
          fixed_storages_.insert(graph().value(*id).storage);
        } else if (const auto* list = std::get_if<cir::ValueList>(&op.operands[operand])) {
          for (const auto& element : *list) {
            if (element.has_value()) fixed_storages_.insert(graph().value(*element).storage);
          }
        }
      }
    }
    for (const ValueId id : graph().outputs) fixed_storages_.insert(graph().value(id).storage);
  }

  // Written or visible afterwards: two runs must not share it.
  bool MustBeFresh(ValueId id) const { return fixed_storages_.contains(graph().value(id).storage); }

  absl::Status PlaceConstants() {
    if (options_.constants.size() != graph().constants.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("the graph has ", graph().constants.size(), " constants, given ", options_.constants.size()));
    }
    std::set<cir::StorageId> seen;
    fresh_source_.assign(graph().values.size(), kNever);
    for (size_t i = 0; i < graph().constants.size(); ++i) {
      const ValueId id = graph().constants[i];
      if (!options_.constants[i]) return absl::InvalidArgumentError(absl::StrCat("constant ", i, " is missing"));
      if (!MustBeFresh(id)) {
        SetConstant(id, std::move(options_.constants[i]));
        continue;
      }
      if (!seen.insert(graph().value(id).storage).second) {
        return absl::UnimplementedError("two constants share memory that the program writes or returns");
      }
      fresh_source_[id.index] = AddConstantCell(std::move(options_.constants[i]));
    }
    return absl::OkStatus();
  }

  // Views and factories whose results nobody uses. Other unused operators stay: they may raise for other data.
  void FindDeadOps() {
    std::vector<bool> used(graph().values.size(), false);
    for (const ValueId id : graph().outputs) used[id.index] = true;
    dead_.assign(graph().ops.size(), false);
    for (const uint32_t op : options_.left_out_ops) dead_[op] = true;
    for (size_t i = graph().ops.size(); i-- > 0;) {
      if (idle_[i] || dead_[i]) continue;
      const Op& op = graph().ops[i];
      bool needed = op.effects.writes != 0 || op.effects.is_random || op.results.empty() || cir::MayWarn(op) ||
                    !(op.effects.is_view || cir::IsDeterministicFactory(op) || cir::IsUninitialized(op));
      for (const Result& result : op.results) {
        for (const ValueId id : result.values) needed |= used[id.index];
      }
      dead_[i] = !needed;
      if (!needed) continue;
      for (const ValueId id : cir::OperandValues(op)) used[id.index] = true;
    }
  }

  absl::Status PlaceOp(uint32_t i) {
    const Op& op = graph().ops[i];
    if (idle_[i] || dead_[i]) {
      ++plan_->counts_.elided;
      return absl::OkStatus();
    }
    if (Fold(op)) {
      ++plan_->counts_.folded;
      return absl::OkStatus();
    }
    for (const ValueId id : cir::OperandValues(op)) {
      if (absl::Status s = MakeConstantAnew(id, i); !s.ok()) return s;
    }
    absl::StatusOr<torch_abi::PreparedCall> call = torch_abi::PreparedCall::CreateIn(graph(), api(), op, features_);
    if (call.ok()) {
      plan_->counts_.linear += call->is_linear() ? 1 : 0;
      const bool unboxed = call->kind() == torch_abi::CallKind::kUnboxed;
      ++(unboxed ? plan_->counts_.unboxed : plan_->counts_.dispatcher);
      AddStep(unboxed ? Mechanism::kUnboxed : Mechanism::kDispatcher, i, *std::move(call), NewValues(op));
      return absl::OkStatus();
    }
    if (cir::IsDeterministicFactory(op) && options_.materializer != nullptr) {
      absl::StatusOr<std::vector<OwnedTensor>> tensors = options_.materializer->Materialize(op);
      if (tensors.ok()) return PlaceMaterialized(op, i, *std::move(tensors));
    }
    if (!options_.allow_python_steps) return call.status();
    PlanStep step;
    step.mechanism = Mechanism::kPython;
    step.op = i;
    for (const ValueId id : cir::OperandValues(op)) step.operand_cells.push_back(id.index);
    for (const ValueId id : NewValues(op)) {
      step.result_cells.push_back(id.index);
      owned_by_run_[id.index] = true;
    }
    plan_->steps_.push_back(std::move(step));
    ++plan_->counts_.python;
    return absl::OkStatus();
  }

  void AddStep(Mechanism mechanism, uint32_t op, torch_abi::PreparedCall call, const std::vector<ValueId>& made) {
    PlanStep step;
    step.mechanism = mechanism;
    step.op = op;
    if (mechanism != Mechanism::kClone && options_.view_tracking_key >= 0 && api().set_key_excluded != nullptr &&
        api().is_key_excluded != nullptr) {
      step.untracked = cir::IsUntrackedFactory(plan_->graph_.ops[op]);
      plan_->view_tracking_key_ = static_cast<uint16_t>(options_.view_tracking_key);
    }
    step.call = static_cast<uint32_t>(plan_->calls_.size());
    plan_->calls_.push_back(std::move(call));
    plan_->steps_.push_back(std::move(step));
    for (const ValueId id : made) owned_by_run_[id.index] = true;
  }

  absl::Status AddClone(uint32_t from_cell, ValueId to, uint32_t op) {
    absl::StatusOr<torch_abi::PreparedCall> call =
        torch_abi::PreparedCall::Create(api(), CloneOp(from_cell, to.index), features_);
    if (!call.ok()) return call.status();
    AddStep(Mechanism::kClone, op, *std::move(call), {to});
    ++plan_->counts_.clones;
    return absl::OkStatus();
  }

  // The first use of a constant that each run needs its own copy of.
  absl::Status MakeConstantAnew(ValueId id, uint32_t op) {
    const uint32_t source = fresh_source_[id.index];
    if (source == kNever) return absl::OkStatus();
    fresh_source_[id.index] = kNever;
    return AddClone(source, id, op);
  }

  absl::Status PlaceMaterialized(const Op& op, uint32_t i, std::vector<OwnedTensor> tensors) {
    const std::vector<ValueId> values = NewValues(op);
    if (tensors.size() != values.size()) {
      return absl::InternalError(absl::StrCat(plan_->DescribeOp(i), ": materialized ", tensors.size(), " tensors, ",
                                              values.size(), " expected"));
    }
    for (size_t v = 0; v < values.size(); ++v) {
      if (!MustBeFresh(values[v])) {
        SetConstant(values[v], std::move(tensors[v]));
        continue;
      }
      if (absl::Status s = AddClone(AddConstantCell(std::move(tensors[v])), values[v], i); !s.ok()) return s;
    }
    return absl::OkStatus();
  }

  // Computes the operator now if it can only ever give the same where the plan serves: grad mode, inference mode,
  // autocast, default dtype and floating-point mode are guarded. False leaves everything as it was.
  bool Fold(const Op& op) {
    if (!options_.fold_constants || !cir::IsPure(op) || !cir::IsReproducible(graph(), op)) return false;
    for (const ValueId id : cir::OperandValues(op)) {
      if (!is_constant_[id.index]) return false;
    }
    const std::vector<ValueId> made = NewValues(op);
    for (const ValueId id : made) {
      const cir::Value& value = graph().value(id);
      if (value.dynamic_shape || MustBeFresh(id)) return false;
      if (static_cast<size_t>(value.type.span_bytes()) > options_.max_folded_bytes) return false;
    }
    absl::StatusOr<torch_abi::PreparedCall> call = torch_abi::PreparedCall::Create(api(), op, features_);
    if (!call.ok()) return false;
    std::vector<void*> cells = plan_->initial_cells_;
    const torch_abi::WarningNotice warnings(api());
    if (!call->Invoke(api(), cells.data()).ok()) return false;
    std::vector<OwnedTensor> tensors;
    bool as_traced = !warnings.noticed();
    for (const ValueId id : made) {
      tensors.push_back(api().TakeCell(&cells[id.index]));
      // Autocast or another default dtype on this thread would show here.
      as_traced &= HasType(tensors.back().ref(), graph().value(id).type);
    }
    if (!as_traced) return false;
    for (size_t i = 0; i < made.size(); ++i) SetConstant(made[i], std::move(tensors[i]));
    return true;
  }

  bool HasType(TensorRef tensor, const cir::TensorType& type) const {
    int64_t dim = 0;
    int64_t* sizes = nullptr;
    int64_t* strides = nullptr;
    if (api().get_dim(tensor.handle(), &dim) != 0 || api().get_sizes(tensor.handle(), &sizes) != 0 ||
        api().get_strides(tensor.handle(), &strides) != 0) {
      return false;
    }
    return api().DTypeOf(tensor) == type.dtype && static_cast<size_t>(dim) == type.sizes.size() &&
           std::equal(type.sizes.begin(), type.sizes.end(), sizes) &&
           std::equal(type.strides.begin(), type.strides.end(), strides);
  }

  void PlaceOutputs() {
    std::vector<bool> seen(graph().values.size(), false);
    plan_->outputs_.resize(graph().outputs.size());
    // The last mention of a cell takes its reference.
    for (size_t i = graph().outputs.size(); i-- > 0;) {
      const uint32_t cell = graph().outputs[i].index;
      plan_->outputs_[i] = {cell, owned_by_run_[cell] && !seen[cell]};
      seen[cell] = true;
    }
    for (uint32_t cell = 0; cell < owned_by_run_.size(); ++cell) {
      if (owned_by_run_[cell]) plan_->owned_cells_.push_back(cell);
    }
  }

  // Calls visit(cell) for every value that a step reads, makes or compares with.
  template <typename Visit>
  void ForEachCell(const PlanStep& step, const Visit& visit) const {
    if (step.mechanism == Mechanism::kClone) return;
    const Op& op = graph().ops[step.op];
    for (const ValueId id : cir::OperandValues(op)) visit(id.index);
    for (const Result& result : op.results) {
      for (const ValueId id : result.values) visit(id.index);
    }
  }

  void PlaceReleases() {
    const auto num_steps = static_cast<uint32_t>(plan_->steps_.size());
    first_step_.assign(graph().values.size(), kNever);
    last_step_.assign(graph().values.size(), 0);
    for (uint32_t s = 0; s < num_steps; ++s) {
      ForEachCell(plan_->steps_[s], [&](uint32_t cell) {
        first_step_[cell] = std::min(first_step_[cell], s);
        last_step_[cell] = s;
      });
    }
    for (const ValueId id : graph().outputs) last_step_[id.index] = num_steps;
    for (const uint32_t cell : plan_->owned_cells_) {
      if (last_step_[cell] < num_steps) plan_->steps_[last_step_[cell]].released_cells.push_back(cell);
    }
  }

  absl::Status PlanArena() {
    // One interval for each storage that the run makes, over all tensors that share it.
    std::vector<StorageLifetime>& lifetimes = plan_->lifetimes_;
    std::vector<uint32_t> position;
    for (const uint32_t cell : plan_->owned_cells_) {
      const cir::Value& value = graph().values[cell];
      const uint32_t storage = value.storage.index;
      if (position.size() <= storage) position.resize(storage + 1, kNever);
      const uint32_t first = std::min(first_step_[cell], last_step_[cell]);
      if (position[storage] == kNever) {
        position[storage] = static_cast<uint32_t>(lifetimes.size());
        lifetimes.push_back({value.storage, first, last_step_[cell], 0});
      }
      StorageLifetime& lifetime = lifetimes[position[storage]];
      lifetime.first_step = std::min(lifetime.first_step, first);
      lifetime.last_step = std::max(lifetime.last_step, last_step_[cell]);
      lifetime.size_bytes = std::max(lifetime.size_bytes, static_cast<size_t>(value.type.span_bytes()));
    }
    // Views of inputs, weights and constants live in memory that the run does not make.
    std::set<cir::StorageId> foreign;
    for (size_t i = 0; i < graph().values.size(); ++i) {
      const cir::Value& value = graph().values[i];
      if (value.origin == Origin::kInput || value.origin == Origin::kCaptured || is_constant_[i]) {
        foreign.insert(value.storage);
      }
    }
    std::erase_if(lifetimes, [&](const StorageLifetime& l) { return foreign.contains(l.storage); });

    std::vector<memory::LiveInterval> intervals;
    intervals.reserve(lifetimes.size());
    for (const StorageLifetime& l : lifetimes) intervals.push_back({l.first_step, l.last_step, l.size_bytes});
    absl::StatusOr<memory::MemoryPlan> plan = memory::PlanMemory(intervals, {.alignment_bytes = kAlignmentBytes});
    if (!plan.ok()) return plan.status();
    if (absl::Status s = memory::VerifyMemoryPlan(intervals, *plan, kAlignmentBytes); !s.ok()) return s;
    plan_->memory_plan_ = *std::move(plan);
    return absl::OkStatus();
  }

  std::shared_ptr<ExecutionPlan> plan_;
  BuildOptions options_;
  torch_abi::AbiFeatures features_;
  std::vector<bool> idle_;
  std::vector<bool> dead_;
  std::set<cir::StorageId> fixed_storages_;
  std::vector<bool> is_constant_;       // by value: the same tensor in every run
  std::vector<bool> owned_by_run_;      // by value: made by a step
  std::vector<uint32_t> fresh_source_;  // by value: the cell of the constant that is to be cloned
  std::vector<uint32_t> first_step_;    // by value
  std::vector<uint32_t> last_step_;
};

absl::StatusOr<std::shared_ptr<const ExecutionPlan>> ExecutionPlan::Build(
    cir::Graph graph, std::shared_ptr<const torch_abi::TorchApi> api, BuildOptions options) {
  return PlanBuilder(std::move(graph), std::move(api), std::move(options)).Build();
}

std::string ExecutionPlan::DescribeOp(uint32_t op) const {
  if (op >= graph_.ops.size()) return "the end of the plan";
  const std::string& source = graph_.sources[graph_.ops[op].source];
  return absl::StrCat("#", op, " ", cir::QualifiedName(graph_.ops[op]), source.empty() ? "" : " (", source,
                      source.empty() ? "" : ")");
}

std::string ExecutionPlan::Dump() const {
  constexpr const char* kMechanisms[] = {"unboxed", "dispatcher", "clone", "python"};
  std::string out = absl::StrCat("plan: ", steps_.size(), " steps (", counts_.unboxed, " unboxed, ", counts_.dispatcher,
                                 " dispatcher, ", counts_.clones, " clones, ", counts_.python, " python), ",
                                 counts_.elided, " operators elided, ", counts_.folded, " folded, ", counts_.in_place,
                                 " in place, ", counts_.linear, " linear layers as one product\n");
  absl::StrAppend(&out, "memory: ", memory_plan_.high_water_bytes, " bytes in one arena, ",
                  memory_plan_.live_peak_bytes, " live at the peak, ", memory_plan_.sum_bytes,
                  " in separate buffers\n");
  for (size_t s = 0; s < steps_.size(); ++s) {
    const PlanStep& step = steps_[s];
    absl::StrAppend(&out, "  step ", s, " ", kMechanisms[static_cast<size_t>(step.mechanism)], " ");
    if (step.mechanism == Mechanism::kClone) {
      absl::StrAppend(&out, "before #", step.op);
    } else {
      absl::StrAppend(&out, cir::PrintOp(graph_, step.op));
    }
    if (!step.released_cells.empty()) {
      absl::StrAppend(&out, " | releases ", absl::StrJoin(step.released_cells, " ", [](std::string* text, uint32_t c) {
        absl::StrAppend(text, "%", c);
      }));
    }
    out += "\n";
  }
  absl::StrAppend(&out, "  returns ", absl::StrJoin(outputs_, " ", [](std::string* text, const Output& o) {
    absl::StrAppend(text, "%", o.cell);
  }));
  absl::StrAppend(&out, "\n", PrintPartition(graph_, partition_));
  return out;
}

}  // namespace cuvil::scheduler
