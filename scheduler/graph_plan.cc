#include "scheduler/graph_plan.h"

#include <cstdint>
#include <set>
#include <unordered_map>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "memory/device/graph_edges.h"
#include "scheduler/graph_split.h"
#include "scheduler/graph_verifier.h"
#include "scheduler/monotonic_clock.h"
#include "scheduler/plan_executor.h"
#include "scheduler/scheduled_capture.h"
#include "scheduler/stream_problem.h"
#include "scheduler/torch/cuda_tensor_factory.h"

namespace cuvil::scheduler {
namespace {

using torch_abi::OwnedTensor;
using torch_abi::TensorRef;

size_t SpanBytes(const cir::TensorType& type) {
  return type.num_elements() == 0 ? 0 : static_cast<size_t>(type.span_bytes());
}

// Notes which step makes which nodes.
class NodeRecorder final : public StepObserver {
 public:
  NodeRecorder(device::StreamCapture* capture, std::vector<GraphPlan::Node>* nodes)
      : capture_(capture), nodes_(nodes) {}

  void OnStep(uint32_t index, uint64_t, uint64_t) noexcept override {
    if (!status_.ok()) return;
    const absl::StatusOr<std::vector<void*>> made = capture_->NewNodes();
    status_ = made.status();
    if (!made.ok()) return;
    for (void* node : *made) nodes_->push_back({node, index});
  }
  const absl::Status& status() const { return status_; }

 private:
  device::StreamCapture* const capture_;
  std::vector<GraphPlan::Node>* const nodes_;
  absl::Status status_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<GraphPlan>> GraphPlan::Create(Parts parts, absl::Span<const TensorRef> inputs,
                                                             absl::Span<const TensorRef> captured,
                                                             std::shared_ptr<GraphArena> arena,
                                                             const CaptureOptions& options) {
  if (absl::Status s = CheckCapturable(*parts.body, arena->device()); !s.ok()) return s;
  auto plan = std::unique_ptr<GraphPlan>(new GraphPlan(std::move(arena)));
  plan->parts_ = std::move(parts);
  const GraphArena& home = *plan->arena_;
  const torch_abi::CurrentDeviceScope current(home.streams(), home.device().index);
  const device::ContextScope context(home.driver(), home.context());
  absl::StatusOr<device::StreamHandle> stream = home.streams().Current(home.device().index);
  if (!stream.ok()) return stream.status();
  // What a capture of ours allocates would end one of the program's own.
  if (device::IsCapturing(home.driver(), *stream)) {
    return absl::FailedPreconditionError("the current stream is being captured");
  }
  const uint64_t start_ns = MonotonicNs();
  absl::Status status = plan->Capture(inputs, captured, options);
  plan->arena_->health().Note(status);
  if (!status.ok()) return status;
  plan->capture_ns_ = MonotonicNs() - start_ns;
  plan->entry_.emplace(plan->arena_->account(), plan->CountOwnBytes());
  return plan;
}

// Memory must not go back while a launch may still use it.
GraphPlan::~GraphPlan() {
  dying_.emplace(arena_->driver());
  const device::ContextScope context(arena_->driver(), arena_->context());
  arena_->WaitUntilIdle();
  executable_.reset();
  graph_.reset();
}

uint64_t GraphPlan::EstimateBytes(const ExecutionPlan& body) {
  uint64_t bytes = body.memory_plan().high_water_bytes;
  for (const cir::ValueId id : body.graph().inputs) bytes += SpanBytes(body.graph().value(id).type);
  return bytes;
}

uint64_t GraphPlan::CountOwnBytes() const {
  uint64_t bytes = input_copy_bytes_;
  std::set<uint64_t> counted;
  const cir::Graph& program = parts_.body->graph();
  for (size_t i = 0; i < kept_.size(); ++i) {
    if (!counted.insert(AddressOf(kept_[i].ref())).second) continue;
    bytes += SpanBytes(program.value(program.outputs[i]).type);
  }
  return bytes;
}

uint64_t GraphPlan::AddressOf(TensorRef tensor) const {
  void* data = nullptr;
  parts_.body->api().get_data_ptr(tensor.handle(), &data);
  return reinterpret_cast<uintptr_t>(data);
}

absl::StatusOr<OwnedTensor> GraphPlan::MakeTensor(const cir::TensorType& type) const {
  static const torch_abi::CudaTensorFactory factory = torch_abi::CudaTensorFactory::Find();
  const torch_abi::TorchApi& api = parts_.body->api();
  if (type.device == cir::DeviceType::kCuda && factory) {
    void* cell = nullptr;
    if (absl::Status s = factory.Make(type, &cell); !s.ok()) return absl::ResourceExhaustedError(s.message());
    return api.TakeCell(&cell);
  }
  void* handle = nullptr;
  const int32_t made = api.empty_strided(static_cast<int64_t>(type.sizes.size()), type.sizes.data(),
                                         type.strides.data(), static_cast<int32_t>(type.dtype),
                                         static_cast<int32_t>(type.device), type.device_index, &handle);
  if (made != 0) return absl::ResourceExhaustedError("torch has no memory for a tensor of a plan");
  return OwnedTensor::Steal(handle);
}

absl::Status GraphPlan::Capture(absl::Span<const TensorRef> inputs, absl::Span<const TensorRef> captured,
                                const CaptureOptions& options) {
  std::shared_ptr<const StreamSchedule> schedule = options.schedule;
  if (schedule == nullptr) {
    absl::StatusOr<StreamSchedule> serial = ScheduleStreams(DescribeSteps(*parts_.body, {}), {});
    if (!serial.ok()) return serial.status();
    schedule = std::make_shared<const StreamSchedule>(*std::move(serial));
  }
  absl::StatusOr<std::vector<device::StreamHandle>> streams = arena_->SideStreams(schedule->num_streams - 1);
  if (!streams.ok()) return streams.status();
  const device::StreamHandle stream = arena_->capture_stream().handle();
  streams->insert(streams->begin(), stream);
  torch_abi::CurrentStreamScope current;
  if (absl::Status s = current.Enter(arena_->streams(), arena_->device().index, stream); !s.ok()) return s;
  // What is allocated and made beside the capture itself must not end captures that other threads make. Within it the
  // default mode tells of calls that a capture does not see.
  std::optional<device::RelaxedCaptureMode> relaxed(std::in_place, arena_->driver());
  {
    const PoolScope workspaces(arena_->workspaces());
    if (!workspaces.status().ok()) return workspaces.status();
    if (absl::Status s = arena_->allocator().MakeWorkspaces(); !s.ok()) return s;
  }
  // The pool asks for the GIL, which nobody who holds the arena may wait for.
  const PoolScope pool(options.pool != nullptr ? *options.pool : arena_->pool());
  if (!pool.status().ok()) return pool.status();
  // Behind whatever uses the memory that is free by now.
  GraphArena::Use use(*arena_, stream);
  if (absl::Status s = use.Begin(); !s.ok()) return s;
  if (absl::Status s = ReserveOnSideStreams(*schedule, *streams); !s.ok()) return s;

  const cir::Graph& program = parts_.body->graph();
  if (inputs.size() != program.inputs.size()) {
    return absl::InternalError("another number of inputs than the plan has");
  }
  std::vector<TensorRef> copies;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const cir::TensorType& type = program.value(program.inputs[i]).type;
    absl::StatusOr<OwnedTensor> copy = MakeTensor(type);
    if (!copy.ok()) return copy.status();
    const size_t size_bytes = SpanBytes(type);
    if (size_bytes != 0) copies_in_.copies.push_back({AddressOf(copy->ref()), AddressOf(inputs[i]), size_bytes});
    input_copy_bytes_ += size_bytes;
    copies.push_back(copy->ref());
    inputs_.push_back(*std::move(copy));
  }
  for (const TensorRef tensor : captured) captured_data_.push_back(reinterpret_cast<void*>(AddressOf(tensor)));

  relaxed.reset();
  absl::StatusOr<device::StreamCapture> capture =
      device::StreamCapture::Begin(arena_->driver(), arena_->capture_stream());
  if (!capture.ok()) return capture.status();
  if (absl::Status s = CaptureCopies(&copies_in_, Node::kInputCopy, &*capture); !s.ok()) return s;
  NodeRecorder recorder(&*capture, &nodes_);
  ScheduledCapture scheduled(*parts_.body, *schedule, arena_->driver(), arena_->streams(), arena_->device().index,
                             *std::move(streams), &recorder);
  if (absl::Status s = scheduled.Fork(); !s.ok()) return s;
  if (absl::Status s = PlanExecutor::RunDirected(*parts_.body, copies, captured, &kept_, scheduled); !s.ok()) {
    // Not an error of the model: an operator that may not run while a stream is captured.
    if (options.failed_op != nullptr && scheduled.running_step().has_value()) {
      *options.failed_op = parts_.body->steps()[*scheduled.running_step()].op;
    }
    return absl::UnavailableError(absl::StrCat("capture: ", s.message()));
  }
  if (!recorder.status().ok()) return recorder.status();
  if (absl::Status s = scheduled.Join(); !s.ok()) return s;
  for (uint32_t i = 0; i < parts_.num_copies; ++i) {
    const cir::TensorType& type = program.value(program.outputs[i]).type;
    const size_t size_bytes = SpanBytes(type);
    if (size_bytes == 0) continue;
    const uint64_t from = AddressOf(kept_[i].ref());
    copies_out_.copies.push_back({from, from, size_bytes});
  }
  if (absl::Status s = CaptureCopies(&copies_out_, Node::kOutputCopy, &*capture); !s.ok()) return s;

  absl::StatusOr<device::CapturedGraph> graph = capture->Finish();
  if (!graph.ok()) return graph.status();
  graph_.emplace(*std::move(graph));
  relaxed.emplace(arena_->driver());
  if (const device::FillKernel* fill = arena_->kernels().fill; fill != nullptr) {
    const auto replaced = fill->ReplaceMemsets(graph_->handle());
    if (!replaced.ok()) return replaced.status();
    for (const device::FillKernel::Replacement& each : *replaced) {
      for (Node& node : nodes_) {
        if (node.node == each.memset) node.node = each.kernel;
      }
    }
  }
  if (absl::Status s = Verify(scheduled); !s.ok()) return s;
  const absl::StatusOr<device::GraphNodeCounts> counts = graph_->CountNodes();
  if (!counts.ok()) return counts.status();
  counts_ = *counts;
  absl::StatusOr<device::ExecutableGraph> executable = graph_->Instantiate();
  if (!executable.ok()) return executable.status();
  executable_.emplace(*std::move(executable));
  return absl::OkStatus();
}

absl::Status GraphPlan::ReserveOnSideStreams(const StreamSchedule& schedule,
                                             absl::Span<const device::StreamHandle> streams) {
  if (schedule.num_streams == 1) return absl::OkStatus();
  // For a block of 1 to 10 MiB torch takes a segment of 20, on each stream anew; for one of 10 exactly so much. What is
  // given back here is what the stream's blocks are cut from then (c10/cuda/CUDACachingAllocator.cpp: kMinLargeAlloc,
  // kLargeBuffer). Inception-v3 on three streams took 68 MiB in the place of 24.
  constexpr int64_t kReservedBytes = int64_t{10} << 20;
  const std::vector<bool> large = StreamsOfLargeBlocks(*parts_.body, schedule);
  cir::TensorType type;
  type.dtype = cir::DType::kUInt8;
  type.device = arena_->device().type;
  type.device_index = arena_->device().index;
  type.sizes = {kReservedBytes};
  type.strides = {1};
  // The block may be what a graph of the pool writes to, and torch fills new tensors when it is to be deterministic:
  // not before what is in flight has ended, and not when the next launch has begun, which the main stream stands for.
  const absl::StatusOr<device::Event> order = device::Event::Create(arena_->driver());
  if (!order.ok()) return order.status();
  for (uint32_t s = 1; s < schedule.num_streams; ++s) {
    if (!large[s]) continue;
    torch_abi::CurrentStreamScope current;
    if (absl::Status e = order->Record(streams[0]); !e.ok()) return e;
    if (absl::Status e = order->MakeWait(streams[s]); !e.ok()) return e;
    if (absl::Status e = current.Enter(arena_->streams(), arena_->device().index, streams[s]); !e.ok()) return e;
    const bool made = MakeTensor(type).ok();  // and gives it back
    if (absl::Status e = order->Record(streams[s]); !e.ok()) return e;
    if (absl::Status e = order->MakeWait(streams[0]); !e.ok()) return e;
    if (!made) return absl::ResourceExhaustedError("torch has no memory for another stream");
  }
  return absl::OkStatus();
}

absl::Status GraphPlan::Verify(const ScheduledCapture& scheduled) const {
  const absl::StatusOr<device::GraphEdges> graph = device::ReadGraphEdges(arena_->driver(), graph_->handle());
  if (!graph.ok()) return graph.status();
  // The copies of inputs come first, those of outputs last, both on the main stream. What they read and write beside
  // the graph's own memory belongs to the caller.
  GraphFacts facts;
  facts.steps.resize(1);
  for (const device::DeviceCopy& copy : copies_in_.copies) {
    facts.steps[0].writes.push_back({copy.to, copy.to + copy.size_bytes});
  }
  facts.steps.insert(facts.steps.end(), scheduled.steps().begin(), scheduled.steps().end());
  facts.steps.emplace_back();
  for (const device::DeviceCopy& copy : copies_out_.copies) {
    facts.steps.back().reads.push_back({copy.from, copy.from + copy.size_bytes});
  }
  std::unordered_map<void*, uint32_t> step_of;
  for (const Node& node : nodes_) {
    step_of[node.node] = node.step == Node::kInputCopy    ? 0
                         : node.step == Node::kOutputCopy ? static_cast<uint32_t>(facts.steps.size() - 1)
                                                          : node.step + 1;
  }
  facts.num_nodes = static_cast<uint32_t>(graph->nodes.size());
  facts.edges = graph->edges;
  for (uint32_t i = 0; i < facts.num_nodes; ++i) {
    if (const auto found = step_of.find(graph->nodes[i]); found != step_of.end()) {
      facts.steps[found->second].nodes.push_back(i);
    }
  }
  for (GraphFacts::Release release : scheduled.releases()) {
    ++release.after_step;
    facts.releases.push_back(release);
  }
  const absl::Status status = VerifyGraph(facts);
  return status.ok() ? status : absl::InternalError(status.message());
}

absl::Status GraphPlan::CaptureCopies(CopyNodes* copies, uint32_t step, device::StreamCapture* capture) {
  for (size_t i = 0; i < copies->copies.size(); i += device::CopyKernel::kMaxCopies) {
    const auto some = absl::MakeConstSpan(copies->copies).subspan(i, device::CopyKernel::kMaxCopies);
    const device::StreamHandle stream = arena_->capture_stream().handle();
    if (absl::Status s = arena_->kernels().copy->Launch(some, stream); !s.ok()) return s;
    const absl::StatusOr<std::vector<void*>> made = capture->NewNodes();
    if (!made.ok()) return made.status();
    if (made->size() != 1) return absl::InternalError("one kernel became several nodes");
    copies->nodes.push_back(made->front());
    nodes_.push_back({made->front(), step});
  }
  return absl::OkStatus();
}

absl::Status GraphPlan::Redirect(const device::ExecutableGraph& executable, CopyNodes* copies,
                                 absl::Span<const uint64_t> addresses, bool are_sources) {
  for (size_t first = 0; first < addresses.size(); first += device::CopyKernel::kMaxCopies) {
    const auto some = absl::MakeSpan(copies->copies).subspan(first, device::CopyKernel::kMaxCopies);
    bool changed = false;
    for (size_t i = 0; i < some.size(); ++i) {
      uint64_t& address = are_sources ? some[i].from : some[i].to;
      changed |= std::exchange(address, addresses[first + i]) != addresses[first + i];
    }
    if (!changed) continue;
    void* node = copies->nodes[first / device::CopyKernel::kMaxCopies];
    if (absl::Status s = arena_->kernels().copy->Update(executable.handle(), node, some); !s.ok()) {
      // What the node has now is unknown; no address is zero.
      for (device::DeviceCopy& copy : some) (are_sources ? copy.from : copy.to) = 0;
      return s;
    }
  }
  return absl::OkStatus();
}

absl::Status GraphPlan::LaunchOther(const device::ExecutableGraph& executable, absl::Span<const uint64_t> sources,
                                    absl::Span<const uint64_t> targets, device::StreamHandle stream) {
  // What its nodes have is unknown; no address is zero.
  CopyNodes in = copies_in_, out = copies_out_;
  for (device::DeviceCopy& copy : in.copies) copy.from = 0;
  for (device::DeviceCopy& copy : out.copies) copy.to = 0;
  if (absl::Status s = Redirect(executable, &in, sources, true); !s.ok()) return s;
  if (absl::Status s = Redirect(executable, &out, targets, false); !s.ok()) return s;
  return executable.Launch(stream);
}

absl::Status GraphPlan::Run(absl::Span<const TensorRef> inputs, absl::Span<const TensorRef> captured,
                            std::vector<OwnedTensor>* outputs, const Watch* watch) {
  absl::Status status = Queue(inputs, captured, outputs, watch);
  if (!status.ok()) arena_->health().Note(status);
  return status;
}

absl::Status GraphPlan::Queue(absl::Span<const TensorRef> inputs, absl::Span<const TensorRef> captured,
                              std::vector<OwnedTensor>* outputs, const Watch* watch) {
  if (inputs.size() != inputs_.size()) return absl::InvalidArgumentError("another number of inputs than the plan has");
  const torch_abi::CurrentDeviceScope current(arena_->streams(), arena_->device().index);
  const device::ContextScope context(arena_->driver(), arena_->context());
  absl::StatusOr<device::StreamHandle> stream = arena_->streams().Current(arena_->device().index);
  if (!stream.ok()) return stream.status();
  // The legacy default stream, which is torch's own, cannot be captured (CUDA Programming Guide, stream capture).
  if (*stream != nullptr && device::IsCapturing(arena_->driver(), *stream)) {
    return absl::FailedPreconditionError("the current stream is being captured");
  }
  const cir::Graph& program = parts_.body->graph();
  absl::InlinedVector<uint64_t, 8> sources, targets;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (SpanBytes(program.value(program.inputs[i]).type) != 0) sources.push_back(AddressOf(inputs[i]));
  }
  absl::InlinedVector<OwnedTensor, 8> fresh;  // of torch's ordinary memory, for the caller's stream
  absl::InlinedVector<TensorRef, 16> tail_captured;
  for (const uint32_t i : parts_.tail_captured) tail_captured.push_back(captured[i]);
  for (uint32_t i = 0; i < parts_.num_copies; ++i) {
    const cir::TensorType& type = program.value(program.outputs[i]).type;
    absl::StatusOr<OwnedTensor> tensor = MakeTensor(type);
    if (!tensor.ok()) return tensor.status();
    if (SpanBytes(type) != 0) targets.push_back(AddressOf(tensor->ref()));
    tail_captured.push_back(tensor->ref());
    fresh.push_back(*std::move(tensor));
  }
  for (size_t i = parts_.num_copies; i < kept_.size(); ++i) tail_captured.push_back(kept_[i].ref());
  if (sources.size() != copies_in_.copies.size() || targets.size() != copies_out_.copies.size()) {
    return absl::InternalError("another number of copies than the graph has");
  }

  GraphArena::Use use(*arena_, *stream);
  if (absl::Status s = use.Begin(); !s.ok()) return s;
  if (watch != nullptr && watch->executable != nullptr) {
    if (absl::Status s = LaunchOther(*watch->executable, sources, targets, *stream); !s.ok()) return s;
  } else {
    if (absl::Status s = Redirect(*executable_, &copies_in_, sources, true); !s.ok()) return s;
    if (absl::Status s = Redirect(*executable_, &copies_out_, targets, false); !s.ok()) return s;
    if (absl::Status s = executable_->Launch(*stream); !s.ok()) return s;
  }
  entry_->Touch(CoarseNs());
  num_launches_.store(num_launches() + 1, std::memory_order_relaxed);  // under the arena's lock
  return PlanExecutor::Run(*parts_.tail, inputs, tail_captured, outputs, nullptr,
                           watch == nullptr ? nullptr : watch->tail);
}

}  // namespace cuvil::scheduler
