#include "scheduler/torch/prepared_call.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace cuvil::torch_abi {

absl::StatusOr<PreparedCall> PreparedCall::Create(const TorchApi& api, const cir::Op& op, const AbiFeatures& features) {
  absl::StatusOr<UnboxedCall> unboxed = UnboxedCall::Create(api, op, features);
  if (unboxed.ok()) return PreparedCall(*std::move(unboxed));
  absl::StatusOr<DispatcherCall> dispatcher = DispatcherCall::Create(api, op);
  if (dispatcher.ok()) return PreparedCall(*std::move(dispatcher));
  return absl::UnimplementedError(
      absl::StrCat(cir::QualifiedName(op), ": ", unboxed.status().message(), "; ", dispatcher.status().message()));
}

absl::StatusOr<PreparedCall> PreparedCall::CreateIn(const cir::Graph& graph, const TorchApi& api, const cir::Op& op,
                                                    const AbiFeatures& features) {
  absl::StatusOr<LinearCall> linear = LinearCall::Create(api, graph, op, features);
  if (linear.ok()) return PreparedCall(*std::move(linear));
  return Create(api, op, features);
}

}  // namespace cuvil::torch_abi
