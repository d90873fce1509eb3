// Captures the steps of a plan on several streams, as a schedule says, and notes what each of them touched.
//
// While a step runs, torch's current stream is the step's. Side streams join the capture by an event of the main stream
// (Fork) and come back to it at the end (Join), inside the same thread-local capture. The facts that it collects are
// those that graph_verifier.h needs: byte ranges come from the tensors, not from the schedule.
//
// Threads:   the capturing thread's, between the begin and the end of a capture on streams[0].
// Ownership: borrows everything until the capture has ended.
// Errors:    Internal     torch refused a stream
//            Unavailable  the driver refused
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "memory/device/cuda_graph.h"
#include "scheduler/execution_plan.h"
#include "scheduler/graph_verifier.h"
#include "scheduler/step_director.h"
#include "scheduler/step_observer.h"
#include "scheduler/stream_schedule.h"
#include "scheduler/torch/cuda_streams.h"

namespace cuvil::scheduler {

class ScheduledCapture final : public StepDirector {
 public:
  // `streams`: at least as many as the schedule has. `observer` hears of each step behind it, with times of zero.
  ScheduledCapture(const ExecutionPlan& plan, const StreamSchedule& schedule, const device::DriverApi& driver,
                   const torch_abi::CudaStreams& torch_streams, int32_t device_index,
                   std::vector<device::StreamHandle> streams, StepObserver* observer);

  // What has been captured so far comes before every step.
  absl::Status Fork();
  absl::Status Before(uint32_t step) override;
  absl::Status After(uint32_t step, void** cells) override;
  absl::Span<const uint32_t> released(uint32_t step) const override { return schedule_.released[step]; }
  // The step that has begun and not ended: where an operator failed.
  std::optional<uint32_t> running_step() const { return running_step_; }
  // From here on, on the main stream, everything has been done.
  absl::Status Join();

  // By step, without nodes.
  const std::vector<GraphFacts::Step>& steps() const { return steps_; }
  const std::vector<GraphFacts::Release>& releases() const { return releases_; }

 private:
  absl::Status Enter(uint32_t stream);
  absl::Status Record(std::optional<device::Event>* event, uint32_t stream);
  ByteRange RangeOf(uint32_t cell, void** cells) const;

  const ExecutionPlan& plan_;
  const StreamSchedule& schedule_;
  const device::DriverApi& driver_;
  const torch_abi::CudaStreams& torch_streams_;
  const int32_t device_index_;
  const std::vector<device::StreamHandle> streams_;
  StepObserver* const observer_;

  uint32_t current_ = 0;
  std::optional<uint32_t> running_step_;
  std::vector<bool> joined_capture_;                // by stream
  std::optional<device::Event> root_;               // set if there are side streams
  std::vector<bool> is_waited_for_;                 // by step
  std::vector<std::optional<device::Event>> done_;  // by step
  std::vector<uint32_t> maker_stream_;              // by storage, of the step that made it
  std::vector<GraphFacts::Step> steps_;
  std::vector<GraphFacts::Release> releases_;
};

}  // namespace cuvil::scheduler
