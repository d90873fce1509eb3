// A plan as one CUDA graph: launched on the caller's current stream, with outputs that no later launch touches.
//
// A call makes fresh tensors for its outputs, tells the graph's copy nodes where they and the inputs are, launches, and
// runs the tail (graph_split.h), all in stream order; nothing waits for the device. Weights are read in place: the
// graph holds their addresses, which whoever calls has compared with captured_data().
//
// Threads:   Run from any thread on any stream; the arena puts the calls in order.
// GIL:       not needed; should be released.
// Ownership: the graph and the copies of inputs; shares the arena.
// Errors:    Create: Unimplemented       the program cannot be one graph; the message says why
//                    Unavailable         the driver or torch refused; the operators one by one may still work
//                    ResourceExhausted   no memory; there may be some when graphs are given up
//                    DataLoss            as for Run
//                    Internal            the graph's order does not prove that its nodes cannot race
//            Run:    FailedPrecondition  the current stream is being captured by somebody else
//                    Unavailable         the driver refused
//                    ResourceExhausted   no memory for the outputs
//                    DataLoss            a device error; nothing is to be expected of this device any more
//                    Aborted, Internal   as PlanExecutor, of the tail
#pragma once

#include <atomic>
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
#include "scheduler/step_observer.h"
#include "scheduler/stream_schedule.h"
#include "scheduler/torch/handles.h"

namespace cuvil::scheduler {

class ScheduledCapture;

class GraphPlan {
 public:
  // The two parts of a program (SplitForGraph).
  struct Parts {
    std::shared_ptr<const ExecutionPlan> body, tail;
    std::vector<uint32_t> tail_captured;
    uint32_t num_copies = 0;
  };
  // A node of the captured graph (CUgraphNode) and the step of the body that made it.
  struct Node {
    static constexpr uint32_t kInputCopy = ~uint32_t{0};
    static constexpr uint32_t kOutputCopy = ~uint32_t{0} - 1;
    void* node;
    uint32_t step;
  };

  struct CaptureOptions {
    std::shared_ptr<const StreamSchedule> schedule;  // of the body; null: one stream
    AllocationPool* pool = nullptr;                  // that outlives the plan; null: the arena's
    std::optional<uint32_t>* failed_op = nullptr;    // set to the body's operator that could not be captured
  };

  // Captures the body for these tensors.
  static absl::StatusOr<std::unique_ptr<GraphPlan>> Create(Parts parts, absl::Span<const torch_abi::TensorRef> inputs,
                                                           absl::Span<const torch_abi::TensorRef> captured,
                                                           std::shared_ptr<GraphArena> arena,
                                                           const CaptureOptions& options);
  static absl::StatusOr<std::unique_ptr<GraphPlan>> Create(Parts parts, absl::Span<const torch_abi::TensorRef> inputs,
                                                           absl::Span<const torch_abi::TensorRef> captured,
                                                           std::shared_ptr<GraphArena> arena) {
    return Create(std::move(parts), inputs, captured, std::move(arena), CaptureOptions());
  }
  ~GraphPlan();

  // Where the weights were at the capture: the graph is good for these addresses only.
  absl::Span<const void* const> captured_data() const { return captured_data_; }

  // How a profile watches a run. Null: as if it did not.
  struct Watch {
    const device::ExecutableGraph* executable = nullptr;  // of graph(), to launch instead of the plan's own
    StepObserver* tail = nullptr;
  };
  absl::Status Run(absl::Span<const torch_abi::TensorRef> inputs, absl::Span<const torch_abi::TensorRef> captured,
                   std::vector<torch_abi::OwnedTensor>* outputs, const Watch* watch = nullptr);

  // Launches the graph as it was launched last, or captured, to see how long that takes. The tensors of that call are
  // still there, and the arena is in use by the caller, on this stream.
  absl::Status Relaunch(device::StreamHandle stream) { return executable_->Launch(stream); }

  // What the graph leaves for the tail, in the order of the body's outputs.
  absl::Span<const torch_abi::OwnedTensor> kept() const { return kept_; }
  torch_abi::TensorRef input_copy(size_t i) const { return inputs_[i].ref(); }
  const ExecutionPlan& body() const { return *parts_.body; }
  const ExecutionPlan& tail() const { return *parts_.tail; }
  // The calling thread's stream, on which Run would launch.
  absl::StatusOr<device::StreamHandle> CurrentStream() const {
    return arena_->streams().Current(arena_->device().index);
  }

  const device::CapturedGraph& graph() const { return *graph_; }
  absl::Span<const Node> nodes() const { return nodes_; }
  const device::GraphNodeCounts& node_counts() const { return counts_; }
  uint64_t capture_ns() const { return capture_ns_; }
  uint64_t num_launches() const { return num_launches_.load(std::memory_order_relaxed); }
  // Copies of inputs and kept results; intermediate results are the arena's.
  uint64_t own_bytes() const { return entry_->own_bytes(); }
  // What a capture of this program is thought to need of the device, before it is known.
  static uint64_t EstimateBytes(const ExecutionPlan& body);
  // From now on the graph may be given up for another.
  void SetHolder(GraphBudget::Holder* holder) { entry_->SetHolder(holder); }
  GraphArena& arena() const { return *arena_; }
  const std::shared_ptr<GraphArena>& shared_arena() const { return arena_; }
  size_t input_copy_bytes() const { return input_copy_bytes_; }

 private:
  // Copies at the graph's beginning or end, and the nodes that do them, so many each.
  struct CopyNodes {
    std::vector<device::DeviceCopy> copies;
    std::vector<void*> nodes;
  };

  explicit GraphPlan(std::shared_ptr<GraphArena> arena) : arena_(std::move(arena)) {}
  absl::Status Capture(absl::Span<const torch_abi::TensorRef> inputs, absl::Span<const torch_abi::TensorRef> captured,
                       const CaptureOptions& options);
  // Has torch take as little as it can for blocks of side streams, within their pool.
  absl::Status ReserveOnSideStreams(const StreamSchedule& schedule, absl::Span<const device::StreamHandle> streams);
  // Whether the captured graph can race; Internal if it can.
  absl::Status Verify(const ScheduledCapture& scheduled) const;
  absl::Status CaptureCopies(CopyNodes* copies, uint32_t step, device::StreamCapture* capture);
  absl::Status Queue(absl::Span<const torch_abi::TensorRef> inputs, absl::Span<const torch_abi::TensorRef> captured,
                     std::vector<torch_abi::OwnedTensor>* outputs, const Watch* watch);
  absl::StatusOr<torch_abi::OwnedTensor> MakeTensor(const cir::TensorType& type) const;
  // Has the nodes of an executable, whose copies are `copies`, copy from, or to, these addresses.
  absl::Status Redirect(const device::ExecutableGraph& executable, CopyNodes* copies,
                        absl::Span<const uint64_t> addresses, bool are_sources);
  // Launches an executable that is not the plan's own.
  absl::Status LaunchOther(const device::ExecutableGraph& executable, absl::Span<const uint64_t> sources,
                           absl::Span<const uint64_t> targets, device::StreamHandle stream);
  uint64_t AddressOf(torch_abi::TensorRef tensor) const;
  uint64_t CountOwnBytes() const;

  // First, so that it ends last: models die at any time, in a capture of the program's own too, which what is destroyed
  // here must not end.
  std::optional<device::RelaxedCaptureMode> dying_;
  const std::shared_ptr<GraphArena> arena_;
  std::optional<GraphBudget::Entry> entry_;  // once there is a graph
  std::atomic<uint64_t> num_launches_{0};    // relaxed: a statistic
  Parts parts_;
  std::vector<torch_abi::OwnedTensor> inputs_;  // the memory that the graph reads
  std::vector<const void*> captured_data_;
  std::vector<torch_abi::OwnedTensor> kept_;  // what the tail reads
  std::optional<device::CapturedGraph> graph_;
  std::optional<device::ExecutableGraph> executable_;
  std::vector<Node> nodes_;
  device::GraphNodeCounts counts_;
  CopyNodes copies_in_, copies_out_;  // under the arena's lock once there is an executable
  uint64_t capture_ns_ = 0;
  size_t input_copy_bytes_ = 0;
};

}  // namespace cuvil::scheduler
