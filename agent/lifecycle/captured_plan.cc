#include "agent/lifecycle/captured_plan.h"

#include <atomic>
#include <charconv>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "agent/assumptions.h"
#include "agent/capture.h"
#include "agent/dispatch_keys.h"
#include "agent/fault_injection.h"
#include "agent/gil.h"
#include "agent/lifecycle/profile_sites.h"
#include "agent/lifecycle/profiler.h"
#include "agent/lifecycle/program_runner.h"
#include "agent/lifecycle/python_step.h"
#include "agent/op_recorder.h"
#include "agent/process_lifetime.h"
#include "jit/cir/empty_program.h"
#include "jit/cir/op_traits.h"
#include "scheduler/execution_plan.h"
#include "scheduler/plan_executor.h"
#include "scheduler/torch/torch_api.h"

namespace cuvil::agent {
namespace {

// "310 dict keys, 12 types" as {"dict keys": 310, "types": 12}.
OwnedRef CountsOf(std::string_view text) {
  Record counts;
  while (!text.empty()) {
    const size_t comma = text.find(", ");
    const std::string_view item = text.substr(0, comma);
    text = comma == std::string_view::npos ? std::string_view() : text.substr(comma + 2);
    uint64_t count = 0;
    const auto [end, error] = std::from_chars(item.data(), item.data() + item.size(), count);
    if (error != std::errc() || end == item.data() + item.size()) continue;
    counts.Set(std::string(end + 1, item.data() + item.size()).c_str(), count);
  }
  return counts.Take();
}

// "(2, 3) float32, (3,) int64": the input tensors as a person reads them.
std::string SignatureText(const cir::Graph& graph) {
  std::string text;
  for (const cir::ValueId id : graph.inputs) {
    const cir::TensorType& type = graph.value(id).type;
    absl::StrAppend(&text, text.empty() ? "(" : ", (");
    for (size_t i = 0; i < type.sizes.size(); ++i) absl::StrAppend(&text, i == 0 ? "" : ", ", type.sizes[i]);
    absl::StrAppend(&text, ") ", std::string(cir::DTypeName(type.dtype)));
  }
  return text;
}

class CapturedPlan : public CallPlan {
 public:
  explicit CapturedPlan(std::shared_ptr<Capture> capture)
      : capture_(std::move(capture)), graph_(ProgramRunner::Create(capture_)) {}

  bool MatchesInputs(const CallArgs& call) const override { return capture_->MatchesInputs(call); }
  bool GuardsHold() override { return capture_->GuardsHold(); }
  std::string LastGuardFailure() const override { return capture_->LastFailure(); }
  bool is_random() const override { return capture_->has_random_ops(); }
  std::optional<trace::SourceLocation> UninitializedMemory() const override;

  absl::Status Build() override;
  absl::StatusOr<OwnedRef> Run(const CallArgs& call) override;
  absl::StatusOr<std::unique_ptr<CallPlan>> WithoutOperators(int num_detaches) const override;

  void Describe(bool built, Record* record) const override;
  std::string Summary() const override {
    return absl::StrCat(capture_->graph().ops.size(), " operators, ", capture_->num_guards(), " guards");
  }
  uint32_t num_python_steps() const override { return plan_->counts().python; }

 private:
  const std::shared_ptr<Capture> capture_;
  std::shared_ptr<const scheduler::ExecutionPlan> plan_;  // null before Build() has succeeded
  const std::unique_ptr<ProgramRunner> graph_;            // null without a GPU
  const uint64_t number_ = NextPlanNumber();
};

// The boundary of this process, made at first use; torch has been imported.
const absl::StatusOr<std::shared_ptr<const torch_abi::TorchApi>>& LoadedApi() {
  static ProcessLifetime<absl::StatusOr<std::shared_ptr<const torch_abi::TorchApi>>> api(torch_abi::TorchApi::Load());
  return *api;
}

absl::Status CapturedPlan::Build() {
  const auto& api = LoadedApi();
  if (!api.ok()) return api.status();
  absl::StatusOr<std::shared_ptr<const scheduler::ExecutionPlan>> plan =
      scheduler::ExecutionPlan::Build(capture_->graph(), *api, PlanOptions(*capture_, **api));
  if (FaultInjected(FaultPoint::kMemoryPlan)) return absl::InternalError("injected fault: memory-plan");
  if (!plan.ok()) return plan.status();
  if (graph_ != nullptr) {
    // The generator of a GPU is not put back after the comparison with eager.
    if (capture_->has_random_ops()) return absl::UnimplementedError("random numbers on a GPU");
    graph_->Build(*api);
  }
  plan_ = *std::move(plan);
  return absl::OkStatus();
}

absl::StatusOr<OwnedRef> CapturedPlan::Run(const CallArgs& call) {
  PinnedTensors pins;
  std::vector<torch_abi::TensorRef> inputs;
  absl::Span<const torch_abi::TensorRef> captured;
  inputs.reserve(capture_->graph().inputs.size());
  if (FaultInjected(FaultPoint::kCollect)) return absl::UnavailableError("injected fault: collect");
  if (!capture_->CollectTensors(call, &pins, &inputs, &captured)) {
    return absl::FailedPreconditionError("a tensor is not what it was");
  }
  if (FaultInjected(FaultPoint::kRunBegin)) return absl::UnavailableError("injected fault: run-begin");
  std::vector<torch_abi::OwnedTensor> outputs;
  absl::Status status;
  bool answered = false;
  if (graph_ != nullptr) {
    absl::StatusOr<bool> ran = graph_->Run(call.args[0], inputs, captured, &outputs);
    status = ran.status();
    answered = !ran.ok() || *ran;
    if (absl::IsFailedPrecondition(status)) return status;
  }
  if (!answered) {
    std::optional<StepRecorder> steps;
    if (Profiler::active()) {
      if (const ProfiledCall* profiled = StepRecorder::CallOf(call.args[0]); profiled != nullptr) {
        steps.emplace(*profiled, number_, PlanPart::kSteps,
                      [&](const std::string& path) { return SitesOfPlan(*plan_, capture_->trace(), 0, path); });
      }
    }
    AssertGilHeld();
    const GilRelease no_gil;
    OperatorSteps python_steps(*LoadedApi());
    const uint64_t begin_ns = graph_ != nullptr ? graph_->BeginOperators() : 0;
    status = scheduler::PlanExecutor::Run(*plan_, inputs, captured, &outputs, &python_steps,
                                          steps ? steps->observer() : nullptr);
    if (begin_ns != 0) graph_->EndOperators(begin_ns);
  }
  if (status.ok() && FaultInjected(FaultPoint::kRun)) return absl::UnavailableError("injected fault: run");
  // Whatever an operator says, eager will say it better. An interruption is not about the operator.
  if (absl::IsCancelled(status) || absl::IsUnimplemented(status)) return status;
  if (!status.ok()) return absl::AbortedError(status.message());

  OwnedRef result = OwnedRef::Steal(capture_->BuildOutput(call, std::move(outputs)));
  if (FaultInjected(FaultPoint::kRebuild)) return absl::InternalError("injected fault: rebuild");
  if (!result) {
    PyErr_Clear();
    return absl::InternalError("the result could not be rebuilt");
  }
  return result;
}

absl::StatusOr<std::unique_ptr<CallPlan>> CapturedPlan::WithoutOperators(int num_detaches) const {
  if (graph_ != nullptr) return absl::UnimplementedError("on a GPU a call's cost is that of a graph");
  absl::StatusOr<cir::Graph> graph = cir::EmptyProgram(capture_->graph(), num_detaches);
  if (!graph.ok()) return graph.status();
  absl::StatusOr<std::shared_ptr<const scheduler::ExecutionPlan>> plan =
      scheduler::ExecutionPlan::Build(*std::move(graph), *LoadedApi(), PlanOptions(*capture_, plan_->api()));
  if (!plan.ok()) return plan.status();
  auto without = std::make_unique<CapturedPlan>(capture_);
  without->plan_ = *std::move(plan);
  return without;
}

std::optional<trace::SourceLocation> CapturedPlan::UninitializedMemory() const {
  const std::vector<trace::SourceLocation>& sources = capture_->trace().sources;
  for (const cir::Op& op : capture_->graph().ops) {
    if (!cir::IsUninitialized(op)) continue;
    return op.source < sources.size() ? sources[op.source] : trace::SourceLocation();
  }
  return std::nullopt;
}

void CapturedPlan::Describe(bool built, Record* record) const {
  const cir::Graph& graph = capture_->graph();
  const trace::Trace& trace = capture_->trace();
  record->Set("signature", SignatureText(graph));
  record->Set("operators", static_cast<uint64_t>(graph.ops.size()));
  record->Set("guards", CountsOf(capture_->DescribeGuards()));

  uint64_t num_frames = 0;
  for (const trace::FrameCount& frame : trace.frames) num_frames += frame.num_entered;
  record->Set("python_frames", num_frames);

  // Operators by the innermost line outside of torch itself.
  struct LineCounts {
    uint64_t operators = 0;
    uint64_t python_steps = 0;
  };
  const auto place_of = [&](const cir::Op& op) -> std::pair<std::string, int> {
    if (op.source >= trace.sources.size()) return {"", 0};
    const trace::SourceLocation& source = trace.sources[op.source];
    if (source.user_file.empty()) return {source.file, source.line};
    return {source.user_file, source.user_line};
  };
  std::map<std::pair<std::string, int>, LineCounts> lines;
  for (const cir::Op& op : graph.ops) ++lines[place_of(op)].operators;
  if (built) {
    for (const scheduler::PlanStep& step : plan_->steps()) {
      if (step.mechanism == scheduler::Mechanism::kPython) ++lines[place_of(graph.ops[step.op])].python_steps;
    }
  }
  RecordList line_list;
  for (const auto& [place, counts] : lines) {
    Record item;
    item.Set("file", place.first);
    item.Set("line", static_cast<uint64_t>(place.second));
    item.Set("operators", counts.operators);
    item.Set("python_steps", counts.python_steps);
    line_list.Add(item.Take());
  }
  record->Set("lines", line_list.Take());
  if (!built) return;
  if (graph_ != nullptr) graph_->Describe(record);

  const scheduler::PlanCounts& counts = plan_->counts();
  Record mechanisms;
  mechanisms.Set("unboxed", uint64_t{counts.unboxed});
  mechanisms.Set("dispatcher", uint64_t{counts.dispatcher});
  mechanisms.Set("clone", uint64_t{counts.clones});
  mechanisms.Set("python", uint64_t{counts.python});
  mechanisms.Set("elided", uint64_t{counts.elided});
  mechanisms.Set("folded", uint64_t{counts.folded});
  record->Set("mechanisms", mechanisms.Take());

  RecordList subgraphs;
  for (const scheduler::Subgraph& subgraph : plan_->partition().subgraphs) {
    Record item;
    item.Set("operators", static_cast<uint64_t>(subgraph.ops.size()));
    item.Set("flops", static_cast<uint64_t>(subgraph.cost.flops));
    item.Set("bytes", static_cast<uint64_t>(subgraph.cost.bytes));
    item.Set("estimate_ns", static_cast<uint64_t>(subgraph.cost.estimate_ns()));
    RecordList predecessors;
    for (const uint32_t predecessor : subgraph.predecessors) {
      predecessors.Add(OwnedRef::Steal(PyLong_FromUnsignedLong(predecessor)));
    }
    item.Set("predecessors", predecessors.Take());
    subgraphs.Add(item.Take());
  }
  record->Set("subgraphs", subgraphs.Take());
  record->Set("max_width", uint64_t{plan_->partition().max_width});

  Record memory;
  memory.Set("bytes_peak", static_cast<uint64_t>(plan_->memory_plan().high_water_bytes));
  memory.Set("bytes_sum", static_cast<uint64_t>(plan_->memory_plan().sum_bytes));
  record->Set("memory", memory.Take());
}

TracedCall TraceWithCapture(PyObject*, const CallArgs& call, vectorcallfunc original) {
  CaptureOutcome outcome = CaptureCall(call, original);
  TracedCall traced;
  traced.result = outcome.result;
  traced.refusal = std::move(outcome.refusal);
  traced.branches = std::move(outcome.branches);
  traced.trace_ns = outcome.trace_ns;
  if (outcome.capture != nullptr) traced.plan = std::make_unique<CapturedPlan>(std::move(outcome.capture));
  return traced;
}

absl::Status Initialize() {
  if (const auto& api = LoadedApi(); !api.ok()) {
    return absl::Status(api.status().code(), absl::StrCat(api.status().message(), "; ", kTorchAdvice));
  }
  return InitializeCapture();
}

}  // namespace

scheduler::BuildOptions PlanOptions(const Capture& capture, const torch_abi::TorchApi& api) {
  std::vector<uint32_t> all(capture.constants().size());
  std::iota(all.begin(), all.end(), 0);
  return PlanOptions(capture, api, all);
}

scheduler::BuildOptions PlanOptions(const Capture& capture, const torch_abi::TorchApi& api,
                                    absl::Span<const uint32_t> constants) {
  scheduler::BuildOptions options;
  options.view_tracking_key = DispatchKeys::view_tracking_key();
  options.floating_point_mode = capture.floating_point_mode();
  for (const uint32_t i : constants) options.constants.push_back(api.NewReference(capture.constants()[i]));
  return options;
}

uint64_t NextPlanNumber() {
  static std::atomic<uint64_t> last{0};  // a number that nothing else depends on
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

PlanSource CaptureTracer() { return {Initialize, TraceWithCapture, SignatureHash}; }

}  // namespace cuvil::agent
