#pragma once

#include <Python.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "agent/dispatch_keys.h"
#include "agent/native_torch_state.h"
#include "agent/py_ref.h"
#include "agent/tensor_bridge.h"
#include "agent/tracer.h"
#include "jit/cir/graph.h"
#include "scheduler/torch/handles.h"

namespace cuvil::agent {

// Writes down every operator that the traced call runs, as Python called it: composite operators whole, below
// autograd (docs/design/0006-torch-boundary.md).
//
// Works as a TorchDispatchMode with a C handler. For calls that come from Python, autograd and the tracking of views
// and versions are skipped, so that the mode sees `linear` and not what it decomposes into; the handler then runs the
// operator from the top with the dispatch keys that it would have had, so that all of that happens exactly once.
//
// Threads: the tracing thread, GIL held.
class OpRecorder final : public ConstantTensors {
 public:
  static absl::Status Initialize();

  explicit OpRecorder(Tracer* tracer);
  ~OpRecorder() override;
  OpRecorder(const OpRecorder&) = delete;
  OpRecorder& operator=(const OpRecorder&) = delete;

  // Pushes and pops the mode. False with an exception set if torch refuses.
  bool Start();
  void Stop();

  // Registers an argument of the call before it starts; the same object twice gives the same value.
  cir::ValueId AddInput(PyObject* tensor);

  // The value that stands for a tensor object, if it has one.
  std::optional<cir::ValueId> Find(PyObject* tensor) const;
  // True iff the tensor's data follows from constants alone: factories and operators on their results.
  bool IsConstant(PyObject* tensor) const override;
  void ReadMetadata(PyObject* tensor) override;
  bool IsArgument(PyObject* tensor) const override { return HasOrigin(tensor, cir::Origin::kInput); }
  void HideMode() const override;
  void ShowMode() const override;
  void WithdrawMode() const override;
  bool IsResult(PyObject* tensor) const override { return HasOrigin(tensor, cir::Origin::kResult); }
  cir::GraphBuilder& graph() { return graph_; }

  // Tensors that existed before the call, in the order of graph().captured. Borrowed: the heap log holds them.
  const std::vector<PyObject*>& captured() const { return captured_; }
  // Of a tensor that existed before the call, as the call's first look at it found it; null if it did not look.
  const TensorMeta* MetadataOf(PyObject* tensor) const;
  std::vector<OwnedRef> TakeConstants() { return std::move(constants_); }
  bool has_random_ops() const { return has_random_ops_; }

  // The handler: runs the operator and returns its result, whatever becomes of the trace.
  PyObject* Handle(PyObject* overload, PyObject* args, PyObject* kwargs);

 private:
  struct Tensor {
    cir::ValueId value;
    PyObject* reference = nullptr;  // weak reference: tells a dead tensor from a new one at its address
  };
  struct Overload;

  static const Overload* Describe(PyObject* overload);
  void Record(const Overload& overload, PyObject* args, PyObject* kwargs, std::vector<cir::Operand>* operands);
  static bool IsUntrackedFactory(const Overload& overload);
  void RefuseOldWrites(const cir::Op& op);
  void RecordResult(const Overload& overload, std::vector<cir::Operand> operands, PyObject* result);
  // An operator that hands data to Python, all of it constant: its result is a constant of the trace.
  bool ReadsConstant(const Overload& overload, PyObject* args, PyObject* kwargs);
  bool ToOperand(PyObject* object, cir::ArgKind kind, cir::Operand* operand);
  bool ToValue(PyObject* tensor, cir::ValueId* value);
  void Register(PyObject* tensor, cir::ValueId value);
  cir::StorageId StorageOf(PyObject* tensor);
  bool IsConstantStorage(cir::StorageId storage) const {
    return storage.index < storage_is_constant_.size() && storage_is_constant_[storage.index];
  }
  bool HasOrigin(PyObject* tensor, cir::Origin origin) const {
    std::optional<cir::ValueId> value = Find(tensor);
    return value && graph_.graph().value(*value).origin == origin;
  }
  bool AllConstant(const std::vector<cir::Operand>& operands) const;

  Tracer* tracer_;
  cir::GraphBuilder graph_;
  std::unordered_map<void*, Tensor> tensors_;  // by TensorImpl
  // Storages of inputs and captured tensors, which outlive the trace.
  std::unordered_map<void*, cir::StorageId> old_storages_;
  std::vector<bool> storage_is_old_;  // by StorageId
  // By StorageId: everything ever written to it follows from constants.
  std::vector<bool> storage_is_constant_;
  std::vector<PyObject*> captured_;
  std::unordered_map<PyObject*, TensorMeta> metadata_;  // held by the heap log
  std::vector<OwnedRef> constants_;
  uint32_t mode_bits_ = 0;
  bool has_random_ops_ = false;
  bool started_ = false;
  mutable bool hidden_ = false;
  mutable bool withdrawn_ = false;
  NativeTorchState recording_state_;  // the thread's, when recording had begun
  mutable SkippedKeys skipped_keys_;
  bool skip_ = false;                    // the operator being run is no part of the program
  std::vector<PyObject*> last_tensors_;  // tensor operands of the operator being recorded; borrowed
};

const TensorBridge& Bridge();

// A strided tensor without conj, neg or zero bit, not quantized, nested or wrapped by a transform.
bool IsPlainTensor(const TensorMeta& meta);

}  // namespace cuvil::agent
