#include "scheduler/graph_split.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "jit/cir/verifier.h"

namespace cuvil::scheduler {
namespace {

using cir::Graph;
using cir::Op;
using cir::Origin;
using cir::Result;
using cir::StorageId;
using cir::ValueId;

std::string Place(const Graph& graph, uint32_t op) {
  const std::string& source = graph.sources[graph.ops[op].source];
  return absl::StrCat("#", op, " ", cir::QualifiedName(graph.ops[op]), source.empty() ? "" : " (", source,
                      source.empty() ? "" : ")");
}

// Every element has a place of its own and no place is left over, so that a copy has the same strides.
bool IsDense(const cir::TensorType& type) {
  return type.span_bytes() == type.num_elements() * cir::ElementSizeBytes(type.dtype);
}

class Splitter {
 public:
  Splitter(const Graph& graph, const SplitOptions& options) : graph_(graph), options_(options) {}

  absl::StatusOr<GraphSplit> Split() {
    GraphSplit split;
    split.body = graph_;
    split.body.outputs.clear();
    for (const ValueId output : graph_.outputs) {
      if (absl::Status s = Need(output); !s.ok()) return s;
    }
    return Assemble(std::move(split));
  }

 private:
  // Notes what the tail has to do for this value.
  absl::Status Need(ValueId id) {
    if (!needed_.insert(id).second) return absl::OkStatus();
    const cir::Value& value = graph_.value(id);
    switch (value.origin) {
      case Origin::kInput:
      case Origin::kCaptured:
        return absl::OkStatus();
      case Origin::kConstant:
        return absl::UnimplementedError("an output is a constant of the call");
      case Origin::kResult:
        break;
    }
    const Op& op = graph_.ops[value.origin_index];
    for (const ValueId operand : cir::OperandValues(op)) {
      if (graph_.value(operand).storage != value.storage) continue;
      // A view: made again from what it views, if that is all its operands say.
      if (op.effects.writes != 0 || op.effects.is_random) {
        return absl::UnimplementedError(
            absl::StrCat("an output is a view made by ", Place(graph_, value.origin_index)));
      }
      for (const ValueId each : cir::OperandValues(op)) {
        if (graph_.value(each).storage != value.storage) {
          return absl::UnimplementedError(
              absl::StrCat("an output is a view that depends on data, ", Place(graph_, value.origin_index)));
        }
        if (absl::Status s = Need(each); !s.ok()) return s;
      }
      view_ops_.insert(value.origin_index);
      return absl::OkStatus();
    }
    return Keep(id);
  }

  // The first tensor of its memory: what the body makes and the tail gets a copy of.
  absl::Status Keep(ValueId id) {
    const cir::Value& value = graph_.value(id);
    if (options_.hidden_views.contains(id)) return RunInTail(value.origin_index);
    if (!IsDense(value.type)) return absl::UnimplementedError("an output's memory has gaps or overlaps");
    if (value.type.requires_grad) return absl::UnimplementedError("an output requires a gradient");
    const auto [kept, inserted] = kept_by_storage_.emplace(value.storage, id);
    if (!inserted) return absl::UnimplementedError("two outputs share memory in a way that no view explains");
    // A copy starts at version 0 where eager's tensor has counted its writes.
    if (!value.type.is_inference && IsVersioned(value.storage) && Written(value.storage)) {
      return absl::UnimplementedError("an output is written in place");
    }
    return absl::OkStatus();
  }

  // The operator reads what the body leaves behind, which must be what it would have read in its place.
  absl::Status RunInTail(uint32_t index) {
    const Op& op = graph_.ops[index];
    if (op.effects.writes != 0 || op.effects.is_random) {
      return absl::UnimplementedError(absl::StrCat("an output is a view made by ", Place(graph_, index)));
    }
    for (const ValueId id : cir::OperandValues(op)) {
      const cir::Value& value = graph_.value(id);
      if (value.origin == Origin::kConstant) {
        return absl::UnimplementedError(absl::StrCat("an output depends on a constant, ", Place(graph_, index)));
      }
      for (uint32_t later = index + 1; later < graph_.ops.size(); ++later) {
        if (Writes(graph_.ops[later], value.storage)) {
          return absl::UnimplementedError(
              absl::StrCat("an operand of ", Place(graph_, index), " is written by ", Place(graph_, later)));
        }
      }
      if (value.origin == Origin::kResult) raw_.insert(id);
      if (value.origin == Origin::kCaptured) needed_.insert(id);
    }
    for (const Result& result : op.results) {
      for (const ValueId id : result.values) {
        const StorageId storage = graph_.value(id).storage;
        if (!graph_.value(id).type.is_inference && IsVersioned(storage) && Written(storage)) {
          return absl::UnimplementedError("an output is written in place");
        }
      }
    }
    tail_ops_.insert(index);
    return absl::OkStatus();
  }

  bool IsVersioned(StorageId storage) const {
    return options_.versioned == nullptr || options_.versioned->contains(storage);
  }
  bool Writes(const Op& op, StorageId storage) const {
    return std::ranges::any_of(cir::WrittenValues(op), [&](ValueId id) { return graph_.value(id).storage == storage; });
  }
  bool Written(StorageId storage) const {
    for (const Op& op : graph_.ops) {
      if (Writes(op, storage)) return true;
    }
    return false;
  }

  bool IsUsedInBody(uint32_t index) const {
    std::set<StorageId> made;
    for (const Result& result : graph_.ops[index].results) {
      for (const ValueId id : result.values) made.insert(graph_.value(id).storage);
    }
    for (uint32_t later = index + 1; later < graph_.ops.size(); ++later) {
      if (view_ops_.contains(later)) continue;
      for (const ValueId id : cir::OperandValues(graph_.ops[later])) {
        if (made.contains(graph_.value(id).storage)) return true;
      }
    }
    return false;
  }

  absl::StatusOr<GraphSplit> Assemble(GraphSplit split) {
    cir::GraphBuilder builder;
    std::map<StorageId, StorageId> storages;
    const auto storage_of = [&](StorageId old) {
      const auto found = storages.find(old);
      return found != storages.end() ? found->second : storages.emplace(old, builder.NewStorage()).first->second;
    };
    std::map<ValueId, ValueId> renamed;
    for (const ValueId id : graph_.inputs) {
      renamed[id] = builder.AddInput(graph_.value(id).type, storage_of(graph_.value(id).storage));
    }
    for (uint32_t i = 0; i < graph_.captured.size(); ++i) {
      const ValueId id = graph_.captured[i];
      if (!needed_.contains(id)) continue;
      renamed[id] = builder.AddCaptured(graph_.value(id).type, storage_of(graph_.value(id).storage));
      split.tail_captured.push_back(i);
    }
    for (const auto& [storage, id] : kept_by_storage_) {
      split.body.outputs.push_back(id);
      renamed[id] = builder.AddCaptured(graph_.value(id).type, storage_of(storage));
    }
    split.num_copies = static_cast<uint32_t>(kept_by_storage_.size());
    std::map<ValueId, ValueId> raw;
    for (const ValueId id : raw_) {
      split.body.outputs.push_back(id);
      raw[id] = builder.AddCaptured(graph_.value(id).type, builder.NewStorage());
    }
    std::set<uint32_t> ops = tail_ops_;
    ops.insert(view_ops_.begin(), view_ops_.end());
    for (const uint32_t index : ops) {
      Op op = graph_.ops[index];
      op.source = builder.AddSource(graph_.sources[op.source]);
      const bool reads_raw = tail_ops_.contains(index);
      const auto name_of = [&](ValueId id) {
        const auto found = raw.find(id);
        return reads_raw && found != raw.end() ? found->second : renamed.at(id);
      };
      cir::RenameOperands(&op, name_of);
      for (Result& result : op.results) {
        for (ValueId& id : result.values) {
          if (cir::MakesValues(result)) {
            const cir::Value& value = graph_.value(id);
            renamed[id] = builder.AddResultValue(value.type, storage_of(value.storage), value.dynamic_shape);
          }
          id = renamed.at(id);
        }
      }
      builder.AddOp(std::move(op));
    }
    for (const ValueId id : graph_.outputs) builder.AddOutput(renamed.at(id));
    absl::StatusOr<Graph> tail = std::move(builder).Build();
    if (!tail.ok()) return absl::InternalError(absl::StrCat("the tail: ", tail.status().message()));
    split.tail = *std::move(tail);
    for (const uint32_t index : tail_ops_) {
      if (!IsUsedInBody(index)) split.left_out_ops.push_back(index);
    }
    return split;
  }

  const Graph& graph_;
  const SplitOptions& options_;
  std::set<ValueId> needed_;
  std::set<uint32_t> view_ops_;
  std::set<uint32_t> tail_ops_;
  std::set<ValueId> raw_;  // operands of tail_ops_ that the body makes
  std::map<StorageId, ValueId> kept_by_storage_;
};

// Memory that belongs to the caller.
std::set<StorageId> ForeignStorages(const Graph& graph) {
  std::set<StorageId> foreign;
  for (const cir::Value& value : graph.values) {
    if (value.origin == Origin::kInput || value.origin == Origin::kCaptured) foreign.insert(value.storage);
  }
  return foreign;
}

// Empty if the step can be captured.
std::string WhyNot(const ExecutionPlan& plan, const PlanStep& step, cir::Device device,
                   const std::set<StorageId>& foreign) {
  const Graph& graph = plan.graph();
  const std::string place = plan.DescribeOp(step.op);
  if (step.mechanism == Mechanism::kClone) return absl::StrCat("a constant is written by ", place);
  if (step.mechanism == Mechanism::kPython) return absl::StrCat("only Python can call ", place);
  const Op& op = graph.ops[step.op];
  const auto is_elsewhere = [&](ValueId id) {
    const cir::TensorType& type = graph.value(id).type;
    return type.device != device.type || type.device_index != device.index;
  };
  if (op.effects.is_random) return absl::StrCat("random numbers: ", place);
  for (const ValueId id : cir::OperandValues(op)) {
    // A constant of the plan never changes, so a kernel may have its value built in.
    if (is_elsewhere(id) && plan.initial_cells()[id.index] == nullptr) {
      return absl::StrCat("reads memory of ", cir::DeviceName({graph.value(id).type.device, -1}), ": ", place);
    }
    if (graph.value(id).dynamic_shape) return absl::StrCat("sizes depend on data: ", place);
    // Absolute offsets into an argument's memory, which the graph has a copy of.
    if (absl::StartsWith(op.name, "aten::as_strided") && foreign.contains(graph.value(id).storage)) {
      return absl::StrCat("addresses memory by offset: ", place);
    }
  }
  for (const Result& result : op.results) {
    for (const ValueId id : result.values) {
      if (is_elsewhere(id)) return absl::StrCat("makes a tensor on another device: ", place);
    }
  }
  for (const ValueId id : cir::WrittenValues(op)) {
    if (foreign.contains(graph.value(id).storage)) return absl::StrCat("writes to an argument or a weight: ", place);
  }
  return "";
}

}  // namespace

absl::StatusOr<GraphSplit> SplitForGraph(const Graph& graph, const SplitOptions& options) {
  return Splitter(graph, options).Split();
}

std::vector<std::string> WhyNotCapturable(const ExecutionPlan& plan, cir::Device device) {
  std::vector<std::string> reasons(plan.graph().ops.size());
  const std::set<StorageId> foreign = ForeignStorages(plan.graph());
  for (const PlanStep& step : plan.steps()) {
    // A clone stands before its operator, or behind the last.
    if (reasons.empty()) return {};
    std::string& reason = reasons[std::min<size_t>(step.op, reasons.size() - 1)];
    if (reason.empty()) reason = WhyNot(plan, step, device, foreign);
  }
  return reasons;
}

absl::Status CheckCapturable(const ExecutionPlan& body, cir::Device device) {
  for (const ValueId id : body.graph().inputs) {
    const cir::TensorType& type = body.graph().value(id).type;
    if (type.device != device.type || type.device_index != device.index) {
      return absl::UnimplementedError("an input is on another device than the first operator");
    }
  }
  for (const std::string& reason : WhyNotCapturable(body, device)) {
    if (!reason.empty()) return absl::UnimplementedError(reason);
  }
  return absl::OkStatus();
}

}  // namespace cuvil::scheduler
