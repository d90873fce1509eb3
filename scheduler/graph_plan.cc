#include "scheduler/graph_plan.h"

#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "scheduler/graph_split.h"
#include "scheduler/monotonic_clock.h"
#include "scheduler/plan_executor.h"

namespace cuvil::scheduler {
namespace {

using torch_abi::OwnedTensor;
using torch_abi::TensorRef;

}  // namespace

absl::StatusOr<std::unique_ptr<GraphPlan>> GraphPlan::Create(Parts parts, absl::Span<const TensorRef> inputs,
                                                             absl::Span<const TensorRef> captured,
                                                             std::shared_ptr<GraphArena> arena) {
  if (absl::Status s = CheckCapturable(*parts.body, arena->device()); !s.ok()) return s;
  auto plan = std::unique_ptr<GraphPlan>(new GraphPlan(std::move(arena)));
  plan->parts_ = std::move(parts);
  const uint64_t start_ns = MonotonicNs();
  absl::Status status = plan->Capture(inputs, captured);
  if (!status.ok()) return status;
  plan->capture_ns_ = MonotonicNs() - start_ns;
  return plan;
}

// Memory must not go back while a launch may still use it.
GraphPlan::~GraphPlan() { arena_->WaitUntilIdle(); }

void* GraphPlan::DataOf(TensorRef tensor) const {
  void* data = nullptr;
  parts_.body->api().get_data_ptr(tensor.handle(), &data);
  return data;
}

absl::Status GraphPlan::Capture(absl::Span<const TensorRef> inputs, absl::Span<const TensorRef> captured) {
  const torch_abi::TorchApi& api = parts_.body->api();
  const device::StreamHandle stream = arena_->capture_stream().handle();
  torch_abi::CurrentStreamScope current;
  if (absl::Status s = current.Enter(arena_->streams(), arena_->device().index, stream); !s.ok()) return s;
  {
    const PoolScope workspaces(arena_->workspaces());
    if (!workspaces.status().ok()) return workspaces.status();
    if (absl::Status s = arena_->allocator().MakeWorkspaces(); !s.ok()) return s;
  }
  // The pool asks for the GIL, which nobody who holds the arena may wait for.
  const PoolScope pool(arena_->pool());
  if (!pool.status().ok()) return pool.status();
  // Behind whatever uses the memory that is free by now.
  GraphArena::Use use(*arena_, stream);
  if (absl::Status s = use.Begin(); !s.ok()) return s;

  std::vector<TensorRef> copies;
  for (const cir::ValueId id : parts_.body->graph().inputs) {
    const cir::TensorType& type = parts_.body->graph().value(id).type;
    InputCopy copy;
    void* handle = nullptr;
    const int32_t made = api.empty_strided(static_cast<int64_t>(type.sizes.size()), type.sizes.data(),
                                           type.strides.data(), static_cast<int32_t>(type.dtype),
                                           static_cast<int32_t>(type.device), type.device_index, &handle);
    if (made != 0) return absl::UnavailableError("no memory for a copy of an input");
    copy.tensor = OwnedTensor::Steal(handle);
    copy.data = DataOf(copy.tensor.ref());
    copy.size_bytes = type.num_elements() == 0 ? 0 : static_cast<size_t>(type.span_bytes());
    input_copy_bytes_ += copy.size_bytes;
    copies.push_back(copy.tensor.ref());
    inputs_.push_back(std::move(copy));
  }
  if (copies.size() != inputs.size()) return absl::InternalError("another number of inputs than the plan has");
  for (const TensorRef tensor : captured) captured_data_.push_back(DataOf(tensor));

  absl::StatusOr<device::StreamCapture> capture =
      device::StreamCapture::Begin(arena_->driver(), arena_->capture_stream());
  if (!capture.ok()) return capture.status();
  if (absl::Status s = PlanExecutor::Run(*parts_.body, copies, captured, &kept_); !s.ok()) {
    // Not an error of the model: an operator that may not run while a stream is captured.
    return absl::UnavailableError(absl::StrCat("capture: ", s.message()));
  }
  absl::StatusOr<device::ExecutableGraph> graph = capture->Finish(arena_->fill_kernel());
  if (!graph.ok()) return graph.status();
  graph_.emplace(*std::move(graph));
  return absl::OkStatus();
}

absl::Status GraphPlan::CopyInputs(absl::Span<const TensorRef> inputs, device::StreamHandle stream) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    const InputCopy& copy = inputs_[i];
    if (copy.size_bytes == 0) continue;
    const int result =
        arena_->driver().cuMemcpyDtoDAsync_v2(reinterpret_cast<uintptr_t>(copy.data),
                                              reinterpret_cast<uintptr_t>(DataOf(inputs[i])), copy.size_bytes, stream);
    if (absl::Status s = arena_->driver().ToStatus("cuMemcpyDtoDAsync", result); !s.ok()) return s;
  }
  return absl::OkStatus();
}

absl::Status GraphPlan::Run(absl::Span<const TensorRef> inputs, absl::Span<const TensorRef> captured,
                            std::vector<OwnedTensor>* outputs) {
  if (inputs.size() != inputs_.size()) return absl::InvalidArgumentError("another number of inputs than the plan has");
  absl::StatusOr<device::StreamHandle> stream = arena_->streams().Current(arena_->device().index);
  if (!stream.ok()) return stream.status();
  if (device::IsCapturing(arena_->driver(), *stream)) {
    return absl::FailedPreconditionError("the current stream is being captured");
  }
  std::vector<TensorRef> tail_captured;
  tail_captured.reserve(parts_.tail_captured.size() + kept_.size());
  for (const uint32_t i : parts_.tail_captured) tail_captured.push_back(captured[i]);
  for (const OwnedTensor& kept : kept_) tail_captured.push_back(kept.ref());

  GraphArena::Use use(*arena_, *stream);
  if (absl::Status s = use.Begin(); !s.ok()) return s;
  if (absl::Status s = CopyInputs(inputs, *stream); !s.ok()) return s;
  if (absl::Status s = graph_->Launch(*stream); !s.ok()) return s;
  return PlanExecutor::Run(*parts_.tail, inputs, tail_captured, outputs);
}

}  // namespace cuvil::scheduler
