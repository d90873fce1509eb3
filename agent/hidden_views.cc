#include "agent/hidden_views.h"

#include <cstddef>

#include "agent/py_ref.h"

namespace cuvil::agent {

std::set<cir::ValueId> HiddenViews(const TensorBridge& bridge, const torch_abi::TorchApi& api, const cir::Graph& body,
                                   absl::Span<const torch_abi::OwnedTensor> kept,
                                   const std::set<cir::StorageId>& seen) {
  const ErrorScope errors;
  std::set<cir::ValueId> views;
  for (size_t i = 0; i < kept.size(); ++i) {
    if (!seen.contains(body.value(body.outputs[i]).storage)) continue;
    const OwnedRef tensor = OwnedRef::Steal(bridge.ToPyObject(api.NewReference(kept[i].ref())));
    const OwnedRef is_view =
        tensor ? OwnedRef::Steal(PyObject_CallMethod(tensor.get(), "_is_view", nullptr)) : OwnedRef();
    if (!is_view) PyErr_Clear();
    if (!is_view || is_view.get() == Py_True) views.insert(body.outputs[i]);
  }
  return views;
}

}  // namespace cuvil::agent
