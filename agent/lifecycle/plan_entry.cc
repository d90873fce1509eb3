#include "agent/lifecycle/plan_entry.h"

#include <optional>

#include "agent/fault_injection.h"
#include "agent/lifecycle/lifecycle.h"
#include "agent/lifecycle/preparation.h"
#include "agent/lifecycle/random_state.h"
#include "agent/lifecycle/thread_extent.h"

namespace cuvil::agent {

Fit FitOf(PlanEntry& entry, const CallArgs& call) {
  if (FaultInjected(FaultPoint::kMatch)) {
    NoteFault(call, "match", "injected fault: match");
    return Fit::kFailed;
  }
  if (!entry.plan->MatchesInputs(call)) return Fit::kSignatureDiffers;
  if (FaultInjected(FaultPoint::kGuard)) {
    NoteFault(call, "guard", "injected fault: guard");
    return Fit::kFailed;
  }
  if (!entry.plan->GuardsHold()) return Fit::kGuardFailed;
  return Fit::kFits;
}

bool TryAgain(PlanEntry& entry) {
  constexpr uint32_t kMaxRetries = 3;
  return entry.num_retries++ < kMaxRetries;
}

absl::StatusOr<OwnedRef> RunPlan(PlanEntry& entry, const CallArgs& call) {
  std::optional<RandomState> before;
  if (entry.plan->is_random()) {
    absl::StatusOr<RandomState> saved = RandomState::Save();
    if (!saved.ok()) return saved.status();
    before.emplace(*std::move(saved));
  }
  absl::StatusOr<OwnedRef> result = [&] {
    const ExtentScope extent(Extent::kPlanned);
    return entry.plan->Run(call);
  }();
  if (!result.ok() && before.has_value()) {
    const ErrorScope errors;
    if (absl::Status status = before->Restore(); !status.ok()) return status;
  }
  if (result.ok()) {
    if (const uint32_t steps = entry.plan->num_python_steps(); steps != 0) {
      Count(TheLifecycle().statistics.python_steps, steps);
    }
  }
  return result;
}

}  // namespace cuvil::agent
