#pragma once

#include <Python.h>

#include <utility>
#include <vector>

#include "agent/op_recorder.h"
#include "agent/tensor_bridge.h"

namespace cuvil::agent {

// Tensors that the call found besides its inputs: weights and buffers, read in place.
//
// The guards prove that every place still holds the same tensor object; what remains to be compared is the object's
// metadata, by direct loads. Python may have read it (`self.weight.dtype`) whether or not an operator uses the tensor.
//
// Threads: GIL held.
class CapturedTensors {
 public:
  void Add(PyObject* tensor, TensorMeta metadata) {
    Tensor added{tensor, Py_TYPE(tensor), Bridge().FromPyObject(tensor).impl(), -1, {}};
    if (!TensorBridge::Flatten(metadata, &added.meta)) {
      added.large = static_cast<int64_t>(large_.size());
      large_.push_back(std::move(metadata));
    }
    tensors_.push_back(added);
  }
  size_t size() const { return tensors_.size(); }
  PyObject* at(size_t i) const { return tensors_[i].object; }
  // Index of the first tensor that is not what it was, or -1. Precondition: the guards hold.
  int64_t FirstChanged() const {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const Tensor& tensor = tensors_[i];
      if (i + kAhead < tensors_.size()) Prefetch(tensors_[i + kAhead]);
      if (Py_TYPE(tensor.object) != tensor.type) return static_cast<int64_t>(i);
      const torch_abi::TensorRef ref = Bridge().FromPyObject(tensor.object);
      const bool same = tensor.large < 0 ? Bridge().SameFlat(ref, tensor.meta)
                                         : Bridge().SameMeta(ref, large_[static_cast<size_t>(tensor.large)]);
      if (!same) return static_cast<int64_t>(i);
    }
    return -1;
  }

 private:
  static constexpr size_t kAhead = 8;  // benchmarks/guards_bench.py, "in calls"

  struct Tensor {
    PyObject* object;  // borrowed: the place that a guard has just compared holds it
    PyTypeObject* type;
    const void* impl;  // where it was: only to prefetch
    int64_t large;     // position in large_, or -1
    FlatTensorMeta meta;
  };

  // Operators have emptied the caches since the last call. Prefetching an address is no access: what lies there may be
  // gone already.
  static void Prefetch(const Tensor& tensor) {
    const char* impl = static_cast<const char*>(tensor.impl);
    __builtin_prefetch(tensor.object);
    __builtin_prefetch(impl);
    __builtin_prefetch(impl + 64);
    __builtin_prefetch(impl + 128);
  }

  std::vector<TensorMeta> large_;  // of tensors with more than five dimensions
  std::vector<Tensor> tensors_;
};

}  // namespace cuvil::agent
