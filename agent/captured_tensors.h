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
    tensors_.push_back({tensor, Py_TYPE(tensor), std::move(metadata)});
  }
  size_t size() const { return tensors_.size(); }
  PyObject* at(size_t i) const { return tensors_[i].object; }
  // Index of the first tensor that is not what it was, or -1. Precondition: the guards hold.
  int64_t FirstChanged() const {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const Tensor& tensor = tensors_[i];
      if (Py_TYPE(tensor.object) != tensor.type) return static_cast<int64_t>(i);
      if (!Bridge().SameMeta(Bridge().FromPyObject(tensor.object), tensor.meta)) return static_cast<int64_t>(i);
    }
    return -1;
  }

 private:
  struct Tensor {
    PyObject* object;  // borrowed: the place that a guard has just compared holds it
    PyTypeObject* type;
    TensorMeta meta;
  };
  std::vector<Tensor> tensors_;
};

}  // namespace cuvil::agent
