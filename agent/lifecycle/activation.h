#pragma once

#include "absl/status/status.h"

namespace cuvil::agent {

// Turns Cuvil on and off for the process. Either changes nothing if it cannot do its work, and is idempotent.
//
// Threads: GIL held. Imports torch.
// Errors:  FailedPrecondition, Unavailable, Unimplemented  one sentence: what is missing, and what would help
absl::Status Enable();
void Disable();
bool Enabled();

}  // namespace cuvil::agent
