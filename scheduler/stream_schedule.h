// Divides the steps of a plan among streams of one CUDA graph so that independent steps can overlap, and says which
// steps must wait for which, and how long each tensor's memory must be held.
//
// Steps are issued in their given order whatever their stream; a stream runs its steps one after the other, and an
// event lets a step wait for one on another stream. Two steps that touch one storage, one of them writing, are always
// in their given order. Events that other orders imply are left out. All on stream 0 is a schedule too: the serial one.
//
// Memory: torch's caching allocator gives a block that was freed to the next allocation on the block's own stream, at
// once. A tensor that another stream reads may therefore be released only when whatever is issued next on the stream
// that allocated it comes behind all its readers. What an operator allocates and frees by itself stays on its stream.
//
// Shapes:    n steps -> n streams, n lists of waits, n lists of released cells, same order.
// Units:     costs in nanoseconds; only compared with each other.
// Threads:   pure; any thread.
// Errors:    InvalidArgument  a storage, a step or a cell that does not exist
// Source:    one stream for each chain of dependent operators, events only where no other order holds: Kwon et al.,
//            Nimble, NeurIPS 2020, arXiv:2012.02732. Schedules compared by measurement, the number of streams among
//            what is tried: Ding et al., IOS, MLSys 2021, arXiv:2011.01302. List scheduling with communication cost:
//            Topcuoglu et al., HEFT, 2002; ours then moves chains while that shortens the estimate.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace cuvil::scheduler {

struct ScheduleStep {
  // Storages whose bytes the step reads or writes. Both empty: a view, which puts nothing into a stream.
  std::vector<uint32_t> reads, writes;
  // The storage that a view looks at; it runs where that was written last.
  uint32_t viewed = UINT32_MAX;
  double cost_ns = 0;
  bool on_main_stream = false;  // what it needs exists for stream 0 only (workspaces of cuBLAS)

  bool touches_memory() const { return !reads.empty() || !writes.empty(); }
};

// A tensor that steps make: the run holds it from its making to its release.
struct ScheduleCell {
  uint32_t cell = 0;
  uint32_t storage = 0;
  uint32_t last_step = 0;  // the last that names the tensor
};

struct ScheduleProblem {
  std::vector<ScheduleStep> steps;
  std::vector<ScheduleCell> cells;  // those that a run releases
  uint32_t num_storages = 0;
};

struct ScheduleOptions {
  uint32_t num_streams = 1;
  double edge_cost_ns = 1000;  // what waiting for another stream costs beyond the wait itself
  double min_chain_ns = 0;     // chains of less stay on the stream of what they depend on
};

struct StreamSchedule {
  std::vector<uint32_t> stream;                 // 0 is where the capture begins and ends
  std::vector<std::vector<uint32_t>> waits;     // earlier steps on other streams, besides the own stream's order
  std::vector<std::vector<uint32_t>> released;  // cells, after the step has been issued
  std::vector<uint32_t> joins;                  // steps on other streams that the end waits for
  std::vector<double> start_ns, end_ns;         // of the estimate
  uint32_t num_streams = 1;                     // that have steps; stream 0 always counts
  double estimate_ns = 0;
};

// The steps that each step must come behind, without those that others imply; ascending.
std::vector<std::vector<uint32_t>> FindDependences(const ScheduleProblem& problem);

absl::Status CheckProblem(const ScheduleProblem& problem);
absl::StatusOr<StreamSchedule> ScheduleStreams(const ScheduleProblem& problem, const ScheduleOptions& options);

// Completes a given assignment of streams: waits, releases, joins, estimate.
absl::StatusOr<StreamSchedule> CompleteSchedule(const ScheduleProblem& problem, std::vector<uint32_t> stream,
                                                double edge_cost_ns);

// One line for each stream: when it is busy, from left to right, and how much. `total_ns` is what the estimate's length
// stands for.
std::string PrintTimeline(const ScheduleProblem& problem, const StreamSchedule& schedule, double total_ns);

}  // namespace cuvil::scheduler
