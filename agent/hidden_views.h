#pragma once

#include <Python.h>

#include <set>

#include "absl/types/span.h"
#include "agent/tensor_bridge.h"
#include "jit/cir/graph.h"
#include "scheduler/torch/handles.h"
#include "scheduler/torch/torch_api.h"

namespace cuvil::agent {

// Outputs of a graph's body, of those whose memory the caller sees, that are views of memory which no operator of the
// program shows (`linear` of three dimensions). A copy of such a one would be no view; scheduler::SplitForGraph wants
// to know of them. `kept` are the outputs of a run; what torch does not tell counts as a view.
//
// Threads: GIL held.
std::set<cir::ValueId> HiddenViews(const TensorBridge& bridge, const torch_abi::TorchApi& api, const cir::Graph& body,
                                   absl::Span<const torch_abi::OwnedTensor> kept, const std::set<cir::StorageId>& seen);

}  // namespace cuvil::agent
