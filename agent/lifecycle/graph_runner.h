#pragma once

#include <Python.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "agent/capture.h"
#include "agent/cuda_state.h"
#include "agent/lifecycle/graph_recorder.h"
#include "agent/lifecycle/record.h"
#include "scheduler/capture_credit.h"
#include "scheduler/graph_budget.h"
#include "scheduler/graph_plan.h"
#include "scheduler/program_cut.h"
#include "scheduler/stream_schedule.h"
#include "scheduler/stream_trial.h"

namespace cuvil::agent {

// A part of a capture's program on a GPU as one CUDA graph, where that is possible.
//
// The graph is captured at the first run, which is the call that compares with eager, so what is compared is what will
// serve, and so is the measurement of schedules on several streams. It is captured again when weights have moved or
// torch's CUDA switches have changed, a few times; after that, and whenever the program cannot be a graph, its
// operators run one by one.
//
// Its memory is counted against the device's budget (scheduler/graph_budget.h). A graph that is given up for another,
// or that finds no memory, is captured again when that is worth it (scheduler/capture_credit.h); until then, too, the
// operators run one by one.
//
// Threads: Build without the GIL; Run with it (it is released while work is queued, and while graphs die).
class GraphRunner final : private scheduler::GraphBudget::Holder {
 public:
  GraphRunner(std::shared_ptr<const Capture> capture, std::shared_ptr<const scheduler::ProgramPart> part,
              cir::Device device)
      : capture_(std::move(capture)), part_(std::move(part)), device_(device) {}
  ~GraphRunner() override;

  // Divides the program and makes plans of its parts. What cannot be a graph is no error: reason() says why.
  void Build(const std::shared_ptr<const torch_abi::TorchApi>& api);

  // Streams that one graph may use from now on; 1 keeps graphs serial.
  static void SetMaxStreams(uint32_t max_streams);

  // True iff the graph has answered; `outputs` are its results. False with OK: run the operators one by one. `recorder`
  // is null but during a profile.
  //
  // Errors: as GraphPlan::Run, but FailedPrecondition for all calls once the device is beyond use
  absl::StatusOr<bool> Run(PyObject* module, absl::Span<const torch_abi::TensorRef> inputs,
                           absl::Span<const torch_abi::TensorRef> captured,
                           std::vector<torch_abi::OwnedTensor>* outputs, GraphRecorder* recorder = nullptr);

  // For runs operator by operator in its place: the time they begin, or 0 if nobody wants to know how long they take.
  uint64_t BeginOperators() const;
  void EndOperators(uint64_t begin_ns);

  // Why there is no graph; empty if there is one or none has been tried.
  std::string reason() const;
  // The operator of the part that may not run while a stream is captured, if that is why there is no graph.
  std::optional<uint32_t> failed_op() const;
  OwnedRef Describe() const;

 private:
  // Weights that keep moving are not worth a graph.
  static constexpr uint32_t kMaxCaptures = 8;

  void GiveUp(std::string reason);
  std::shared_ptr<void> GiveUpGraph() override;
  // No graph for the moment; `capture_ns` is what an attempt costs.
  void WaitForMemory(std::string reason, uint64_t capture_ns);
  void ReportDeviceError(PyObject* module);
  absl::Status AfterFailure(PyObject* module, absl::Status status);
  // Plans of the program's two parts.
  absl::Status Divide(const std::set<cir::ValueId>& hidden_views);
  absl::StatusOr<std::shared_ptr<scheduler::GraphPlan>> CaptureInRoom(PyObject* module,
                                                                      absl::Span<const torch_abi::TensorRef> inputs,
                                                                      absl::Span<const torch_abi::TensorRef> captured);
  absl::StatusOr<std::shared_ptr<scheduler::GraphPlan>> CaptureAnew(PyObject* module,
                                                                    absl::Span<const torch_abi::TensorRef> inputs,
                                                                    absl::Span<const torch_abi::TensorRef> captured,
                                                                    const CudaState& state);
  // Measures whether several streams are faster, and gives the plan that is.
  absl::StatusOr<std::shared_ptr<scheduler::GraphPlan>> Fastest(PyObject* module,
                                                                std::shared_ptr<scheduler::GraphPlan> serial,
                                                                absl::Span<const torch_abi::TensorRef> inputs,
                                                                absl::Span<const torch_abi::TensorRef> captured);

  const std::shared_ptr<const Capture> capture_;
  const std::shared_ptr<const scheduler::ProgramPart> part_;
  const cir::Device device_;
  std::shared_ptr<const torch_abi::TorchApi> api_;
  // After Build: of the thread that captures.
  scheduler::GraphPlan::Parts parts_;
  uint64_t need_bytes_ = 0;                                    // what a capture was seen to need, or 0
  std::shared_ptr<const scheduler::StreamSchedule> schedule_;  // null: serial, or not measured
  std::optional<CudaState> measured_state_;                    // for which schedule_ was found

  mutable absl::Mutex mutex_;  // nothing is called under it
  std::shared_ptr<scheduler::GraphPlan> graph_ ABSL_GUARDED_BY(mutex_);
  CudaState state_ ABSL_GUARDED_BY(mutex_);
  bool capturing_ ABSL_GUARDED_BY(mutex_) = false;
  std::shared_ptr<const scheduler::StreamReport> streams_ ABSL_GUARDED_BY(mutex_);
  uint32_t num_captures_ ABSL_GUARDED_BY(mutex_) = 0;
  bool gave_up_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<uint32_t> failed_op_ ABSL_GUARDED_BY(mutex_);
  scheduler::CaptureCredit credit_ ABSL_GUARDED_BY(mutex_);
  uint64_t num_given_up_ ABSL_GUARDED_BY(mutex_) = 0;
  // There is no graph for want of memory; written under the mutex.
  std::atomic<bool> waiting_{false};
  std::string reason_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace cuvil::agent
