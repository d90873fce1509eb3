// What the agent takes for granted about the interpreter and about torch, by name: assumptions.def has them all. The
// self-tests at enable() check each one on throw-away objects, and the first that does not hold is named in one
// sentence that says what to do next.
//
// Threads:   GIL held.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"

namespace cuvil::agent {

enum class Assumption : uint8_t {
#define CUVIL_ASSUMPTION(subject, enumerator, name, text) enumerator,
#include "agent/assumptions.def"
#undef CUVIL_ASSUMPTION
  kNone,
};

namespace assumptions_internal {
inline constinit Assumption corrupted = Assumption::kNone;
}  // namespace assumptions_internal

// A test asked for this assumption to be wrong: the self-test then looks in another place, or expects something else.
inline bool Corrupted(Assumption assumption) { return assumptions_internal::corrupted == assumption; }

// Whether what was found is what a self-test expects.
inline bool Holds(Assumption assumption, bool found) { return found != Corrupted(assumption); }

// The sentence. Unimplemented for the interpreter, FailedPrecondition for torch.
absl::Status Violated(Assumption assumption);

// What follows a sentence about a torch that is not as it should be.
inline constexpr char kTorchAdvice[] =
    "use a release of torch from 2.10 on, or report this with the output of `python -m cuvil doctor`";

std::vector<std::string> AssumptionNames();

// For tests, before the first self-test of the process: makes the named assumption wrong; "" undoes it.
//
// Errors: InvalidArgument  no assumption of that name
absl::Status CorruptAssumption(std::string_view name);

}  // namespace cuvil::agent
