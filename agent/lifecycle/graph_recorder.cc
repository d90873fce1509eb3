#include "agent/lifecycle/graph_recorder.h"

#include <string>

#include "agent/lifecycle/profile_sites.h"

namespace cuvil::agent {

GraphRecorder::GraphRecorder(PyObject* module, uint64_t plan_number, const trace::Trace& trace, uint32_t first_op)
    : module_(module), plan_number_(plan_number), trace_(trace), first_op_(first_op) {}

bool GraphRecorder::Prepare(const std::shared_ptr<const scheduler::GraphPlan>& plan) {
  const ProfiledCall* call = StepRecorder::AnyCallOf(module_);
  if (call == nullptr) return true;
  watched_ = true;
  kernels_ = call->kernels();
  if (!ProfilePause::paused()) {
    const auto of_tail = [&](const std::string& path) { return SitesOfTail(plan->tail(), trace_, path); };
    tail_.emplace(*call, plan_number_, PlanPart::kTail, of_tail);
    watch_.tail = tail_->observer();
  }
  if (kernels_ == nullptr) return true;
  const auto of_graph = [&](const std::string& path) { return SitesOfGraph(*plan, trace_, first_op_, path); };
  first_site_ = call->AddSites(plan_number_, PlanPart::kGraph, of_graph);
  call_ = call->kernel_call();
  executable_ = kernels_->ExecutableOf(plan);
  watch_.executable = executable_.get();
  return executable_ != nullptr;
}

const scheduler::GraphPlan::Watch* GraphRecorder::Begin() {
  if (kernels_ != nullptr) entered_ = kernels_->EnterLaunch(first_site_, call_);
  return watched_ ? &watch_ : nullptr;
}

void GraphRecorder::End() {
  if (entered_) kernels_->Leave();
  entered_ = false;
  executable_.reset();
}

}  // namespace cuvil::agent
