#pragma once

#include <Python.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "agent/capture.h"
#include "agent/guards.h"
#include "agent/tensor_bridge.h"

namespace cuvil::agent {

class OpRecorder;
class HeapLog;

// Which calls a capture is for: argument layout, tensor metadata, values and identities of everything else.
//
// Containers of builtin types are matched by structure, because callers build them anew; other objects by identity.
//
// Threads: GIL held.
class InputSignature {
 public:
  // Why an argument cannot be part of a signature, and what to pass in its place.
  struct WhyNot {
    std::string message;
    const char* advice = "";
  };

  // Registers every tensor with the recorder and every container with the heap log. False with a reason: the call
  // has an argument that cannot be part of a signature.
  static bool Describe(const CallArgs& call, OpRecorder* recorder, HeapLog* heap, InputSignature* signature,
                       WhyNot* why_not);

  bool Matches(const CallArgs& call) const;
  // The graph's input tensors, in order; borrowed. False if the arguments have lost their structure meanwhile.
  bool CollectTensors(const CallArgs& call, absl::InlinedVector<PyObject*, 8>* tensors) const;
  // The argument object (tensor or container) at a position of the walk over the arguments.
  PyObject* ObjectAt(const CallArgs& call, uint32_t position) const;
  // Position of a container or tensor that the signature describes, by identity at trace time; -1 if none.
  int64_t PositionOf(PyObject* object) const;
  // From now on the tensor at this input must be this very object: the call also reached it another way.
  void PinIdentity(PyObject* tensor);
  // Numbers and strings among the arguments that must be the very objects, as the call asked for their identity.
  void PinAtoms(const ExpectedValue::Pinned& pinned);
  // True iff `object` is an argument tensor without attributes that the next call may replace by another.
  bool IsFleetingTensor(PyObject* object) const;
  // Identity at trace time is only known until the trace ends.
  void ForgetObjects() { objects_.clear(); }

 private:
  enum class Kind : uint8_t { kTensor, kSameAs, kAtom, kTuple, kList, kDict, kSlice, kObject };
  struct Node {
    Kind kind;
    uint32_t count = 0;            // kTuple, kList, kDict: children; kSameAs: position of the first occurrence
    TensorMeta meta;               // kTensor
    PyTypeObject* type = nullptr;  // containers; borrowed, builtin or kept by `value`
    ExpectedValue value;           // kAtom, kObject; kTensor with pinned identity
    bool pinned = false;
    std::vector<ExpectedValue> keys;  // kDict
  };

  bool Add(PyObject* object, OpRecorder* recorder, HeapLog* heap, WhyNot* why_not, int depth);
  bool Walk(const CallArgs& call, bool compare) const;
  bool MatchNode(PyObject* object, bool compare) const;

  Py_ssize_t num_positional_ = 0;
  std::vector<ExpectedValue> keyword_names_;
  std::vector<Node> nodes_;              // pre-order over all arguments but the module
  std::vector<PyObject*> objects_;       // by position, during the trace only
  std::vector<uint32_t> identities_;     // positions of tensors and mutable containers, first occurrences
  mutable std::vector<PyObject*> seen_;  // scratch of a walk, by position; no Python code runs during one
};

}  // namespace cuvil::agent
