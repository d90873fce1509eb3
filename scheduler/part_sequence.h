// The parts of a program, run one after the other, and the tensors that they hand on.
//
// A tensor that a part makes lives until the last part that takes it has run, or goes to the caller.
//
// Threads:   immutable; any number of threads run it at once.
// Errors:    Run: what a part's run says, unchanged; Internal if it makes another number of tensors than the part has
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "jit/cir/graph.h"
#include "scheduler/program_cut.h"
#include "scheduler/torch/handles.h"
#include "scheduler/torch/torch_api.h"

namespace cuvil::scheduler {

class PartSequence {
 public:
  // `parts` are CutProgram's of the program, all of them.
  PartSequence(const cir::Graph& program, std::vector<ProgramPart> parts);

  size_t size() const { return parts_.size(); }
  const ProgramPart& part(size_t i) const { return *parts_[i]; }
  const std::shared_ptr<const ProgramPart>& shared_part(size_t i) const { return parts_[i]; }

  using RunPart = absl::FunctionRef<absl::Status(size_t part, absl::Span<const torch_abi::TensorRef> inputs,
                                                 absl::Span<const torch_abi::TensorRef> captured,
                                                 std::vector<torch_abi::OwnedTensor>* outputs)>;
  absl::Status Run(const torch_abi::TorchApi& api, absl::Span<const torch_abi::TensorRef> inputs,
                   absl::Span<const torch_abi::TensorRef> captured, std::vector<torch_abi::OwnedTensor>* outputs,
                   RunPart run_part) const;

 private:
  // Where a tensor comes from.
  struct Source {
    enum class Kind : uint8_t { kInput, kCaptured, kMade };
    Kind kind = Kind::kInput;
    uint32_t index = 0;  // position in the program's, or in what the parts have made
  };
  struct Flow {
    std::vector<Source> inputs;      // for ProgramPart::inputs
    uint32_t first_made = 0;         // of ProgramPart::outputs
    std::vector<uint32_t> released;  // what nobody takes after this part
  };
  static torch_abi::TensorRef Find(const Source& source, absl::Span<const torch_abi::TensorRef> inputs,
                                   absl::Span<const torch_abi::TensorRef> captured,
                                   absl::Span<const torch_abi::OwnedTensor> made);

  std::vector<std::shared_ptr<const ProgramPart>> parts_;
  std::vector<Flow> flows_;
  std::vector<Source> outputs_;
  uint32_t num_made_ = 0;
};

}  // namespace cuvil::scheduler
