#include "scheduler/plan_executor.h"

#include <array>
#include <cstring>
#include <memory>

#include "absl/base/attributes.h"
#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "scheduler/monotonic_clock.h"
#include "scheduler/torch/warning_notice.h"

namespace cuvil::scheduler {
namespace {

using torch_abi::OwnedTensor;
using torch_abi::TensorRef;

// Plans up to this size keep their cells on the stack (8 KiB); ResNet-50 needs about 700.
constexpr size_t kInlineCells = 1024;

// The cells of one run. What it still owns at the end, for whatever reason, is released.
class RunCells {
 public:
  explicit RunCells(const ExecutionPlan& plan) : plan_(plan) {
    const absl::Span<void* const> initial = plan.initial_cells();
    if (initial.size() > kInlineCells) heap_ = std::make_unique_for_overwrite<void*[]>(initial.size());
    cells_ = heap_ != nullptr ? heap_.get() : inline_.data();
    std::memcpy(cells_, initial.data(), initial.size() * sizeof(void*));
  }
  ~RunCells() {
    if (finished_) return;
    for (const uint32_t cell : plan_.owned_cells()) plan_.api().Drop(cells_ + cell);
  }
  RunCells(const RunCells&) = delete;
  RunCells& operator=(const RunCells&) = delete;

  void** data() { return cells_; }
  // Every owned cell has been emptied.
  void Finish() { finished_ = true; }

 private:
  const ExecutionPlan& plan_;
  std::array<void*, kInlineCells> inline_;
  std::unique_ptr<void*[]> heap_;
  void** cells_;
  bool finished_ = false;
};

absl::Status RunPythonStep(const ExecutionPlan& plan, const PlanStep& step, void** cells,
                           PythonStepCallback* callback) {
  if (callback == nullptr) return absl::FailedPreconditionError("a Python step, but no callback");
  std::vector<TensorRef> operands;
  operands.reserve(step.operand_cells.size());
  for (const uint32_t cell : step.operand_cells) operands.emplace_back(cells + cell);
  std::vector<OwnedTensor> results;
  absl::Status status = callback->Run(plan.graph().ops[step.op], operands, &results);
  if (!status.ok()) return status;
  if (results.size() != step.result_cells.size()) {
    return absl::InternalError(
        absl::StrCat("the Python step gave ", results.size(), " tensors, ", step.result_cells.size(), " in the trace"));
  }
  for (size_t i = 0; i < results.size(); ++i) {
    void** cell = cells + step.result_cells[i];
    *cell = plan.api().undefined_impl();
    plan.api().assign_tensors(results[i].ref().handle(), cell);
  }
  return absl::OkStatus();
}

// Keeps a dispatch key from being used on this thread for the length of one step.
class KeyExclusion {
 public:
  KeyExclusion(const torch_abi::TorchApi& api, uint16_t key)
      : api_(api), key_(key), was_excluded_(api.is_key_excluded(key)) {
    if (!was_excluded_) api_.set_key_excluded(key_, true);
  }
  ~KeyExclusion() {
    if (!was_excluded_) api_.set_key_excluded(key_, false);
  }
  KeyExclusion(const KeyExclusion&) = delete;
  KeyExclusion& operator=(const KeyExclusion&) = delete;

 private:
  const torch_abi::TorchApi& api_;
  const uint16_t key_;
  const bool was_excluded_;
};

absl::Status RunUntracked(const ExecutionPlan& plan, const PlanStep& step, void** cells) {
  const KeyExclusion exclusion(plan.api(), plan.view_tracking_key());
  return plan.call(step).Invoke(plan.api(), cells);
}

absl::Status WithLocation(const ExecutionPlan& plan, const PlanStep& step, const absl::Status& status) {
  absl::Status located(status.code(), absl::StrCat(plan.DescribeOp(step.op), ": ", status.message()));
  const cir::Graph& graph = plan.graph();
  if (step.op < graph.ops.size()) {
    located.SetPayload(kSourcePayload, absl::Cord(graph.sources[graph.ops[step.op].source]));
  }
  return located;
}

// One step, without the release of what it used last.
ABSL_ATTRIBUTE_ALWAYS_INLINE inline absl::Status RunStep(const ExecutionPlan& plan, const PlanStep& step, void** cells,
                                                         PythonStepCallback* python_steps,
                                                         const torch_abi::WarningNotice& warnings) {
  const absl::Status status = step.mechanism == Mechanism::kPython ? RunPythonStep(plan, step, cells, python_steps)
                              : step.untracked                     ? RunUntracked(plan, step, cells)
                                                                   : plan.call(step).Invoke(plan.api(), cells);
  if (!status.ok()) return WithLocation(plan, step, status);
  if (warnings.noticed()) {
    return WithLocation(plan, step, absl::UnimplementedError("warns, which only eager can do"));
  }
  return absl::OkStatus();
}

// Observed or not are two loops, so that the one that serves asks nothing about observers.
template <bool kObserved>
absl::Status RunSteps(const ExecutionPlan& plan, void** cells, PythonStepCallback* python_steps,
                      StepObserver* observer) {
  const torch_abi::WarningNotice warnings(plan.api());
  uint32_t index = 0;
  for (const PlanStep& step : plan.steps()) {
    uint64_t start_ns = 0;
    if constexpr (kObserved) {
      observer->OnStepStart(index);
      start_ns = MonotonicNs();
    }
    const absl::Status status = RunStep(plan, step, cells, python_steps, warnings);
    if (status.ok()) {
      for (const uint32_t cell : step.released_cells) plan.api().Drop(cells + cell);
    }
    if constexpr (kObserved) observer->OnStep(index++, start_ns, MonotonicNs());
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status RunDirectedSteps(const ExecutionPlan& plan, void** cells, StepDirector& director) {
  const torch_abi::WarningNotice warnings(plan.api());
  for (uint32_t index = 0; index < plan.steps().size(); ++index) {
    if (absl::Status s = director.Before(index); !s.ok()) return s;
    if (absl::Status s = RunStep(plan, plan.steps()[index], cells, nullptr, warnings); !s.ok()) return s;
    if (absl::Status s = director.After(index, cells); !s.ok()) return s;
    for (const uint32_t cell : director.released(index)) plan.api().Drop(cells + cell);
  }
  return absl::OkStatus();
}

// One run, whose steps `run_steps` issues.
template <typename RunSteps>
absl::Status RunPlan(const ExecutionPlan& plan, absl::Span<const TensorRef> inputs,
                     absl::Span<const TensorRef> captured, std::vector<OwnedTensor>* outputs,
                     const RunSteps& run_steps) {
  const cir::Graph& graph = plan.graph();
  const torch_abi::TorchApi& api = plan.api();
  outputs->clear();
  if (inputs.size() != graph.inputs.size() || captured.size() != graph.captured.size()) {
    return absl::InvalidArgumentError(absl::StrCat("the plan takes ", graph.inputs.size(), " inputs and ",
                                                   graph.captured.size(), " captured tensors, given ", inputs.size(),
                                                   " and ", captured.size()));
  }
  outputs->reserve(plan.outputs().size());

  RunCells run(plan);
  void** cells = run.data();
  for (size_t i = 0; i < inputs.size(); ++i) cells[graph.inputs[i].index] = inputs[i].impl();
  for (size_t i = 0; i < captured.size(); ++i) cells[graph.captured[i].index] = captured[i].impl();

  if (absl::Status s = run_steps(cells); !s.ok()) return s;

  for (const ExecutionPlan::Output& output : plan.outputs()) {
    outputs->push_back(output.moves ? api.TakeCell(cells + output.cell)
                                    : api.NewReference(TensorRef(cells + output.cell)));
  }
  run.Finish();
  return absl::OkStatus();
}

}  // namespace

absl::Status PlanExecutor::Run(const ExecutionPlan& plan, absl::Span<const TensorRef> inputs,
                               absl::Span<const TensorRef> captured, std::vector<OwnedTensor>* outputs,
                               PythonStepCallback* python_steps, StepObserver* observer) {
  return RunPlan(plan, inputs, captured, outputs, [&](void** cells) {
    return observer == nullptr ? RunSteps<false>(plan, cells, python_steps, nullptr)
                               : RunSteps<true>(plan, cells, python_steps, observer);
  });
}

absl::Status PlanExecutor::RunDirected(const ExecutionPlan& plan, absl::Span<const TensorRef> inputs,
                                       absl::Span<const TensorRef> captured, std::vector<OwnedTensor>* outputs,
                                       StepDirector& director) {
  return RunPlan(plan, inputs, captured, outputs,
                 [&](void** cells) { return RunDirectedSteps(plan, cells, director); });
}

}  // namespace cuvil::scheduler
