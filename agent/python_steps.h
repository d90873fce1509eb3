// Runs single operators through `torch.ops`: the scheduler's way for what no native call reaches.
//
// Threads:   any; takes the GIL itself. Several runs may use one object at once.
// Errors:    Aborted   the operator raised; the message is the exception's, which is cleared
//            Internal  it returned something else than in the trace
#pragma once

#include <Python.h>

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "agent/py_ref.h"
#include "agent/tensor_bridge.h"
#include "scheduler/python_step.h"
#include "scheduler/torch/torch_api.h"

namespace cuvil::agent {

class PythonSteps : public scheduler::PythonStepCallback, public scheduler::ConstantMaterializer {
 public:
  // Borrows the bridge, which lives as long as the process.
  PythonSteps(const TensorBridge* bridge, std::shared_ptr<const torch_abi::TorchApi> api)
      : bridge_(bridge), api_(std::move(api)) {}

  absl::Status Run(const cir::Op& op, absl::Span<const torch_abi::TensorRef> operands,
                   std::vector<torch_abi::OwnedTensor>* results) override;
  absl::StatusOr<std::vector<torch_abi::OwnedTensor>> Materialize(const cir::Op& op) override;

 private:
  // All of these: GIL held. Null: an exception is set.
  OwnedRef FindOverload(PyObject* torch, const cir::Op& op) const;
  OwnedRef ConvertTensor(torch_abi::TensorRef tensor) const;
  OwnedRef ConvertOperand(PyObject* torch, const cir::Operand& operand, const torch_abi::TensorRef** next) const;
  absl::Status Call(const cir::Op& op, absl::Span<const torch_abi::TensorRef> operands,
                    std::vector<torch_abi::OwnedTensor>* results) const;
  absl::Status StoreResult(const cir::Result& result, PyObject* returned,
                           std::vector<torch_abi::OwnedTensor>* results) const;

  const TensorBridge* bridge_;
  std::shared_ptr<const torch_abi::TorchApi> api_;
};

}  // namespace cuvil::agent
