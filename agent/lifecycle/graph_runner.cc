#include "agent/lifecycle/graph_runner.h"

#include <set>
#include <unordered_map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "agent/cuda_memory_pool.h"
#include "agent/dispatch_keys.h"
#include "agent/gil.h"
#include "agent/lifecycle/captured_plan.h"
#include "agent/op_recorder.h"
#include "agent/process_lifetime.h"
#include "scheduler/graph_arena.h"
#include "scheduler/graph_split.h"

namespace cuvil::agent {
namespace {

using scheduler::GraphArena;
using scheduler::GraphPlan;

// The arena of each module's plans, by the module's address; it lives as long as one of them. GIL held.
absl::StatusOr<std::shared_ptr<GraphArena>> ArenaOf(PyObject* module, cir::Device device) {
  static ProcessLifetime<std::unordered_map<PyObject*, std::weak_ptr<GraphArena>>> arenas;
  if (const auto found = arenas->find(module); found != arenas->end()) {
    std::shared_ptr<GraphArena> arena = found->second.lock();
    if (arena != nullptr && arena->device() == device) return arena;
  }
  std::erase_if(*arenas, [](const auto& entry) { return entry.second.expired(); });
  absl::StatusOr<std::shared_ptr<GraphArena>> arena =
      GraphArena::CreateForProcess(device, std::make_unique<TorchCudaAllocator>(device.index));
  if (arena.ok()) (*arenas)[module] = *arena;
  return arena;
}

// Outputs of the body that are views of memory which no operator of the program shows. GIL held.
std::set<cir::ValueId> HiddenViews(const GraphPlan& plan) {
  const ErrorScope errors;
  std::set<cir::ValueId> views;
  const std::vector<cir::ValueId>& outputs = plan.body().graph().outputs;
  for (size_t i = 0; i < outputs.size(); ++i) {
    const OwnedRef tensor = OwnedRef::Steal(Bridge().ToPyObject(plan.body().api().NewReference(plan.kept()[i].ref())));
    const OwnedRef is_view =
        tensor ? OwnedRef::Steal(PyObject_CallMethod(tensor.get(), "_is_view", nullptr)) : OwnedRef();
    if (!is_view) PyErr_Clear();
    if (!is_view || is_view.get() == Py_True) views.insert(outputs[i]);
  }
  return views;
}

}  // namespace

std::unique_ptr<GraphRunner> GraphRunner::Create(std::shared_ptr<Capture> capture) {
  for (const cir::Value& value : capture->graph().values) {
    if (value.type.device != cir::DeviceType::kCuda) continue;
    const cir::Device device{value.type.device, value.type.device_index};
    return std::unique_ptr<GraphRunner>(new GraphRunner(std::move(capture), device));
  }
  return nullptr;
}

GraphRunner::~GraphRunner() {
  std::shared_ptr<GraphPlan> graph;
  {
    const absl::MutexLock lock(&mutex_);
    graph = std::move(graph_);
  }
  if (graph == nullptr) return;
  if (!Py_IsInitialized()) {
    // At the end of the process the driver may be gone already.
    static ProcessLifetime<std::vector<std::shared_ptr<GraphPlan>>> left_behind;
    left_behind->push_back(std::move(graph));
    return;
  }
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

void GraphRunner::Build(const std::shared_ptr<const torch_abi::TorchApi>& api) {
  api_ = api;
  if (absl::Status s = Divide({}); !s.ok()) GiveUp(std::string(s.message()));
}

absl::Status GraphRunner::Divide(const std::set<cir::ValueId>& hidden_views) {
  absl::StatusOr<scheduler::GraphSplit> split = scheduler::SplitForGraph(capture_->graph(), hidden_views);
  if (!split.ok()) return split.status();
  scheduler::BuildOptions options = PlanOptions(*capture_, *api_);
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

absl::StatusOr<std::shared_ptr<GraphPlan>> GraphRunner::CaptureAnew(PyObject* module,
                                                                    absl::Span<const torch_abi::TensorRef> inputs,
                                                                    absl::Span<const torch_abi::TensorRef> captured) {
  absl::StatusOr<std::shared_ptr<GraphArena>> arena = ArenaOf(module, device_);
  if (!arena.ok()) return arena.status();
  const auto create = [&]() -> absl::StatusOr<std::shared_ptr<GraphPlan>> {
    AssertGilHeld();
    const GilRelease no_gil;
    absl::StatusOr<std::unique_ptr<GraphPlan>> plan = GraphPlan::Create(parts_, inputs, captured, *arena);
    if (!plan.ok()) return plan.status();
    return std::shared_ptr<GraphPlan>(*std::move(plan));
  };
  absl::StatusOr<std::shared_ptr<GraphPlan>> plan = create();
  if (!plan.ok()) return plan;
  const std::set<cir::ValueId> hidden_views = HiddenViews(**plan);
  if (hidden_views.empty()) return plan;
  if (absl::Status s = Divide(hidden_views); !s.ok()) return s;
  return create();
}

absl::StatusOr<bool> GraphRunner::Run(PyObject* module, absl::Span<const torch_abi::TensorRef> inputs,
                                      absl::Span<const torch_abi::TensorRef> captured,
                                      std::vector<torch_abi::OwnedTensor>* outputs, GraphRecorder* recorder) {
  // A graph belongs to one device's context. Operators find their tensors' device themselves.
  if (CudaState::CurrentDevice() != device_.index) return false;
  CudaState state = CudaState::Read();
  std::shared_ptr<GraphPlan> graph;
  {
    const absl::MutexLock lock(&mutex_);
    if (gave_up_) return false;
    if (graph_ != nullptr && state_ == state && Bridge().AreAt(captured, graph_->captured_data())) {
      graph = graph_;
    } else {
      if (capturing_) return false;
      // Ours would allocate, which ends a capture of the program's own.
      if (CudaState::StreamIsCapturing()) {
        return absl::FailedPreconditionError("the current stream is being captured");
      }
      if (++num_captures_ > kMaxCaptures) {
        gave_up_ = true;
        reason_ = "weights or torch's CUDA switches keep changing";
        return false;
      }
      capturing_ = true;
    }
  }
  if (graph == nullptr) {
    absl::StatusOr<std::shared_ptr<GraphPlan>> made = CaptureAnew(module, inputs, captured);
    std::shared_ptr<GraphPlan> replaced;  // freed without the lock
    {
      const absl::MutexLock lock(&mutex_);
      capturing_ = false;
      if (!made.ok()) {
        gave_up_ = true;
        reason_ = std::string(made.status().message());
        return false;
      }
      graph = *made;
      replaced = std::exchange(graph_, *std::move(made));
      state_ = std::move(state);
    }
    AssertGilHeld();
    const GilRelease no_gil;
    replaced.reset();
  }
  AssertGilHeld();
  const GilRelease no_gil;
  const scheduler::GraphPlan::Watch* watch = recorder == nullptr ? nullptr : recorder->Begin(graph);
  const absl::Status s = graph->Run(inputs, captured, outputs, watch);
  if (recorder != nullptr) recorder->End();
  if (!s.ok()) {
    if (absl::IsUnavailable(s)) GiveUp(absl::StrCat("device error: ", s.message()));
    return s;
  }
  return true;
}

void GraphRunner::Describe(Record* record) const {
  const absl::MutexLock lock(&mutex_);
  Record graph;
  graph.SetBool("captured", graph_ != nullptr && !gave_up_);
  graph.Set("reason", reason_);
  if (graph_ != nullptr) {
    const auto& counts = graph_->node_counts();
    graph.Set("kernels", uint64_t{counts.kernels});
    graph.Set("copies", uint64_t{counts.copies});
    graph.Set("memsets", uint64_t{counts.memsets});
    graph.Set("other_nodes", uint64_t{counts.others});
    graph.Set("capture_ns", graph_->capture_ns());
    graph.Set("input_copy_bytes", static_cast<uint64_t>(graph_->input_copy_bytes()));
    graph.Set("captures", uint64_t{num_captures_});
  }
  record->Set("cuda_graph", graph.Take());
}

}  // namespace cuvil::agent
