#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "agent/capture.h"
#include "agent/lifecycle/adoption.h"
#include "agent/lifecycle/call_plan.h"
#include "agent/py_ref.h"

namespace cuvil::agent {

// One signature of one module on its way from capture to service.
//
// Threads: GIL held, but for `stage`, `last_used` and what the builder writes: `build_status`, `build_ns` and the
// inside of `plan` are written before `stage` leaves kBuilding with a release store, and read after an acquire load
// of it.
struct PlanEntry {
  enum class Stage : uint8_t {
    kBuilding,  // the capture waits for its execution plan
    kBuilt,     // or could not be, see build_status; the next call compares it with eager
    kServing,   // equal to eager; `adoption` says which calls it answers
    kDropped,   // build failed or compared unequal; kept only while a call holds it
  };

  PlanEntry(std::unique_ptr<CallPlan> plan, uint64_t hash, Adoption::Policy policy)
      : hash(hash), plan(std::move(plan)), adoption(policy) {}

  const uint64_t hash;
  std::atomic<uint64_t> last_used{0};
  std::atomic<Stage> stage{Stage::kBuilding};
  const std::unique_ptr<CallPlan> plan;

  absl::Status build_status;
  uint64_t build_ns = 0;

  Adoption adoption;
  bool waited = false;        // a call has waited for the builder
  bool comparing = false;     // a thread is running the comparing call
  uint32_t inconclusive = 0;  // comparing calls that ended without a verdict
  uint32_t num_retries = 0;   // internal failures in a row that the plan was kept in spite of
  uint64_t num_planned = 0;
  uint64_t num_guard_checks = 0;
  uint64_t trace_ns = 0;
  uint64_t compare_ns = 0;
};

// Whether the entry's plan describes this call: its signature matches, and everything it depends on is unchanged.
//
// Threads: GIL held. Runs no Python code.
// kFailed: that cannot be said of this call, because of an internal failure, which has been noted.
enum class Fit : uint8_t { kSignatureDiffers, kGuardFailed, kFits, kFailed };
Fit FitOf(PlanEntry& entry, const CallArgs& call);

// Whether a plan that failed for an internal reason is worth another try: three times in a row, then no more.
bool TryAgain(PlanEntry& entry);

// Answers the call by the entry's plan, right after FitOf() said kFits.
//
// A plan writes nothing that the program can see but the generator's state, which is put back on failure. So whatever
// fails, the original can run as if nothing had happened, and an operator's error is raised by it, with the program's
// own traceback.
//
// Threads: GIL held on entry and exit.
// Errors:  as CallPlan::Run; Internal as well if the generator's state could not be saved or put back
absl::StatusOr<OwnedRef> RunPlan(PlanEntry& entry, const CallArgs& call);

}  // namespace cuvil::agent
