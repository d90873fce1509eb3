// What decides how C code treats an object: its class and the special methods that the class has or lacks, how it
// hashes and compares as a key, and the content that a C function reads when it is handed the object.

#include <cstddef>

#include "absl/strings/str_cat.h"
#include "agent/call_table.h"
#include "agent/cpython_compat.h"
#include "agent/cpython_private.h"
#include "agent/object_layouts.h"
#include "agent/py_ref.h"
#include "agent/tracer.h"

namespace cuvil::agent {
namespace {

constexpr int kMaxDepth = 32;

// The special methods that C code looks up to compare, search, order, add, print or test an object.
const char* const kProtocols[] = {
    "__abs__",      "__add__",      "__and__",     "__bool__",    "__call__",          "__complex__",
    "__contains__", "__divmod__",   "__enter__",   "__eq__",      "__exit__",          "__float__",
    "__floordiv__", "__format__",   "__ge__",      "__get__",     "__getattr__",       "__getattribute__",
    "__getitem__",  "__gt__",       "__hash__",    "__iadd__",    "__iand__",          "__ifloordiv__",
    "__ilshift__",  "__imatmul__",  "__imod__",    "__imul__",    "__index__",         "__instancecheck__",
    "__int__",      "__invert__",   "__ior__",     "__ipow__",    "__irshift__",       "__isub__",
    "__iter__",     "__itruediv__", "__ixor__",    "__le__",      "__len__",           "__length_hint__",
    "__lshift__",   "__lt__",       "__matmul__",  "__missing__", "__mod__",           "__mul__",
    "__ne__",       "__neg__",      "__next__",    "__or__",      "__pos__",           "__pow__",
    "__radd__",     "__rand__",     "__rdivmod__", "__repr__",    "__reversed__",      "__rfloordiv__",
    "__rlshift__",  "__rmatmul__",  "__rmod__",    "__rmul__",    "__ror__",           "__round__",
    "__rpow__",     "__rrshift__",  "__rshift__",  "__rsub__",    "__rtruediv__",      "__rxor__",
    "__set__",      "__setitem__",  "__str__",     "__sub__",     "__subclasscheck__", "__truediv__",
    "__trunc__",    "__xor__",
};

// Values whose content never changes.
bool IsValueType(PyTypeObject* type) {
  const TorchTypes& torch = Types();
  return type == &PyTuple_Type || type == &PyFrozenSet_Type || type == &PyRange_Type || type == &PySlice_Type ||
         type == torch.size || type == torch.dtype || type == torch.device || type == torch.layout ||
         type == torch.memory_format || type == &PyFunction_Type || type == &PyCFunction_Type ||
         type == &PyMethod_Type || type == &PyCode_Type || type == &PyMethodDescr_Type ||
         type == &PyWrapperDescr_Type || type == &PyGetSetDescr_Type || type == &PyCell_Type ||
         type == &_PyWeakref_RefType || type == &PyProperty_Type || type == torch.partial;
}

// A special method that C code calls and nobody watches: a C function that is bound to some other object, or an object
// that is called. Functions are frames; slots and descriptors of C types work on the object itself.
bool IsForeignMethod(PyObject* method) {
  PyTypeObject* const type = Py_TYPE(method);
  if (type == &PyStaticMethod_Type || type == &PyClassMethod_Type) {
    const OwnedRef inner = OwnedRef::Steal(PyObject_GetAttrString(method, "__func__"));
    PyErr_Clear();
    return !inner || IsForeignMethod(inner.get());
  }
  if (type == &PyFunction_Type || type == &PyWrapperDescr_Type || type == &PyMethodDescr_Type ||
      type == &PyClassMethodDescr_Type || type == &PyGetSetDescr_Type || type == &PyMemberDescr_Type ||
      PyType_Check(method)) {
    return false;
  }
  if (type == &PyMethod_Type) return !PyFunction_Check(PyMethod_GET_FUNCTION(method));
  if (PyCFunction_Check(method)) {
    PyObject* const self = PyCFunction_GET_SELF(method);
    return self != nullptr && !PyModule_Check(self) && !PyType_Check(self);
  }
  return PyCallable_Check(method) != 0;
}

}  // namespace

void Tracer::TouchClass(PyObject* object) {
  PyTypeObject* const type = Py_TYPE(object);
  // A class, too, may be given another class. Only instances of heap types have attributes of their own that matter
  // here.
  if (PyType_Check(object)) {
    heap_.TouchType(reinterpret_cast<PyTypeObject*>(object), InternedName("__class__"));
  } else if (PyModule_Check(object) || ((type->tp_flags & Py_TPFLAGS_HEAPTYPE) && !IsTensor(object))) {
    heap_.TouchInstance(object);
  }
}

PyObject* Tracer::TouchMethod(PyTypeObject* type, const char* method) {
  PyObject* const found = heap_.TouchType(type, InternedName(method));
  if (found != nullptr && (type->tp_flags & Py_TPFLAGS_HEAPTYPE) && IsForeignMethod(found)) {
    Refuse("unknown-object",
           absl::StrCat(method, " of the class ", type->tp_name, " is a C function of another object, or no function"),
           "define it by def");
  }
  return found;
}

void Tracer::TouchSpecial(PyObject* object, const char* method) {
  TouchClass(object);
  TouchMethod(Py_TYPE(object), method);
}

void Tracer::TouchProtocols(PyObject* object) {
  PyTypeObject* const type = Py_TYPE(object);
  if (!(type->tp_flags & Py_TPFLAGS_HEAPTYPE)) return;
  // Any attribute of a class changes its tag: one stands for all of its special methods, those that it lacks included.
  TouchSpecial(object, "__eq__");
  if (IsTensor(object) || !known_protocols_.insert(type).second) return;
  for (const char* method : kProtocols) {
    if (_PyType_Lookup(type, InternedName(method)) != nullptr) TouchMethod(type, method);
  }
}

void Tracer::TouchResult(PyObject* object) {
  if (object == nullptr || IsAtom(object) || IsTensor(object)) return;
  if (PyTuple_Check(object) || PyList_Check(object) || PyDict_Check(object) || PyAnySet_Check(object)) {
    return TouchDeep(object);
  }
  // Kept alive, it would be finalized later.
  if (Py_TYPE(object)->tp_finalize == nullptr) TouchProtocols(object);
}

void Tracer::TouchKey(PyObject* key) {
  if (PyTuple_CheckExact(key)) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(key); ++i) TouchKey(PyTuple_GET_ITEM(key, i));
    return;
  }
  // Its class may come to hash or compare otherwise, and another class may be assigned to it.
  if (!(Py_TYPE(key)->tp_flags & Py_TPFLAGS_HEAPTYPE)) return TouchClass(key);
  TouchSpecial(key, "__hash__");
  TouchSpecial(key, "__eq__");
}

void Tracer::TouchKeys(PyObject* container) {
  Py_ssize_t position = 0;
  PyObject* key;
  if (PyDict_Check(container)) {
    if (HasOnlyStringKeys(reinterpret_cast<PyDictObject*>(container))) return;
    PyObject* value;
    while (PyDict_Next(container, &position, &key, &value)) TouchKey(key);
  } else if (PyAnySet_Check(container)) {
    Py_hash_t hash;
    while (_PySet_NextEntry(container, &position, &key, &hash)) TouchKey(key);
  }
}

void Tracer::TouchAbcToken() {
  // The caches behind an ABC are invisible but harmless: registrations change the token.
  const OwnedRef module = OwnedRef::Steal(PyImport_ImportModule("_abc"));
  const OwnedRef token = module ? OwnedRef::Steal(PyObject_GetAttrString(module.get(), "get_cache_token")) : OwnedRef();
  const OwnedRef none = OwnedRef::Steal(PyTuple_New(0));
  const OwnedRef value = token ? OwnedRef::Steal(PyObject_CallObject(token.get(), none.get())) : OwnedRef();
  if (!value) {
    PyErr_Clear();
    Refuse("c-callable", "an abstract base class is tested in a way that is not known",
           "test for the classes that you mean");
    return;
  }
  heap_.TouchCall(token.get(), none.get(), value.get());
}

bool Tracer::TouchContent(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  if (PyType_Check(object) || PyModule_Check(object)) {
    TouchClass(object);
    TouchProtocols(object);
    return true;
  }
  if (IsAtom(object) || IsValueType(type)) return true;
  if (PyDict_Check(object)) {
    if (type != &PyDict_Type) TouchProtocols(object);
    heap_.TouchDictAll(object);
    return true;
  }
  if (PyList_Check(object)) {
    if (type != &PyList_Type) TouchProtocols(object);
    heap_.TouchList(object);
    return true;
  }
  if (PyAnySet_Check(object)) {
    if (type != &PySet_Type) TouchProtocols(object);
    heap_.TouchSet(object);
    return true;
  }
  if (PyTuple_Check(object) || PyLong_Check(object) || PyUnicode_Check(object) || PyFloat_Check(object) ||
      PyBytes_Check(object)) {
    TouchProtocols(object);
    return true;
  }
  if (IsDictView(type)) return TouchContent(reinterpret_cast<DictView*>(object)->dict);
  if (type == &PyDictProxy_Type) {
    PyObject* mapping = reinterpret_cast<MappingProxy*>(object)->mapping;
    return TouchContent(mapping);
  }
  if (PyObject_TypeCheck(object, Types().generator)) {
    Refuse("generator", "draws from a torch.Generator object of its own",
           "use the default generator (torch.manual_seed) inside of models");
    return true;
  }
  if (IsTensor(object)) return true;  // its data is only reached by operators or by functions that are denied
  if (PyIter_Check(object) || type == Types().deque || type == &PyByteArray_Type || type == &PyMemoryView_Type) {
    TouchOpaque(object);
    return true;
  }
  if (type->tp_flags & Py_TPFLAGS_HEAPTYPE) {
    TouchProtocols(object);
    // State that a C base keeps (deque, array, ctypes, numpy) cannot be compared.
    PyTypeObject* base = SolidBase(type);
    if (base != &PyBaseObject_Type && !PyExceptionInstance_Check(object)) TouchOpaque(object);
    return true;
  }
  return false;
}

void Tracer::TouchDeep(PyObject* object, int depth) {
  if (IsAtom(object) || IsTensor(object)) return;
  if (depth > kMaxDepth) {
    Refuse("unknown-object", "a C function reads a container that is nested very deeply", kAdviceDevelop);
    return;
  }
  if (!TouchContent(object)) {
    Refuse("unknown-object", absl::StrCat("a C function reads an object of type ", Py_TYPE(object)->tp_name),
           kAdviceDevelop);
    return;
  }
  if (IsDictView(Py_TYPE(object))) return TouchDeep(reinterpret_cast<DictView*>(object)->dict, depth + 1);
  if (PyTuple_Check(object)) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(object); ++i) TouchDeep(PyTuple_GET_ITEM(object, i), depth + 1);
  } else if (PyList_Check(object)) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(object); ++i) TouchDeep(PyList_GET_ITEM(object, i), depth + 1);
  } else if (PyDict_Check(object)) {
    Py_ssize_t position = 0;
    PyObject* key;
    PyObject* value;
    while (PyDict_Next(object, &position, &key, &value)) {
      TouchDeep(key, depth + 1);
      TouchDeep(value, depth + 1);
    }
  } else if (PyAnySet_Check(object)) {
    Py_ssize_t position = 0;
    PyObject* element;
    Py_hash_t hash;
    while (_PySet_NextEntry(object, &position, &element, &hash)) TouchDeep(element, depth + 1);
  } else if (Py_TYPE(object) == &PySlice_Type) {
    auto* slice = reinterpret_cast<PySliceObject*>(object);
    for (PyObject* part : {slice->start, slice->stop, slice->step}) TouchDeep(part, depth + 1);
  }
}

}  // namespace cuvil::agent
