#pragma once

#include "absl/status/statusor.h"
#include "jit/cir/graph.h"

namespace cuvil::cir {

// A program with the inputs, captured tensors, constants and number of outputs of `graph`, and next to no operators:
// what the graph made is a `detach` of one of its captured tensors or inputs, so that it is a tensor of its own. With
// `num_detaches` > 1 it is one of another one, and so on: what more of them take is what one takes.
//
// Threads: pure.
// Errors:  Unimplemented  it makes an output and has neither an input nor a captured tensor
absl::StatusOr<Graph> EmptyProgram(const Graph& graph, int num_detaches = 1);

}  // namespace cuvil::cir
