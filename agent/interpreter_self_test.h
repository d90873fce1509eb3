// Checks on throw-away objects every assumption that the agent makes about the running interpreter.
//
// Threads:   GIL held. A few milliseconds; the first verdict is remembered for the life of the process.
// Errors:    Unimplemented  a version, build or layout that the agent does not know, in one sentence
#pragma once

#include "absl/status/status.h"

namespace cuvil::agent {

absl::Status InterpreterSelfTest();

}  // namespace cuvil::agent
