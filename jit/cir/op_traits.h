// What an operator's schema does not tell: randomness, data-dependent shapes, determinism of factories, and whether a
// plan may contain it at all.
//
// Threads:   pure; any thread.
// Source:    ops.def, which tests compare with the tags of the running torch.
#pragma once

#include <string_view>

#include "absl/status/status.h"
#include "jit/cir/graph.h"
#include "jit/cir/schema.h"

namespace cuvil::cir {

// Can the operator appear in a plan? Unimplemented with one sentence that says why not.
//
// Allowed:   operators of namespaces whose semantics the schema tells in full (aten, prims, torchvision, ...), unless
//            ops.def denies them (data leaves the tensor world, metadata of an existing tensor changes, ...).
absl::Status CheckAllowed(const Schema& schema);

// The sizes of its results depend on tensor data, for these operands (a boolean mask makes `index` dynamic).
bool HasDynamicShape(const Graph& graph, const Op& op);

// It draws from a generator, for these operands (dropout with train=False does not).
bool IsRandom(const Op& op);

// Makes the same tensor from the same constant arguments every time, and reads no tensor (arange, zeros, tril_indices).
bool IsDeterministicFactory(const Op& op);

// Its result reads memory nobody wrote (empty, empty_like, new_empty, ...).
bool IsUninitializedFactory(const Op& op);

// Whether running it or not makes no difference when its results are not used: no writes, no generator, no raise that
// the trace did not see.
bool IsPure(const Op& op);

}  // namespace cuvil::cir
