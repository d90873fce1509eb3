// What the stream schedule has to know of a plan's steps on a GPU.
//
// Costs are estimates of kernels that run alone on a device with idle room: at batch 1, which is where streams help,
// a contraction is one wave of tiles or less, so that its time is that of one tile. They rank steps; which schedule is
// used is measured (stream_trial.h).
//
// Shapes:    one ScheduleStep for each step of the plan, same order; storages are the graph's.
// Units:     nanoseconds on a GPU of the size of an H200.
// Threads:   pure; any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "jit/cir/graph.h"
#include "scheduler/execution_plan.h"
#include "scheduler/stream_schedule.h"

namespace cuvil::scheduler {

// `num_kernels`: by step, how many nodes it put into a graph; empty where that is not known.
ScheduleProblem DescribeSteps(const ExecutionPlan& plan, absl::Span<const uint32_t> num_kernels);

// By stream of the schedule: whether torch will want blocks of more than 1 MiB there, which it cuts from segments of
// another kind than smaller ones. Convolutions do, for cuDNN.
std::vector<bool> StreamsOfLargeBlocks(const ExecutionPlan& plan, const StreamSchedule& schedule);

// Whether the operator surely runs without cuBLAS, whose workspaces torch keeps for each stream, 32 MiB on an H200.
// Convolutions count as sure: torch gives them to cuDNN unless that is switched off.
bool RunsWithoutBlas(const cir::Op& op);

}  // namespace cuvil::scheduler
