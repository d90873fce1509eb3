// What each instruction reads and writes, told from its operands before it runs (Tracer::Dispatch), and the object
// operations that instructions and C functions share: truth, iteration, subscripts, comparison, arithmetic.

#include <cstddef>
#include <string>

#include "absl/strings/str_cat.h"
#include "agent/call_table.h"
#include "agent/cpython_compat.h"
#include "agent/cpython_private.h"
#include "agent/object_layouts.h"
#include "agent/py_ref.h"
#include "agent/tracer.h"

namespace cuvil::agent {
namespace {

PyObject* Special(PyTypeObject* type, const char* method) { return _PyType_Lookup(type, InternedName(method)); }

// Whether what a special method does is known: absent, written in Python (its frame is watched), or inherited from a
// builtin type. A C type may read anything (decimal arithmetic reads the thread's context).
bool IsKnownMethod(PyObject* method) {
  if (method == nullptr || PyFunction_Check(method) || method == Py_None) return true;
  CallEntry entry = FindCallModel(CImplementation(method));
  return entry.model != CallModel::kUnknown && entry.model != CallModel::kDenied;
}

const char* const kBinaryMethods[][2] = {
    // In the order of NB_ADD … NB_XOR, NB_INPLACE_ADD … (opcode.h); the in-place method first for the second half.
    {"__add__", "__radd__"},       {"__and__", "__rand__"},       {"__floordiv__", "__rfloordiv__"},
    {"__lshift__", "__rlshift__"}, {"__matmul__", "__rmatmul__"}, {"__mul__", "__rmul__"},
    {"__mod__", "__rmod__"},       {"__or__", "__ror__"},         {"__pow__", "__rpow__"},
    {"__rshift__", "__rrshift__"}, {"__sub__", "__rsub__"},       {"__truediv__", "__rtruediv__"},
    {"__xor__", "__rxor__"}};
const char* const kInplaceMethods[] = {"__iadd__", "__iand__",     "__ifloordiv__", "__ilshift__", "__imatmul__",
                                       "__imul__", "__imod__",     "__ior__",       "__ipow__",    "__irshift__",
                                       "__isub__", "__itruediv__", "__ixor__"};
constexpr int kNumBinary = 13;

// Guards compare such objects by value, so that whether two of them are one object is more than they say.
bool ComparesByValue(PyObject* object) {
  if (object == Py_None || object == Py_Ellipsis || object == Py_NotImplemented || PyBool_Check(object)) return false;
  return IsAtom(object) || PyTuple_Check(object);
}

// What guards that compare by value take for the same.
bool SameValue(PyObject* left, PyObject* right) {
  if (left == right || SameAtom(left, right)) return true;
  if (!PyTuple_Check(left) || Py_TYPE(left) != Py_TYPE(right)) return false;
  if (PyTuple_GET_SIZE(left) != PyTuple_GET_SIZE(right)) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(left); ++i) {
    if (!SameValue(PyTuple_GET_ITEM(left, i), PyTuple_GET_ITEM(right, i))) return false;
  }
  return true;
}

}  // namespace

void Tracer::TouchOpaque(PyObject* object) {
  heap_.set_source(CurrentSource());
  heap_.TouchOpaque(object);
}

void Tracer::CompareIdentity(PyObject* left, PyObject* right) {
  if (ComparesByValue(left) && ComparesByValue(right)) {
    // Different values stay different as long as the guards hold.
    if (!SameValue(left, right)) return;
    PinIdentity(left);
    PinIdentity(right);
    return;
  }
  if (IsAtom(left) || IsAtom(right)) return;
  // Distinct arguments are told apart by the signature, and what the call makes is distinct from everything else.
  // Whether an argument is some older object, or is not, no guard says.
  const bool tensors = IsTensor(left) && IsTensor(right) && constants_ != nullptr;
  if (tensors) {
    if (left == right || (!constants_->IsArgument(left) && !constants_->IsArgument(right))) return;
    if ((constants_->IsArgument(left) || constants_->IsResult(left)) &&
        (constants_->IsArgument(right) || constants_->IsResult(right))) {
      return;
    }
    // An argument against a weight: the plan checks that they still differ.
    PyObject* older = constants_->IsArgument(left) ? right : left;
    heap_.Hold(older);
    compared_with_arguments_.push_back(older);
    compared_at_.push_back(CurrentSource());
    return;
  } else if (!heap_.IsStructural(left) && !heap_.IsStructural(right)) {
    return;
  } else if (heap_.IsStructural(left) && heap_.IsStructural(right)) {
    return;
  }
  Refuse("identity", "compares an argument by identity with an older object", "compare values, or pass a flag");
}

void Tracer::PinIdentity(PyObject* object) {
  if (!ComparesByValue(object)) return;
  if (heap_.IsStructural(object)) {
    Refuse("identity", "asks which tuple an argument is", "compare values");
    return;
  }
  heap_.PinIdentity(object);
}

void Tracer::TouchWholeInstance(PyObject* object) {
  PyObject* dict = heap_.TouchInstance(object);
  if (dict != nullptr) heap_.TouchDictAll(dict);
  PyObject* mro = Py_TYPE(object)->tp_mro;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(mro); ++i) {
    auto* base = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(mro, i));
    PyObject* name;
    PyObject* descriptor;
    Py_ssize_t position = 0;
    while (PyDict_Next(TypeNamespace(base), &position, &name, &descriptor)) {
      if (Py_TYPE(descriptor) == &PyMemberDescr_Type && (base->tp_flags & Py_TPFLAGS_HEAPTYPE)) {
        GetDescriptor(object, descriptor);
      }
    }
  }
  if (SolidBase(Py_TYPE(object)) != &PyBaseObject_Type && !TouchContent(object)) TouchOpaque(object);
}

void Tracer::Truth(PyObject* object) {
  if (object == nullptr || IsAtom(object) || PyTuple_CheckExact(object) || IsTensor(object)) return;
  PyTypeObject* type = Py_TYPE(object);
  if (type == &PyDict_Type || type == &PyList_Type || type == &PySet_Type || IsDictView(type)) {
    TouchContent(object);
    return;
  }
  TouchSpecial(object, "__bool__");
  TouchSpecial(object, "__len__");
  PyObject* method = Special(type, "__bool__");
  if (method == nullptr) method = Special(type, "__len__");
  // Written in Python: its frame is watched. Absent: always true. In C: it reads the content.
  if (method != nullptr && !PyFunction_Check(method) && (!IsKnownMethod(method) || !TouchContent(object))) {
    Refuse("unknown-object", absl::StrCat("the truth of an object of type ", type->tp_name, " is tested"),
           kAdviceDevelop);
  }
}

void Tracer::Iterate(PyObject* iterable) {
  if (iterable == nullptr || IsTensor(iterable)) return;
  PyTypeObject* type = Py_TYPE(iterable);
  if (PyGen_CheckExact(iterable) || PyCoro_CheckExact(iterable)) return;  // its frame is watched
  if (type->tp_flags & Py_TPFLAGS_HEAPTYPE) {
    TouchSpecial(iterable, "__iter__");
    PyObject* method = Special(type, "__iter__");
    if (method != nullptr && PyFunction_Check(method)) return;
    if (method == nullptr) {
      TouchSpecial(iterable, "__getitem__");
      return;
    }
  }
  if (!IsKnownMethod(Special(type, "__iter__")) && !PyIter_Check(iterable)) {
    Refuse("unknown-object", absl::StrCat("an object of type ", type->tp_name, " is iterated"), kAdviceDevelop);
    return;
  }
  if (!TouchContent(iterable)) {
    Refuse("unknown-object", absl::StrCat("an object of type ", type->tp_name, " is iterated"), kAdviceDevelop);
  }
}

void Tracer::Advance(PyObject* iterator) {
  if (iterator == nullptr || PyGen_CheckExact(iterator)) return;
  PyTypeObject* type = Py_TYPE(iterator);
  if (type->tp_flags & Py_TPFLAGS_HEAPTYPE) {
    PyObject* method = Special(type, "__next__");
    if (method != nullptr && PyFunction_Check(method)) {
      TouchSpecial(iterator, "__next__");
      return;
    }
  }
  TouchOpaque(iterator);  // advancing changes it: it must be the call's own
}

void Tracer::GetDictItem(PyObject* dict, PyObject* key) {
  heap_.TouchDictKey(dict, key);
  TouchKey(key);
  TouchKeys(dict);  // one that hashes alike may come to be equal
}

void Tracer::GetItem(PyObject* container, PyObject* key) {
  if (container == nullptr || key == nullptr) return;
  PyTypeObject* type = Py_TYPE(container);
  if (type == &PyDict_Type) return GetDictItem(container, key);
  if (IsTensor(container)) return TouchDeep(key);
  if (type == &PyList_Type || type == &PyTuple_Type || type == &PyUnicode_Type) {
    TouchDeep(key);  // an index may be an object with an __index__
    TouchContent(container);
    return;
  }
  if (PyType_Check(container)) {
    TouchClass(container);
    TouchMethod(type, "__getitem__");
    TouchMethod(reinterpret_cast<PyTypeObject*>(container), "__class_getitem__");
    return;
  }
  if (type->tp_flags & Py_TPFLAGS_HEAPTYPE) {
    TouchSpecial(container, "__getitem__");
    PyObject* method = Special(type, "__getitem__");
    if (method != nullptr && PyFunction_Check(method)) return;
  }
  if (PyDict_Check(container)) {
    GetDictItem(container, key);
    TouchSpecial(container, "__missing__");
    if (PyObject_TypeCheck(container, Types().defaultdict) && IsPlainKey(key) &&
        PyDict_GetItemWithError(container, key) == nullptr) {
      heap_.TouchDictAll(container);
      Write(container);
      OwnedRef factory = OwnedRef::Steal(PyObject_GetAttrString(container, "default_factory"));
      if (factory && factory.get() != Py_None) Call(factory.get(), {nullptr, 0, nullptr});
    }
    return;
  }
  if (type == &PyDictProxy_Type) return GetItem(reinterpret_cast<MappingProxy*>(container)->mapping, key);
  if (!TouchContent(container)) {
    Refuse("unknown-object", absl::StrCat("an item of an object of type ", type->tp_name, " is read"), kAdviceDevelop);
  }
}

void Tracer::SetItem(PyObject* container, PyObject* key) {
  if (container == nullptr || key == nullptr) return;
  PyTypeObject* type = Py_TYPE(container);
  if (IsTensor(container)) return TouchDeep(key);
  if (!PyDict_Check(container)) TouchDeep(key);  // an index may be an object with an __index__
  if (type->tp_flags & Py_TPFLAGS_HEAPTYPE) {
    TouchSpecial(container, "__setitem__");
    PyObject* method = Special(type, "__setitem__");
    if (method != nullptr && PyFunction_Check(method)) return;
  }
  if (PyDict_Check(container)) {
    GetDictItem(container, key);
  } else if (!TouchContent(container)) {
    Refuse("unknown-object", absl::StrCat("an item of an object of type ", type->tp_name, " is written"),
           kAdviceDevelop);
    return;
  }
  Write(container);
}

void Tracer::Contains(PyObject* container, PyObject* item) {
  if (container == nullptr || item == nullptr || IsTensor(container)) return;
  PyTypeObject* type = Py_TYPE(container);
  if (type->tp_flags & Py_TPFLAGS_HEAPTYPE) {
    TouchSpecial(container, "__contains__");
    PyObject* method = Special(type, "__contains__");
    if (method != nullptr && PyFunction_Check(method)) return;
    if (method == nullptr) {
      TouchKey(item);
      return Iterate(container);
    }
  }
  if (PyDict_Check(container)) return GetDictItem(container, item);
  if (type == &PyDictKeys_Type) return GetDictItem(reinterpret_cast<DictView*>(container)->dict, item);
  if (PyAnySet_CheckExact(container) && heap_.TouchSetKey(container, item)) return TouchKey(item);
  if (!TouchContent(container)) {
    Refuse("unknown-object", absl::StrCat("membership in an object of type ", type->tp_name, " is tested"),
           kAdviceDevelop);
  }
  // Elements are compared with the item, whatever they hold.
  TouchKeys(container);
  if (!IsAtom(item)) {
    TouchDeep(item);
    TouchKey(item);
    if (!PyAnySet_Check(container)) TouchDeep(container);
  }
  if (PyList_Check(container) || PyTuple_Check(container)) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(container); ++i) {
      TouchKey(PySequence_Fast_GET_ITEM(container, i));
    }
  }
}

void Tracer::Compare(PyObject* left, PyObject* right, int kind) {
  static const char* const kMethods[] = {"__lt__", "__le__", "__eq__", "__ne__", "__gt__", "__ge__"};
  for (PyObject* operand : {left, right}) {
    if (operand == nullptr || IsAtom(operand) || IsTensor(operand)) continue;
    PyTypeObject* type = Py_TYPE(operand);
    if (type->tp_richcompare == nullptr || type->tp_richcompare == PyBaseObject_Type.tp_richcompare) {
      if (type->tp_flags & Py_TPFLAGS_HEAPTYPE) {
        TouchSpecial(operand, kMethods[kind]);
      } else {
        TouchClass(operand);  // a module may be given another class
      }
      continue;
    }
    if (type->tp_flags & Py_TPFLAGS_HEAPTYPE) {
      TouchSpecial(operand, kMethods[kind]);
      PyObject* method = Special(type, kMethods[kind]);
      if (method == nullptr || PyFunction_Check(method)) continue;
      if (!IsKnownMethod(method)) {
        Refuse("unknown-object", absl::StrCat("an object of type ", type->tp_name, " is compared"), kAdviceDevelop);
        return;
      }
    }
    TouchDeep(operand);
  }
}

void Tracer::Binary(PyObject* left, PyObject* right, int kind) {
  bool in_place = kind >= kNumBinary;
  const char* const* methods = kBinaryMethods[in_place ? kind - kNumBinary : kind];
  if (left != nullptr && right != nullptr && (IsTensor(left) || IsTensor(right))) {
    // Python's and numpy's numbers take part as constants.
    for (PyObject* operand : {left, right}) {
      if (!IsTensor(operand)) TouchDeep(operand);
    }
    return;
  }
  for (PyObject* operand : {left, right}) {
    if (operand == nullptr || IsAtom(operand)) continue;
    PyTypeObject* type = Py_TYPE(operand);
    if (type->tp_flags & Py_TPFLAGS_HEAPTYPE) {
      TouchSpecial(operand, methods[0]);
      TouchSpecial(operand, methods[1]);
      if (in_place) TouchSpecial(operand, kInplaceMethods[kind - kNumBinary]);
      if (!IsKnownMethod(Special(type, methods[0])) || !IsKnownMethod(Special(type, methods[1]))) {
        Refuse("unknown-object", absl::StrCat("arithmetic on an object of type ", type->tp_name), kAdviceDevelop);
        return;
      }
    }
    if (!TouchContent(operand)) {
      Refuse("unknown-object", absl::StrCat("arithmetic on an object of type ", type->tp_name), kAdviceDevelop);
      return;
    }
    TouchKeys(operand);
    if (kind % kNumBinary == 6 && PyUnicode_Check(left)) TouchDeep(operand);  // "%" formats its argument
  }
  if (in_place && left != nullptr && (PyList_Check(left) || PyAnySet_Check(left) || PyDict_Check(left))) Write(left);
}

void Tracer::Unary(PyObject* operand, const char* method) {
  if (operand == nullptr || IsAtom(operand) || IsTensor(operand)) return;
  if (Py_TYPE(operand)->tp_flags & Py_TPFLAGS_HEAPTYPE && IsKnownMethod(Special(Py_TYPE(operand), method))) {
    return TouchSpecial(operand, method);
  }
  Refuse("unknown-object", absl::StrCat("arithmetic on an object of type ", Py_TYPE(operand)->tp_name), kAdviceDevelop);
}

void Tracer::Format(PyObject* object) {
  if (object == nullptr || IsAtom(object)) return;
  PyTypeObject* type = Py_TYPE(object);
  if (type == Types().dtype || type == Types().device) return;
  if (PyType_Check(object)) {
    for (const char* method : {"__format__", "__str__", "__repr__"}) heap_.TouchType(type, InternedName(method));
    heap_.TouchType(reinterpret_cast<PyTypeObject*>(object), InternedName("__module__"));
    return TouchTypeNames(reinterpret_cast<PyTypeObject*>(object));
  }
  TouchTypeNames(type);
  TouchSpecial(object, "__format__");
  TouchSpecial(object, "__str__");
  TouchSpecial(object, "__repr__");
  TouchDeep(object);
}

void Tracer::MatchClass(PyObject* subject, PyObject* cls, PyObject* names, int num_positional) {
  IsInstance(subject, cls);
  for (Py_ssize_t i = 0; PyTuple_Check(names) && i < PyTuple_GET_SIZE(names); ++i) {
    GetAttr(subject, PyTuple_GET_ITEM(names, i));
  }
  GetAttr(cls, InternedName("__match_args__"));
  if (num_positional == 0 || !PyType_Check(cls) || !PyObject_TypeCheck(subject, reinterpret_cast<PyTypeObject*>(cls))) {
    return;
  }
  // C reads the attributes that stand for positions; without __match_args__ builtin classes match the subject itself.
  PyObject* const positions = Special(reinterpret_cast<PyTypeObject*>(cls), "__match_args__");
  if (positions == nullptr) return;
  if (!PyTuple_CheckExact(positions)) {
    Refuse("match", "__match_args__ is no tuple", kAdviceDevelop);
    return;
  }
  for (Py_ssize_t i = 0; i < num_positional && i < PyTuple_GET_SIZE(positions); ++i) {
    PyObject* const name = PyTuple_GET_ITEM(positions, i);
    if (PyUnicode_CheckExact(name)) GetAttr(subject, name);
  }
}

void Tracer::EnterContext(PyObject* manager) {
  if (manager == nullptr) return;
  TouchSpecial(manager, "__enter__");
  TouchSpecial(manager, "__exit__");
  PyObject* leave = Special(Py_TYPE(manager), "__exit__");
  PyObject* method = Special(Py_TYPE(manager), "__enter__");
  if (method != nullptr && !PyFunction_Check(method)) {
    std::string name = Py_TYPE(manager)->tp_name;
    if (name == "_thread.RLock" || name == "_thread.lock") {
      TakeLock();
    } else if (name.find("DisableTorchFunction") == std::string::npos) {
      Refuse("context-manager", absl::StrCat("the context manager ", name, " is written in C and not known"),
             "move it outside of the model");
    }
  } else if (leave != nullptr && !PyFunction_Check(leave)) {
    Refuse("context-manager", absl::StrCat("__exit__ of ", Py_TYPE(manager)->tp_name, " is no Python function"),
           "define it by def");
  }
}

void Tracer::LoadGlobal(const FrameView& frame, PyObject* name) {
  PyObject* globals = frame.globals();
  PyObject* builtins = frame.builtins();
  if (!PyDict_CheckExact(globals) || !PyDict_CheckExact(builtins)) {
    Refuse("namespace", "global names are looked up in something that is no dict", "use an ordinary module");
    return;
  }
  heap_.TouchDictKey(globals, name);
  if (PyDict_GetItemWithError(globals, name) == nullptr) heap_.TouchDictKey(builtins, name);
}

void Tracer::LoadName(const FrameView& frame, PyObject* name, PyObject* locals) {
  if (locals == nullptr) return LoadGlobal(frame, name);
  if (!PyDict_CheckExact(locals)) {
    // A class body with __prepare__: its namespace type decides; a dict subclass in practice.
    if (!PyDict_Check(locals)) Refuse("namespace", "names are looked up in a custom namespace", kAdviceDevelop);
    TouchSpecial(locals, "__getitem__");
  }
  heap_.TouchDictKey(locals, name);
  if (PyDict_GetItemWithError(locals, name) == nullptr) LoadGlobal(frame, name);
}

void Tracer::StoreName(const FrameView& frame, PyObject* name) {
  PyObject* locals = frame.locals();
  if (locals == nullptr) locals = frame.globals();
  if (!PyDict_Check(locals)) {
    Refuse("namespace", "a name is stored in a custom namespace", kAdviceDevelop);
    return;
  }
  if (!PyDict_CheckExact(locals)) TouchSpecial(locals, "__setitem__");
  heap_.TouchDictKey(locals, name);
  Write(locals);
}

void Tracer::ImportName(const FrameView& frame, const Site& site, PyObject** sp) {
  PyObject* name = NameOperand(frame, site);
  LoadGlobal(frame, InternedName("__import__"));
  heap_.TouchDictKey(frame.globals(), InternedName("__name__"));
  PyObject* modules = PySys_GetObject("modules");
  OwnedRef level = OwnedRef::New(sp[-2]);
  long depth = level && PyLong_Check(level.get()) ? PyLong_AsLong(level.get()) : 1;
  std::string full = PyUnicode_AsUTF8(name) == nullptr ? "" : PyUnicode_AsUTF8(name);
  if (depth > 0) {
    PyObject* package = PyDict_GetItemString(frame.globals(), "__package__");
    heap_.TouchDictKey(frame.globals(), InternedName("__package__"));
    std::string base = package != nullptr && PyUnicode_Check(package) ? PyUnicode_AsUTF8(package) : "";
    for (long i = 1; i < depth; ++i) {
      size_t dot = base.rfind('.');
      base = dot == std::string::npos ? "" : base.substr(0, dot);
    }
    full = full.empty() ? base : base + "." + full;
  }
  if (modules == nullptr || !PyDict_CheckExact(modules)) {
    Refuse("import", "sys.modules is no dict", "do not replace sys.modules");
    return;
  }
  for (size_t end = full.find('.');; end = full.find('.', end + 1)) {
    OwnedRef part = OwnedRef::Steal(PyUnicode_InternFromString(full.substr(0, end).c_str()));
    heap_.TouchDictKey(modules, part.get());
    if (PyDict_GetItemWithError(modules, part.get()) == nullptr) {
      Refuse("import", absl::StrCat("imports ", full, " for the first time"),
             "the next call finds it imported and is traced anew", true);
      return;
    }
    if (end == std::string::npos) break;
  }
}

void Tracer::Dispatch(const FrameView& frame, const Site& site, PyObject** sp) {
  switch (site.op) {
    case Op::kPure:
    case Op::kIsOp:
      if (site.op == Op::kIsOp && sp[-1] != nullptr && sp[-2] != nullptr) CompareIdentity(sp[-2], sp[-1]);
      return;
    case Op::kBranchNone:
      return;  // counted by WatchBranch()
    case Op::kLoadGlobal:
      return LoadGlobal(frame, NameOperand(frame, site));
    case Op::kLoadName:
      return LoadName(frame, NameOperand(frame, site), frame.locals());
    case Op::kLoadFromDict:
      return LoadName(frame, NameOperand(frame, site), sp[-1]);
    case Op::kLoadBuildClass:
      return LoadGlobal(frame, InternedName("__build_class__"));
    case Op::kLoadAttr:
    case Op::kLoadMethod:
    case Op::kImportFrom:
      if (sp[-1] != nullptr) GetAttr(sp[-1], NameOperand(frame, site));
      return;
    case Op::kLoadSuperAttr:
      return GetSuperAttr(sp[-2], sp[-1], NameOperand(frame, site));
    case Op::kLoadDeref:
    case Op::kLoadClassDeref:
    case Op::kStoreDeref:
    case Op::kDeleteDeref: {
      PyObject* cell = frame.localsplus()[DerefIndex(site)];
      if (cell == nullptr || !PyCell_Check(cell)) return;
      heap_.TouchCell(cell);
      if (site.op == Op::kStoreDeref || site.op == Op::kDeleteDeref) Write(cell);
      return;
    }
    case Op::kStoreAttr:
    case Op::kDeleteAttr:
      if (sp[-1] != nullptr) SetAttr(sp[-1], NameOperand(frame, site));
      return;
    case Op::kStoreGlobal:
    case Op::kDeleteGlobal:
      heap_.TouchDictKey(frame.globals(), NameOperand(frame, site));
      return Write(frame.globals());
    case Op::kStoreName:
    case Op::kDeleteName:
      return StoreName(frame, NameOperand(frame, site));
    case Op::kBinaryOp:
      return Binary(sp[-2], sp[-1], BinaryOpKind(site));
    case Op::kBinarySubscr:
      return GetItem(sp[-2], sp[-1]);
    case Op::kBinarySlice:
      for (PyObject* bound : {sp[-2], sp[-1]}) {
        if (bound != nullptr) TouchDeep(bound);
      }
      if (sp[-3] != nullptr && IsTensor(sp[-3])) return;
      return GetItem(sp[-3], Py_None);
    case Op::kStoreSubscr:
    case Op::kDeleteSubscr:
      return SetItem(sp[-2], sp[-1]);
    case Op::kStoreSlice:
      for (PyObject* bound : {sp[-2], sp[-1]}) {
        if (bound != nullptr) TouchDeep(bound);
      }
      return SetItem(sp[-3], Py_None);
    case Op::kCompareOp:
      return Compare(sp[-2], sp[-1], CompareKind(site));
    case Op::kContainsOp:
      return Contains(sp[-1], sp[-2]);
    case Op::kUnaryNot:
    case Op::kToBool:
    case Op::kBranchTruth:
      return Truth(sp[-1]);
    case Op::kUnaryNegative:
      return Unary(sp[-1], "__neg__");
    case Op::kUnaryPositive:
      return Unary(sp[-1], "__pos__");
    case Op::kUnaryInvert:
      return Unary(sp[-1], "__invert__");
    case Op::kGetIter:
    case Op::kUnpackSequence:
    case Op::kUnpackEx:
    case Op::kGetYieldFromIter:
    case Op::kListExtend:
      return Iterate(sp[-1]);
    case Op::kSetUpdate:
      Iterate(sp[-1]);
      if (sp[-1] != nullptr && !PyIter_Check(sp[-1])) TouchDeep(sp[-1]);
      return;
    case Op::kDictUpdate:
    case Op::kDictMerge:
      if (sp[-1] != nullptr && !TouchContent(sp[-1])) {
        Refuse("unknown-object", "a mapping that is no dict is unpacked", kAdviceDevelop);
      } else if (sp[-1] != nullptr && !PyDict_Check(sp[-1])) {
        TouchSpecial(sp[-1], "keys");
      } else if (sp[-1] != nullptr) {
        TouchKeys(sp[-1]);
      }
      return;
    case Op::kForIter:
      return Advance(sp[-1]);
    case Op::kGetLen:
      if (sp[-1] != nullptr) TouchContent(sp[-1]);
      return;
    case Op::kCall: {
      CallSiteView call;
      if (!DecodeCall(frame, site, sp, &call)) {
        Refuse("call", "a call could not be decoded", "please report this line");
        return;
      }
      Arguments args{call.args, call.nargs, call.kwnames};
      if (call.self_or_null != nullptr) return CallWithSelf(call.callable, call.self_or_null, args);
      return Call(call.callable, args);
    }
    case Op::kCallEx: {
      CallExView call;
      if (!DecodeCallEx(frame, site, sp, &call)) {
        Refuse("call", "a call could not be decoded", "please report this line");
        return;
      }
      return CallExpanded(call.callable, call.positional, call.keywords);
    }
    case Op::kWithEnter:
      return EnterContext(sp[-1]);
    case Op::kImportName:
      return ImportName(frame, site, sp);
    case Op::kFormatValue:
    case Op::kFormatSimple:
    case Op::kConvertValue:
      return Format(site.op == Op::kFormatValue && (site.oparg & 4) != 0 ? sp[-2] : sp[-1]);
    case Op::kFormatWithSpec:
      return Format(sp[-2]);
    case Op::kMatchSequence:
    case Op::kMatchMapping:
      // A class that is registered as a sequence or mapping gets a flag of its own, which moves no tag.
      if (sp[-1] != nullptr && (Py_TYPE(sp[-1])->tp_flags & Py_TPFLAGS_HEAPTYPE)) {
        TouchProtocols(sp[-1]);
        TouchAbcToken();
      }
      return;
    case Op::kMatchKeys:
      if (sp[-2] != nullptr && !TouchContent(sp[-2])) Refuse("match", "a pattern matches a mapping", kAdviceDevelop);
      return;
    case Op::kMatchClass:
      if (sp[-3] != nullptr && sp[-2] != nullptr) MatchClass(sp[-3], sp[-2], sp[-1], site.oparg);
      return;
    case Op::kCheckExcMatch:
      return;  // exception classes: a subtype test without hooks
    case Op::kBuild:
      if (const int stride = KeyStride(site); stride != 0) {
        const Py_ssize_t count = Py_ssize_t{site.oparg} * stride;
        for (Py_ssize_t i = -count; i < 0; i += stride) {
          if (sp[i] != nullptr) TouchKey(sp[i]);
        }
      }
      return;
    case Op::kSetAdd:
      if (sp[-1] != nullptr) TouchKey(sp[-1]);
      return;
    case Op::kMapAdd:
      if (sp[-2] != nullptr) TouchKey(sp[-2]);
      return;
    case Op::kBuildString:
    case Op::kListToTuple:
    case Op::kListAppend:
    case Op::kMakeFunction:
    case Op::kSetFunctionAttribute:
    case Op::kLoadLocals:
    case Op::kLoadAssertionError:
    case Op::kWithExit:
    case Op::kReraise:
    case Op::kPushExcInfo:
    case Op::kPopExcept:
    case Op::kReturnGenerator:
    case Op::kSetupAnnotations:
      return;
    case Op::kRaise:
      for (int i = 1; i <= site.oparg; ++i) {  // a class is called without arguments
        if (sp[-i] != nullptr && PyType_Check(sp[-i]))
          CallType(reinterpret_cast<PyTypeObject*>(sp[-i]), {nullptr, 0, nullptr});
      }
      return;
    case Op::kReturn:
      if (site.depth == 0 || sp[-1] == nullptr || IsTensor(sp[-1])) return;
      // C code may have called the function: map() or filter(), or an instruction that a special method serves.
      if (deep_returns_) return TouchDeep(sp[-1]);
      if (Py_TYPE(sp[-1])->tp_flags & Py_TPFLAGS_HEAPTYPE) TouchResult(sp[-1]);
      return;
    case Op::kYield:
      // The consumer may be a C function (any, max, sum) that looks into what it is given.
      TouchResult(sp[-1]);
      return;
    case Op::kSend:
      return;  // resumes a generator, whose frame is watched
    case Op::kIntrinsic1:
    case Op::kIntrinsic2:
      return;  // list to tuple, unary plus, StopIteration conversion: no state but their operand's
    case Op::kGetAwaitable:
    case Op::kAsyncWithEnter:
    case Op::kGetAiter:
    case Op::kGetAnext:
    case Op::kEndAsyncFor:
    case Op::kAsyncGenWrap:
      Refuse("async", "the model awaits", "make forward an ordinary function");
      return;
    case Op::kImportStar:
    case Op::kCheckEgMatch:
    case Op::kPrintExpr:
    case Op::kUnknown:
      Refuse("instruction", absl::StrCat("an instruction is not modelled: ", OpName(site.op)), kAdviceDevelop);
      return;
  }
}

}  // namespace cuvil::agent
