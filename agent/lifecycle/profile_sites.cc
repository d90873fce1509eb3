#include "agent/lifecycle/profile_sites.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "agent/module_path.h"
#include "jit/cir/graph.h"
#include "scheduler/kernel_profile.h"

namespace cuvil::agent {
namespace {

using scheduler::ProfileKind;
using scheduler::ProfileSite;

ProfileSite SiteOf(std::string op, size_t source_index, const trace::Trace& trace, const std::string& module) {
  ProfileSite site;
  site.kind = ProfileKind::kStep;
  site.op = std::move(op);
  site.module = module;
  if (source_index >= trace.sources.size()) return site;
  const trace::SourceLocation& source = trace.sources[source_index];
  site.module = JoinModulePath(module, source.module);
  site.file = source.user_file;
  site.line = source.user_line;
  site.function = source.user_function;
  return site;
}

// A constant that each run gets a copy of stands where it is first used.
std::string OperatorOf(const scheduler::PlanStep& step, const cir::Op& op) {
  return step.mechanism == scheduler::Mechanism::kClone ? "aten::clone" : cir::QualifiedName(op);
}

}  // namespace

std::vector<ProfileSite> SitesOfPlan(const scheduler::ExecutionPlan& plan, const trace::Trace& trace, uint32_t first_op,
                                     const std::string& module) {
  std::vector<ProfileSite> sites;
  sites.reserve(plan.steps().size());
  for (const scheduler::PlanStep& step : plan.steps()) {
    // As the program called it: the plan may have made it an in-place operator.
    const cir::Op& op = trace.graph.ops[first_op + step.op];
    sites.push_back(SiteOf(OperatorOf(step, op), op.source, trace, module));
  }
  return sites;
}

std::vector<ProfileSite> SitesOfGraph(const scheduler::GraphPlan& plan, const trace::Trace& trace, uint32_t first_op,
                                      const std::string& module) {
  std::vector<ProfileSite> sites = SitesOfPlan(plan.body(), trace, first_op, module);
  const cir::Graph& graph = plan.body().graph();
  const uint32_t num_sites = scheduler::KernelProfile::NumSites(plan);
  for (size_t first = 0; sites.size() < num_sites; first += scheduler::KernelProfile::kOutputsPerSite) {
    size_t source = trace.sources.size();
    if (first < graph.outputs.size()) {
      const uint32_t op = first_op + graph.value(graph.outputs[first]).origin_index;
      if (op < trace.graph.ops.size()) source = trace.graph.ops[op].source;
    }
    sites.push_back(SiteOf("(copy of outputs)", source, trace, module));
  }
  return sites;
}

std::vector<ProfileSite> SitesOfTail(const scheduler::ExecutionPlan& tail, const trace::Trace& trace,
                                     const std::string& module) {
  const cir::Graph& graph = tail.graph();
  const std::vector<std::string>& names = trace.graph.sources;
  std::vector<ProfileSite> sites;
  sites.reserve(tail.steps().size());
  for (const scheduler::PlanStep& step : tail.steps()) {
    const cir::Op& op = graph.ops[step.op];
    // A tail has sources of its own, with the trace's words. One line may stand for several modules: outputs are made
    // last.
    const auto last = std::find(names.rbegin(), names.rend(), graph.sources[op.source]);
    const auto source = static_cast<size_t>(names.rend() - last) - 1;  // huge if there is none
    sites.push_back(SiteOf(OperatorOf(step, op), source, trace, module));
  }
  return sites;
}

}  // namespace cuvil::agent
