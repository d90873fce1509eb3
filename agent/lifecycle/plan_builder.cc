#include "agent/lifecycle/plan_builder.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "agent/boundary.h"
#include "agent/fault_injection.h"
#include "agent/gil.h"
#include "agent/lifecycle/background_worker.h"
#include "agent/lifecycle/lifecycle.h"
#include "agent/lifecycle/preparation.h"
#include "agent/lifecycle/session.h"

namespace cuvil::agent {
namespace {

constexpr uint64_t kMaxWaitNs = 20'000'000;

class BuildJob : public BackgroundWorker::Job {
 public:
  explicit BuildJob(std::shared_ptr<PlanEntry> entry) : entry_(std::move(entry)) {}

  void Run() noexcept override {
    Statistics& statistics = TheLifecycle().statistics;
    const uint64_t start_ns = MonotonicNs();
    absl::Status status = ContainStatus([&]() -> absl::Status {
      if (FaultInjected(FaultPoint::kPlanBuild)) return absl::InternalError("injected fault: plan-build");
      return entry_->plan->Build();
    });
    if (status.ok() && FaultInjected(FaultPoint::kPublish)) status = absl::InternalError("injected fault: publish");
    if (status.ok()) Count(statistics.plans_built);
    entry_->build_ns = MonotonicNs() - start_ns;
    Count(statistics.build_ns, entry_->build_ns);
    entry_->build_status = std::move(status);
    // Partner: the acquire loads in module_call.cc and explain.cc.
    entry_->stage.store(PlanEntry::Stage::kBuilt, std::memory_order_release);
  }

 private:
  const std::shared_ptr<PlanEntry> entry_;
};

}  // namespace

void BuildNow(const std::shared_ptr<PlanEntry>& entry) {
  BuildJob job(entry);
  AssertGilHeld();
  const GilRelease no_gil;
  job.Run();
}

void BuildInBackground(const std::shared_ptr<PlanEntry>& entry, const CallArgs& call) {
  Lifecycle& lifecycle = TheLifecycle();
  const absl::Status status = FaultInjected(FaultPoint::kSubmit)
                                  ? absl::UnavailableError("injected fault: submit")
                                  : lifecycle.worker.Submit(std::make_shared<BuildJob>(entry));
  if (status.ok()) return;
  // No thread to be had: the call at hand pays the milliseconds.
  NoteFault(call, "submit", status.message());
  BuildNow(entry);
}

void Build(const std::shared_ptr<PlanEntry>& entry, const CallArgs& call) {
  if (TheLifecycle().settings.prepare == PrepareMode::kSync || prepare_session != nullptr) {
    BuildNow(entry);
  } else {
    BuildInBackground(entry, call);
  }
}

void WaitForBuild(PlanEntry& entry) {
  if (entry.waited) return;
  entry.waited = true;
  const std::chrono::nanoseconds timeout(std::min(entry.trace_ns / 32, kMaxWaitNs));
  if (timeout < std::chrono::microseconds(10)) return;
  AssertGilHeld();
  const GilRelease no_gil;
  TheLifecycle().worker.WaitFor(
      [&entry] { return entry.stage.load(std::memory_order_acquire) != PlanEntry::Stage::kBuilding; }, timeout);
}

}  // namespace cuvil::agent
