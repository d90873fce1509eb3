// Checks every invariant that the stages behind CIR rely on; a graph that passes can be planned without asserting.
//
// Checked:   ids in range; each value defined once, before use, by what its origin says; operands fit their kinds;
//            written operands are values; an alias return names a written operand; views and same-object results share
//            storage with an operand, other results do not; types well formed; sources in range; outputs defined.
// Threads:   pure; any thread.
// Errors:    InvalidArgument  the first violation, with the operator's index and name
//            Unimplemented    a same-object result whose operands have data-dependent shapes: the identity seen in the
//                             trace may not hold for other data
#pragma once

#include "absl/status/status.h"
#include "jit/cir/graph.h"

namespace cuvil::cir {

absl::Status Verify(const Graph& graph);

}  // namespace cuvil::cir
