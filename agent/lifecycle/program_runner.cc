#include "agent/lifecycle/program_runner.h"

#include <atomic>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "agent/gil.h"
#include "agent/lifecycle/captured_plan.h"
#include "agent/lifecycle/graph_recorder.h"
#include "agent/lifecycle/log.h"
#include "agent/lifecycle/profile_sites.h"
#include "agent/lifecycle/profiler.h"
#include "agent/lifecycle/python_step.h"
#include "scheduler/graph_split.h"
#include "scheduler/plan_executor.h"

namespace cuvil::agent {

using scheduler::ExecutionPlan;
using scheduler::ProgramPart;
using torch_abi::OwnedTensor;
using torch_abi::TensorRef;

std::unique_ptr<ProgramRunner> ProgramRunner::Create(std::shared_ptr<const Capture> capture) {
  for (const cir::Value& value : capture->graph().values) {
    if (value.type.device != cir::DeviceType::kCuda) continue;
    const cir::Device device{value.type.device, value.type.device_index};
    return std::unique_ptr<ProgramRunner>(new ProgramRunner(std::move(capture), device));
  }
  return nullptr;
}

std::shared_ptr<ProgramRunner::Sequence> ProgramRunner::MakeWhole() const {
  const cir::Graph& program = capture_->graph();
  // Nothing to cut: never an error.
  std::vector<ProgramPart> parts = *scheduler::CutProgram(program, std::vector<bool>(program.ops.size(), false));
  auto sequence = std::make_shared<Sequence>(scheduler::PartSequence(program, std::move(parts)));
  auto graph = std::make_unique<GraphRunner>(capture_, sequence->flow.shared_part(0), device_);
  sequence->parts.push_back({std::move(graph), nullptr, NextPlanNumber()});
  return sequence;
}

std::shared_ptr<ProgramRunner::Sequence> ProgramRunner::MakeParts(const std::vector<std::string>& host_reasons) const {
  const auto plan_body = [&](const ProgramPart& part, scheduler::GraphSplit split) {
    scheduler::BuildOptions options = PlanOptions(*capture_, *api_, part.constants);
    options.left_out_ops = std::move(split.left_out_ops);
    return ExecutionPlan::Build(std::move(split.body), api_, std::move(options));
  };
  absl::StatusOr<std::vector<ProgramPart>> cut =
      scheduler::CutForGraphs(capture_->graph(), device_, host_reasons, plan_body);
  // As one graph it has been tried before.
  if (!cut.ok() || cut->size() == 1) return nullptr;
  auto sequence = std::make_shared<Sequence>(scheduler::PartSequence(capture_->graph(), *std::move(cut)));
  bool has_graph = false;
  for (size_t i = 0; i < sequence->flow.size(); ++i) {
    const std::shared_ptr<const ProgramPart>& of_program = sequence->flow.shared_part(i);
    Part part{nullptr, nullptr, NextPlanNumber()};
    auto plan = ExecutionPlan::Build(of_program->graph, api_, PlanOptions(*capture_, *api_, of_program->constants));
    if (!plan.ok()) return nullptr;
    part.plan = *std::move(plan);
    if (of_program->on_graph) {
      part.graph = std::make_unique<GraphRunner>(capture_, of_program, device_);
      part.graph->Build(api_);
      has_graph |= part.graph->reason().empty();
    }
    sequence->parts.push_back(std::move(part));
  }
  return has_graph ? sequence : nullptr;
}

void ProgramRunner::Build(const std::shared_ptr<const torch_abi::TorchApi>& api) {
  api_ = api;
  std::shared_ptr<Sequence> sequence = MakeWhole();
  GraphRunner& whole = *sequence->parts.front().graph;
  whole.Build(api);
  std::vector<std::string> reasons(capture_->graph().ops.size());
  if (!whole.reason().empty()) {
    if (std::shared_ptr<Sequence> parts = MakeParts(reasons); parts != nullptr) sequence = std::move(parts);
  }
  const absl::MutexLock lock(&mutex_);
  std::swap(sequence_, sequence);  // one of an earlier Build dies without the lock
  host_reasons_ = std::move(reasons);
}

std::shared_ptr<ProgramRunner::Sequence> ProgramRunner::CutAnew(const std::shared_ptr<Sequence>& sequence) {
  if (sequence->is_final.load(std::memory_order_relaxed)) return nullptr;
  std::vector<std::pair<uint32_t, std::string>> failures;
  for (size_t p = 0; p < sequence->parts.size(); ++p) {
    const Part& part = sequence->parts[p];
    const std::optional<uint32_t> failed = part.graph == nullptr ? std::nullopt : part.graph->failed_op();
    if (failed.has_value()) failures.emplace_back(sequence->flow.part(p).first_op + *failed, part.graph->reason());
  }
  if (failures.empty()) return nullptr;
  std::vector<std::string> reasons;
  {
    const absl::MutexLock lock(&mutex_);
    if (sequence_ != sequence) return sequence_;  // another thread was faster
    for (auto& [op, reason] : failures) host_reasons_[op] = std::move(reason);
    reasons = host_reasons_;
    if (++num_cuts_ > kMaxCuts) reasons.clear();
  }
  std::shared_ptr<Sequence> parts;
  if (!reasons.empty()) {
    AssertGilHeld();
    const GilRelease no_gil;
    parts = MakeParts(reasons);
  }
  if (parts == nullptr) {
    sequence->is_final.store(true, std::memory_order_relaxed);
    return nullptr;
  }
  std::shared_ptr<Sequence> replaced;  // freed without the lock
  const absl::MutexLock lock(&mutex_);
  if (sequence_ == sequence) replaced = std::exchange(sequence_, parts);
  return sequence_;
}

absl::StatusOr<bool> ProgramRunner::RunGraph(const Part& part, uint32_t first_op, PyObject* module,
                                             absl::Span<const TensorRef> inputs, absl::Span<const TensorRef> captured,
                                             std::vector<OwnedTensor>* outputs) const {
  std::optional<GraphRecorder> recorder;
  if (Profiler::active()) recorder.emplace(module, part.number, capture_->trace(), first_op);
  return part.graph->Run(module, inputs, captured, outputs, recorder ? &*recorder : nullptr);
}

absl::Status ProgramRunner::RunPart(const Sequence& sequence, size_t index, PyObject* module,
                                    absl::Span<const TensorRef> inputs, absl::Span<const TensorRef> captured,
                                    std::vector<OwnedTensor>* outputs, bool* graph_is_missing) const {
  const Part& part = sequence.parts[index];
  const uint32_t first_op = sequence.flow.part(index).first_op;
  if (part.graph != nullptr) {
    const absl::StatusOr<bool> ran = RunGraph(part, first_op, module, inputs, captured, outputs);
    if (!ran.ok() || *ran) return ran.status();
    *graph_is_missing = true;
  }
  std::optional<StepRecorder> steps;
  if (Profiler::active()) {
    if (const ProfiledCall* profiled = StepRecorder::CallOf(module); profiled != nullptr) {
      steps.emplace(*profiled, part.number, PlanPart::kSteps, [&](const std::string& path) {
        return SitesOfPlan(*part.plan, capture_->trace(), first_op, path);
      });
    }
  }
  AssertGilHeld();
  const GilRelease no_gil;
  OperatorSteps python_steps(api_);
  const uint64_t begin_ns = part.graph != nullptr ? part.graph->BeginOperators() : 0;
  absl::Status status = scheduler::PlanExecutor::Run(*part.plan, inputs, captured, outputs, &python_steps,
                                                     steps ? steps->observer() : nullptr);
  if (begin_ns != 0) part.graph->EndOperators(begin_ns);
  return status;
}

absl::StatusOr<bool> ProgramRunner::Run(PyObject* module, absl::Span<const TensorRef> inputs,
                                        absl::Span<const TensorRef> captured, std::vector<OwnedTensor>* outputs) {
  std::shared_ptr<Sequence> sequence = this->sequence();
  if (sequence->parts.size() == 1) {
    absl::StatusOr<bool> ran = RunGraph(sequence->parts.front(), 0, module, inputs, captured, outputs);
    if (!ran.ok() || *ran) return ran;
    sequence = CutAnew(sequence);
    if (sequence == nullptr) return false;
  }
  // A run in which captures failed is done again, cut anew: what answers the call that compares is what will serve. A
  // plan writes to nothing that is not its own, so that running twice is running once.
  while (true) {
    bool graph_is_missing = false;
    const absl::Status status = sequence->flow.Run(
        *api_, inputs, captured, outputs,
        [&](size_t part, absl::Span<const TensorRef> part_inputs, absl::Span<const TensorRef> part_captured,
            std::vector<OwnedTensor>* part_outputs) {
          return RunPart(*sequence, part, module, part_inputs, part_captured, part_outputs, &graph_is_missing);
        });
    if (!status.ok()) return status;
    if (!graph_is_missing) return true;
    std::shared_ptr<Sequence> cut = CutAnew(sequence);
    if (cut == nullptr) return true;
    sequence = std::move(cut);
  }
}

uint64_t ProgramRunner::BeginOperators() const {
  const std::shared_ptr<Sequence> sequence = this->sequence();
  return sequence->parts.size() == 1 ? sequence->parts.front().graph->BeginOperators() : 0;
}

void ProgramRunner::EndOperators(uint64_t begin_ns) {
  const std::shared_ptr<Sequence> sequence = this->sequence();
  if (sequence->parts.size() == 1) sequence->parts.front().graph->EndOperators(begin_ns);
}

void ProgramRunner::Describe(Record* record) const {
  const std::shared_ptr<Sequence> sequence = this->sequence();
  if (sequence->parts.size() == 1) {
    record->Set("cuda_graph", sequence->parts.front().graph->Describe());
    return;
  }
  RecordList parts;
  for (size_t p = 0; p < sequence->parts.size(); ++p) {
    const ProgramPart& of_program = sequence->flow.part(p);
    Record part;
    part.Set("operators", static_cast<uint64_t>(of_program.graph.ops.size()));
    part.Set("reason", of_program.reason);
    if (sequence->parts[p].graph != nullptr) part.Set("cuda_graph", sequence->parts[p].graph->Describe());
    parts.Add(part.Take());
  }
  record->Set("parts", parts.Take());
}

}  // namespace cuvil::agent
