// Runs an execution plan on the calling thread.
//
// Threads:   any number at once, on one plan or many; no lock, no shared state. The thread's own grad mode, inference
//            mode, autocast and generators apply, as in eager.
// GIL:       the caller's business; should be released. Only the callback takes it.
// Observer:  null when nobody looks; then the steps run in a loop that knows of none.
// Ownership: borrows inputs and captured tensors, which the caller keeps alive; outputs are new references.
// Errors:    Aborted, Internal  an operator failed; the message names it and its source line. Everything the run made
//                               is released, `outputs` is left empty. What in-place operators wrote stays written.
//            Unimplemented      an operator gave a C++ warning, which is not printed; otherwise as Aborted
//            FailedPrecondition a Python step without a callback
//            as the director   what its functions say, unchanged
//            InvalidArgument    another number of inputs or captured tensors than the plan has
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "scheduler/execution_plan.h"
#include "scheduler/python_step.h"
#include "scheduler/step_director.h"
#include "scheduler/step_observer.h"
#include "scheduler/torch/handles.h"

namespace cuvil::scheduler {

// The payload of an operator's error: its line, in the words of cir::Graph::sources.
inline constexpr char kSourcePayload[] = "cuvil/source";

class PlanExecutor {
 public:
  static absl::Status Run(const ExecutionPlan& plan, absl::Span<const torch_abi::TensorRef> inputs,
                          absl::Span<const torch_abi::TensorRef> captured, std::vector<torch_abi::OwnedTensor>* outputs,
                          PythonStepCallback* python_steps = nullptr, StepObserver* observer = nullptr);

  // The same for a plan without Python steps, with the director around each step.
  static absl::Status RunDirected(const ExecutionPlan& plan, absl::Span<const torch_abi::TensorRef> inputs,
                                  absl::Span<const torch_abi::TensorRef> captured,
                                  std::vector<torch_abi::OwnedTensor>* outputs, StepDirector& director);
};

}  // namespace cuvil::scheduler
