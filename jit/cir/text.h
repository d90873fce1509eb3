// CIR as text: Parse(Print(g)) == g for every graph, bit for bit (doubles as shortest exact decimals, NaNs as bits).
//
//     cir 1
//     source 0 "model.py:12 in forward"
//     %0 : float32[1,64]{64,1} cpu @0 = input 0
//     %1 : float32[64,64]{64,1} cpu @1 = captured 0
//     #0 aten::linear(Tensor %0, Tensor %1, Tensor? none) -> (%2 : float32[1,64]{64,1} cpu @2) source 0
//     #1 aten::relu_(Tensor ! %2) -> (& same %2) source 0
//     return %2
//
// `@n` is the storage, `!` marks a written operand, `&` a returned reference, `[...]` list results, `_` an unused one;
// `view` and `random` follow the results.
//
// Threads:   pure; any thread.
// Errors:    Parse: InvalidArgument with the line number. The result is not verified: call Verify.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "jit/cir/graph.h"

namespace cuvil::cir {

std::string Print(const Graph& graph);
std::string PrintOp(const Graph& graph, uint32_t op_index);
std::string PrintAttr(const Attr& attr);
absl::StatusOr<Graph> Parse(std::string_view text);

}  // namespace cuvil::cir
