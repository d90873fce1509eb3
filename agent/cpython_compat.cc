#include "agent/cpython_compat.h"

#include "agent/cpython_compat_internal.h"
#include "agent/instrument.h"
#include "agent/object_layouts.h"
#include "agent/py_ref.h"

namespace cuvil::agent {
namespace {

// The view of `frame`, or of the next frame below it that runs Python code the user wrote.
FrameView ViewFrom(_PyInterpreterFrame* frame) {
  while (frame != nullptr && _PyFrame_IsIncomplete(frame)) frame = frame->previous;
  if (frame == nullptr) return FrameView();
  PyCodeObject* code = compat::FrameCode(frame);
  CodeRecord* record = Instrumenter::FindRecord(code);
  return FrameView(frame, record != nullptr ? record->original() : code, compat::Owner(frame));
}

}  // namespace

PyFunctionObject* FrameView::function() const noexcept {
#if CUVIL_PY311
  PyObject* function = reinterpret_cast<PyObject*>(frame_->f_func);
#else
  PyObject* function = frame_->f_funcobj;
#endif
  if (function == nullptr || !PyFunction_Check(function)) return nullptr;
  return reinterpret_cast<PyFunctionObject*>(function);
}

PyObject* FrameView::globals() const noexcept { return frame_->f_globals; }
PyObject* FrameView::builtins() const noexcept { return frame_->f_builtins; }
PyObject* FrameView::locals() const noexcept { return frame_->f_locals; }
PyObject** FrameView::localsplus() const noexcept { return frame_->localsplus; }
FrameView FrameView::previous() const noexcept { return ViewFrom(frame_->previous); }

int FrameView::line() const noexcept {
  PyCodeObject* running = compat::FrameCode(frame_);
  // An instrumented copy has its own offsets, and says the original's lines.
  const auto offset = (compat::InstructionPointer(frame_) - _PyCode_CODE(running)) * sizeof(_Py_CODEUNIT);
  return ExactSourceLine(running, static_cast<int>(offset));
}

PyObject* FrameView::generator() const noexcept {
  return resumed() ? reinterpret_cast<PyObject*>(compat::Generator(frame_)) : nullptr;
}

FrameView CurrentFrame(PyThreadState* thread) noexcept { return ViewFrom(compat::TopFrame(thread)); }

int ExactSourceLine(PyCodeObject* code, int offset) noexcept {
  int line = PyCode_Addr2Line(code, offset);
  return line < 0 ? 0 : line;
}

int ExactSourceColumn(PyCodeObject* code, int offset) noexcept {
  int line = 0, column = 0, end_line = 0, end_column = 0;
  if (PyCode_Addr2Location(code, offset, &line, &column, &end_line, &end_column) == 0) return 0;
  return column < 0 ? 0 : column + 1;
}

uint32_t TypeTag(PyTypeObject* type) noexcept {
  if (type->tp_version_tag != 0) return type->tp_version_tag;
#if CUVIL_PY311
  // 3.11 has no call that assigns a tag; a lookup that misses the method cache does.
  static PyObject* name = PyUnicode_InternFromString("__module__");
  if (name == nullptr) {
    PyErr_Clear();
    return 0;
  }
  _PyType_Lookup(type, name);
#else
  PyUnstable_Type_AssignVersionTag(type);
#endif
  return type->tp_version_tag;
}

bool HasInstanceAttributes(PyObject* object) noexcept {
  const PyTypeObject* type = Py_TYPE(object);
  PyObject* dict = nullptr;
  if (type->tp_flags & Py_TPFLAGS_MANAGED_DICT) {
    // Include/internal/pycore_object.h and pycore_dict.h: 3.11 keeps a pointer to the values at -4 words and the dict
    // at -3; 3.12 has one word at -3 whose low bit tells values (address - 1) from a dict; 3.13 has the dict at -3 and
    // the values behind the object. How many values are in use stands two bytes before the first (3.13: in the header).
    PyObject** words = reinterpret_cast<PyObject**>(object);
#if CUVIL_PY311
    const auto* values = reinterpret_cast<const uint8_t*>(words[-4]);
    if (values != nullptr) return values[-2] != 0;
    dict = words[-3];
#elif PY_VERSION_HEX < 0x030D0000
    const auto word = reinterpret_cast<uintptr_t>(words[-3]);
    if ((word & 1) != 0) return reinterpret_cast<const uint8_t*>(word + 1)[-2] != 0;
    dict = words[-3];
#else
    dict = words[-3];
    if (dict == nullptr && (type->tp_flags & Py_TPFLAGS_INLINE_VALUES) != 0) {
      // struct _dictvalues begins with capacity, size, embedded, valid, one byte each.
      const uint8_t* values = reinterpret_cast<const uint8_t*>(object) + type->tp_basicsize;
      return values[3] != 0 && values[1] != 0;
    }
#endif
  } else if (PyObject** pointer = _PyObject_GetDictPtr(object); pointer != nullptr) {
    dict = *pointer;
  }
  return dict != nullptr && PyDict_GET_SIZE(dict) != 0;
}

PyObject* TypeNamespace(PyTypeObject* type) noexcept {
#if PY_VERSION_HEX >= 0x030C0000
  PyObject* dict = PyType_GetDict(type);
  Py_XDECREF(dict);  // the type owns it
  return dict;
#else
  return type->tp_dict;
#endif
}

PyDictObject* InstanceDict(PyObject* object) noexcept {
  // A class keeps its attributes behind its type tag; its __dict__ is not an attribute store that Python can reach.
  if (PyType_Check(object)) return nullptr;
  ErrorScope errors;
  OwnedRef owned = OwnedRef::Steal(PyObject_GenericGetDict(object, nullptr));
  if (!owned || !PyDict_Check(owned.get())) return nullptr;
  auto* attributes = reinterpret_cast<PyDictObject*>(owned.get());  // the object keeps it alive
  return HasTableOfItsOwn(attributes) ? attributes : nullptr;
}

bool HasTableOfItsOwn(PyDictObject* attributes) noexcept {
  if (attributes->ma_values == nullptr) return true;
  PyObject* dict = reinterpret_cast<PyObject*>(attributes);
  if (!PyDict_CheckExact(dict)) return false;
  ErrorScope errors;
  // popitem() gives the dict a table of its own. The last item goes back to where it was; an empty dict gets a key for
  // the occasion, because popitem() refuses it.
  static PyObject* occasion = PyUnicode_InternFromString("__cuvil_detach__");
  if (occasion == nullptr) return false;
  bool empty = attributes->ma_used == 0;
  if (empty && PyDict_SetItem(dict, occasion, Py_None) < 0) return false;
  OwnedRef item = OwnedRef::Steal(PyObject_CallMethod(dict, "popitem", nullptr));
  if (!item) return false;
  if (!empty && PyDict_SetItem(dict, PyTuple_GET_ITEM(item.get(), 0), PyTuple_GET_ITEM(item.get(), 1)) < 0) {
    return false;
  }
  return attributes->ma_values == nullptr;
}

bool HasOnlyStringKeys(const PyDictObject* dict) noexcept {
  return reinterpret_cast<const uint8_t*>(dict->ma_keys)[kDictKeysKindOffset] != 0;
}

bool ThreadIsObserved(PyThreadState* thread) noexcept {
  if (thread->c_tracefunc != nullptr || thread->c_profilefunc != nullptr) return true;
#if CUVIL_PY311
  return thread->cframe->use_tracing != 0;
#else
  const PyInterpreterState* interpreter = thread->interp;
  for (uint8_t tools : interpreter->monitors.tools) {
    if (tools != 0) return true;
  }
  for (PyObject* name : interpreter->monitoring_tool_names) {
    if (name != nullptr) return true;
  }
  return false;
#endif
}

namespace compat {

PyCodeObject* NewCode(PyCodeObject* original, const CodeParts& parts) {
  OwnedRef bytecode = OwnedRef::Steal(PyBytes_FromStringAndSize(parts.bytecode.data(), parts.bytecode.size()));
  OwnedRef lines = OwnedRef::Steal(PyBytes_FromStringAndSize(parts.lines.data(), parts.lines.size()));
  OwnedRef exceptions = OwnedRef::Steal(PyBytes_FromStringAndSize(parts.exceptions.data(), parts.exceptions.size()));
  OwnedRef locals = OwnedRef::Steal(PyCode_GetVarnames(original));
  OwnedRef free_variables = OwnedRef::Steal(PyCode_GetFreevars(original));
  OwnedRef cells = OwnedRef::Steal(PyCode_GetCellvars(original));
  PyCodeObject* copy = nullptr;
  if (bytecode && lines && exceptions && locals && free_variables && cells) {
    // Not code.replace(): that raises an audit event, whose Python handlers would run inside the hook.
#if CUVIL_PY311
    auto* make = PyCode_NewWithPosOnlyArgs;
#else
    auto* make = PyUnstable_Code_NewWithPosOnlyArgs;
#endif
    copy = make(original->co_argcount, original->co_posonlyargcount, original->co_kwonlyargcount,
                static_cast<int>(PyTuple_GET_SIZE(locals.get())), parts.stack_size, original->co_flags, bytecode.get(),
                parts.constants, original->co_names, locals.get(), free_variables.get(), cells.get(),
                original->co_filename, original->co_name, original->co_qualname, original->co_firstlineno, lines.get(),
                exceptions.get());
  }
  if (copy == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  // The order of cells and free variables decides what the instructions' indices mean.
  int same = copy->co_nlocalsplus == original->co_nlocalsplus
                 ? PyObject_RichCompareBool(copy->co_localsplusnames, original->co_localsplusnames, Py_EQ)
                 : 0;
  if (same != 1) {
    PyErr_Clear();
    Py_DECREF(copy);
    return nullptr;
  }
  // The constructor does not know CO_FAST_HIDDEN (locals of inlined comprehensions at module and class level).
  PyObject* kinds = copy->co_localspluskinds;
  copy->co_localspluskinds = Py_NewRef(original->co_localspluskinds);
  Py_DECREF(kinds);
  return copy;
}

void GrowStack(PyCodeObject* code, int growth) {
  code->co_stacksize += growth;
#if !CUVIL_PY311
  code->co_framesize += growth;
#endif
}

#if CUVIL_PY311
Py_ssize_t RequestExtraIndex(freefunc release) { return _PyEval_RequestCodeExtraIndex(release); }
#else
Py_ssize_t RequestExtraIndex(freefunc release) { return PyUnstable_Eval_RequestCodeExtraIndex(release); }
#endif

void* GetExtra(PyCodeObject* code, Py_ssize_t index) {
  void* extra = nullptr;
#if CUVIL_PY311
  _PyCode_GetExtra(reinterpret_cast<PyObject*>(code), index, &extra);
#else
  PyUnstable_Code_GetExtra(reinterpret_cast<PyObject*>(code), index, &extra);
#endif
  return extra;
}

bool SetExtra(PyCodeObject* code, Py_ssize_t index, void* extra) {
#if CUVIL_PY311
  int status = _PyCode_SetExtra(reinterpret_cast<PyObject*>(code), index, extra);
#else
  int status = PyUnstable_Code_SetExtra(reinterpret_cast<PyObject*>(code), index, extra);
#endif
  if (status < 0) PyErr_Clear();
  return status == 0;
}

void SetVectorcall(PyFunctionObject* function, vectorcallfunc entry) {
#if CUVIL_PY311
  // Sites that are specialised for the function compare its version; zero matches none of them.
  function->vectorcall = entry;
  function->func_version = 0;
#else
  PyFunction_SetVectorcall(function, entry);
#endif
}

}  // namespace compat
}  // namespace cuvil::agent
