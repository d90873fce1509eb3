#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "agent/py_ref.h"
#include "agent/torch_state.h"
#include "agent/trace/trace.h"
#include "scheduler/torch/handles.h"

namespace cuvil::agent {

class GuardSet;
class InputSignature;
class OutputRecipe;
class CapturedTensors;

// The arguments of one vectorcall of torch.nn.Module.__call__; args[0] is the module.
//
// Ownership: borrows everything for the duration of the call it describes.
struct CallArgs {
  PyObject* const* args = nullptr;
  size_t nargsf = 0;
  PyObject* kwnames = nullptr;

  Py_ssize_t num_positional() const { return PyVectorcall_NARGS(nargsf); }
  Py_ssize_t num_keywords() const { return kwnames == nullptr ? 0 : PyTuple_GET_SIZE(kwnames); }
  Py_ssize_t num_arguments() const { return num_positional() + num_keywords(); }
};

// Why a call cannot be planned, in the words `explain()` shows.
struct Refusal {
  std::string code;  // stable reason code, e.g. "data-read"; empty: not refused
  std::string file;  // where the first offending instruction stands
  int line = 0;
  std::string message;  // what happened there
  std::string advice;   // what the user can do about it
  bool retry = false;   // the state settles by itself (a cache was filled): trace the next call again

  bool empty() const { return code.empty(); }
};

// Gives a refusal that no instruction is the reason for, or whose instruction is not known, a place: the module's
// forward. No Python code runs.
void PlaceAtForward(PyObject* module, Refusal* refusal);

// References that keep the captured tensors of one running plan alive while the GIL is released.
//
// Threads: GIL held for every member, destructor included.
class PinnedTensors {
 public:
  PinnedTensors() = default;
  PinnedTensors(const PinnedTensors&) = delete;
  PinnedTensors& operator=(const PinnedTensors&) = delete;
  ~PinnedTensors() {
    for (PyObject* tensor : tensors_) Py_DECREF(tensor);
    for (PyObject* tensor : captured_) Py_DECREF(tensor);
  }

  void Pin(PyObject* tensor) { tensors_.push_back(Py_NewRef(tensor)); }
  // Once. The list outlives this.
  void PinAll(absl::Span<PyObject* const> captured) {
    for (PyObject* tensor : captured) Py_INCREF(tensor);
    captured_ = captured;
  }

 private:
  absl::InlinedVector<PyObject*, 8> tensors_;
  absl::Span<PyObject* const> captured_;
};

// What a successful trace proved: the tensor program, the conditions under which it is the whole call, and how
// to rebuild the call's result from the program's outputs.
//
// Immutable but for the version tags that GuardsHold() refreshes. Owns no strong reference through which the
// traced module could be reached: heap objects are held weakly or not at all.
//
// Threads: GIL held for every member function; shared between threads as shared_ptr, which may drop it anywhere.
class Capture {
 public:
  ~Capture();
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  // True iff the call has the traced call's signature: argument layout, tensor metadata, values of all else, and
  // identities among the arguments. Runs no Python code.
  bool MatchesInputs(const CallArgs& call) const;

  // True iff nothing that the traced call read has changed, torch's ambient state included. Refreshes version
  // tags of objects that changed only where the trace did not look. Runs no Python code.
  bool GuardsHold();
  // The guard that failed last, in words; empty if none has.
  std::string LastFailure() const;

  // Tensor handles for the plan, valid while `pins` lives. Call after the two checks above, under the same hold
  // of the GIL. False if a captured tensor is not what it was.
  bool CollectTensors(const CallArgs& call, PinnedTensors* pins, std::vector<torch_abi::TensorRef>* inputs,
                      absl::Span<const torch_abi::TensorRef>* captured);

  // A new reference to the call's result; null with no exception set if it cannot be rebuilt.
  PyObject* BuildOutput(const CallArgs& call, std::vector<torch_abi::OwnedTensor> results);

  const trace::Trace& trace() const { return trace_; }
  const cir::Graph& graph() const { return trace_.graph; }
  // Constant tensors of the graph, in order; owned by the capture and never written.
  const std::vector<torch_abi::TensorRef>& constants() const { return constants_; }
  // scheduler::FloatingPointMode() of the traced thread, which the guards compare.
  uint32_t floating_point_mode() const { return torch_state_.floating_point_mode; }
  bool has_random_ops() const { return has_random_ops_; }
  size_t num_guards() const;
  std::string DescribeGuards() const;  // one line per kind: count
  uint64_t signature_hash() const { return signature_hash_; }

 private:
  friend class CaptureBuilder;
  Capture();

  trace::Trace trace_;
  std::unique_ptr<GuardSet> guards_;
  std::unique_ptr<InputSignature> inputs_;
  std::unique_ptr<OutputRecipe> output_;
  std::unique_ptr<CapturedTensors> captured_;  // what the plan reads, in the order of graph().captured
  std::unique_ptr<CapturedTensors> seen_;      // what the call came across, and no operator uses
  std::string last_failure_;
  std::vector<OwnedRef> constant_objects_;
  std::vector<torch_abi::TensorRef> constants_;
  TorchState torch_state_;
  std::vector<PyObject*> not_arguments_;  // borrowed, compared by address: no argument tensor may be one of these
  bool has_random_ops_ = false;
  uint64_t signature_hash_ = 0;
};

struct CaptureOutcome {
  PyObject* result = nullptr;  // new reference to what the call returned; null: the call raised, exception set
  std::shared_ptr<Capture> capture;
  Refusal refusal;                           // why there is no capture; empty if there is one
  std::vector<trace::BranchCount> branches;  // which way the call's branches went, refused or not
  uint64_t trace_ns = 0;                     // the whole traced call
};

// Runs the call for real, exactly as `original` would, and watches it. The caller has made sure that no other
// trace is active on any thread. Never fails: at worst there is a result and a refusal, which says where.
CaptureOutcome CaptureCall(const CallArgs& call, vectorcallfunc original);

// Constant-time hash of a call's signature; equal signatures hash equal. Runs no Python code.
uint64_t SignatureHash(const CallArgs& call);

// The function behind torch.nn.Module.__call__ (borrowed), known after InitializeCapture().
PyObject* ModuleCallFunction();

// The same as it stands; torch has been imported.
//
// Errors: FailedPrecondition  it is no plain function, so that its calls cannot be intercepted
absl::StatusOr<OwnedRef> FindModuleCall();

// Resolves the torch objects that tracing needs; once, from enable(). The message is one sentence.
absl::Status InitializeCapture();

}  // namespace cuvil::agent
