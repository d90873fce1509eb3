// One operator call through libtorch's C++ entry point, with everything that does not change prepared.
//
// Constant arguments (numbers, lists, strings, dtypes) are encoded once and passed by address or value; a call copies
// the template of argument words, puts in the addresses of the cells of its tensors, and jumps. Nothing is allocated
// and no reference count is touched for arguments; results are constructed by the callee in their cells.
//
// Cells:     an array of TensorImpl pointers, one for each value of the graph. Operands must be filled; cells of new
//            results must be null and own a reference afterwards.
// Threads:   Invoke is const and re-entrant; each call has its own cells.
// GIL:       not needed; what the operator does with TLS (grad mode, autocast, modes) is as in eager.
// Errors:    Create: NotFound       no entry point of that signature, or a feature that the self test did not pass
//            Invoke: Aborted        the operator threw; no result cell was filled
//                    Internal       it returned something else than in the trace; its results were dropped
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "jit/cir/graph.h"
#include "scheduler/torch/torch_api.h"

namespace cuvil::torch_abi {

class UnboxedCall {
 public:
  static absl::StatusOr<UnboxedCall> Create(const TorchApi& api, const cir::Op& op, const AbiFeatures& features);

  absl::Status Invoke(const TorchApi& api, void** cells) const;

 private:
  friend class UnboxedCallBuilder;

  enum class PatchKind : uint8_t {
    kTensor,    // the word is the address of the cell
    kOptional,  // std::optional<Tensor>
    kArray,     // the elements of a TensorList; its length is in the template
    kListRef,   // IListRef<Tensor> of such a list
    kCopy,      // a fresh copy of constant words: parameters that the callee owns (SymInt, optional<Generator>)
  };
  struct Patch {
    PatchKind kind;
    uint16_t word;     // where the address goes
    uint16_t count;    // kArray, kListRef: elements; kCopy: words
    uint32_t scratch;  // first word of scratch space
    uint32_t first;    // position in operands_; kCopy: in copies_
  };
  enum class ReturnForm : uint8_t { kVoid, kReference, kTensor, kTuple };
  struct Return {
    cir::ResultForm form;
    bool is_list;
    uint32_t offset;  // in words, from the start of the returned object
    uint32_t first;   // position in results_
    uint32_t count;
  };

  UnboxedCall() = default;
  absl::Status StoreReturns(const TorchApi& api, void** cells, uint64_t* returned) const;
  absl::Status StoreTensor(const TorchApi& api, void** cells, const Return& slot, void** source) const;
  absl::Status StoreList(const TorchApi& api, void** cells, const Return& slot, uint64_t* source) const;

  void* function_ = nullptr;
  std::vector<uint64_t> words_;  // padded to what CallWords reads
  int num_stack_ = 0;
  bool uses_vector_ = false;
  ReturnForm return_form_ = ReturnForm::kVoid;
  uint32_t return_scratch_ = 0;  // where the returned object is built, unless it is a cell
  uint32_t scratch_words_ = 0;
  std::vector<Patch> patches_;
  std::vector<Return> returns_;
  std::vector<uint32_t> operands_;  // cell numbers
  std::vector<uint32_t> results_;
  std::vector<uint64_t> copies_;
  std::vector<std::unique_ptr<uint64_t[]>> constants_;  // what words_ points to
  std::vector<OwnedTensor> numbers_;                    // wrapped numbers
};

}  // namespace cuvil::torch_abi
