#pragma once

#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/types/span.h"
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
    const torch_abi::TensorRef ref = Bridge().FromPyObject(tensor);
    const void* const autograd = Bridge().AutogradMeta(ref);
    Tensor added{tensor, ref.impl(), autograd != nullptr ? Bridge().LeafFlag(autograd) : ref.impl(), 0, false};
    Flat flat{Py_TYPE(tensor), {}};
    if (TensorBridge::Flatten(metadata, &flat.meta)) {
      // A model has few kinds of weights: what they must be stays in the nearest cache.
      const auto known = std::find(flat_.begin(), flat_.end(), flat);
      added.expected = static_cast<uint32_t>(known - flat_.begin());
      if (known == flat_.end()) flat_.push_back(flat);
    } else {
      added.is_large = true;
      added.expected = static_cast<uint32_t>(large_.size());
      large_.push_back({Py_TYPE(tensor), std::move(metadata)});
    }
    tensors_.push_back(added);
    objects_.push_back(tensor);
    refs_.push_back(ref);
  }
  size_t size() const { return tensors_.size(); }
  PyObject* at(size_t i) const { return tensors_[i].object; }
  // All of them, as Python has them and as torch has them. Precondition of looking at one: the guards hold.
  absl::Span<PyObject* const> objects() const { return objects_; }
  absl::Span<const torch_abi::TensorRef> refs() const { return refs_; }
  // Index of the first tensor that is not what it was, or -1. Precondition: the guards hold.
  int64_t FirstChanged() const {
    const TensorBridge& bridge = Bridge();
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const Tensor& tensor = tensors_[i];
      if (i + kAhead < tensors_.size()) Prefetch(tensors_[i + kAhead]);
      const torch_abi::TensorRef ref = bridge.FromPyObject(tensor.object);
      bool same;
      if (tensor.is_large) {
        const Large& expected = large_[tensor.expected];
        same = Py_TYPE(tensor.object) == expected.type && bridge.SameMeta(ref, expected.meta);
      } else {
        const Flat& expected = flat_[tensor.expected];
        same = Py_TYPE(tensor.object) == expected.type && bridge.SameFlat(ref, expected.meta);
      }
      if (!same) return static_cast<int64_t>(i);
    }
    return -1;
  }

 private:
  static constexpr size_t kAhead = 8;  // benchmarks/guards_bench.py, "in calls"

  // Two share a cache line.
  struct Tensor {
    PyObject* object;  // borrowed: the place that a guard has just compared holds it
    const void* impl;  // where it and what is looked at of its autograd metadata were: only to prefetch
    const void* autograd;
    uint32_t expected : 31;  // position in flat_ or large_
    uint32_t is_large : 1;
  };
  struct Flat {
    PyTypeObject* type;
    FlatTensorMeta meta;
    bool operator==(const Flat&) const = default;
  };
  struct Large {
    PyTypeObject* type;
    TensorMeta meta;
  };

  // Operators have emptied the caches since the last call. Prefetching an address is no access: what lies there may be
  // gone already.
  static void Prefetch(const Tensor& tensor) {
    const char* impl = static_cast<const char*>(tensor.impl);
    __builtin_prefetch(tensor.object);
    __builtin_prefetch(impl);
    __builtin_prefetch(impl + 64);
    __builtin_prefetch(impl + 128);
    __builtin_prefetch(tensor.autograd);
  }

  std::vector<Flat> flat_;
  std::vector<Large> large_;                // of tensors with more than five dimensions
  std::vector<PyObject*> objects_;          // as tensors_
  std::vector<torch_abi::TensorRef> refs_;  // as tensors_: a place in the object
  std::vector<Tensor> tensors_;
};

}  // namespace cuvil::agent
