// Goes between torch.Tensor objects and tensor handles, and reads a tensor's metadata by direct loads.
//
// Every offset is searched for or checked at start on throw-away tensors; a torch whose layout does not show the
// expected pattern is refused with one sentence.
//
// Threads:   immutable after Calibrate. FromPyObject, Read and SameMeta make no Python call; they need no GIL as long
//            as the tensor is kept alive and nobody else changes its metadata.
// Ownership: FromPyObject borrows; ToPyObject takes the tensor over and returns a new reference.
// Errors:    Calibrate: Unavailable  torch is not imported, or a symbol is missing
//                       FailedPrecondition  a probe did not show the expected pattern
// Source:    THPVariable (torch/csrc/autograd/python_variable.h), c10::TensorImpl (c10/core/TensorImpl.h).
#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "jit/cir/tensor_type.h"
#include "scheduler/torch/handles.h"

namespace cuvil::agent {

// What a plan depends on of a tensor that it reads. The data pointer is not part of it.
struct TensorMeta {
  cir::DType dtype{};
  cir::DeviceType device{};
  int8_t device_index = -1;
  uint64_t key_set = 0;  // dispatch keys: layout, conj, neg, zero tensor, inference, autograd, functorch ...
  uint32_t flags = 0;    // the bit field of TensorImpl that holds is_wrapped_number and friends, masked
  int64_t storage_offset = 0;
  bool requires_grad = false;
  bool is_inference = false;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;

  bool operator==(const TensorMeta&) const = default;
  cir::TensorType ToType() const;
};

// The same in two cache lines, for tensors that are compared with every call. Of tensors of at most five dimensions.
struct FlatTensorMeta {
  uint64_t key_set = 0;
  int64_t storage_offset = 0;
  uint32_t dtype_and_device = 0;  // as they lie in the tensor
  uint8_t flags = 0;
  bool requires_grad = false;
  uint8_t dimension = 0;
  int64_t sizes[5] = {};
  int64_t strides[5] = {};

  bool operator==(const FlatTensorMeta&) const = default;
};

class TensorBridge {
 public:
  // GIL held. torch must have been imported.
  static absl::StatusOr<TensorBridge> Calibrate();

  // The object must be an instance of torch.Tensor (checked by the caller: IsTensor). Null handle: never.
  torch_abi::TensorRef FromPyObject(PyObject* tensor) const {
    return torch_abi::TensorRef(reinterpret_cast<char*>(tensor) + cell_offset_);
  }
  // Exactly torch.Tensor or torch.nn.Parameter, or a subclass of torch.Tensor.
  bool IsTensor(PyObject* object) const;
  bool IsExactTensor(PyObject* object) const { return Py_TYPE(object) == tensor_type_; }
  bool IsExactParameter(PyObject* object) const { return Py_TYPE(object) == parameter_type_; }
  // GIL held. The Python object of this very tensor if it has one, as THPVariable_Wrap does. Null with an exception
  // set.
  PyObject* ToPyObject(torch_abi::OwnedTensor tensor) const;

  TensorMeta Read(torch_abi::TensorRef tensor) const;
  // A few nanoseconds; no allocation. One virtual call if the tensor has autograd metadata and is no leaf that requires
  // a gradient.
  bool SameMeta(torch_abi::TensorRef tensor, const TensorMeta& meta) const;
  // False if the tensor has too many dimensions.
  static bool Flatten(const TensorMeta& meta, FlatTensorMeta* flat);
  bool SameFlat(torch_abi::TensorRef tensor, const FlatTensorMeta& meta) const;

  // Identity of the memory (StorageImpl*), address of the first element, version counter.
  void* Storage(torch_abi::TensorRef tensor) const;
  void* Data(torch_abi::TensorRef tensor) const;
  void* StorageData(torch_abi::TensorRef tensor) const;
  // Whether each tensor's first element is at that address.
  bool AreAt(absl::Span<const torch_abi::TensorRef> tensors, absl::Span<const void* const> data) const;
  size_t StorageBytes(torch_abi::TensorRef tensor) const;
  // Null when the tensor has none (inference tensors).
  const void* AutogradMeta(torch_abi::TensorRef tensor) const;
  // What SameMeta() looks at in it, only to be prefetched.
  const void* LeafFlag(const void* autograd_meta) const { return static_cast<const char*>(autograd_meta) + leaf_flag_; }
  // False when the tensor has no version counter (inference tensors).
  bool Version(torch_abi::TensorRef tensor, uint32_t* version) const;

 private:
  TensorBridge() = default;
  friend class TensorBridgeCalibrator;

  const char* Impl(torch_abi::TensorRef tensor) const { return static_cast<const char*>(tensor.impl()); }
  bool RequiresGrad(const char* impl) const;

  PyTypeObject* tensor_type_ = nullptr;
  PyTypeObject* parameter_type_ = nullptr;
  PyObject* (*wrap_)(const void* tensor) = nullptr;  // THPVariable_Wrap
  ptrdiff_t cell_offset_ = 0;                        // from the PyObject to its at::Tensor
  // From the TensorImpl. The first three are where every version has them; they are checked, not searched for.
  static constexpr ptrdiff_t kStorage = 16;
  static constexpr ptrdiff_t kAutogradMeta = 24;
  static constexpr ptrdiff_t kVersionCounter = 40;
  ptrdiff_t sizes_and_strides_ = 0;
  ptrdiff_t storage_offset_ = 0;
  ptrdiff_t dtype_ = 0;  // two bytes; the device's two bytes and its flag follow, then the bit fields
  ptrdiff_t key_set_ = 0;
  uint64_t differentiable_keys_ = 0;  // the keys that an inference tensor lacks
  ptrdiff_t bytes_in_storage_ = 0;    // from the StorageImpl
  ptrdiff_t leaf_flag_ = 0;           // from the autograd metadata: a byte, 1 if a gradient is required; 0: unknown
};

}  // namespace cuvil::agent
