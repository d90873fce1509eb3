// The functions of the libtorch that is loaded in this process, and what was found out about its C++ ABI.
//
// Threads:   immutable after Load; shared as const.
// Ownership: keeps the library open.
// GIL:       not needed.
// Errors:    Load: Unavailable          no libtorch in the process, or a function of the C shim is missing
//                  FailedPrecondition   a function did not do on a throw-away tensor what it should
#pragma once

#include <complex>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "jit/cir/attr.h"
#include "jit/cir/tensor_type.h"
#include "scheduler/torch/handles.h"

namespace cuvil::torch_abi {

// What of the C++ ABI of this libtorch may be used. Everything starts as false and is set by the self test.
struct AbiFeatures {
  bool unboxed = false;          // at::_ops::X::call with tensors, numbers, lists, optionals
  bool scalars = false;          // ... with c10::Scalar
  bool symints = false;          // ... with c10::SymInt by value
  bool tensor_lists = false;     // ... with Tensor[] and lists as results
  bool strings = false;          // ... with str
  bool wrapped_numbers = false;  // 0-dim tensors that behave as Python numbers can be made
  bool exceptions = false;       // what torch throws is caught with its text
};

class TorchApi {
 public:
  // Finds the library that `import torch` loaded, or opens `library_path` (tests without Python), and runs the self
  // test. A failed part of the test of the C++ ABI clears its features; the C shim must pass.
  static absl::StatusOr<std::shared_ptr<const TorchApi>> Load(const std::string& library_path = "");

  TorchApi(const TorchApi&) = delete;
  TorchApi& operator=(const TorchApi&) = delete;

#define CUVIL_SHIM(member, symbol, result, parameters) result(*member) parameters = nullptr;
#include "scheduler/torch/shim_functions.def"
#undef CUVIL_SHIM

  // The calling thread's excluded dispatch keys (c10::impl); null where they are not exported.
  bool (*is_key_excluded)(uint16_t key) = nullptr;
  void (*set_key_excluded)(uint16_t key, bool excluded) = nullptr;

  // The calling thread's c10::WarningHandler; never null after Load.
  void* (*get_warning_handler)() = nullptr;
  void (*set_warning_handler)(void* handler) = nullptr;

  // A tensor of its own over the storage of `self`, untracked; the offset is added to that of `self`. May be null.
  int32_t (*reinterpret_tensor)(void* self, int64_t dim, const int64_t* sizes, const int64_t* strides, int64_t offset,
                                void** made) = nullptr;

  // Null if the library does not export it.
  void* FindSymbol(const char* name) const;

  const AbiFeatures& abi() const { return abi_; }
  // One line for each part of the self test that failed; empty is good.
  const std::string& abi_report() const { return abi_report_; }

  // Ends the reference that a cell holds and leaves null in it. Null cells stay as they are.
  void Drop(void** cell) const {
    if (*cell == nullptr) return;
    // Assigning the undefined tensor is the only exported way to release a reference without freeing the cell.
    assign_tensors(undefined_.ref().handle(), cell);
    *cell = nullptr;
  }
  // Moves the reference out of the cell into a handle of its own and leaves null.
  OwnedTensor TakeCell(void** cell) const;
  OwnedTensor NewReference(TensorRef tensor) const;
  // The TensorImpl of the undefined tensor.
  void* undefined_impl() const { return undefined_.ref().impl(); }

  // A fresh contiguous CPU tensor without dimensions that holds the number. FailedPrecondition for what is no number.
  absl::StatusOr<OwnedTensor> MakeNumber(const cir::Attr& number) const;
  // The same, made to take part in type promotion as a Python number. Needs abi().wrapped_numbers.
  absl::StatusOr<OwnedTensor> MakeWrappedNumber(const cir::Attr& number) const;
  absl::StatusOr<OwnedTensor> MakeEmpty(cir::DType dtype, const std::vector<int64_t>& sizes) const;

  cir::DType DTypeOf(TensorRef tensor) const;

 private:
  friend class SelfTest;
  TorchApi() = default;

  void* library_ = nullptr;
  OwnedTensor undefined_;
  AbiFeatures abi_;
  std::string abi_report_;
  ptrdiff_t wrapped_flag_byte_ = 0;  // from the TensorImpl
  uint8_t wrapped_flag_bit_ = 0;     // a mask
};

}  // namespace cuvil::torch_abi
