#include "agent/input_signature.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "agent/call_table.h"
#include "agent/cpython_compat.h"
#include "agent/heap_log.h"
#include "agent/op_recorder.h"

namespace cuvil::agent {
namespace {

constexpr int kMaxDepth = 16;

bool IsPlainContainer(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  return type == &PyTuple_Type || type == &PyList_Type || type == &PyDict_Type || type == Types().size ||
         // A namedtuple: a tuple subclass whose instances carry nothing else.
         (PyTuple_Check(object) && type->tp_dictoffset == 0 && !(type->tp_flags & Py_TPFLAGS_MANAGED_DICT));
}

uint64_t Mix(uint64_t hash, uint64_t value) {
  hash ^= value + 0x9E3779B97F4A7C15ull + (hash << 6) + (hash >> 2);
  return hash * 0xff51afd7ed558ccdull;
}

uint64_t HashObject(PyObject* object, int depth) {
  PyTypeObject* type = Py_TYPE(object);
  uint64_t hash = reinterpret_cast<uintptr_t>(type) >> 4;
  if (IsTensor(object)) {
    TensorMeta meta = Bridge().Read(Bridge().FromPyObject(object));
    hash = Mix(hash, static_cast<uint64_t>(meta.dtype));
    hash = Mix(hash, static_cast<uint64_t>(meta.device) * 256 + static_cast<uint8_t>(meta.device_index));
    hash = Mix(hash, meta.key_set);
    hash = Mix(hash, meta.requires_grad);
    for (int64_t size : meta.sizes) hash = Mix(hash, static_cast<uint64_t>(size));
    for (int64_t stride : meta.strides) hash = Mix(hash, static_cast<uint64_t>(stride));
    return hash;
  }
  if (type == &PyFloat_Type) {
    double value = PyFloat_AS_DOUBLE(object);
    uint64_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return Mix(hash, bits);
  }
  if (IsAtom(object) && type != &PyComplex_Type) {
    Py_hash_t value = PyObject_Hash(object);
    if (value == -1) PyErr_Clear();
    return Mix(hash, static_cast<uint64_t>(value));
  }
  if (IsPlainContainer(object) && depth < kMaxDepth) {
    if (PyDict_CheckExact(object)) {
      Py_ssize_t position = 0;
      PyObject* key;
      PyObject* value;
      while (PyDict_Next(object, &position, &key, &value)) {
        hash = Mix(hash, IsAtom(key) ? HashObject(key, depth + 1) : 1);
        hash = Mix(hash, HashObject(value, depth + 1));
      }
      return Mix(hash, PyDict_GET_SIZE(object));
    }
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i) {
      hash = Mix(hash, HashObject(PySequence_Fast_GET_ITEM(object, i), depth + 1));
    }
    return Mix(hash, PySequence_Fast_GET_SIZE(object));
  }
  if (type == &PySlice_Type) {
    auto* slice = reinterpret_cast<PySliceObject*>(object);
    for (PyObject* part : {slice->start, slice->stop, slice->step}) hash = Mix(hash, HashObject(part, depth + 1));
    return hash;
  }
  return Mix(hash, reinterpret_cast<uintptr_t>(object) >> 4);
}

}  // namespace

uint64_t SignatureHash(const CallArgs& call) {
  uint64_t hash = Mix(static_cast<uint64_t>(call.num_positional()), static_cast<uint64_t>(call.num_keywords()));
  for (Py_ssize_t i = 1; i < call.num_arguments(); ++i) hash = Mix(hash, HashObject(call.args[i], 0));
  for (Py_ssize_t i = 0; i < call.num_keywords(); ++i) {
    hash = Mix(hash, static_cast<uint64_t>(PyObject_Hash(PyTuple_GET_ITEM(call.kwnames, i))));
  }
  return hash;
}

bool InputSignature::Describe(const CallArgs& call, OpRecorder* recorder, HeapLog* heap, InputSignature* signature,
                              WhyNot* why_not) {
  signature->num_positional_ = call.num_positional();
  for (Py_ssize_t i = 0; i < call.num_keywords(); ++i) {
    signature->keyword_names_.emplace_back(PyTuple_GET_ITEM(call.kwnames, i));
  }
  for (Py_ssize_t i = 1; i < call.num_arguments(); ++i) {
    if (!signature->Add(call.args[i], recorder, heap, why_not, 0)) return false;
  }
  return true;
}

bool InputSignature::Add(PyObject* object, OpRecorder* recorder, HeapLog* heap, WhyNot* why_not, int depth) {
  // Tensors and mutable containers have an identity that the call can see.
  bool has_identity = IsTensor(object) || PyList_CheckExact(object) || PyDict_CheckExact(object);
  if (has_identity) {
    for (size_t i = 0; i < objects_.size(); ++i) {
      if (objects_[i] != object) continue;
      Node node{Kind::kSameAs};
      node.count = static_cast<uint32_t>(i);
      nodes_.push_back(std::move(node));
      objects_.push_back(nullptr);
      return true;
    }
  }
  size_t position = nodes_.size();
  nodes_.push_back({Kind::kObject});
  objects_.push_back(has_identity || IsPlainContainer(object) ? object : nullptr);
  if (has_identity) identities_.push_back(static_cast<uint32_t>(position));
  PyTypeObject* type = Py_TYPE(object);
  if (IsTensor(object)) {
    if (!Bridge().IsExactTensor(object) && !Bridge().IsExactParameter(object)) {
      why_not->message = absl::StrCat("an argument is a tensor subclass, ", type->tp_name);
      why_not->advice = "pass a plain tensor; modules inside that are given such are planned on their own";
      return false;
    }
    if (!IsPlainTensor(Bridge().Read(Bridge().FromPyObject(object)))) {
      why_not->message = "an argument is not a plain strided tensor (conj, neg, zero, sparse, quantized, …)";
      why_not->advice = "make it plain before the call: resolve_conj(), resolve_neg(), to_dense(), dequantize()";
      return false;
    }
    recorder->AddInput(object);
    Node& node = nodes_[position];
    node.kind = Kind::kTensor;
    node.meta = Bridge().Read(Bridge().FromPyObject(object));
    node.type = type;
    if (HasInstanceAttributes(object)) {
      node.pinned = true;
      node.value = ExpectedValue(object);
    }
    return true;
  }
  if (IsAtom(object)) {
    nodes_[position].kind = Kind::kAtom;
    nodes_[position].value = ExpectedValue(object);
    return true;
  }
  if (IsPlainContainer(object) && depth < kMaxDepth) {
    heap->MarkStructural(object);
    nodes_[position].type = type;
    nodes_[position].value = ExpectedValue(reinterpret_cast<PyObject*>(type));
    if (PyDict_CheckExact(object)) {
      nodes_[position].kind = Kind::kDict;
      nodes_[position].count = static_cast<uint32_t>(PyDict_GET_SIZE(object));
      Py_ssize_t where = 0;
      PyObject* key;
      PyObject* value;
      while (PyDict_Next(object, &where, &key, &value)) {
        nodes_[position].keys.emplace_back(key);
        if (!Add(value, recorder, heap, why_not, depth + 1)) return false;
      }
      return true;
    }
    nodes_[position].kind = PyList_Check(object) ? Kind::kList : Kind::kTuple;
    nodes_[position].count = static_cast<uint32_t>(PySequence_Fast_GET_SIZE(object));
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i) {
      if (!Add(PySequence_Fast_GET_ITEM(object, i), recorder, heap, why_not, depth + 1)) return false;
    }
    return true;
  }
  if (type == &PySlice_Type) {
    nodes_[position].kind = Kind::kSlice;
    auto* slice = reinterpret_cast<PySliceObject*>(object);
    for (PyObject* part : {slice->start, slice->stop, slice->step}) {
      if (!Add(part, recorder, heap, why_not, depth + 1)) return false;
    }
    return true;
  }
  nodes_[position].value = ExpectedValue(object);
  if (nodes_[position].value.unknown()) {
    why_not->message = absl::StrCat("an argument is a ", type->tp_name, ", which cannot be told from another one");
    why_not->advice = "pass tensors, numbers, strings, containers of them, or objects that can be referenced weakly";
    return false;
  }
  return true;
}

bool InputSignature::MatchNode(PyObject* object, bool compare) const {
  if (seen_.size() >= nodes_.size()) return false;
  const Node& node = nodes_[seen_.size()];
  seen_.push_back(object);
  switch (node.kind) {
    case Kind::kTensor:
      // The exact type: a subclass may override everything.
      if (Py_TYPE(object) != node.type) return false;
      if (!compare) return true;
      if (!Bridge().SameMeta(Bridge().FromPyObject(object), node.meta)) return false;
      return node.pinned ? node.value.Matches(object) : !HasInstanceAttributes(object);
    case Kind::kSameAs:
      return seen_[node.count] == object;
    case Kind::kAtom:
    case Kind::kObject:
      return !compare || node.value.Matches(object);
    case Kind::kTuple:
    case Kind::kList:
      if (Py_TYPE(object) != node.type || PySequence_Fast_GET_SIZE(object) != node.count) return false;
      for (uint32_t i = 0; i < node.count; ++i) {
        if (!MatchNode(PySequence_Fast_GET_ITEM(object, i), compare)) return false;
      }
      return true;
    case Kind::kDict: {
      if (!PyDict_CheckExact(object) || PyDict_GET_SIZE(object) != node.count) return false;
      Py_ssize_t where = 0;
      PyObject* key;
      PyObject* value;
      for (uint32_t i = 0; PyDict_Next(object, &where, &key, &value); ++i) {
        if (!node.keys[i].Matches(key) || !MatchNode(value, compare)) return false;
      }
      return true;
    }
    case Kind::kSlice: {
      if (Py_TYPE(object) != &PySlice_Type) return false;
      auto* slice = reinterpret_cast<PySliceObject*>(object);
      for (PyObject* part : {slice->start, slice->stop, slice->step}) {
        if (!MatchNode(part, compare)) return false;
      }
      return true;
    }
  }
  return false;
}

bool InputSignature::Walk(const CallArgs& call, bool compare) const {
  seen_.clear();
  for (Py_ssize_t i = 1; i < call.num_arguments(); ++i) {
    if (!MatchNode(call.args[i], compare)) return false;
  }
  return seen_.size() == nodes_.size();
}

bool InputSignature::Matches(const CallArgs& call) const {
  if (call.num_positional() != num_positional_) return false;
  if (static_cast<size_t>(call.num_keywords()) != keyword_names_.size()) return false;
  for (size_t i = 0; i < keyword_names_.size(); ++i) {
    if (!keyword_names_[i].Matches(PyTuple_GET_ITEM(call.kwnames, i))) return false;
  }
  if (!Walk(call, true)) return false;
  // What was distinct at the trace must be distinct now: in-place operators and returned containers tell.
  for (size_t i = 1; i < identities_.size(); ++i) {
    for (size_t k = 0; k < i; ++k) {
      if (seen_[identities_[i]] == seen_[identities_[k]]) return false;
    }
  }
  return true;
}

bool InputSignature::CollectTensors(const CallArgs& call, absl::InlinedVector<PyObject*, 8>* tensors) const {
  if (!Walk(call, false)) return false;
  for (size_t i = 0; i < nodes_.size(); ++i) {
    if (nodes_[i].kind == Kind::kTensor) tensors->push_back(seen_[i]);
  }
  return true;
}

PyObject* InputSignature::ObjectAt(const CallArgs& call, uint32_t position) const {
  return Walk(call, false) && position < seen_.size() ? seen_[position] : nullptr;
}

int64_t InputSignature::PositionOf(PyObject* object) const {
  for (size_t i = 0; i < objects_.size(); ++i) {
    if (objects_[i] == object) return static_cast<int64_t>(i);
  }
  return -1;
}

void InputSignature::PinIdentity(PyObject* tensor) {
  int64_t position = PositionOf(tensor);
  if (position < 0) return;
  nodes_[position].pinned = true;
  nodes_[position].value = ExpectedValue(tensor);
}

void InputSignature::PinAtoms(const ExpectedValue::Pinned& pinned) {
  for (Node& node : nodes_) {
    if (node.kind == Kind::kAtom && pinned.count(node.value.pointer()) != 0) {
      node.value = ExpectedValue(node.value.pointer(), &pinned);
    }
  }
}

bool InputSignature::IsFleetingTensor(PyObject* object) const {
  const int64_t position = PositionOf(object);
  return position >= 0 && nodes_[position].kind == Kind::kTensor && !nodes_[position].pinned;
}

}  // namespace cuvil::agent
