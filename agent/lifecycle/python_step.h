#pragma once

#include <Python.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "agent/py_ref.h"
#include "jit/cir/graph.h"
#include "scheduler/python_step.h"
#include "scheduler/torch/handles.h"
#include "scheduler/torch/torch_api.h"

namespace cuvil::agent {

// Runs single operators through torch's Python binding: the C function behind torch.ops.<namespace>.<name>.<overload>.
// No Python code runs, and the operator goes through the dispatcher from the top, as in eager.
//
// Threads: any; takes the GIL.
// Errors:  Aborted        the operator raised
//          Cancelled      what it raised is no Exception (KeyboardInterrupt): left pending in this thread
//          Unimplemented  torch has no such operator
class OperatorSteps : public scheduler::PythonStepCallback {
 public:
  explicit OperatorSteps(std::shared_ptr<const torch_abi::TorchApi> api) : api_(std::move(api)) {}
  absl::Status Run(const cir::Op& op, absl::Span<const torch_abi::TensorRef> operands,
                   std::vector<torch_abi::OwnedTensor>* results) override;

 private:
  const std::shared_ptr<const torch_abi::TorchApi> api_;
};

}  // namespace cuvil::agent
