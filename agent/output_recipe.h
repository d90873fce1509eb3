#pragma once

#include <Python.h>

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "agent/capture.h"
#include "agent/guards.h"
#include "agent/heap_log.h"
#include "agent/py_ref.h"

namespace cuvil::agent {

class InputSignature;
class OpRecorder;

// How to rebuild a call's result from the plan's tensors: the same types, the same sharing, strides and views as the
// operators made them. Runs no Python code: instances are made bare and filled attribute by attribute.
//
// Threads: GIL held.
class OutputRecipe {
 public:
  // Why a result cannot be rebuilt, and what to return in its place.
  struct WhyNot {
    std::string message;
    const char* advice = "return tensors, containers of them, dataclasses or plain values";
  };

  // Describes `result` after the trace; adds the tensors it needs to the graph's outputs. Null with a reason if some
  // part of it cannot be rebuilt.
  // `guarded`: what the guards prove to be where it was.
  static std::unique_ptr<OutputRecipe> Describe(PyObject* result, const HeapLog& heap,
                                                const std::unordered_set<PyObject*>& guarded,
                                                const InputSignature& inputs, OpRecorder* recorder, WhyNot* why_not);

  // New reference; null without an exception if a part is gone.
  PyObject* Build(const CallArgs& call, const InputSignature& inputs,
                  std::vector<torch_abi::OwnedTensor> results) const;

 private:
  enum class Kind : uint8_t {
    kResult,    // a tensor of the plan
    kArgument,  // an argument object, by position
    kExisting,  // an object that existed before the call
    kAtom,
    kTuple,  // tuple or a subclass of it
    kList,
    kDict,      // dict or a subclass of it, with the instance's attributes
    kInstance,  // an object made by the call, filled attribute by attribute
    kSlice,
    kRepeat,  // the same object as an earlier node
  };
  struct Node {
    Kind kind;
    uint32_t index = 0;      // kResult: plan output; kArgument: position; kRepeat: node
    OwnedRef object;         // kAtom: the value
    ExpectedValue existing;  // kExisting: the object; containers: the type
    PyObject* existing_pointer = nullptr;
    bool has_factory = false;               // kDict: a defaultdict, whose factory is the first child
    std::vector<uint32_t> children;         // kDict: key, value, key, value, …
    std::vector<OwnedRef> attribute_names;  // kDict, kInstance, kTuple: the instance's __dict__
    std::vector<uint32_t> attributes;
    std::vector<Py_ssize_t> member_offsets;  // kInstance: __slots__
    std::vector<uint32_t> members;
  };
  struct Describer;
  struct Builder;

  std::vector<Node> nodes_;
  std::vector<OwnedRef> kept_;
};

}  // namespace cuvil::agent
