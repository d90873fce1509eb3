#include "agent/forward_place.h"

#include "agent/cpython_private.h"
#include "agent/py_ref.h"

namespace cuvil::agent {
namespace {

// A decorated function may be wrapped, and its wrapper wrapped again; a cycle is somebody's joke.
constexpr int kMaxWrappers = 16;

PyObject* Interned(const char* text) noexcept {
  PyObject* name = PyUnicode_InternFromString(text);
  if (name == nullptr) PyErr_Clear();
  return name;  // interned names are few and live as long as the process
}

PyObject* Item(PyObject* dict, PyObject* name) noexcept {
  PyObject* value =
      dict != nullptr && name != nullptr && PyDict_Check(dict) ? PyDict_GetItemWithError(dict, name) : nullptr;
  if (value == nullptr) PyErr_Clear();
  return value;
}

// The function below methods and wrappers; null if there is none.
PyFunctionObject* Unwrap(PyObject* callable) noexcept {
  static PyObject* wrapped = Interned("__wrapped__");
  for (int i = 0; i < kMaxWrappers && callable != nullptr; ++i) {
    if (PyMethod_Check(callable)) {
      callable = PyMethod_GET_FUNCTION(callable);
      continue;
    }
    if (!PyFunction_Check(callable)) return nullptr;
    auto* function = reinterpret_cast<PyFunctionObject*>(callable);
    PyObject* inner = Item(function->func_dict, wrapped);
    if (inner == nullptr || (!PyFunction_Check(inner) && !PyMethod_Check(inner))) return function;
    callable = inner;
  }
  return nullptr;
}

PyCodeObject* CodeOf(PyFunctionObject* function) noexcept {
  return function == nullptr ? nullptr : reinterpret_cast<PyCodeObject*>(function->func_code);
}

}  // namespace

PyCodeObject* ForwardCode(PyObject* module) noexcept {
  static PyObject* name = Interned("forward");
  if (name == nullptr) return nullptr;
  const ErrorScope errors;
  const OwnedRef attributes = OwnedRef::Steal(PyObject_GenericGetDict(module, nullptr));
  PyErr_Clear();
  PyObject* forward = Item(attributes.get(), name);
  if (forward == nullptr) forward = _PyType_Lookup(Py_TYPE(module), name);
  return CodeOf(Unwrap(forward));
}

CodePlace ForwardPlace(PyObject* module) {
  static PyObject* name = Interned("__call__");
  const ErrorScope errors;
  PyCodeObject* code = ForwardCode(module);
  if (code == nullptr && name != nullptr) code = CodeOf(Unwrap(_PyType_Lookup(Py_TYPE(module), name)));
  if (code == nullptr) return {};
  const char* file = PyUnicode_AsUTF8(code->co_filename);
  if (file == nullptr) PyErr_Clear();
  return {file == nullptr ? "?" : file, code->co_firstlineno};
}

}  // namespace cuvil::agent
