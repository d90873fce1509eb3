#include "scheduler/program_cut.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "jit/cir/verifier.h"

namespace cuvil::scheduler {
namespace {

using cir::Graph;
using cir::Op;
using cir::Origin;
using cir::Result;
using cir::ResultForm;
using cir::StorageId;
using cir::ValueId;

// Each round keeps at least one more operator out of the graphs; programs that need more are not worth it.
constexpr int kMaxRounds = 32;

struct Stretch {
  uint32_t begin, end;
  bool on_host;
};

std::vector<Stretch> Stretches(const std::vector<bool>& on_host) {
  std::vector<Stretch> stretches;
  for (uint32_t i = 0; i < on_host.size(); ++i) {
    if (stretches.empty() || stretches.back().on_host != on_host[i]) stretches.push_back({i, i, on_host[i]});
    stretches.back().end = i + 1;
  }
  return stretches;
}

// Storages that somebody writes, and their constants are made anew for each run: two parts would make two.
absl::Status CheckConstants(const Graph& program, const std::vector<Stretch>& stretches) {
  std::set<StorageId> fresh;
  for (const Op& op : program.ops) {
    for (const ValueId id : cir::WrittenValues(op)) fresh.insert(program.value(id).storage);
  }
  for (const ValueId id : program.outputs) fresh.insert(program.value(id).storage);
  for (const ValueId constant : program.constants) {
    const StorageId storage = program.value(constant).storage;
    if (!fresh.contains(storage)) continue;
    uint32_t num_users = 0;
    for (const Stretch& stretch : stretches) {
      bool uses = false;
      for (uint32_t i = stretch.begin; i < stretch.end; ++i) {
        for (const ValueId id : cir::OperandValues(program.ops[i])) uses |= program.value(id).storage == storage;
      }
      num_users += uses ? 1 : 0;
    }
    if (num_users > 1) return absl::UnimplementedError("parts share a constant that the program writes or returns");
  }
  for (const ValueId id : program.outputs) {
    if (program.value(id).origin == Origin::kConstant) {
      return absl::UnimplementedError("an output is a constant of the call");
    }
  }
  return absl::OkStatus();
}

ProgramPart WholeProgram(const Graph& program, bool on_host) {
  ProgramPart part;
  part.graph = program;
  part.on_graph = !on_host;
  part.inputs = program.inputs;
  for (uint32_t i = 0; i < program.captured.size(); ++i) part.captured.push_back(i);
  for (uint32_t i = 0; i < program.constants.size(); ++i) part.constants.push_back(i);
  part.outputs = program.outputs;
  for (const ValueId id : program.outputs) part.versioned.insert(program.value(id).storage);
  return part;
}

// Makes one part after the other.
class Cutter {
 public:
  explicit Cutter(const Graph& program) : program_(program), last_user_(program.values.size(), 0) {
    for (uint32_t i = 0; i < program.ops.size(); ++i) {
      ForEachNamed(program.ops[i], [&](ValueId id) { last_user_[id.index] = i; });
    }
    for (const ValueId id : program.outputs) {
      last_user_[id.index] = static_cast<uint32_t>(program.ops.size());
      seen_.insert(program.value(id).storage);
    }
  }

  absl::StatusOr<ProgramPart> Cut(const Stretch& stretch) {
    ProgramPart part;
    part.first_op = stretch.begin;
    part.on_graph = !stretch.on_host;
    cir::GraphBuilder builder;
    std::map<StorageId, StorageId> storages;
    std::map<ValueId, ValueId> renamed;
    const auto storage_of = [&](StorageId old) {
      const auto found = storages.find(old);
      if (found != storages.end()) return found->second;
      const StorageId made = storages.emplace(old, builder.NewStorage()).first->second;
      if (seen_.contains(old)) part.versioned.insert(made);
      return made;
    };
    const auto take = [&](ValueId id) {
      if (renamed.contains(id)) return;
      const cir::Value& value = program_.value(id);
      const StorageId storage = storage_of(value.storage);
      switch (value.origin) {
        case Origin::kCaptured:
          renamed[id] = builder.AddCaptured(value.type, storage);
          part.captured.push_back(value.origin_index);
          break;
        case Origin::kConstant:
          renamed[id] = builder.AddConstant(value.type, storage);
          part.constants.push_back(value.origin_index);
          break;
        case Origin::kInput:
        case Origin::kResult:
          renamed[id] = builder.AddInput(value.type, storage);
          part.inputs.push_back(id);
          break;
      }
    };
    for (uint32_t i = stretch.begin; i < stretch.end; ++i) {
      Op op = program_.ops[i];
      // Beforehand, so that results are declared right before their operator.
      ForEachNamed(op, [&](ValueId id) {
        const cir::Value& value = program_.value(id);
        if (value.origin != Origin::kResult || value.origin_index < stretch.begin) take(id);
      });
      op.source = builder.AddSource(program_.sources[op.source]);
      cir::RenameOperands(&op, [&](ValueId id) { return renamed.at(id); });
      for (Result& result : op.results) {
        for (ValueId& id : result.values) {
          if (cir::MakesValues(result)) {
            const cir::Value& value = program_.value(id);
            renamed[id] = builder.AddResultValue(value.type, storage_of(value.storage), value.dynamic_shape);
            if (last_user_[id.index] >= stretch.end) part.outputs.push_back(id);
          }
          id = renamed.at(id);
        }
      }
      builder.AddOp(std::move(op));
    }
    for (const ValueId id : part.outputs) builder.AddOutput(renamed.at(id));
    absl::StatusOr<Graph> graph = std::move(builder).Build();
    if (!graph.ok()) return absl::InternalError(absl::StrCat("a part: ", graph.status().message()));
    part.graph = *std::move(graph);
    return part;
  }

 private:
  // Operands, and objects that the operator hands back.
  template <typename Function>
  static void ForEachNamed(const Op& op, const Function& function) {
    for (const ValueId id : cir::OperandValues(op)) function(id);
    for (const Result& result : op.results) {
      if (result.form != ResultForm::kSame) continue;
      for (const ValueId id : result.values) function(id);
    }
  }

  const Graph& program_;
  std::vector<uint32_t> last_user_;  // by value: operator; the number of operators: the caller
  std::set<StorageId> seen_;         // by the caller
};

bool Touches(const Graph& graph, const Op& op, StorageId storage) {
  for (const ValueId id : cir::WrittenValues(op)) {
    if (graph.value(id).storage == storage) return true;
  }
  for (const Result& result : op.results) {
    for (const ValueId id : result.values) {
      if (graph.value(id).storage == storage) return true;
    }
  }
  return false;
}

// A copy counts its writes from 0, wherever the writes of its original were made.
void KeepVersionsOutside(const Graph& program, std::vector<std::string>* reasons) {
  std::set<StorageId> written;
  for (const Op& op : program.ops) {
    for (const ValueId id : cir::WrittenValues(op)) written.insert(program.value(id).storage);
  }
  std::set<StorageId> done;
  for (const ValueId output : program.outputs) {
    const cir::Value& value = program.value(output);
    if (value.type.is_inference || !written.contains(value.storage) || !done.insert(value.storage).second) continue;
    for (uint32_t i = 0; i < program.ops.size(); ++i) {
      std::string& reason = (*reasons)[i];
      if (reason.empty() && Touches(program, program.ops[i], value.storage)) reason = "an output is written in place";
    }
  }
}

// What keeps operators of a part out of a graph; by its operators.
class PartCheck {
 public:
  PartCheck(const ProgramPart& part, cir::Device device)
      : part_(part), device_(device), reasons_(part.graph.ops.size()) {}

  absl::Status Run(const BodyPlanner& plan_body) {
    const Graph& graph = part_.graph;
    for (const ValueId id : graph.inputs) {
      const cir::TensorType& type = graph.value(id).type;
      if (type.device == device_.type && type.device_index == device_.index) continue;
      for (uint32_t i = 0; i < graph.ops.size(); ++i) {
        const std::vector<ValueId> operands = cir::OperandValues(graph.ops[i]);
        if (std::find(operands.begin(), operands.end(), id) == operands.end()) continue;
        Set(i, absl::StrCat("reads memory of ", cir::DeviceName({type.device, -1})));
      }
    }
    if (found_) return absl::OkStatus();
    SplitOptions options;
    options.versioned = &part_.versioned;
    absl::StatusOr<GraphSplit> split = SplitForGraph(graph, options);
    if (!split.ok()) {
      FindOutputs(options);
      // Each alone could be one, but not together.
      if (!found_) SetAll(std::string(split.status().message()));
      return absl::OkStatus();
    }
    const absl::StatusOr<std::shared_ptr<const ExecutionPlan>> body = plan_body(part_, *std::move(split));
    if (!body.ok()) return body.status();
    const std::vector<std::string> why = WhyNotCapturable(**body, device_);
    for (uint32_t i = 0; i < why.size(); ++i) {
      if (!why[i].empty()) Set(i, why[i]);
    }
    return absl::OkStatus();
  }

  bool found() const { return found_; }
  const std::vector<std::string>& reasons() const { return reasons_; }

 private:
  void Set(uint32_t op, std::string reason) {
    if (reasons_[op].empty()) reasons_[op] = std::move(reason);
    found_ = true;
  }
  void SetAll(const std::string& reason) {
    for (uint32_t i = 0; i < reasons_.size(); ++i) Set(i, reason);
  }

  // Whatever makes or writes an output that no copy can stand for stays with the caller.
  void FindOutputs(const SplitOptions& options) {
    Graph alone = part_.graph;
    for (const ValueId output : part_.graph.outputs) {
      alone.outputs = {output};
      const absl::StatusOr<GraphSplit> split = SplitForGraph(alone, options);
      if (split.ok()) continue;
      const StorageId storage = alone.value(output).storage;
      for (uint32_t i = 0; i < alone.ops.size(); ++i) {
        if (Touches(alone, alone.ops[i], storage)) Set(i, std::string(split.status().message()));
      }
    }
  }

  const ProgramPart& part_;
  const cir::Device device_;
  std::vector<std::string> reasons_;
  bool found_ = false;
};

}  // namespace

absl::StatusOr<std::vector<ProgramPart>> CutProgram(const Graph& program, const std::vector<bool>& on_host) {
  if (on_host.size() != program.ops.size()) return absl::InternalError("another number of operators");
  const std::vector<Stretch> stretches = Stretches(on_host);
  std::vector<ProgramPart> parts;
  if (stretches.size() <= 1) {
    parts.push_back(WholeProgram(program, !stretches.empty() && stretches.front().on_host));
    return parts;
  }
  for (const cir::Value& value : program.values) {
    if (value.dynamic_shape) return absl::UnimplementedError("sizes depend on data");
  }
  if (absl::Status s = CheckConstants(program, stretches); !s.ok()) return s;
  Cutter cutter(program);
  for (const Stretch& stretch : stretches) {
    absl::StatusOr<ProgramPart> part = cutter.Cut(stretch);
    if (!part.ok()) return part.status();
    parts.push_back(*std::move(part));
  }
  return parts;
}

absl::StatusOr<std::vector<ProgramPart>> CutForGraphs(const Graph& program, cir::Device device,
                                                      std::vector<std::string> host_reasons,
                                                      const BodyPlanner& plan_body, const GraphCutOptions& options) {
  KeepVersionsOutside(program, &host_reasons);
  for (int round = 0; round < kMaxRounds; ++round) {
    std::vector<bool> on_host(program.ops.size());
    for (uint32_t i = 0; i < on_host.size(); ++i) on_host[i] = !host_reasons[i].empty();
    uint32_t num_graphs = 0;
    for (const Stretch& stretch : Stretches(on_host)) {
      if (stretch.on_host) continue;
      const bool is_short = stretch.end - stretch.begin < options.min_graph_ops;
      num_graphs += is_short ? 0 : 1;
      for (uint32_t i = stretch.begin; is_short && i < stretch.end; ++i) on_host[i] = true;
    }
    if (num_graphs > options.max_graphs) {
      return absl::UnimplementedError(absl::StrCat(num_graphs, " graphs would be needed"));
    }
    absl::StatusOr<std::vector<ProgramPart>> parts = CutProgram(program, on_host);
    if (!parts.ok()) return parts.status();
    bool found = false;
    for (ProgramPart& part : *parts) {
      if (!part.on_graph) {
        for (size_t i = 0; part.reason.empty() && i < part.graph.ops.size(); ++i) {
          part.reason = host_reasons[part.first_op + i];
        }
        continue;
      }
      PartCheck check(part, device);
      if (absl::Status s = check.Run(plan_body); !s.ok()) return s;
      for (size_t i = 0; check.found() && i < check.reasons().size(); ++i) {
        if (!check.reasons()[i].empty()) host_reasons[part.first_op + i] = check.reasons()[i];
      }
      found |= check.found();
    }
    if (!found) return parts;
  }
  return absl::UnimplementedError("too many operators cannot be captured");
}

}  // namespace cuvil::scheduler
