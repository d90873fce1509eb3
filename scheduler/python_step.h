// What the scheduler asks of whoever can call Python: operators that no native way reaches.
//
// Threads:   the calling thread of the executor, GIL not held; implementations take it.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "jit/cir/graph.h"
#include "scheduler/torch/handles.h"

namespace cuvil::scheduler {

class PythonStepCallback {
 public:
  virtual ~PythonStepCallback() = default;
  // Runs the operator. `operands` are in the order of cir::OperandValues(op); `results` gets one tensor for each value
  // that the op's results of form kNew and kList name, in order.
  virtual absl::Status Run(const cir::Op& op, absl::Span<const torch_abi::TensorRef> operands,
                           std::vector<torch_abi::OwnedTensor>* results) = 0;
};

// Computes, while a plan is built, what an operator without tensor operands makes.
class ConstantMaterializer {
 public:
  virtual ~ConstantMaterializer() = default;
  // One tensor for each value that the op's results of form kNew and kList name, in order.
  virtual absl::StatusOr<std::vector<torch_abi::OwnedTensor>> Materialize(const cir::Op& op) = 0;
};

}  // namespace cuvil::scheduler
