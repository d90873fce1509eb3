#pragma once

#include <Python.h>

#include <cstdint>

#include "absl/status/status.h"

namespace cuvil::agent {

// What a C function does to the state that a trace watches.
enum class CallModel : uint8_t {
  kUnknown,        // not in the table: refuse
  kPure,           // depends on its arguments' values only; containers among them are read
  kTensorOp,       // shows itself as operators; containers among its arguments are read
  kTensorMake,     // makes a tensor from Python numbers; a tensor among them would be read silently
  kAmbient,        // reads ambient state without changing it: called again by a guard
  kAmbientShown,   // the same, of state that NativeTorchState shows: without a guard of its own where that is read
  kDispatchModes,  // how many dispatch modes are active: the trace's own must not be seen
  kAmbientSet,     // changes ambient state that the end of the trace compares with its start
  kGetAttr,
  kSetAttr,
  kDelAttr,
  kHasAttr,
  kIsInstance,
  kIsSubclass,
  kIter,
  kNext,
  kLen,
  kTruthAll,
  kReduce,
  kSorted,
  kId,
  kType,
  kCallable,
  kVars,
  kRepr,
  kImport,
  kContextGet,
  kContextSet,
  kContextReset,
  kObjectGetAttribute,
  kObjectSetAttr,
  kObjectDelAttr,
  kObjectNew,
  kObjectInit,
  kTypeCall,
  kAbcCheck,
  kLock,
  kUnlock,
  kContainerMethod,  // a method of a builtin container or value type: `owner` and `name` tell which
  kDenied,           // known to be impossible; the message says why
};

struct CallEntry {
  CallModel model = CallModel::kUnknown;
  const char* reason = nullptr;   // kDenied: what it does
  PyTypeObject* owner = nullptr;  // the type that defines a method, if any
  const char* name = "";
};

// The table of modelled C functions, keyed by the PyMethodDef or wrapperbase that implements them, so that it finds a
// function however it was reached (bound, unbound, imported under another name).
//
// Threads: built once under the GIL, immutable afterwards.
// Errors:  Unavailable  torch is not importable
absl::Status BuildCallTable();
CallEntry FindCallModel(const void* implementation);

// Identity of the C implementation behind a builtin, method descriptor, slot wrapper or classmethod descriptor; null
// for other objects.
const void* CImplementation(PyObject* callable);

// Torch classes that the tracer tells apart.
struct TorchTypes {
  PyTypeObject* tensor = nullptr;
  PyTypeObject* parameter = nullptr;
  PyTypeObject* module = nullptr;
  PyTypeObject* script_module = nullptr;  // torch.jit.ScriptModule
  PyTypeObject* dtype = nullptr;
  PyTypeObject* device = nullptr;
  PyTypeObject* layout = nullptr;
  PyTypeObject* memory_format = nullptr;
  PyTypeObject* size = nullptr;
  PyTypeObject* generator = nullptr;
  PyTypeObject* lru_cache = nullptr;
  PyTypeObject* partial = nullptr;
  PyTypeObject* deque = nullptr;
  PyTypeObject* defaultdict = nullptr;
  PyTypeObject* method_wrapper = nullptr;  // of bound slot wrappers, such as None.__str__
  PyTypeObject* finfo = nullptr;
  PyTypeObject* iinfo = nullptr;
};
const TorchTypes& Types();
// The first base that is written in C: what a `class` statement made is passed over.
PyTypeObject* SolidBase(PyTypeObject* type);
inline bool IsTensor(PyObject* object) { return PyObject_TypeCheck(object, Types().tensor); }

}  // namespace cuvil::agent
