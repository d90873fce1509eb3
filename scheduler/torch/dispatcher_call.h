// One operator call through the boxed dispatcher entry of libtorch's stable C shim.
//
// The way for operators without an unboxed entry point (torchvision, Tensor?[] arguments) and for machines whose C++
// ABI we do not know. Costs more (a handle for each tensor, lists and strings made anew, a lookup by name) and, on
// torch 2.11, an operator's error text goes to the standard error stream: the shim writes it there and returns a bare
// code, and a redirection of a process-wide stream would swallow what other threads write.
//
// Cells, threads, GIL: as UnboxedCall.
// Errors:    Create: Unimplemented  an argument that the shim refuses (Scalar)
//            Invoke: Aborted        the operator failed; with its text where the shim keeps it
//                    Internal       it returned something else than in the trace; its results were dropped
// Source:    torch/csrc/stable/c/shim.h, stableivalue_conversions.h (an optional is a heap cell that the callee frees)
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "jit/cir/graph.h"
#include "scheduler/torch/torch_api.h"

namespace cuvil::torch_abi {

class DispatcherCall {
 public:
  static absl::StatusOr<DispatcherCall> Create(const TorchApi& api, const cir::Op& op);

  absl::Status Invoke(const TorchApi& api, void** cells) const;

 private:
  DispatcherCall() = default;
  uint64_t EncodeTensor(const TorchApi& api, void** cells, uint32_t cell) const;
  uint64_t EncodeOperand(const TorchApi& api, void** cells, size_t i) const;
  absl::Status StoreResult(const TorchApi& api, void** cells, const cir::Result& result, uint64_t returned) const;

  std::string name_;
  std::string overload_;
  std::vector<cir::ArgKind> kinds_;
  std::vector<cir::Operand> operands_;
  std::vector<cir::Result> results_;
  std::vector<OwnedTensor> numbers_;  // wrapped numbers, by operand; empty handles elsewhere
};

}  // namespace cuvil::torch_abi
