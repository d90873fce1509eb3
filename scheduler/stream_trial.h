// Finds out by measurement whether a plan's graph is faster on several streams, and gives the faster one.
//
// Schedules for two and more streams are captured beside the serial graph and launched in turn on the caller's current
// stream; the fastest median wins, the serial graph unless another one is faster by more than noise. That happens
// within the call that prepares the plan, never while it serves, and is bounded: in time, in launches, in memory.
// Launches read the inputs of that call and write the graphs' own memory; a body has neither random numbers nor writes
// to anybody else's tensors (CheckCapturable), so they leave nothing behind.
//
// Candidates take their memory from a pool that lives as long as the trial; the winner is captured again, in the
// arena's.
//
// Threads:   the thread that prepares; GIL not held, no use of the arena under way on this thread.
// Errors:    none: whatever fails leaves the serial graph in service, and the report says why
// Source:    docs/design/0010-parallel-subgraphs.md
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "scheduler/graph_arena.h"
#include "scheduler/graph_plan.h"
#include "scheduler/stream_schedule.h"
#include "scheduler/torch/handles.h"

namespace cuvil::scheduler {

struct StreamTrialOptions {
  uint32_t max_streams = 4;  // 1: serial, without a trial
  uint64_t budget_ns = 50'000'000;
  uint32_t max_launches = 30;
  double min_gain = 0.03;  // of the serial time
  // What the pool may hold for a schedule: so many times what it holds for the serial graph, and so much more.
  double max_pool_factor = 1.10;
  uint64_t max_pool_growth_bytes = uint64_t{40} << 20;
};

struct StreamCandidate {
  std::string name;
  uint32_t num_streams = 1;
  double predicted_ns = 0;
  double replay_ns = 0;     // median; zero: not measured
  uint64_t pool_bytes = 0;  // that the pool held with it
  std::string rejected;     // why it was not measured, or not used
};

struct StreamReport {
  std::vector<StreamCandidate> candidates;  // the first is serial
  uint32_t chosen = 0;
  std::string skipped;  // why there was no trial; empty if there was one; a short serial graph is timed anyway
  std::string timeline;
  double launch_ns = 0;  // host time of a launch of what was chosen; zero: not measured
  uint64_t trial_ns = 0;
  uint32_t num_launches = 0;
};

struct StreamTrialOutcome {
  std::unique_ptr<GraphPlan> plan;                 // null: the serial one stays
  std::shared_ptr<const StreamSchedule> schedule;  // of `plan`
  StreamReport report;
};

StreamTrialOutcome TryStreams(GraphPlan& serial, const GraphPlan::Parts& parts,
                              absl::Span<const torch_abi::TensorRef> inputs,
                              absl::Span<const torch_abi::TensorRef> captured, const std::shared_ptr<GraphArena>& arena,
                              const StreamTrialOptions& options);

// Position of the fastest median; the first unless another one is below it by more than `min_gain` of it. Empty samples
// do not take part.
uint32_t ChooseFastest(absl::Span<const std::vector<double>> samples, double min_gain);

double Median(std::vector<double> samples);

}  // namespace cuvil::scheduler
