// aten::linear of small matrices as what it becomes inside torch, one addmm, without what torch does on the way there.
//
// torch makes a tracked view of the weight for its transpose and another of the bias for its rows, by five trips
// through the dispatcher: half of the time of a layer with 64 features. Here both are made bare, sharing the storage,
// for the length of the call. The product is torch's own addmm on the same memory.
//
// Bits:      Create runs aten::linear and this call on numbers of the same sizes and demands equal bits.
// Cells:     as UnboxedCall.
// Threads:   Invoke is const and re-entrant. GIL: not needed.
// Errors:    Create: NotFound           another operator, other types or sizes, or other bits
//            Invoke: Aborted            addmm threw, or a view could not be made
// Source:    at::native::linear (ATen/native/Linear.cpp): addmm(bias, input, weight.t()) for two dimensions and a bias.
#pragma once

#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "jit/cir/graph.h"
#include "scheduler/torch/torch_api.h"
#include "scheduler/torch/unboxed_call.h"

namespace cuvil::torch_abi {

class LinearCall {
 public:
  // `graph` has the types of the operands: sizes and strides of weight and bias are those of every run.
  static absl::StatusOr<LinearCall> Create(const TorchApi& api, const cir::Graph& graph, const cir::Op& op,
                                           const AbiFeatures& features);

  absl::Status Invoke(const TorchApi& api, void** cells) const;

 private:
  // A tensor of two dimensions over the memory of another.
  struct View {
    int64_t sizes[2];
    int64_t strides[2];
  };

  explicit LinearCall(UnboxedCall product) : product_(std::move(product)) {}
  absl::Status SameBitsAsLinear(const TorchApi& api, const cir::Op& op, cir::DType dtype,
                                const AbiFeatures& features) const;

  UnboxedCall product_;  // addmm over four cells: input, transposed weight, bias, result
  View transposed_{};
  View rows_of_bias_{};
  uint32_t input_ = 0;  // cells
  uint32_t weight_ = 0;
  uint32_t bias_ = 0;
  uint32_t result_ = 0;
};

}  // namespace cuvil::torch_abi
