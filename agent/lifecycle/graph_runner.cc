#include "agent/lifecycle/graph_runner.h"

#include <algorithm>
#include <atomic>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "agent/dispatch_keys.h"
#include "agent/gil.h"
#include "agent/hidden_views.h"
#include "agent/lifecycle/captured_plan.h"
#include "agent/lifecycle/graph_memory.h"
#include "agent/lifecycle/lifecycle.h"
#include "agent/lifecycle/log.h"
#include "agent/lifecycle/preparation.h"
#include "agent/op_recorder.h"
#include "agent/process_lifetime.h"
#include "scheduler/device_health.h"
#include "scheduler/graph_arena.h"
#include "scheduler/graph_split.h"

namespace cuvil::agent {
namespace {

using scheduler::GraphArena;
using scheduler::GraphPlan;

// Of a program whose capture has not been tried: on an H200 captures take 3 to 20 ms.
constexpr uint64_t kTypicalCaptureNs = 20'000'000;

// A number that nothing else depends on.
std::atomic<uint32_t> max_streams = scheduler::StreamTrialOptions().max_streams;

// GIL held.
bool CudnnIsEnabled() {
  const ErrorScope errors;
  const OwnedRef module = OwnedRef::Steal(PyImport_ImportModule("torch._C"));
  const OwnedRef answer =
      module ? OwnedRef::Steal(PyObject_CallMethod(module.get(), "_get_cudnn_enabled", nullptr)) : OwnedRef();
  if (!answer) PyErr_Clear();
  return answer.get() == Py_True;
}

OwnedRef DescribeStreams(const scheduler::StreamReport& report) {
  Record streams;
  RecordList candidates;
  for (uint32_t i = 0; i < report.candidates.size(); ++i) {
    const scheduler::StreamCandidate& candidate = report.candidates[i];
    Record item;
    item.Set("name", candidate.name);
    item.Set("streams", uint64_t{candidate.num_streams});
    item.Set("predicted_ns", static_cast<uint64_t>(candidate.predicted_ns));
    item.Set("replay_ns", static_cast<uint64_t>(candidate.replay_ns));
    item.Set("pool_bytes", candidate.pool_bytes);
    item.Set("rejected", candidate.rejected);
    item.SetBool("chosen", i == report.chosen);
    candidates.Add(item.Take());
  }
  streams.Set("candidates", candidates.Take());
  streams.Set("count", uint64_t{report.candidates.empty() ? 1 : report.candidates[report.chosen].num_streams});
  streams.Set("skipped", report.skipped);
  streams.Set("timeline", report.timeline);
  streams.Set("launch_ns", static_cast<uint64_t>(report.launch_ns));
  streams.Set("trial_ns", report.trial_ns);
  streams.Set("launches", uint64_t{report.num_launches});
  return streams.Take();
}

}  // namespace

GraphRunner::~GraphRunner() {
  if (scheduler::GraphBudget* budget = GraphArena::BudgetOf(device_.index)) budget->Forget(this);
  std::shared_ptr<GraphPlan> graph;
  {
    const absl::MutexLock lock(&mutex_);
    graph = std::move(graph_);
  }
  if (graph == nullptr) return;
  if (!Py_IsInitialized() || TheLifecycle().exiting.load(std::memory_order_relaxed)) {
    // At the end of the process the driver may be gone already.
    static ProcessLifetime<std::vector<std::shared_ptr<GraphPlan>>> left_behind;
    left_behind->push_back(std::move(graph));
    return;
  }
  LetGraphDie(std::move(graph));
}

void GraphRunner::GiveUp(std::string reason) {
  const absl::MutexLock lock(&mutex_);
  gave_up_ = true;
  reason_ = std::move(reason);
}

std::string GraphRunner::reason() const {
  const absl::MutexLock lock(&mutex_);
  return reason_;
}

std::optional<uint32_t> GraphRunner::failed_op() const {
  const absl::MutexLock lock(&mutex_);
  return gave_up_ ? failed_op_ : std::nullopt;
}

void GraphRunner::Build(const std::shared_ptr<const torch_abi::TorchApi>& api) {
  api_ = api;
  if (absl::Status s = Divide({}); !s.ok()) GiveUp(std::string(s.message()));
}

absl::Status GraphRunner::Divide(const std::set<cir::ValueId>& hidden_views) {
  absl::StatusOr<scheduler::GraphSplit> split =
      scheduler::SplitForGraph(part_->graph, {hidden_views, &part_->versioned});
  if (!split.ok()) return split.status();
  scheduler::BuildOptions options = PlanOptions(*capture_, *api_, part_->constants);
  options.left_out_ops = std::move(split->left_out_ops);
  auto body = scheduler::ExecutionPlan::Build(std::move(split->body), api_, std::move(options));
  if (!body.ok()) return body.status();
  scheduler::BuildOptions tail_options;
  tail_options.view_tracking_key = DispatchKeys::view_tracking_key();
  auto tail = scheduler::ExecutionPlan::Build(std::move(split->tail), api_, std::move(tail_options));
  if (!tail.ok()) return tail.status();
  if (absl::Status s = scheduler::CheckCapturable(**body, device_); !s.ok()) return s;
  parts_ = {*std::move(body), *std::move(tail), std::move(split->tail_captured), split->num_copies};
  return absl::OkStatus();
}

std::shared_ptr<void> GraphRunner::GiveUpGraph() {
  const absl::MutexLock lock(&mutex_);
  if (graph_ == nullptr) return nullptr;
  credit_.GivenUp(graph_->capture_ns(), graph_->num_launches());
  waiting_.store(true, std::memory_order_relaxed);
  ++num_given_up_;
  reason_ = "its memory was wanted for other graphs or by torch";
  Count(TheLifecycle().statistics.graphs_given_up);
  return std::move(graph_);
}

void GraphRunner::WaitForMemory(std::string reason, uint64_t capture_ns) {
  const absl::MutexLock lock(&mutex_);
  credit_.GivenUp(capture_ns, 0);
  waiting_.store(true, std::memory_order_relaxed);
  reason_ = std::move(reason);
}

uint64_t GraphRunner::BeginOperators() const { return waiting_.load(std::memory_order_relaxed) ? MonotonicNs() : 0; }

void GraphRunner::EndOperators(uint64_t begin_ns) {
  if (begin_ns == 0) return;
  const uint64_t duration_ns = MonotonicNs() - begin_ns;
  const absl::MutexLock lock(&mutex_);
  credit_.Ran(duration_ns);
}

void GraphRunner::ReportDeviceError(PyObject* module) {
  scheduler::DeviceHealth* health = GraphArena::HealthOf(device_.index);
  if (health == nullptr || !health->TakeReport()) return;
  Count(TheLifecycle().statistics.device_errors);
  const std::string error(health->status().message());
  std::string steps = "no steps";
  if (parts_.body != nullptr && !parts_.body->steps().empty()) {
    const auto& steps_of_body = parts_.body->steps();
    steps =
        absl::StrCat("steps 0 to ", steps_of_body.size() - 1, ", ", parts_.body->DescribeOp(steps_of_body.front().op),
                     " to ", parts_.body->DescribeOp(steps_of_body.back().op));
  }
  Log(LogLevel::kWarning, "",
      absl::StrCat("cuda:", int{device_.index}, " is beyond use: ", error, ", noticed by the plan of ",
                   ModuleName(module), " (", steps,
                   "); kernels fail later than they are launched, so it may have been ",
                   "an earlier one. Calls on this device run as CPython would from now on."));
}

absl::StatusOr<std::shared_ptr<GraphPlan>> GraphRunner::CaptureInRoom(PyObject* module,
                                                                      absl::Span<const torch_abi::TensorRef> inputs,
                                                                      absl::Span<const torch_abi::TensorRef> captured) {
  const uint64_t need_bytes = need_bytes_ != 0 ? need_bytes_ : GraphPlan::EstimateBytes(*parts_.body);
  absl::StatusOr<GraphRoom> room = MakeGraphRoom(module, device_, need_bytes);
  if (!room.ok()) return room.status();
  (void)TakeOutOfMemory();
  std::optional<uint32_t> failed_op;
  absl::StatusOr<std::shared_ptr<GraphPlan>> plan = [&]() -> absl::StatusOr<std::shared_ptr<GraphPlan>> {
    AssertGilHeld();
    const GilRelease no_gil;
    absl::StatusOr<std::unique_ptr<GraphPlan>> made =
        GraphPlan::Create(parts_, inputs, captured, room->arena, {schedule_, nullptr, &failed_op});
    if (!made.ok()) return made.status();
    return std::shared_ptr<GraphPlan>(*std::move(made));
  }();
  Count(TheLifecycle().statistics.graph_captures);
  absl::Status status = plan.status();
  if (TakeOutOfMemory() && !status.ok()) status = absl::ResourceExhaustedError(status.message());
  {
    const absl::MutexLock lock(&mutex_);
    failed_op_ = absl::IsUnavailable(status) ? failed_op : std::nullopt;
  }
  if (absl::IsResourceExhausted(status)) GiveUpGraphs(device_.index);
  if (status.ok()) {
    status = SettleGraphRoom(module, (*plan)->own_bytes(), &*room);
    if (room->is_first || !status.ok()) need_bytes_ = room->need_bytes;
    // Alone in its arena, and too big all the same.
    if (!status.ok() && room->is_first) status = absl::UnimplementedError(status.message());
  }
  {
    AssertGilHeld();
    const GilRelease no_gil;
    room->reservation = {};
    if (!status.ok()) plan = status;
    room->arena.reset();
  }
  if (!status.ok()) KeepGraphLimit(device_.index);
  return plan;
}

absl::StatusOr<std::shared_ptr<GraphPlan>> GraphRunner::CaptureAnew(PyObject* module,
                                                                    absl::Span<const torch_abi::TensorRef> inputs,
                                                                    absl::Span<const torch_abi::TensorRef> captured,
                                                                    const CudaState& state) {
  // Other switches mean other kernels, with other times.
  if (measured_state_ != state) measured_state_.reset();
  if (!measured_state_.has_value()) schedule_.reset();
  absl::StatusOr<std::shared_ptr<GraphPlan>> plan = CaptureInRoom(module, inputs, captured);
  if (!plan.ok() && schedule_ != nullptr) {
    schedule_.reset();
    plan = CaptureInRoom(module, inputs, captured);
  }
  if (!plan.ok()) return plan;
  if (const std::set<cir::ValueId> hidden_views =
          HiddenViews(Bridge(), *api_, (*plan)->body().graph(), (*plan)->kept(), part_->versioned);
      !hidden_views.empty()) {
    if (absl::Status s = Divide(hidden_views); !s.ok()) return s;
    {
      AssertGilHeld();
      const GilRelease no_gil;
      plan->reset();
    }
    need_bytes_ = 0;
    measured_state_.reset();
    schedule_.reset();
    plan = CaptureInRoom(module, inputs, captured);
    if (!plan.ok()) return plan;
  }
  if (measured_state_.has_value()) return plan;
  measured_state_ = state;
  return Fastest(module, *std::move(plan), inputs, captured);
}

absl::StatusOr<std::shared_ptr<GraphPlan>> GraphRunner::Fastest(PyObject* module, std::shared_ptr<GraphPlan> serial,
                                                                absl::Span<const torch_abi::TensorRef> inputs,
                                                                absl::Span<const torch_abi::TensorRef> captured) {
  std::shared_ptr<GraphArena> arena = serial->shared_arena();
  scheduler::StreamTrialOptions options;
  // Without cuDNN convolutions multiply matrices by cuBLAS, whose workspaces only the capture stream has.
  options.max_streams = CudnnIsEnabled() ? max_streams.load(std::memory_order_relaxed) : 1;
  scheduler::StreamTrialOutcome outcome;
  {
    AssertGilHeld();
    const GilRelease no_gil;
    outcome = scheduler::TryStreams(*serial, parts_, inputs, captured, arena, options);
    if (outcome.plan != nullptr) serial = std::move(outcome.plan);  // the old one goes here, where it may wait
    const absl::MutexLock lock(&mutex_);
    streams_ = std::make_shared<const scheduler::StreamReport>(std::move(outcome.report));
  }
  (void)TakeOutOfMemory();  // a candidate that found no memory is none
  schedule_ = std::move(outcome.schedule);
  if (schedule_ == nullptr) {
    KeepGraphLimit(device_.index);  // the trial's pool is torch's cache by now
    return serial;
  }
  // Side streams have memory of their own.
  GraphRoom room;
  room.arena = std::move(arena);
  const absl::Status settled = SettleGraphRoom(module, serial->own_bytes(), &room);
  need_bytes_ = room.need_bytes;
  {
    AssertGilHeld();
    const GilRelease no_gil;
    room.arena.reset();
    if (!settled.ok()) serial.reset();
  }
  if (settled.ok()) return serial;
  KeepGraphLimit(device_.index);
  return settled;
}

void GraphRunner::SetMaxStreams(uint32_t number) { max_streams.store(number, std::memory_order_relaxed); }

absl::Status GraphRunner::AfterFailure(PyObject* module, absl::Status status) {
  if (TakeOutOfMemory() || absl::IsResourceExhausted(status)) {
    // Eager is about to need what the graphs have.
    GiveUpGraphs(device_.index);
    return absl::AbortedError(status.message());
  }
  if (absl::IsDataLoss(status)) {
    ReportDeviceError(module);
    return absl::FailedPreconditionError(status.message());
  }
  if (absl::IsUnavailable(status)) GiveUp(std::string(status.message()));
  return status;
}

absl::StatusOr<bool> GraphRunner::Run(PyObject* module, absl::Span<const torch_abi::TensorRef> inputs,
                                      absl::Span<const torch_abi::TensorRef> captured,
                                      std::vector<torch_abi::OwnedTensor>* outputs, GraphRecorder* recorder) {
  if (const scheduler::DeviceHealth* health = GraphArena::HealthOf(device_.index); health != nullptr && !health->ok()) {
    ReportDeviceError(module);
    return absl::FailedPreconditionError("the device is beyond use");
  }
  CudaState state = CudaState::Read();
  std::shared_ptr<GraphPlan> graph;
  {
    const absl::MutexLock lock(&mutex_);
    if (gave_up_) return false;
    if (graph_ != nullptr && state_ == state && Bridge().AreAt(captured, graph_->captured_data())) {
      graph = graph_;
    } else {
      if (capturing_) return false;
      const bool is_again = graph_ == nullptr && waiting_.load(std::memory_order_relaxed);
      if (is_again && !credit_.IsWorthIt()) return false;
      // Ours would allocate, which ends a capture of the program's own.
      if (CudaState::StreamIsCapturing()) {
        return absl::FailedPreconditionError("the current stream is being captured");
      }
      if (!is_again && ++num_captures_ > kMaxCaptures) {
        gave_up_ = true;
        reason_ = "weights or torch's CUDA switches keep changing";
        return false;
      }
      capturing_ = true;
    }
  }
  if (graph == nullptr) {
    const uint64_t start_ns = MonotonicNs();
    absl::StatusOr<std::shared_ptr<GraphPlan>> made = CaptureAnew(module, inputs, captured, state);
    const uint64_t capture_ns = MonotonicNs() - start_ns;
    std::shared_ptr<GraphPlan> replaced;  // freed without the lock
    {
      const absl::MutexLock lock(&mutex_);
      capturing_ = false;
      if (made.ok()) {
        graph = *std::move(made);
        replaced = std::exchange(graph_, graph);
        state_ = std::move(state);
        waiting_.store(false, std::memory_order_relaxed);
        reason_.clear();
      }
    }
    if (graph == nullptr) {
      const std::string reason(made.status().message());
      if (absl::IsFailedPrecondition(made.status())) return made.status();
      if (absl::IsDataLoss(made.status())) return AfterFailure(module, made.status());
      if (absl::IsResourceExhausted(made.status())) {
        WaitForMemory(reason, std::max(capture_ns, kTypicalCaptureNs));
      } else {
        GiveUp(reason);
      }
      return false;
    }
    graph->SetHolder(this);
    AssertGilHeld();
    const GilRelease no_gil;
    if (replaced != nullptr) replaced->SetHolder(nullptr);
    replaced.reset();
  }
  if (recorder != nullptr && !recorder->Prepare(graph)) return false;
  const absl::Status status = [&] {
    AssertGilHeld();
    const GilRelease no_gil;
    (void)TakeOutOfMemory();  // of the program's own
    const scheduler::GraphPlan::Watch* watch = recorder == nullptr ? nullptr : recorder->Begin();
    absl::Status ran = graph->Run(inputs, captured, outputs, watch);
    if (recorder != nullptr) recorder->End();
    graph.reset();  // it may have been given up meanwhile
    return ran;
  }();
  if (!status.ok()) return AfterFailure(module, status);
  return true;
}

OwnedRef GraphRunner::Describe() const {
  Record graph;
  std::shared_ptr<GraphPlan> plan;
  std::shared_ptr<const scheduler::StreamReport> streams;
  {
    const absl::MutexLock lock(&mutex_);
    plan = gave_up_ ? nullptr : graph_;
    streams = streams_;
    graph.SetBool("captured", plan != nullptr);
    graph.Set("reason", reason_);
    graph.Set("captures", uint64_t{num_captures_});
    graph.Set("given_up", num_given_up_);
    graph.SetBool("waits_for_memory", waiting_.load(std::memory_order_relaxed));
  }
  if (plan != nullptr) {
    const auto& counts = plan->node_counts();
    graph.Set("kernels", uint64_t{counts.kernels});
    graph.Set("copies", uint64_t{counts.copies});
    graph.Set("memsets", uint64_t{counts.memsets});
    graph.Set("other_nodes", uint64_t{counts.others});
    graph.Set("capture_ns", plan->capture_ns());
    graph.Set("input_copy_bytes", static_cast<uint64_t>(plan->input_copy_bytes()));
    graph.Set("own_bytes", plan->own_bytes());
    // The budget's lock is taken before a runner's, never after.
    const scheduler::GraphBudget::Usage usage = plan->arena().budget().usage();
    graph.Set("pool_bytes", plan->arena().account().pool_bytes());
    graph.Set("budget_bytes", usage.limit_bytes);
    graph.Set("budget_used_bytes", usage.used_bytes());
    graph.Set("launches", plan->num_launches());
    if (streams != nullptr) graph.Set("streams", DescribeStreams(*streams));
    AssertGilHeld();
    const GilRelease no_gil;
    plan.reset();  // it may have been given up meanwhile
  }
  return graph.Take();
}

}  // namespace cuvil::agent
