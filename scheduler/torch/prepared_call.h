// One operator call, by the first way that can do it: unboxed entry point, then boxed dispatcher; where the graph is
// known, small linear layers without their detours first of all.
//
// All run the operator through torch's dispatcher from the top, with the thread's own grad mode, inference mode,
// autocast and modes: views, version counters, aliasing and random numbers are eager's own. The per-operator AOTI
// functions are no third way: they start below those layers, so in-place ones leave the version counter alone
// (docs/design/0006-torch-boundary.md).
//
// Threads:   Invoke is const and re-entrant. GIL: not needed.
// Errors:    Create: Unimplemented  no way can call the operator with these arguments
//            Invoke: Aborted, Internal as UnboxedCall and DispatcherCall
#pragma once

#include <variant>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "jit/cir/graph.h"
#include "scheduler/torch/dispatcher_call.h"
#include "scheduler/torch/linear_call.h"
#include "scheduler/torch/torch_api.h"
#include "scheduler/torch/unboxed_call.h"

namespace cuvil::torch_abi {

enum class CallKind : uint8_t { kUnboxed, kDispatcher };

class PreparedCall {
 public:
  static absl::StatusOr<PreparedCall> Create(const TorchApi& api, const cir::Op& op, const AbiFeatures& features);

  // For an operator of `graph`, whose values have types that hold in every run.
  static absl::StatusOr<PreparedCall> CreateIn(const cir::Graph& graph, const TorchApi& api, const cir::Op& op,
                                               const AbiFeatures& features);

  CallKind kind() const {
    return std::holds_alternative<DispatcherCall>(call_) ? CallKind::kDispatcher : CallKind::kUnboxed;
  }
  bool is_linear() const { return std::holds_alternative<LinearCall>(call_); }

  absl::Status Invoke(const TorchApi& api, void** cells) const {
    if (const auto* unboxed = std::get_if<UnboxedCall>(&call_)) return unboxed->Invoke(api, cells);
    if (const auto* linear = std::get_if<LinearCall>(&call_)) return linear->Invoke(api, cells);
    return std::get<DispatcherCall>(call_).Invoke(api, cells);
  }

 private:
  explicit PreparedCall(std::variant<UnboxedCall, DispatcherCall, LinearCall> call) : call_(std::move(call)) {}
  std::variant<UnboxedCall, DispatcherCall, LinearCall> call_;
};

}  // namespace cuvil::torch_abi
