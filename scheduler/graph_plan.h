// A plan as one CUDA graph: launched on the caller's current stream, with outputs that no later launch touches.
//
// A call copies its inputs to where the graph reads them, launches, and runs the tail (graph_split.h), all in stream
// order; nothing waits for the device. Weights are read in place: the graph holds their addresses, which Fits()
// compares.
//
// Threads:   Run from any thread on any stream; the arena puts the calls in order.
// GIL:       not needed; should be released.
// Ownership: the graph and the copies of inputs; shares the arena.
// Errors:    Create: Unimplemented       the program cannot be one graph; the message says why
//                    Unavailable         the driver or torch refused; the operators one by one may still work
//            Run:    FailedPrecondition  the current stream is being captured by somebody else
//                    Unavailable         a device error; nothing is to be expected of this device any more
//                    Aborted, Internal   as PlanExecutor, of the tail
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "memory/device/cuda_graph.h"
#include "scheduler/execution_plan.h"
#include "scheduler/graph_arena.h"
#include "scheduler/torch/handles.h"

namespace cuvil::scheduler {

class GraphPlan {
 public:
  // The two parts of a program (SplitForGraph).
  struct Parts {
    std::shared_ptr<const ExecutionPlan> body, tail;
    std::vector<uint32_t> tail_captured;
  };

  // Captures the body for these tensors.
  static absl::StatusOr<std::unique_ptr<GraphPlan>> Create(Parts parts, absl::Span<const torch_abi::TensorRef> inputs,
                                                           absl::Span<const torch_abi::TensorRef> captured,
                                                           std::shared_ptr<GraphArena> arena);
  ~GraphPlan();

  // Where the weights were at the capture: the graph is good for these addresses only.
  absl::Span<const void* const> captured_data() const { return captured_data_; }

  absl::Status Run(absl::Span<const torch_abi::TensorRef> inputs, absl::Span<const torch_abi::TensorRef> captured,
                   std::vector<torch_abi::OwnedTensor>* outputs);

  // What the graph leaves for the tail, in the order of the body's outputs.
  absl::Span<const torch_abi::OwnedTensor> kept() const { return kept_; }
  torch_abi::TensorRef input_copy(size_t i) const { return inputs_[i].tensor.ref(); }
  const ExecutionPlan& body() const { return *parts_.body; }

  const device::GraphNodeCounts& node_counts() const { return graph_->counts(); }
  uint64_t capture_ns() const { return capture_ns_; }
  size_t input_copy_bytes() const { return input_copy_bytes_; }

 private:
  struct InputCopy {
    torch_abi::OwnedTensor tensor;
    void* data = nullptr;
    size_t size_bytes = 0;
  };

  explicit GraphPlan(std::shared_ptr<GraphArena> arena) : arena_(std::move(arena)) {}
  absl::Status Capture(absl::Span<const torch_abi::TensorRef> inputs, absl::Span<const torch_abi::TensorRef> captured);
  absl::Status CopyInputs(absl::Span<const torch_abi::TensorRef> inputs, device::StreamHandle stream);
  void* DataOf(torch_abi::TensorRef tensor) const;

  const std::shared_ptr<GraphArena> arena_;
  Parts parts_;
  std::vector<InputCopy> inputs_;
  std::vector<const void*> captured_data_;
  std::vector<torch_abi::OwnedTensor> kept_;  // what the tail reads
  std::optional<device::ExecutableGraph> graph_;
  uint64_t capture_ns_ = 0;
  size_t input_copy_bytes_ = 0;
};

}  // namespace cuvil::scheduler
