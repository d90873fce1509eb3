#pragma once

#include <Python.h>

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "agent/capture.h"
#include "agent/collector_pause.h"
#include "agent/cpython_compat.h"
#include "agent/forward_place.h"
#include "agent/frame_hook.h"
#include "agent/heap_log.h"
#include "agent/instrument.h"
#include "agent/module_path.h"
#include "agent/trace/trace.h"

namespace cuvil::agent {

// For what the models of instructions and of objects refuse.
inline constexpr char kAdviceDevelop[] = "rewrite the line with tensor operators or plain Python containers";

// An interned string that lives as long as the process; `text` is a literal.
PyObject* InternedName(const char* text);

// Tells which tensors of a trace hold the same data in every call.
class ConstantTensors {
 public:
  virtual ~ConstantTensors() = default;
  virtual bool IsConstant(PyObject* tensor) const = 0;
  virtual bool IsArgument(PyObject* tensor) const = 0;
  // Python reads the tensor's shape, type or the like: refuses the trace if they are not what they were before.
  virtual void ReadMetadata(PyObject* tensor) = 0;
  virtual bool IsResult(PyObject* tensor) const = 0;  // made by an operator of the trace
  // Takes the recorder's dispatch mode away for one C call that would see it, and puts it back.
  virtual void HideMode() const = 0;
  virtual void ShowMode() const = 0;
  // Takes it away for good, if no other mode has been put above it.
  virtual void WithdrawMode() const = 0;
};

// Watches one call instruction by instruction and models, from each instruction's operands, what state it is about to
// read or write. What cannot be modelled refuses the trace; the call itself runs on undisturbed.
//
// The models stand in instruction_models.cc (attributes, subscripts, iteration, operators) and call_models.cc (calls
// of C functions and types).
//
// Threads: the tracing thread, GIL held.
class Tracer final : public ProbeSink {
 public:
  Tracer() = default;
  Tracer(const Tracer&) = delete;
  Tracer& operator=(const Tracer&) = delete;

  void OnFrameEnter(const FrameView& frame, bool instrumented, const char* why_not) noexcept override;
  void OnProbe(const FrameView& frame, const Site& site, PyObject** stack_top) noexcept override;
  void OnFrameExit(const FrameView& frame, bool raised) noexcept override;
  void OnFrameLeave(const FrameView& frame, FrameExit exit, PyObject* result) noexcept override;

  // The first refusal wins. The location is the instruction probed last.
  void Refuse(const char* code, std::string message, const char* advice, bool retry = false);
  bool refused() const { return !refusal_.empty(); }
  const Refusal& refusal() const { return refusal_; }

  HeapLog& heap() { return heap_; }
  // Ends with the first refusal: from then on the call may do what sees it.
  void set_collector_pause(CollectorPause* pause) { collector_pause_ = pause; }
  // The call that is being traced; sources name modules by their path below it.
  void set_root(const ModuleCallScope* root) { root_ = root; }
  // The code whose returns give the call's result, or null.
  void set_forward(PyCodeObject* code) { forward_ = code; }
  void set_constants(ConstantTensors* constants) { constants_ = constants; }
  // Index in the trace's source table of the instruction probed last.
  uint32_t CurrentSource();
  std::vector<trace::SourceLocation> TakeSources() { return std::move(sources_); }
  // Which way the call's branches went; those after a refusal count as well.
  std::vector<trace::BranchCount> BranchCounts() const;
  std::vector<trace::FrameCount> FrameCounts() const;
  const trace::SourceLocation& source(uint32_t index) const { return sources_[index]; }

  // Where the call returned what it made, where the exception that it ended with came from, and where a lock was taken
  // last; without a file if that is not known.
  CodePlace ReturnPlace() const { return returned_at_; }
  CodePlace RaisePlace() const { return raised_at_; }
  CodePlace LockPlace() const { return locked_at_; }

  // Older tensors that an argument was told apart from by identity, and the sources of the lines that did so.
  const std::vector<PyObject*>& compared_with_arguments() const { return compared_with_arguments_; }
  const std::vector<uint32_t>& compared_at() const { return compared_at_; }
  // Locks that the call took and did not give back.
  int locks_held() const { return locks_held_; }
  // The file of the innermost traced frame; empty outside of one.
  std::string CurrentFile() const;

 private:
  struct Frame {
    void* id = nullptr;
    PyCodeObject* code = nullptr;  // held by the heap log
    int offset = -1;               // of the instruction probed last
    Op op = Op::kUnknown;
    bool ignored = false;  // code of torch that is no part of the model, see HasNoNetEffect()
    // The jump before the instruction at hand, if which way it went is still to be told; lives as long as the frame.
    const Site* branch = nullptr;
  };

  // Instructions: each models one class of instructions from its operands.
  void Dispatch(const FrameView& frame, const Site& site, PyObject** sp);
  void LoadGlobal(const FrameView& frame, PyObject* name);
  void LoadName(const FrameView& frame, PyObject* name, PyObject* locals);
  void StoreName(const FrameView& frame, PyObject* name);
  void ImportName(const FrameView& frame, const Site& site, PyObject** sp);

  // Branches: what the test at `site` says, or what it was that the last one said.
  void WatchBranch(Frame& top, const FrameView& frame, const Site& site, PyObject** sp);
  void CountBranch(const CodeRecord& record, const Site& site, bool outcome);

  // Operations on objects.
  void GetAttr(PyObject* object, PyObject* name);
  void GetGenericAttr(PyObject* object, PyObject* name);
  void GetTypeAttr(PyTypeObject* type, PyObject* name);
  void GetModuleAttr(PyObject* module, PyObject* name);
  void GetTensorAttr(PyObject* tensor, PyObject* name);
  void GetSuperAttr(PyObject* start_type, PyObject* object, PyObject* name);
  void GetDescriptor(PyObject* object, PyObject* descriptor);
  // A class's __name__ and __qualname__.
  void TouchTypeNames(PyTypeObject* type);
  // What a property, staticmethod or classmethod holds.
  void TouchWrapped(PyObject* descriptor);
  // A C member that holds an object, by its name on the type.
  void TouchMember(PyObject* object, const char* name);
  void GetGetSet(PyObject* object, PyObject* descriptor);
  void SetAttr(PyObject* object, PyObject* name);
  void SetGenericAttr(PyObject* object, PyObject* name);
  void GetItem(PyObject* container, PyObject* key);
  void SetItem(PyObject* container, PyObject* key);
  void GetDictItem(PyObject* dict, PyObject* key);
  // C code may use the object by any of its special methods: which they are.
  void TouchProtocols(PyObject* object);
  // A Python function hands the object to whoever called it, which may be C code.
  void TouchResult(PyObject* object);
  // A dict or set is asked for it: what decides how it hashes and compares.
  void TouchKey(PyObject* key);
  // The same for all that a dict or set holds.
  void TouchKeys(PyObject* container);
  // Which classes are registered with abstract ones.
  void TouchAbcToken();
  void Iterate(PyObject* iterable);
  void Advance(PyObject* iterator);
  void Truth(PyObject* object);
  void Contains(PyObject* container, PyObject* item);
  void Compare(PyObject* left, PyObject* right, int kind);
  void Binary(PyObject* left, PyObject* right, int kind);
  void Unary(PyObject* operand, const char* method);
  void Format(PyObject* object);
  void EnterContext(PyObject* manager);
  void MatchClass(PyObject* subject, PyObject* cls, PyObject* names, int num_positional);
  // The class of an object: its ob_type, and the class attributes that a special-method lookup reads.
  void TouchClass(PyObject* object);
  void TouchSpecial(PyObject* object, const char* method);
  // The attribute as the class has it (borrowed; null if none), refused if it is one that C code calls unwatched.
  PyObject* TouchMethod(PyTypeObject* type, const char* method);
  // The content that a C function reads when it is handed the object: a builtin container's elements.
  // False: the content of such an object cannot be watched.
  bool TouchContent(PyObject* object);
  void TouchDeep(PyObject* object, int depth = 0);
  // State that cannot be watched: fine for objects the call makes, refused for older ones.
  void TouchOpaque(PyObject* object);
  void Write(PyObject* object);
  // Called when the innermost frame takes a lock.
  void TakeLock();
  void HideModeFrom(const FrameView& frame, const Site& site, PyObject** sp);
  void ShowMode();
  void WithdrawMode();
  void CompareIdentity(PyObject* left, PyObject* right);
  // The call depends on which object this is: matters for those that guards compare by value.
  void PinIdentity(PyObject* object);
  // Everything an instance holds: copy and pickle read it in C.
  void TouchWholeInstance(PyObject* object);

  // Calls.
  struct Arguments {
    PyObject* const* values;  // positional, then keyword values
    Py_ssize_t count;
    PyObject* kwnames;  // tuple or null
    Py_ssize_t positional() const { return count - (kwnames == nullptr ? 0 : PyTuple_GET_SIZE(kwnames)); }
    PyObject* keyword(const char* name) const;
  };
  void Call(PyObject* callable, const Arguments& args);
  void CallWithSelf(PyObject* callable, PyObject* self, const Arguments& args);
  void CallExpanded(PyObject* callable, PyObject* positional, PyObject* keywords);
  void CallType(PyTypeObject* type, const Arguments& args);
  void CallModelled(const void* key, PyObject* callable, PyObject* self, const Arguments& args);
  void CallContainerMethod(PyObject* self, const std::string& name, const Arguments& args);
  void CallLruCache(PyObject* wrapper, const Arguments& args);
  void CallKeyFunction(PyObject* function);
  void IsInstance(PyObject* object, PyObject* classes);
  void MakeFromTensors(PyObject* maker, const Arguments& args);
  bool CalledFromTorchOps() const;
  bool IsTorchCode(PyCodeObject* code) const;
  // Torch resolves `torch.ops.x.y` in Python when an operator is first seen and keeps the result; what it does on the
  // way is not the model.
  static bool HasNoNetEffect(PyCodeObject* code);
  const Frame& UserFrame() const;
  static CodePlace PlaceIn(const Frame& frame);

  HeapLog heap_;
  ConstantTensors* constants_ = nullptr;
  CollectorPause* collector_pause_ = nullptr;
  void StopWatching();
  Refusal refusal_;
  std::vector<Frame> frames_;
  std::vector<PyObject*> compared_with_arguments_;
  std::vector<uint32_t> compared_at_;
  PyCodeObject* forward_ = nullptr;
  CodePlace returned_at_, raised_at_, locked_at_;
  bool unwinding_ = false;  // an exception leaves frame after frame
  bool mode_hidden_ = false;
  bool deep_returns_ = false;                          // map() or filter() hands results of Python functions to C
  std::unordered_set<PyTypeObject*> known_protocols_;  // whose special methods have been looked through
  int locks_held_ = 0;
  // Generators made by the call, by address: one that is older cannot live at the same place.
  std::unordered_set<PyObject*> generators_;

  std::vector<trace::SourceLocation> sources_;
  const ModuleCallScope* root_ = nullptr;
  // (code, offset) of the innermost frame and of the innermost frame outside of torch, and the innermost module.
  std::map<std::tuple<PyCodeObject*, int, PyCodeObject*, int, PyObject*>, uint32_t> source_index_;
  mutable std::unordered_map<PyCodeObject*, bool> is_torch_code_;
  // By code (CodeRecord::number) and offset: after a refusal nothing keeps the code alive.
  std::map<std::pair<uint64_t, int>, trace::BranchCount> branches_;
  std::unordered_map<PyCodeObject*, uint32_t> frame_counts_;
};

}  // namespace cuvil::agent
