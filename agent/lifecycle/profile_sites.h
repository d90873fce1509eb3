// The sites of a plan's steps: what a profile says of each of them.
//
// Threads: pure; no GIL.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "agent/trace/trace.h"
#include "scheduler/execution_plan.h"
#include "scheduler/graph_plan.h"
#include "scheduler/profile_recorder.h"

namespace cuvil::agent {

// One for each step of a plan whose operators are those of the trace from `first_op` on. `module` is the path of the
// traced module.
std::vector<scheduler::ProfileSite> SitesOfPlan(const scheduler::ExecutionPlan& plan, const trace::Trace& trace,
                                                uint32_t first_op, const std::string& module);

// One for each step of the body, and one for each kernel that copies outputs (scheduler::KernelProfile::NumSites). Such
// a kernel stands at the line of the first output that it copies.
std::vector<scheduler::ProfileSite> SitesOfGraph(const scheduler::GraphPlan& plan, const trace::Trace& trace,
                                                 uint32_t first_op, const std::string& module);

// One for each step of a tail, whose operators were made from those of the trace.
std::vector<scheduler::ProfileSite> SitesOfTail(const scheduler::ExecutionPlan& tail, const trace::Trace& trace,
                                                const std::string& module);

}  // namespace cuvil::agent
