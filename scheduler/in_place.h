// Lets elementwise operators write over an operand that nobody else will ever look at.
//
// `%2 = relu(%1)` becomes `relu_(%1)`, and %1 stands for %2 from there on, if the operator makes the same bits either
// way, %1 is a fresh tensor of the same type that shares its memory with no other value, this is its only use, and
// neither result nor operand reaches the caller: an in-place operator advances the version counter, which would show.
//
// Threads:   pure; any thread.
// Errors:    none; what does not qualify stays as it is.
#pragma once

#include <cstdint>

#include "jit/cir/graph.h"

namespace cuvil::scheduler {

// Gives the number of operators that were rewritten. `graph` must have passed Verify; afterwards the values that such
// operators made are named nowhere, which Verify would not accept.
uint32_t WriteInPlace(cir::Graph* graph);

}  // namespace cuvil::scheduler
