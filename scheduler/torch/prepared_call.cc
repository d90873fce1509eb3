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

}  // namespace cuvil::torch_abi
