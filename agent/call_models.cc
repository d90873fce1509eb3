// What a call reads and writes before its callee runs. Python functions are watched frame by frame; C functions are
// looked up in the call table; what is in neither is refused.

#include <cstring>
#include <string>
#include <string_view>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "agent/call_table.h"
#include "agent/cpython_private.h"
#include "agent/native_torch_state.h"
#include "agent/object_layouts.h"
#include "agent/py_ref.h"
#include "agent/tracer.h"

namespace cuvil::agent {
namespace {

constexpr char kAdviceTensor[] = "keep the value in a tensor (torch.where, masks), or compute it before the call";
constexpr char kAdviceMove[] = "do that before or after the call of the model";
constexpr char kAdviceCall[] = "move the call outside of the model, or ask for the function to be modelled";

std::string NameOf(PyObject* callable) {
  OwnedRef name = OwnedRef::Steal(PyObject_GetAttrString(callable, "__qualname__"));
  if (!name) PyErr_Clear();
  std::string text = Py_TYPE(callable)->tp_name;
  if (name && PyUnicode_Check(name.get())) {
    text = PyUnicode_AsUTF8(name.get());
    OwnedRef module = OwnedRef::Steal(PyObject_GetAttrString(callable, "__module__"));
    if (!module) PyErr_Clear();
    if (module && PyUnicode_Check(module.get())) text = absl::StrCat(PyUnicode_AsUTF8(module.get()), ".", text);
  }
  return text;
}

bool In(std::string_view name, std::initializer_list<std::string_view> names) {
  for (std::string_view candidate : names) {
    if (candidate == name) return true;
  }
  return false;
}

// Numbers, and lists and tuples of them: everything whose values a tensor constructor reads and a guard covers.
bool OnlyNumbers(PyObject* object, int depth = 0) {
  if (IsAtom(object)) return true;
  if (depth > 32 || !(PyTuple_CheckExact(object) || PyList_CheckExact(object) || Py_TYPE(object) == Types().size)) {
    return false;
  }
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i) {
    if (!OnlyNumbers(PySequence_Fast_GET_ITEM(object, i), depth + 1)) return false;
  }
  return true;
}

// Something in the object, at any depth of lists and tuples, is a tensor: for the wording of a refusal.
bool ContainsTensor(PyObject* object, int depth = 0) {
  if (IsTensor(object)) return true;
  if (depth > 8 || !(PyTuple_Check(object) || PyList_Check(object))) return false;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i) {
    if (ContainsTensor(PySequence_Fast_GET_ITEM(object, i), depth + 1)) return true;
  }
  return false;
}

// Types whose construction from C reads its arguments' content and nothing else.
bool IsPlainConstructor(PyTypeObject* type) {
  const TorchTypes& torch = Types();
  return type == &PyTuple_Type || type == &PyList_Type || type == &PyDict_Type || type == &PySet_Type ||
         type == &PyFrozenSet_Type || type == &PyUnicode_Type || type == &PyLong_Type || type == &PyFloat_Type ||
         type == &PyBool_Type || type == &PyComplex_Type || type == &PyBytes_Type || type == &PyRange_Type ||
         type == &PySlice_Type || type == &PyODict_Type || type == &PyEnum_Type || type == &PyZip_Type ||
         type == &PyMap_Type || type == &PyFilter_Type || type == &PyReversed_Type || type == &PyProperty_Type ||
         type == &PyBaseObject_Type || type == &PyMethod_Type || type == &PyDictProxy_Type ||
         type == &PyStaticMethod_Type || type == &PyClassMethod_Type || type == torch.size || type == torch.device ||
         type == torch.partial || type == torch.deque || type == torch.defaultdict || type == torch.finfo ||
         type == torch.iinfo;
}

// The C function that makes instances of the type is one whose effects are known: object's, or a plain constructor's.
bool HasKnownNew(PyTypeObject* type) {
  const newfunc make = type->tp_new;
  if (make == nullptr || make == PyBaseObject_Type.tp_new || make == PyType_Type.tp_new) return true;
  if (PyExceptionClass_Check(reinterpret_cast<PyObject*>(type))) return true;
  // A class with a __new__ in Python: what that calls is seen.
  if (make == Types().parameter->tp_new) return true;
  for (PyTypeObject* base = type; base != nullptr; base = base->tp_base) {
    if (IsPlainConstructor(base)) return base->tp_new == make;
  }
  return false;
}

bool IsItertool(PyTypeObject* type) {
  return absl::StartsWith(type->tp_name, "itertools.") || absl::StartsWith(type->tp_name, "operator.");
}

}  // namespace

PyObject* Tracer::Arguments::keyword(const char* name) const {
  for (Py_ssize_t i = 0; kwnames != nullptr && i < PyTuple_GET_SIZE(kwnames); ++i) {
    if (PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(kwnames, i), name) == 0) return values[positional() + i];
  }
  return nullptr;
}

void Tracer::CallWithSelf(PyObject* callable, PyObject* self, const Arguments& args) {
  std::vector<PyObject*> values;
  values.reserve(args.count + 1);
  values.push_back(self);
  for (Py_ssize_t i = 0; i < args.count; ++i) values.push_back(args.values[i]);
  Call(callable, {values.data(), args.count + 1, args.kwnames});
}

void Tracer::CallExpanded(PyObject* callable, PyObject* positional, PyObject* keywords) {
  std::vector<PyObject*> values;
  if (PyTuple_Check(positional) || PyList_Check(positional)) {
    if (!PyTuple_CheckExact(positional) && !PyList_CheckExact(positional)) TouchProtocols(positional);
    if (PyList_Check(positional)) heap_.TouchList(positional);
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(positional); ++i) {
      values.push_back(PySequence_Fast_GET_ITEM(positional, i));
    }
  } else {
    Iterate(positional);
    // What Python-level callees do with the arguments is watched; of C callees nothing would be known.
    PyTypeObject* type = Py_TYPE(callable);
    PyObject* method = _PyType_Lookup(type, InternedName("__call__"));
    if (type == &PyFunction_Type || (method != nullptr && PyFunction_Check(method))) {
      Call(callable, {nullptr, 0, nullptr});
    } else if (type == &PyMethod_Type && PyFunction_Check(PyMethod_GET_FUNCTION(callable))) {
      heap_.TouchFunction(PyMethod_GET_FUNCTION(callable));
    } else {
      Refuse("call", absl::StrCat(NameOf(callable), " is called with * of an iterator"), "make it a tuple first");
    }
    return;
  }
  OwnedRef names;
  if (keywords != nullptr) {
    if (!PyDict_Check(keywords)) {
      Refuse("call", "a mapping that is no dict is expanded into keywords", "make it a dict first");
      return;
    }
    heap_.TouchDictAll(keywords);
    names = OwnedRef::Steal(PyTuple_New(PyDict_GET_SIZE(keywords)));
    Py_ssize_t position = 0;
    PyObject* key;
    PyObject* value;
    for (Py_ssize_t i = 0; PyDict_Next(keywords, &position, &key, &value); ++i) {
      PyTuple_SET_ITEM(names.get(), i, Py_NewRef(key));
      values.push_back(value);
    }
  }
  Call(callable, {values.data(), static_cast<Py_ssize_t>(values.size()), names.get()});
}

void Tracer::Call(PyObject* callable, const Arguments& args) {
  if (callable == nullptr || refused()) return;
  PyTypeObject* type = Py_TYPE(callable);
  if (type == &PyFunction_Type) {
    heap_.TouchFunction(callable);
    return;
  }
  if (type == &PyMethod_Type) {
    return CallWithSelf(PyMethod_GET_FUNCTION(callable), PyMethod_GET_SELF(callable), args);
  }
  if (PyType_Check(callable)) return CallType(reinterpret_cast<PyTypeObject*>(callable), args);
  const void* key = CImplementation(callable);
  if (key != nullptr) {
    PyObject* self = nullptr;
    if (PyCFunction_Check(callable)) {
      self = PyCFunction_GET_SELF(callable);
      if (self != nullptr && PyModule_Check(self)) self = nullptr;
    } else if (type == Types().method_wrapper) {
      OwnedRef bound = OwnedRef::Steal(PyObject_GetAttrString(callable, "__self__"));
      self = bound.get();  // borrowed from the wrapper
    } else if (args.count > 0) {
      // An unbound method: the first argument is self.
      return CallModelled(key, callable, args.values[0], {args.values + 1, args.count - 1, args.kwnames});
    }
    return CallModelled(key, callable, self, args);
  }
  if (type == Types().partial) {
    OwnedRef function = OwnedRef::Steal(PyObject_GetAttrString(callable, "func"));
    OwnedRef bound = OwnedRef::Steal(PyObject_GetAttrString(callable, "args"));
    OwnedRef keywords = OwnedRef::Steal(PyObject_GetAttrString(callable, "keywords"));
    if (!function || !bound || !keywords) return;
    // partial.__setstate__ changes one in place.
    for (const char* member : {"func", "args", "keywords"}) TouchMember(callable, member);
    std::vector<PyObject*> values;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(bound.get()); ++i) values.push_back(PyTuple_GET_ITEM(bound.get(), i));
    for (Py_ssize_t i = 0; i < args.count; ++i) values.push_back(args.values[i]);
    // The call's own keywords, then the bound ones: a callee's model looks them up by name.
    OwnedRef names = OwnedRef::Steal(PyList_New(0));
    for (Py_ssize_t i = 0; names && args.kwnames != nullptr && i < PyTuple_GET_SIZE(args.kwnames); ++i) {
      PyList_Append(names.get(), PyTuple_GET_ITEM(args.kwnames, i));
    }
    if (names && PyDict_Check(keywords.get())) {
      heap_.TouchDictAll(keywords.get());
      Py_ssize_t position = 0;
      PyObject* name;
      PyObject* value;
      while (PyDict_Next(keywords.get(), &position, &name, &value)) {
        PyList_Append(names.get(), name);
        values.push_back(value);
      }
    }
    OwnedRef tuple = names ? OwnedRef::Steal(PyList_AsTuple(names.get())) : OwnedRef();
    if (!tuple) return;
    return Call(function.get(), {values.data(), static_cast<Py_ssize_t>(values.size()), tuple.get()});
  }
  if (type == Types().lru_cache) return CallLruCache(callable, args);
  // An object with a Python-level __call__.
  PyObject* method = _PyType_Lookup(type, InternedName("__call__"));
  if (method != nullptr && (PyFunction_Check(method))) {
    TouchSpecial(callable, "__call__");
    return;
  }
  if (IsItertool(type)) {  // operator.attrgetter and friends
    for (Py_ssize_t i = 0; i < args.count; ++i) TouchDeep(args.values[i]);
    if (absl::StrContains(type->tp_name, "itemgetter")) return;
  }
  if (method != nullptr && type == &_PyWeakref_RefType) {
    // Dereferencing: the referent is reached by identity, and was alive.
    PyObject* referent = PyWeakref_GET_OBJECT(callable);
    heap_.TouchWeakref(callable);
    if (referent != nullptr && referent != Py_None) heap_.Hold(referent);
    return;
  }
  Refuse("c-callable", absl::StrCat("calls ", NameOf(callable), ", which is not modelled"), kAdviceCall);
}

void Tracer::CallType(PyTypeObject* type, const Arguments& args) {
  PyObject* object = reinterpret_cast<PyObject*>(type);
  if (type == &PyType_Type && args.count == 1) {
    TouchClass(args.values[0]);
    return;
  }
  PyTypeObject* meta = Py_TYPE(type);
  if (meta != &PyType_Type) {
    PyObject* call = TouchMethod(meta, "__call__");
    if (call != nullptr && PyFunction_Check(call)) return;  // a metaclass __call__ in Python: its frame is watched
  }
  if (type == &PySuper_Type) return;
  TouchClass(object);
  PyObject* make = TouchMethod(type, "__new__");
  PyObject* init = TouchMethod(type, "__init__");
  if (refused()) return;
  bool python_new = make != nullptr && (PyFunction_Check(make) || Py_TYPE(make) == &PyStaticMethod_Type);
  bool python_init = init != nullptr && PyFunction_Check(init);
  if (type->tp_flags & Py_TPFLAGS_HEAPTYPE) {
    PyTypeObject* base = type;
    while (base != nullptr && (base->tp_flags & Py_TPFLAGS_HEAPTYPE)) base = base->tp_base;
    if (type == Types().tensor || PyType_IsSubtype(type, Types().tensor)) {
      if (python_new) return;  // nn.Parameter: its frame is watched
      return MakeFromTensors(object, args);
    }
    if (!IsItertool(type) && !HasKnownNew(type)) {
      Refuse("c-callable", absl::StrCat("constructs an object of the C type ", type->tp_name), kAdviceCall);
      return;
    }
    bool known = base == &PyBaseObject_Type || IsPlainConstructor(base) || PyType_IsSubtype(type, &PyType_Type) ||
                 PyExceptionClass_Check(object);
    if (!known && !(python_new && python_init)) {
      const char* name = type->tp_name;
      if (type == Types().partial || type == Types().deque || type == Types().defaultdict || IsItertool(type)) {
        known = true;
      } else {
        Refuse("c-callable", absl::StrCat("constructs an object of the C type ", name), kAdviceCall);
        return;
      }
    }
    if (python_new && python_init) return;
    if (base == &PyBaseObject_Type && (python_init || python_new || args.count == 0)) return;
    if (PyType_IsSubtype(type, &PyType_Type)) return;  // makes a class; its hooks are frames
  } else if (!IsPlainConstructor(type) && !IsItertool(type) && !PyExceptionClass_Check(object) &&
             type != &PyType_Type && type != &_PyWeakref_RefType) {
    Refuse("c-callable", absl::StrCat("constructs an object of the C type ", type->tp_name), kAdviceCall);
    return;
  }
  if (type == &_PyWeakref_RefType && args.count > 1 && args.values[1] != Py_None && !PyFunction_Check(args.values[1]) &&
      !(PyMethod_Check(args.values[1]) && PyFunction_Check(PyMethod_GET_FUNCTION(args.values[1])))) {
    Refuse("c-callable", "a weak reference's callback is written in C", kAdviceCall);
    return;
  }
  if (PyExceptionClass_Check(object) || type == &_PyWeakref_RefType || type == &PyMethod_Type) return;
  for (Py_ssize_t i = 0; i < args.count; ++i) {
    PyObject* argument = args.values[i];
    if (type == Types().partial || ((type == &PyMap_Type || type == &PyFilter_Type) && i == 0)) {
      if (i == 0 && type != Types().partial) CallKeyFunction(argument);
      continue;
    }
    if (IsTensor(argument)) {
      if (type == &PyUnicode_Type || type == &PyBool_Type || type == &PyLong_Type || type == &PyFloat_Type ||
          type == &PyComplex_Type || type == &PyBytes_Type) {
        continue;  // __bool__, __int__, … show as operators, __str__ as frames
      }
      continue;  // iterating a tensor is unbind
    }
    if (type == &PyUnicode_Type) {
      Format(argument);
    } else if (type == &PyBool_Type) {
      Truth(argument);
    } else if (IsItertool(type)) {
      if (PyCallable_Check(argument)) CallKeyFunction(argument);
      TouchDeep(argument);
    } else if (!IsAtom(argument)) {
      Iterate(argument);
      // What consumes the iterator, or looks into the pairs of a dict, may be C.
      if (!PyIter_Check(argument)) TouchDeep(argument);
      if (PyGen_Check(argument) || !PyIter_Check(argument)) continue;
      Advance(argument);
    }
  }
}

void Tracer::CallLruCache(PyObject* wrapper, const Arguments& args) {
  // A hit runs no Python and depends on the cache's dict; a miss runs the function and fills the cache, which the
  // end of the trace sees as a write. The dict is reached as the garbage collector does.
  struct Search {
    PyObject* dict = nullptr;
  } search;
  heap_.TouchInstance(wrapper);
  PyObject* own = reinterpret_cast<PyObject*>(InstanceDict(wrapper));
  auto visit = [](PyObject* object, void* context) -> int {
    auto* pair = static_cast<std::pair<Search*, PyObject*>*>(context);
    if (PyDict_CheckExact(object) && object != pair->second && pair->first->dict == nullptr) pair->first->dict = object;
    return 0;
  };
  std::pair<Search*, PyObject*> context{&search, own};
  if (Py_TYPE(wrapper)->tp_traverse != nullptr) Py_TYPE(wrapper)->tp_traverse(wrapper, visit, &context);
  if (search.dict == nullptr) {
    Refuse("c-callable", absl::StrCat("calls ", NameOf(wrapper), ", a cached function whose cache cannot be seen"),
           kAdviceCall);
    return;
  }
  OwnedRef info = OwnedRef::Steal(PyObject_CallMethod(wrapper, "cache_info", nullptr));
  OwnedRef limit = info ? OwnedRef::Steal(PyObject_GetAttrString(info.get(), "maxsize")) : OwnedRef();
  OwnedRef size = info ? OwnedRef::Steal(PyObject_GetAttrString(info.get(), "currsize")) : OwnedRef();
  if (!limit || !size) {
    PyErr_Clear();
    return;
  }
  // A full cache puts a new result into the entry of an old one: the same object is another value then.
  if (limit.get() != Py_None && PyObject_RichCompareBool(size.get(), limit.get(), Py_LT) != 1) {
    Refuse("c-callable", absl::StrCat("calls ", NameOf(wrapper), ", whose full cache keeps the recently used entries"),
           "give the cache room, or maxsize=None");
    return;
  }
  heap_.TouchDictAll(search.dict);
  Write(search.dict);
  for (Py_ssize_t i = 0; i < args.count; ++i) {
    if (!IsAtom(args.values[i])) TouchDeep(args.values[i]);
  }
  OwnedRef function = OwnedRef::Steal(PyObject_GetAttrString(wrapper, "__wrapped__"));
  if (function && PyFunction_Check(function.get())) heap_.TouchFunction(function.get());
  PyErr_Clear();
}

void Tracer::CallKeyFunction(PyObject* function) {
  // What C code calls itself shows no instruction: only callees that are watched as frames, or that read nothing but
  // the values they are given (whose content the caller has touched).
  if (function == nullptr || function == Py_None) return;
  if (PyFunction_Check(function)) {
    deep_returns_ = true;
    return heap_.TouchFunction(function);
  }
  if (PyMethod_Check(function)) return CallKeyFunction(PyMethod_GET_FUNCTION(function));
  if (PyType_Check(function)) {
    auto* type = reinterpret_cast<PyTypeObject*>(function);
    deep_returns_ = true;
    if (IsPlainConstructor(type) && type != Types().partial) return;
    if (SolidBase(type) == &PyBaseObject_Type) return CallType(type, {nullptr, 0, nullptr});
  }
  PyObject* self = PyCFunction_Check(function) ? PyCFunction_GET_SELF(function) : nullptr;
  bool bound = self != nullptr && !PyModule_Check(self) && !PyType_Check(self);
  CallEntry entry = FindCallModel(CImplementation(function));
  if (!bound && Py_TYPE(function) != Types().method_wrapper) {
    if (entry.model == CallModel::kTensorOp || entry.model == CallModel::kLen || entry.model == CallModel::kReduce ||
        entry.model == CallModel::kTruthAll) {
      return;
    }
    if (entry.model == CallModel::kContainerMethod && entry.owner == &PyUnicode_Type &&
        std::string_view(entry.name).substr(0, 6) != "format") {
      return;
    }
  }
  PyObject* method = _PyType_Lookup(Py_TYPE(function), InternedName("__call__"));
  if (method != nullptr && PyFunction_Check(method)) {
    deep_returns_ = true;
    return TouchSpecial(function, "__call__");
  }
  if (absl::StrContains(Py_TYPE(function)->tp_name, "itemgetter")) return;
  Refuse("c-callable", absl::StrCat("C code calls ", NameOf(function), ", which is not modelled"), kAdviceCall);
}

void Tracer::IsInstance(PyObject* object, PyObject* classes) {
  if (PyTuple_Check(classes)) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(classes); ++i) IsInstance(object, PyTuple_GET_ITEM(classes, i));
    return;
  }
  TouchClass(object);
  PyTypeObject* meta = Py_TYPE(classes);
  if (PyType_Check(classes)) {
    TouchClass(classes);
    TouchMethod(meta, "__instancecheck__");
    TouchMethod(meta, "__subclasscheck__");
    if (!IsTensor(object) && !PyType_Check(object)) {
      heap_.TouchType(Py_TYPE(object), InternedName("__class__"));
    }
    return;
  }
  TouchSpecial(classes, "__instancecheck__");
  // types.UnionType: its members are classes.
  OwnedRef members = OwnedRef::Steal(PyObject_GetAttrString(classes, "__args__"));
  if (members && PyTuple_Check(members.get())) IsInstance(object, members.get());
  PyErr_Clear();
}

void Tracer::MakeFromTensors(PyObject* maker, const Arguments& args) {
  for (Py_ssize_t i = 0; i < args.count; ++i) {
    PyObject* argument = args.values[i];
    if (IsTensor(argument)) continue;
    if (ContainsTensor(argument)) {
      Refuse("data-read",
             absl::StrCat("makes a tensor with ", NameOf(maker),
                          " from tensors inside of a container, which reads their data"),
             "use torch.stack or torch.cat");
      return;
    }
    const bool value = PyType_Check(argument) || Py_TYPE(argument) == Types().dtype ||
                       Py_TYPE(argument) == Types().device || Py_TYPE(argument) == Types().layout ||
                       Py_TYPE(argument) == Types().memory_format;
    if (value) continue;
    if (!OnlyNumbers(argument)) {
      Refuse(
          "unknown-object",
          absl::StrCat("makes a tensor with ", NameOf(maker), " from an object of type ", Py_TYPE(argument)->tp_name),
          "make it from numbers, lists and tuples");
      return;
    }
    TouchDeep(argument);
  }
}

void Tracer::CallContainerMethod(PyObject* self, const std::string& name, const Arguments& args) {
  if (self == nullptr) return;
  bool list = PyList_Check(self);
  bool dict = PyDict_Check(self);
  bool set = PyAnySet_Check(self);
  for (Py_ssize_t i = 0; i < args.count; ++i) {
    PyObject* argument = args.values[i];
    if (IsAtom(argument) || IsTensor(argument)) continue;
    if (name == "add" || (list && name == "insert" && i == 0)) TouchDeep(argument);
    bool stores_only = (list && In(name, {"append", "insert"})) || (dict && i > 0) || name == "add";
    if (name == "sort" || (args.kwnames != nullptr && args.keyword("key") == argument)) {
      CallKeyFunction(argument);
    } else if (!stores_only &&
               !(dict && i == 0 &&
                 In(name, {"get", "pop", "setdefault", "__getitem__", "__setitem__", "__delitem__", "__contains__"}))) {
      Iterate(argument);
      TouchDeep(argument);
    }
  }
  PyTypeObject* type = Py_TYPE(self);
  if ((type->tp_flags & Py_TPFLAGS_HEAPTYPE) && !PyType_Check(self)) TouchClass(self);
  if (dict && args.count > 0 &&
      In(name, {"get", "pop", "setdefault", "__getitem__", "__setitem__", "__delitem__", "__contains__"})) {
    GetDictItem(self, args.values[0]);
    if (!In(name, {"get", "__getitem__", "__contains__"})) Write(self);
    if (PyODict_Check(self) && In(name, {"pop", "__delitem__"})) heap_.TouchDictAll(self);
    return;
  }
  if (PyODict_Check(self) && name == "move_to_end") return TouchOpaque(self);
  if (In(name, {"__reduce_ex__", "__reduce__", "__getstate__", "__dir__", "__sizeof__"}) && !list && !dict && !set &&
      !IsTensor(self) && !PyType_Check(self)) {
    return TouchWholeInstance(self);
  }
  if (PyUnicode_Check(self) && In(name, {"format", "format_map"})) {
    for (Py_ssize_t i = 0; i < args.count; ++i) {
      if (IsAtom(args.values[i])) continue;
      Refuse("c-callable", "str.format is given an object whose attributes it may read", "use an f-string");
      return;
    }
  }
  if (In(name, {"index", "count", "remove", "__contains__", "__eq__", "__ne__", "__lt__", "__gt__", "__le__", "__ge__",
                "copy", "__add__", "join", "sort", "__iter__", "__reversed__"}) &&
      (list || PyTuple_Check(self))) {
    TouchDeep(self);
  }
  TouchKeys(self);
  if (!TouchContent(self)) {
    TouchOpaque(self);
    return;
  }
  bool writes = false;
  if (list) {
    writes = In(name, {"append", "extend", "insert", "pop", "remove", "clear", "sort", "reverse", "__setitem__",
                       "__delitem__", "__iadd__", "__imul__", "__init__"});
  } else if (dict) {
    writes = In(name, {"popitem", "update", "clear", "__init__", "__ior__", "__setstate__"});
  } else if (set) {
    writes = In(name, {"add", "remove", "discard", "pop", "clear", "update", "difference_update", "__ior__", "__iand__",
                       "__isub__", "__ixor__", "intersection_update", "symmetric_difference_update", "__init__"});
  } else if (PyExceptionInstance_Check(self)) {
    TouchOpaque(self);
  }
  if (writes) Write(self);
}

void Tracer::CallModelled(const void* key, PyObject* callable, PyObject* self, const Arguments& args) {
  CallEntry entry = FindCallModel(key);
  auto argument = [&](Py_ssize_t i) { return i < args.positional() ? args.values[i] : nullptr; };
  auto deep = [&] {
    for (Py_ssize_t i = 0; i < args.count; ++i) TouchDeep(args.values[i]);
  };
  switch (entry.model) {
    case CallModel::kUnknown:
      if (CalledFromTorchOps()) return deep();  // torch.ops.*: shows as an operator
      Refuse("c-callable", absl::StrCat("calls ", NameOf(callable), ", which is not modelled"), kAdviceCall);
      return;
    case CallModel::kDenied:
      // Data of a tensor that depends on nothing but constants is a constant.
      if (entry.owner == Types().tensor && self != nullptr && IsTensor(self) && constants_ != nullptr &&
          In(entry.name,
             {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "is_nonzero", "nonzero", "equal"}) &&
          constants_->IsConstant(self)) {
        return;
      }
      if (entry.reason != nullptr && absl::StrContains(entry.reason, "data")) {
        Refuse("data-read", absl::StrCat(NameOf(callable), " ", entry.reason), kAdviceTensor);
      } else {
        Refuse("c-callable", absl::StrCat(NameOf(callable), " ", entry.reason), kAdviceMove);
      }
      return;
    case CallModel::kPure:
      return deep();
    case CallModel::kTensorOp:
      if (self != nullptr && !PyType_Check(self) && !IsTensor(self)) TouchDeep(self);
      return deep();
    case CallModel::kTensorMake:
      return MakeFromTensors(callable, args);
    case CallModel::kAmbient:
    case CallModel::kAmbientShown: {
      deep();
      if (refused()) return;
      OwnedRef values = OwnedRef::Steal(PyTuple_New(args.positional()));
      for (Py_ssize_t i = 0; i < args.positional(); ++i) PyTuple_SET_ITEM(values.get(), i, Py_NewRef(args.values[i]));
      if (args.kwnames != nullptr && PyTuple_GET_SIZE(args.kwnames) != 0) {
        Refuse("c-callable", absl::StrCat("calls ", NameOf(callable), " with keywords"), kAdviceCall);
        return;
      }
      OwnedRef result = OwnedRef::Steal(PyObject_CallObject(callable, values.get()));
      if (!result) {
        PyErr_Clear();  // the call itself is about to raise
        return;
      }
      // State that the call itself set and read back compares unequal at the end: refused.
      heap_.TouchCall(callable, values.get(), result.get(),
                      entry.model == CallModel::kAmbientShown && NativeTorchStateReader::available());
      return;
    }
    case CallModel::kLock:
      TakeLock();
      return;
    case CallModel::kUnlock:
      --locks_held_;
      return;
    case CallModel::kDispatchModes:
      return;  // none: a call inside of one is not traced, and the recorder's own is hidden from this function
    case CallModel::kAmbientSet:
      return;  // operators in between are checked by the recorder, the end of the trace compares the whole state
    case CallModel::kGetAttr:
    case CallModel::kHasAttr:
      if (argument(0) != nullptr && argument(1) != nullptr && PyUnicode_Check(argument(1))) {
        GetAttr(argument(0), argument(1));
      }
      return;
    case CallModel::kSetAttr:
    case CallModel::kDelAttr:
      if (argument(0) != nullptr && argument(1) != nullptr && PyUnicode_Check(argument(1))) {
        SetAttr(argument(0), argument(1));
      }
      return;
    case CallModel::kObjectGetAttribute:
      if (self != nullptr && argument(0) != nullptr && PyUnicode_Check(argument(0))) {
        GetGenericAttr(self, argument(0));
      }
      return;
    case CallModel::kObjectSetAttr:
    case CallModel::kObjectDelAttr:
      if (self != nullptr && argument(0) != nullptr && PyUnicode_Check(argument(0))) {
        if (IsTensor(self)) {
          Refuse("tensor-attribute", "sets an attribute of a tensor", "hand the value on beside the tensor");
          return;
        }
        SetGenericAttr(self, argument(0));
      }
      return;
    case CallModel::kObjectNew: {
      // Every type's C __new__ has the same implementation; the first argument is the class.
      PyObject* of = argument(0);
      if (of == nullptr || !PyType_Check(of)) return;
      auto* type = reinterpret_cast<PyTypeObject*>(of);
      if (PyType_IsSubtype(type, Types().tensor)) return MakeFromTensors(of, args);
      PyTypeObject* base = type;
      while (base != nullptr && (base->tp_flags & Py_TPFLAGS_HEAPTYPE) && base != Types().deque &&
             base != Types().defaultdict && base != Types().partial) {
        base = base->tp_base;
      }
      if (base != nullptr && HasKnownNew(type) &&
          (IsPlainConstructor(base) || PyExceptionClass_Check(of) || PyType_IsSubtype(type, &PyType_Type))) {
        for (Py_ssize_t i = 1; i < args.count; ++i) {
          Iterate(args.values[i]);
          TouchContent(args.values[i]);
        }
        return;
      }
      Refuse("c-callable", absl::StrCat("constructs an object of the C type ", type->tp_name), kAdviceCall);
      return;
    }
    case CallModel::kObjectInit:
      return;
    case CallModel::kTypeCall:
      if (self != nullptr && PyType_Check(self)) {
        // type.__call__(cls, …) from a metaclass: what calling the class does, short of the metaclass itself.
        auto* type = reinterpret_cast<PyTypeObject*>(self);
        heap_.TouchType(type, InternedName("__new__"));
        heap_.TouchType(type, InternedName("__init__"));
        if (type->tp_flags & Py_TPFLAGS_HEAPTYPE) return;
        CallType(type, args);
      }
      return;
    case CallModel::kIsInstance:
      if (self != nullptr && PyType_Check(self) && argument(0) != nullptr) {
        TouchClass(argument(0));
      } else if (argument(0) != nullptr && argument(1) != nullptr) {
        IsInstance(argument(0), argument(1));
      }
      return;
    case CallModel::kIsSubclass:
      for (Py_ssize_t i = 0; i < args.positional(); ++i) {
        PyObject* object = args.values[i];
        if (PyType_Check(object)) {
          heap_.TouchType(reinterpret_cast<PyTypeObject*>(object), InternedName("__mro__"));
          heap_.TouchType(Py_TYPE(object), InternedName("__subclasscheck__"));
        } else if (PyTuple_Check(object)) {
          for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(object); ++k) {
            if (PyType_Check(PyTuple_GET_ITEM(object, k))) {
              heap_.TouchType(Py_TYPE(PyTuple_GET_ITEM(object, k)), InternedName("__subclasscheck__"));
            }
          }
        }
      }
      return;
    case CallModel::kAbcCheck: {
      TouchAbcToken();
      for (Py_ssize_t i = 0; i < args.positional(); ++i) {
        PyObject* object = args.values[i];
        TouchClass(object);
        auto* type = PyType_Check(object) ? reinterpret_cast<PyTypeObject*>(object) : Py_TYPE(object);
        heap_.TouchType(type, InternedName("__subclasshook__"));
        heap_.TouchType(type, InternedName("__class__"));
      }
      return;
    }
    case CallModel::kIter:
      if (argument(0) != nullptr && args.count == 1) {
        Iterate(argument(0));
        // Who takes the elements may be C code.
        if (PyList_Check(argument(0)) || PyTuple_Check(argument(0)) || PyDict_Check(argument(0)) ||
            PyAnySet_Check(argument(0)) || IsDictView(Py_TYPE(argument(0)))) {
          TouchDeep(argument(0));
        }
      }
      if (args.count > 1) Refuse("c-callable", "iter() with a sentinel", kAdviceCall);
      return;
    case CallModel::kNext:
      if (argument(0) != nullptr) Advance(argument(0));
      return;
    case CallModel::kLen:
      if (argument(0) != nullptr && !IsTensor(argument(0))) {
        PyTypeObject* type = Py_TYPE(argument(0));
        if (type->tp_flags & Py_TPFLAGS_HEAPTYPE) {
          TouchSpecial(argument(0), "__len__");
          PyObject* method = _PyType_Lookup(type, InternedName("__len__"));
          if (method != nullptr && PyFunction_Check(method)) return;
        }
        if (!TouchContent(argument(0))) {
          Refuse("unknown-object", absl::StrCat("len() of an object of type ", type->tp_name), kAdviceCall);
        }
      }
      return;
    case CallModel::kTruthAll:
    case CallModel::kSorted:
    case CallModel::kReduce:
      for (Py_ssize_t i = 0; i < args.count; ++i) {
        PyObject* object = args.values[i];
        if (i >= args.positional()) {
          PyObject* name = PyTuple_GET_ITEM(args.kwnames, i - args.positional());
          if (PyUnicode_CompareWithASCIIString(name, "key") == 0) {
            CallKeyFunction(object);
            continue;
          }
        }
        if (IsAtom(object) || IsTensor(object)) continue;
        PyTypeObject* type = Py_TYPE(object);
        if (type->tp_iter != nullptr) {
          Iterate(object);
          if (PyIter_Check(object)) {
            Advance(object);
          } else {
            TouchDeep(object);  // elements are compared, added or tested
          }
        } else {
          TouchClass(object);
          for (const char* method : {"__index__", "__float__", "__int__", "__lt__", "__gt__", "__add__", "__radd__",
                                     "__eq__", "__hash__", "__abs__", "__round__"}) {
            TouchMethod(type, method);
          }
          if (!(type->tp_flags & Py_TPFLAGS_HEAPTYPE)) TouchDeep(object);
        }
      }
      return;
    case CallModel::kId:
      // An address is only good for telling objects apart; tensors that the call makes have new ones every time.
      if (argument(0) != nullptr && IsTensor(argument(0))) {
        Refuse("identity", "reads the address of a tensor object", "compare with `is`, or keep an index");
      } else if (argument(0) != nullptr) {
        PinIdentity(argument(0));
      }
      return;
    case CallModel::kType:
    case CallModel::kCallable:
      if (argument(0) != nullptr) TouchSpecial(argument(0), "__call__");
      return;
    case CallModel::kVars:
      if (argument(0) == nullptr) {
        Refuse("c-callable", "vars() hands out the local namespace", kAdviceCall);
      } else if (!PyType_Check(argument(0)) && !PyModule_Check(argument(0))) {
        heap_.TouchInstance(argument(0));
      }
      return;
    case CallModel::kRepr:
      for (Py_ssize_t i = 0; i < args.count; ++i) {
        if (!IsTensor(args.values[i])) Format(args.values[i]);
      }
      return;
    case CallModel::kImport:
      Refuse("import", "calls __import__", "import the module at the top of the file");
      return;
    case CallModel::kContextGet:
      if (self != nullptr) heap_.TouchContextVar(self);
      return;
    case CallModel::kContextSet:
    case CallModel::kContextReset:
      if (self != nullptr) {
        heap_.TouchContextVar(self);
        Write(self);
      }
      return;
    case CallModel::kContainerMethod: {
      // object's own helpers that only matter on classes (…__subclasshook__), and value types' methods.
      return CallContainerMethod(self, entry.name, args);
    }
  }
}

}  // namespace cuvil::agent
