#pragma once

#include <memory>

#include "agent/lifecycle/plan_entry.h"

namespace cuvil::agent {

// Builds the entry's plan and publishes the outcome, good or bad, with its stage.
//
// Threads:  GIL held on entry and exit; released while the plan is built. The second form leaves the work to the
//           background thread, and does it itself where there is none to be had.
void BuildNow(const std::shared_ptr<PlanEntry>& entry);
void BuildInBackground(const std::shared_ptr<PlanEntry>& entry, const CallArgs& call);
// The one or the other, as the settings say.
void Build(const std::shared_ptr<PlanEntry>& entry, const CallArgs& call);

// Waits once per entry for the builder, for a small part of what the traced call took: building is mostly a matter of
// milliseconds, and a whole eager call instead would be the longer wait.
void WaitForBuild(PlanEntry& entry);

}  // namespace cuvil::agent
