#pragma once

#include <memory>

#include "agent/lifecycle/plan_entry.h"

namespace cuvil::agent {

// Builds the entry's plan and publishes the outcome, good or bad, with its stage.
//
// Threads:  GIL held on entry and exit; released while the plan is built. The second form leaves the work to the
//           background thread, and does it itself where there is none to be had.
void BuildNow(const std::shared_ptr<PlanEntry>& entry);
void BuildInBackground(const std::shared_ptr<PlanEntry>& entry);

}  // namespace cuvil::agent
