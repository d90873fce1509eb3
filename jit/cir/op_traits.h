// What an operator's schema does not tell: randomness, data-dependent shapes, hidden writes, and whether a plan may
// contain it at all.
//
// Threads:   pure; any thread.
// Source:    ops.def, which a test compares with the tags of the running torch.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "jit/cir/graph.h"
#include "jit/cir/schema.h"

namespace cuvil::cir {

// Can the operator appear in a plan? Unimplemented with one sentence that says why not.
//
// Allowed:   operators of namespaces whose schemas tell all they do (aten, prims, torchvision, mkldnn), unless ops.def
//            denies them: data leaves the tensor world, the storage of an existing tensor changes, ...
absl::Status CheckAllowed(const Schema& schema);

// Returns no tensor and reads only metadata that guards cover (result_type, is_floating_point): may run during a trace
// without a place in the graph. CheckAllowed refuses it.
bool IsMetadataQuery(const Schema& schema);

// Writes as the schema tells plus the hidden ones (the running statistics of batch_norm in training mode), and
// randomness for these operands. is_view is not derived: GraphBuilder sees it in the storages.
Effects DeriveEffects(const Schema& schema, const Op& op);

// It draws from a generator, for these operands (dropout with train=False does not).
bool IsRandom(const Op& op);

// The sizes of its results depend on tensor data, for these operands: a boolean mask makes `index` dynamic, and an
// operand of dynamic shape makes every operator dynamic.
bool HasDynamicShape(const Graph& graph, const Op& op);

// Makes the same tensors from the same constants every time and reads no tensor (arange, zeros, tril_indices).
bool IsDeterministicFactory(const Op& op);

// Torch's Python functions make new tensors (zeros, arange, rand, ones_like) without tracking their versions, although
// what they call inside does when it is called as an operator.
bool IsUntrackedFactory(const Op& op);

// The contents of its results are whatever the memory held (empty, new_empty, ...).
bool IsUninitialized(const Op& op);

// A view that gives a deprecation warning for some shapes (`x.T` of three dimensions): even an unused one does.
bool MayWarn(const Op& op);

// Computes results from operands and does nothing else: no writes, no generator, no results of unknown content.
bool IsPure(const Op& op);

}  // namespace cuvil::cir
