// What attribute access reads and writes: Python's generic lookup protocol, step by step, and the C attributes
// (getset and member descriptors) whose meaning is known.
//
// Source: Objects/object.c (_PyObject_GenericGetAttrWithDict), Objects/typeobject.c (type_getattro, super_getattro).

#include <Python.h>
// After Python.h, which it needs:
#include <structmember.h>

#include <cstring>
#include <string>
#include <string_view>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "agent/call_table.h"
#include "agent/cpython_private.h"
#include "agent/object_layouts.h"
#include "agent/py_ref.h"
#include "agent/tracer.h"

namespace cuvil::agent {
namespace {

constexpr char kAdviceOutside[] = "read it before the call and pass it in, or keep it in a plain attribute";

std::string_view NameOf(PyObject* name) {
  const char* text = PyUnicode_AsUTF8(name);
  if (text == nullptr) PyErr_Clear();
  return text == nullptr ? "?" : text;
}

bool OneOf(std::string_view name, std::initializer_list<std::string_view> names) {
  for (std::string_view candidate : names) {
    if (name == candidate) return true;
  }
  return false;
}

// `__getattribute__` or `__setattr__` as the type inherits it from object; anything else is somebody's own.
bool IsObjectSlot(PyObject* method) {
  if (method == nullptr) return true;
  CallEntry entry = FindCallModel(CImplementation(method));
  return entry.model == CallModel::kObjectGetAttribute || entry.model == CallModel::kObjectSetAttr ||
         entry.model == CallModel::kObjectDelAttr;
}

bool IsAutogradContext(PyObject* object) {
  for (PyTypeObject* type = Py_TYPE(object); type != nullptr; type = type->tp_base) {
    if (std::string_view(type->tp_name) == "torch._C._FunctionBase") return true;
  }
  return false;
}

Py_ssize_t MemberOffset(PyObject* descriptor) {
  return reinterpret_cast<PyMemberDescrObject*>(descriptor)->d_member->offset;
}

}  // namespace

void Tracer::GetAttr(PyObject* object, PyObject* name) {
  PyTypeObject* type = Py_TYPE(object);
  if (name == nullptr) return;
  if (IsTensor(object)) return GetTensorAttr(object, name);
  if (PyType_Check(object)) return GetTypeAttr(reinterpret_cast<PyTypeObject*>(object), name);
  if (PyModule_Check(object)) return GetModuleAttr(object, name);
  if (type == &PySuper_Type) {
    auto* super = reinterpret_cast<SuperObject*>(object);
    if (super->object != nullptr) {
      GetSuperAttr(reinterpret_cast<PyObject*>(super->type), super->object, name);
    }
    return;
  }
  TouchClass(object);
  PyObject* getattribute = heap_.TouchType(type, InternedName("__getattribute__"));
  if (getattribute != nullptr && PyFunction_Check(getattribute)) {
    return;  // its frame is watched; object.__getattribute__ inside it is modelled
  }
  if (std::string_view(type->tp_name) == "types.UnionType") return;  // immutable
  if (type == &Py_GenericAliasType) {
    // Immutable, but most attributes are those of the class behind it.
    PyObject* origin = _PyType_Lookup(type, InternedName("__origin__"));
    PyObject* behind = nullptr;
    if (origin != nullptr && Py_TYPE(origin) == &PyMemberDescr_Type) {
      std::memcpy(&behind, reinterpret_cast<char*>(object) + MemberOffset(origin), sizeof behind);
    }
    if (behind != nullptr && _PyType_Lookup(type, name) == nullptr) GetAttr(behind, name);
    return;
  }
  if (type == &PyMethod_Type) {
    // A bound method forwards to its function.
    if (_PyType_Lookup(type, name) == nullptr) GetAttr(PyMethod_GET_FUNCTION(object), name);
    return;
  }
  if (type->tp_getattro != PyObject_GenericGetAttr && !IsObjectSlot(getattribute)) {
    Refuse("attribute",
           absl::StrCat("attribute ", NameOf(name), " of an object of type ", type->tp_name, " is looked up by C code"),
           kAdviceOutside);
    return;
  }
  GetGenericAttr(object, name);
}

void Tracer::GetGenericAttr(PyObject* object, PyObject* name) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject* dict = nullptr;
  if ((type->tp_flags & Py_TPFLAGS_HEAPTYPE) || type->tp_dictoffset != 0) dict = heap_.TouchInstance(object);
  PyObject* descriptor = heap_.TouchType(type, name);
  // Its class may come to have __get__ or __set__.
  if (descriptor != nullptr) TouchProtocols(descriptor);
  if (descriptor != nullptr && Py_TYPE(descriptor)->tp_descr_set != nullptr) return GetDescriptor(object, descriptor);
  if (dict != nullptr) {
    heap_.TouchDictKey(dict, name);
    if (PyDict_GetItemWithError(dict, name) != nullptr) return;
  }
  if (descriptor != nullptr) return GetDescriptor(object, descriptor);
  TouchMethod(type, "__getattr__");
}

void Tracer::TouchMember(PyObject* object, const char* name) {
  PyObject* descriptor = _PyType_Lookup(Py_TYPE(object), InternedName(name));
  if (descriptor == nullptr || Py_TYPE(descriptor) != &PyMemberDescr_Type) return;
  heap_.TouchMember(object, MemberOffset(descriptor));
}

void Tracer::TouchTypeNames(PyTypeObject* type) {
  // CPython 3.13 moves no tag when one of them is assigned.
  if (!(type->tp_flags & Py_TPFLAGS_HEAPTYPE) || (type->tp_flags & Py_TPFLAGS_IMMUTABLETYPE)) return;
  PyObject* object = reinterpret_cast<PyObject*>(type);
  heap_.TouchMember(object, offsetof(PyHeapTypeObject, ht_name));
  heap_.TouchMember(object, offsetof(PyHeapTypeObject, ht_qualname));
}

void Tracer::TouchWrapped(PyObject* descriptor) {
  // Calling __init__ again replaces what one of these wraps, and no tag moves.
  if (PyObject_TypeCheck(descriptor, &PyProperty_Type)) {
    TouchMember(descriptor, "fget");
  } else if (PyObject_TypeCheck(descriptor, &PyStaticMethod_Type) ||
             PyObject_TypeCheck(descriptor, &PyClassMethod_Type)) {
    TouchMember(descriptor, "__func__");
  }
}

void Tracer::GetDescriptor(PyObject* object, PyObject* descriptor) {
  PyTypeObject* type = Py_TYPE(descriptor);
  TouchWrapped(descriptor);
  if (type->tp_descr_get == nullptr || PyFunction_Check(descriptor) || type == &PyMethodDescr_Type ||
      type == &PyWrapperDescr_Type || type == &PyClassMethodDescr_Type || type == &PyClassMethod_Type ||
      type == &PyStaticMethod_Type) {
    return;
  }
  if (PyObject_TypeCheck(descriptor, &PyProperty_Type)) {
    OwnedRef getter = OwnedRef::Steal(PyObject_GetAttrString(descriptor, "fget"));
    if (!getter) {
      PyErr_Clear();
      return;
    }
    if (!PyFunction_Check(getter.get())) Call(getter.get(), {&object, 1, nullptr});
    return;
  }
  if (type == &PyGetSetDescr_Type) return GetGetSet(object, descriptor);
  if (type == &PyMemberDescr_Type) {
    PyMemberDef* member = reinterpret_cast<PyMemberDescrObject*>(descriptor)->d_member;
    if (member->type == T_OBJECT || member->type == T_OBJECT_EX) {
      heap_.TouchMember(object, member->offset);
    } else if (!(member->flags & READONLY)) {
      Refuse("attribute",
             absl::StrCat("attribute ", member->name, " of a ", Py_TYPE(object)->tp_name,
                          " is C data that cannot be watched"),
             kAdviceOutside);
    }
    return;
  }
  if (type->tp_flags & Py_TPFLAGS_HEAPTYPE) {
    TouchSpecial(descriptor, "__get__");
    PyObject* get = _PyType_Lookup(type, InternedName("__get__"));
    if (get != nullptr && PyFunction_Check(get)) return;
  }
  if (type == Types().lru_cache || type == &PyMethod_Type) return;  // binds to the instance
  Refuse("attribute", absl::StrCat("a descriptor of type ", type->tp_name, " is written in C and not known"),
         kAdviceOutside);
}

void Tracer::GetGetSet(PyObject* object, PyObject* descriptor) {
  std::string_view name = reinterpret_cast<PyGetSetDescrObject*>(descriptor)->d_getset->name;
  PyTypeObject* owner = PyDescr_TYPE(descriptor);
  if (name == "__dict__") {
    heap_.TouchInstance(object);
    return;
  }
  if (name == "__class__") {
    TouchClass(object);
    return;
  }
  if (name == "__weakref__") return;
  if (owner == &PyFunction_Type) {
    heap_.TouchFunction(object);
    if (name == "__name__") heap_.TouchMember(object, offsetof(PyFunctionObject, func_name));
    if (name == "__qualname__") heap_.TouchMember(object, offsetof(PyFunctionObject, func_qualname));
    if (OneOf(name, {"__code__", "__defaults__", "__kwdefaults__", "__name__", "__qualname__", "__closure__"})) return;
    if (name == "__annotations__") {
      // A dict, read as such. The compiler leaves a tuple there, which the first access replaces.
      if (PyFunction_GetAnnotations(object) == nullptr) PyErr_Clear();
      heap_.TouchMember(object, offsetof(PyFunctionObject, func_annotations));
      return;
    }
  }
  const TorchTypes& torch = Types();
  if (owner == torch.dtype || owner == torch.device || owner == torch.size || owner == torch.layout ||
      owner == &PyMethod_Type || owner == &PyCFunction_Type || owner == &PyMethodDescr_Type ||
      owner == &PyWrapperDescr_Type || owner == &PyProperty_Type || owner == &PyCode_Type || owner == &PyLong_Type ||
      owner == &PyFloat_Type || owner == &PyComplex_Type || owner == &PyCell_Type || owner == &PyStaticMethod_Type ||
      owner == &PyClassMethod_Type) {
    if (owner == &PyCell_Type) heap_.TouchCell(object);
    return;
  }
  if (PyExceptionInstance_Check(object) && name == "__context__") {
    Refuse("attribute", "reads which exception was being handled when another was raised, maybe by the caller",
           kAdviceOutside);
    return;
  }
  if (PyExceptionInstance_Check(object) || IsAutogradContext(object)) {
    TouchOpaque(object);
    return;
  }
  if (PyODict_Check(object) || PyDict_Check(object)) {
    TouchContent(object);
    return;
  }
  if (std::string_view(owner->tp_name).substr(0, 6) == "torch." &&
      (std::string_view(owner->tp_name).find("info") != std::string_view::npos)) {
    return;  // torch.finfo, torch.iinfo
  }
  Refuse(
      "attribute",
      absl::StrCat("attribute ", name, " of a ", Py_TYPE(object)->tp_name, " is computed by C code that is not known"),
      kAdviceOutside);
}

void Tracer::GetTypeAttr(PyTypeObject* type, PyObject* name) {
  PyTypeObject* meta = Py_TYPE(type);
  PyObject* own_lookup = heap_.TouchType(meta, InternedName("__getattribute__"));
  if (own_lookup != nullptr && PyFunction_Check(own_lookup)) return;  // its frame is watched
  TouchClass(reinterpret_cast<PyObject*>(type));
  PyObject* meta_attribute = heap_.TouchType(meta, name);
  if (meta_attribute != nullptr) TouchProtocols(meta_attribute);
  if (meta_attribute != nullptr && Py_TYPE(meta_attribute)->tp_descr_set != nullptr) {
    // type.__dict__, __mro__, …: the type's tag covers them. A metaclass property is a frame.
    heap_.TouchType(type, name);
    if (OneOf(NameOf(name), {"__name__", "__qualname__"})) TouchTypeNames(type);
    if (PyObject_TypeCheck(meta_attribute, &PyProperty_Type)) {
      GetDescriptor(reinterpret_cast<PyObject*>(type), meta_attribute);
    }
    return;
  }
  PyObject* attribute = heap_.TouchType(type, name);
  if (attribute != nullptr) {
    PyTypeObject* kind = Py_TYPE(attribute);
    TouchProtocols(attribute);
    if (!PyObject_TypeCheck(attribute, &PyProperty_Type)) TouchWrapped(attribute);
    if (kind->tp_descr_get != nullptr && (kind->tp_flags & Py_TPFLAGS_HEAPTYPE)) {
      TouchSpecial(attribute, "__get__");
      PyObject* get = _PyType_Lookup(kind, InternedName("__get__"));
      if (get != nullptr && !PyFunction_Check(get) && !PyObject_TypeCheck(attribute, &PyProperty_Type)) {
        Refuse("attribute", absl::StrCat("a descriptor of type ", kind->tp_name, " is written in C and not known"),
               kAdviceOutside);
      }
    }
    return;
  }
  TouchMethod(meta, "__getattr__");
}

void Tracer::GetModuleAttr(PyObject* module, PyObject* name) {
  PyTypeObject* type = Py_TYPE(module);
  heap_.TouchInstance(module);  // a module's class can be replaced, too
  PyObject* own_lookup = heap_.TouchType(type, InternedName("__getattribute__"));
  if (own_lookup != nullptr && PyFunction_Check(own_lookup)) return;  // its frame is watched
  PyObject* descriptor = heap_.TouchType(type, name);
  if (descriptor != nullptr) TouchProtocols(descriptor);
  if (descriptor != nullptr && Py_TYPE(descriptor)->tp_descr_set != nullptr) {
    if (PyObject_TypeCheck(descriptor, &PyProperty_Type)) GetDescriptor(module, descriptor);
    return;
  }
  PyObject* dict = PyModule_GetDict(module);
  heap_.TouchDictKey(dict, name);
  if (PyDict_GetItemWithError(dict, name) != nullptr || descriptor != nullptr) return;
  heap_.TouchDictKey(dict, InternedName("__getattr__"));
  PyObject* const own_getattr = PyDict_GetItemWithError(dict, InternedName("__getattr__"));
  if (own_getattr != nullptr && !PyFunction_Check(own_getattr)) {
    Refuse("attribute", "a module's __getattr__ is no Python function", kAdviceOutside);
  }
  if (type != &PyModule_Type) TouchMethod(type, "__getattr__");
}

void Tracer::GetTensorAttr(PyObject* tensor, PyObject* name) {
  PyTypeObject* type = Py_TYPE(tensor);
  heap_.TouchType(type, InternedName("__getattribute__"));
  PyObject* descriptor = heap_.TouchType(type, name);
  std::string_view text = NameOf(name);
  if (descriptor != nullptr && Py_TYPE(descriptor) == &PyGetSetDescr_Type) {
    // Metadata is part of every tensor's guard or follows from the operators; `.T` and friends are operators.
    if (OneOf(text, {"shape",     "dtype",     "device",        "ndim",          "layout",    "is_cuda", "is_cpu",
                     "is_meta",   "is_sparse", "is_sparse_csr", "is_quantized",  "is_mkldnn", "is_xpu",  "is_mps",
                     "is_nested", "is_ipu",    "is_xla",        "is_hpu",        "is_mtia",   "is_maia", "is_vulkan",
                     "is_ort",    "itemsize",  "nbytes",        "requires_grad", "is_leaf",   "T",       "mT",
                     "H",         "mH",        "real",          "imag",          "__class__", "names",   "has_names",
                     "name",      "is_lazy"})) {
      if (constants_ != nullptr) constants_->ReadMetadata(tensor);
      return;
    }
    if (text == "__dict__") {
      heap_.TouchInstance(tensor);
      return;
    }
    Refuse("tensor-attribute", absl::StrCat("reads ", text, " of a tensor"),
           "use detach() or plain operators instead of the attribute");
    return;
  }
  if (descriptor != nullptr && Py_TYPE(descriptor)->tp_descr_set != nullptr) return GetDescriptor(tensor, descriptor);
  if (text == "__dict__") {
    heap_.TouchInstance(tensor);
    return;
  }
  if (descriptor != nullptr) TouchProtocols(descriptor);
  // An attribute that somebody put on the tensor object comes first. Operators' results carry none but the call's own,
  // and what a call may be given as an argument carries none at all.
  const bool is_older = constants_ == nullptr || (!constants_->IsResult(tensor) && !constants_->IsArgument(tensor));
  if (descriptor == nullptr || is_older || HasInstanceAttributes(tensor)) {
    PyObject* dict = heap_.TouchInstance(tensor);
    if (dict != nullptr) heap_.TouchDictKey(dict, name);
    if (descriptor == nullptr && (dict == nullptr || PyDict_GetItemWithError(dict, name) == nullptr)) {
      TouchMethod(type, "__getattr__");
    }
  }
}

void Tracer::GetSuperAttr(PyObject* start_type, PyObject* object, PyObject* name) {
  if (start_type == nullptr || object == nullptr || !PyType_Check(start_type)) return;
  TouchClass(object);
  PyTypeObject* of = PyType_Check(object) && PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(object),
                                                              reinterpret_cast<PyTypeObject*>(start_type))
                         ? reinterpret_cast<PyTypeObject*>(object)
                         : Py_TYPE(object);
  PyObject* mro = of->tp_mro;
  if (mro == nullptr) return;
  // Every class after `start_type` until the one that has the name: their tags cover the lookup.
  heap_.TouchType(of, name);
  bool after = false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(mro); ++i) {
    PyObject* candidate = PyTuple_GET_ITEM(mro, i);
    if (!after) {
      after = candidate == start_type;
      continue;
    }
    auto* type = reinterpret_cast<PyTypeObject*>(candidate);
    PyObject* found = heap_.TouchType(type, name);
    if (found == nullptr) continue;
    PyObject* own = PyDict_GetItemWithError(TypeNamespace(type), name);
    if (own == nullptr) continue;
    TouchProtocols(own);
    if (Py_TYPE(own)->tp_descr_set != nullptr) {
      GetDescriptor(object, own);
    } else {
      TouchWrapped(own);
    }
    return;
  }
}

void Tracer::SetAttr(PyObject* object, PyObject* name) {
  PyTypeObject* type = Py_TYPE(object);
  if (name == nullptr) return;
  if (PyType_Check(object)) {
    heap_.TouchType(reinterpret_cast<PyTypeObject*>(object), name);
    return Write(object);
  }
  if (PyModule_Check(object)) {
    PyObject* dict = PyModule_GetDict(object);
    heap_.TouchDictKey(dict, name);
    return Write(dict);
  }
  for (const char* method : {"__setattr__", "__delattr__"}) {
    PyObject* found = _PyType_Lookup(type, InternedName(method));
    if (found != nullptr && PyFunction_Check(found)) {
      TouchClass(object);
      heap_.TouchType(type, InternedName("__setattr__"));
      heap_.TouchType(type, InternedName("__delattr__"));
      PyObject* set = _PyType_Lookup(type, InternedName("__setattr__"));
      if (set != nullptr && PyFunction_Check(set)) return;  // its frame is watched
    }
  }
  TouchClass(object);
  PyObject* setattr_slot = heap_.TouchType(type, InternedName("__setattr__"));
  heap_.TouchType(type, InternedName("__delattr__"));
  if (type->tp_setattro != PyObject_GenericSetAttr && !IsObjectSlot(setattr_slot)) {
    Refuse("attribute",
           absl::StrCat("attribute ", NameOf(name), " of an object of type ", type->tp_name, " is set by C code"),
           kAdviceOutside);
    return;
  }
  SetGenericAttr(object, name);
}

void Tracer::SetGenericAttr(PyObject* object, PyObject* name) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject* dict = nullptr;
  if ((type->tp_flags & Py_TPFLAGS_HEAPTYPE) || type->tp_dictoffset != 0) dict = heap_.TouchInstance(object);
  PyObject* descriptor = heap_.TouchType(type, name);
  if (descriptor != nullptr) TouchProtocols(descriptor);
  if (descriptor != nullptr && Py_TYPE(descriptor)->tp_descr_set != nullptr) {
    PyTypeObject* kind = Py_TYPE(descriptor);
    if (PyObject_TypeCheck(descriptor, &PyProperty_Type)) {
      // Functions are frames that are watched.
      for (const char* member : {"fset", "fdel"}) {
        TouchMember(descriptor, member);
        const OwnedRef function = OwnedRef::Steal(PyObject_GetAttrString(descriptor, member));
        PyErr_Clear();
        if (!function || function.get() == Py_None || PyFunction_Check(function.get())) continue;
        Refuse("attribute",
               absl::StrCat("what sets attribute ", NameOf(name), " of a ", type->tp_name, " is no function"),
               "define it by def");
      }
      return;
    }
    if (kind == &PyMemberDescr_Type) {
      PyMemberDef* member = reinterpret_cast<PyMemberDescrObject*>(descriptor)->d_member;
      if (member->type == T_OBJECT || member->type == T_OBJECT_EX) {
        heap_.TouchMember(object, member->offset);
        return Write(object);
      }
    }
    if (kind == &PyGetSetDescr_Type) {
      std::string_view text = NameOf(name);
      if (OneOf(text, {"__class__", "__dict__"})) {
        heap_.TouchInstance(object);
        return Write(object);
      }
      // The context of an autograd Function: made for one application.
      if (PyExceptionInstance_Check(object) || IsAutogradContext(object)) return TouchOpaque(object);
      if (PyFunction_Check(object)) {
        heap_.TouchFunction(object);
        // Names and documentation are no state that the log compares: only a function made here may change them.
        TouchOpaque(object);
        return Write(object);
      }
    } else if (kind->tp_flags & Py_TPFLAGS_HEAPTYPE) {
      TouchSpecial(descriptor, "__set__");
      PyObject* set = _PyType_Lookup(kind, InternedName("__set__"));
      if (set != nullptr && PyFunction_Check(set)) return;
    }
    Refuse("attribute",
           absl::StrCat("sets attribute ", NameOf(name), " of a ", type->tp_name, ", which C code handles"),
           kAdviceOutside);
    return;
  }
  if (dict == nullptr) return;  // the instruction will raise
  heap_.TouchDictKey(dict, name);
  Write(dict);
}

}  // namespace cuvil::agent
