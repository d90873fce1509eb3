#include "agent/expected_value.h"

#include <cmath>
#include <string_view>

#include "agent/call_table.h"

namespace cuvil::agent {
namespace {

// More than this is not owned, whatever it is.
constexpr size_t kMaxOwnedObjects = 256;
// Immutable objects refer to older ones, so nesting ends; this is for those made by C in other ways.
constexpr int kMaxDepth = 32;

// Which objects the type's own traversal hands out, in its order.
std::vector<PyObject*> ReferentsOf(PyObject* object) {
  std::vector<PyObject*> referents;
  const traverseproc traverse = Py_TYPE(object)->tp_traverse;
  if (traverse == nullptr) return referents;
  const visitproc visit = [](PyObject* referent, void* list) -> int {
    static_cast<std::vector<PyObject*>*>(list)->push_back(referent);
    return 0;
  };
  traverse(object, visit, &referents);
  return referents;
}

bool IsNan(PyObject* object) {
  if (PyFloat_CheckExact(object)) return std::isnan(PyFloat_AS_DOUBLE(object));
  if (!PyComplex_CheckExact(object)) return false;
  return std::isnan(PyComplex_RealAsDouble(object)) || std::isnan(PyComplex_ImagAsDouble(object));
}

bool IsStaticType(PyObject* object) {
  return PyType_Check(object) && !(reinterpret_cast<PyTypeObject*>(object)->tp_flags & Py_TPFLAGS_HEAPTYPE);
}

}  // namespace

bool ExpectedValue::MayOwn(PyObject* object) {
  std::unordered_set<PyObject*> seen{object};
  std::vector<PyObject*> pending{object};
  while (!pending.empty()) {
    PyObject* next = pending.back();
    pending.pop_back();
    if (IsAtom(next) || IsStaticType(next)) continue;
    PyTypeObject* type = Py_TYPE(next);
    if (IsTensor(next) || PyType_SUPPORTS_WEAKREFS(type) || next == Py_None) return false;
    if (!PyObject_IS_GC(next)) continue;
    for (PyObject* referent : ReferentsOf(next)) {
      // A C type made at run time is told apart from Python's by being immutable.
      if (PyType_Check(referent) &&
          PyType_HasFeature(reinterpret_cast<PyTypeObject*>(referent), Py_TPFLAGS_IMMUTABLETYPE)) {
        continue;
      }
      if (seen.insert(referent).second) pending.push_back(referent);
    }
    if (seen.size() > kMaxOwnedObjects) return false;
  }
  return true;
}

namespace {

// The trace logs each attribute that it reads of such an object, and refuses to read anything else of it.
bool IsReadPieceByPiece(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  if (type == &PyList_Type || type == &PyDict_Type || type == &PySet_Type || type == &PyCell_Type) return true;
  if (IsTensor(object) || PyExceptionInstance_Check(object)) return true;
  if (std::string_view(type->tp_name) == "types.SimpleNamespace") return true;
  return (type->tp_flags & Py_TPFLAGS_HEAPTYPE) && SolidBase(type) == &PyBaseObject_Type;
}

// All that such an object is, its type, its address and its referents tell.
bool IsItsReferents(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  if (type == &PySlice_Type || type == &PyDictProxy_Type || type == &PyProperty_Type || type == &PyStaticMethod_Type ||
      type == &PyClassMethod_Type || type == &PySuper_Type || type == Types().method_wrapper ||
      type == &PyDictItems_Type || type == &PyDictKeys_Type || type == &PyDictValues_Type ||
      type == &PyContextVar_Type || type == &PyMethodDescr_Type || type == &PyMemberDescr_Type ||
      type == &PyGetSetDescr_Type || type == &PyWrapperDescr_Type || type == &PyClassMethodDescr_Type) {
    return true;
  }
  for (const std::string_view name :
       {"types.UnionType", "typing.Union", "operator.itemgetter", "operator.attrgetter", "operator.methodcaller"}) {
    if (type->tp_name == name) return true;
  }
  // Iterators, generators and the like: a trace that uses one that is older than the call is refused.
  return PyIter_Check(object);
}

}  // namespace

ExpectedValue::ExpectedValue(PyObject* value, const Pinned* pinned, int depth) : pointer_(value) {
  if (value == nullptr) return;
  type_ = Py_TYPE(value);
  if (depth > kMaxDepth) {
    mode_ = Mode::kUnknown;
    return;
  }
  // `in`, == of containers and lookups take a NaN for equal to itself only.
  if (IsNan(value) || (pinned != nullptr && pinned->count(value) != 0)) {
    mode_ = MayOwn(value) ? Mode::kPinned : Mode::kUnknown;
    if (mode_ == Mode::kPinned) keeper_ = Py_NewRef(value);
    return;
  }
  if (IsAtom(value)) {
    mode_ = Mode::kOwned;
    keeper_ = Py_NewRef(value);
    return;
  }
  if (PyTuple_Check(value)) {
    mode_ = Mode::kTuple;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i) {
      items_.emplace_back(PyTuple_GET_ITEM(value, i), pinned, depth + 1);
    }
    return;
  }
  if (type_ == &PyList_Type || type_ == &PyDict_Type || type_ == &PySet_Type || IsTensor(value)) {
    mode_ = Mode::kPlain;
    return;
  }
  if (PyType_SUPPORTS_WEAKREFS(type_)) {
    keeper_ = PyWeakref_NewRef(value, nullptr);
    if (keeper_ != nullptr) {
      mode_ = Mode::kWeak;
      return;
    }
    PyErr_Clear();
  }
  if (PyLong_Check(value) || PyBytes_Check(value)) {
    keeper_ = PyLong_Check(value) ? PyLong_Type.tp_as_number->nb_int(value)
                                  : PyBytes_FromStringAndSize(PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value));
    mode_ = keeper_ != nullptr ? Mode::kDerived : Mode::kUnknown;
    if (keeper_ == nullptr) PyErr_Clear();
  } else if (IsReadPieceByPiece(value)) {
    mode_ = Mode::kPlain;
  } else if (MayOwn(value)) {
    mode_ = Mode::kOwned;
    keeper_ = Py_NewRef(value);
  } else if (IsItsReferents(value)) {
    mode_ = Mode::kReferents;
    for (PyObject* referent : ReferentsOf(value)) items_.emplace_back(referent, pinned, depth + 1);
  } else {
    mode_ = Mode::kUnknown;
  }
}

ExpectedValue ExpectedValue::ForKey(PyObject* key) {
  if (!PyTuple_Check(key) || !MayOwn(key)) return ExpectedValue(key);
  ExpectedValue expected;
  expected.mode_ = Mode::kOwned;
  expected.pointer_ = expected.keeper_ = Py_NewRef(key);
  return expected;
}

ExpectedValue::~ExpectedValue() { Py_XDECREF(keeper_); }

bool ExpectedValue::MatchesItems(PyObject* now) const {
  // Not by address: an equal tuple with the same items is the same value to any program that does not ask for `is`.
  if (now == nullptr || Py_TYPE(now) != type_) return false;
  if (static_cast<size_t>(PyTuple_GET_SIZE(now)) != items_.size()) return false;
  for (size_t i = 0; i < items_.size(); ++i) {
    if (!items_[i].Matches(PyTuple_GET_ITEM(now, i))) return false;
  }
  return true;
}

bool ExpectedValue::MatchesParts(PyObject* now) const {
  if (mode_ == Mode::kUnknown || Py_TYPE(now) != type_) return false;
  if (mode_ == Mode::kDerived) {
    // The base's own comparison: the derived class may have one in Python.
    const OwnedRef same = OwnedRef::Steal(Py_TYPE(keeper_)->tp_richcompare(now, keeper_, Py_EQ));
    if (!same) PyErr_Clear();
    return same.get() == Py_True;
  }
  struct Walk {
    const std::vector<ExpectedValue>& items;
    size_t next;
  } walk{items_, 0};
  const visitproc visit = [](PyObject* referent, void* context) -> int {
    auto* at = static_cast<Walk*>(context);
    return at->next < at->items.size() && at->items[at->next++].Matches(referent) ? 0 : 1;
  };
  return type_->tp_traverse(now, visit, &walk) == 0 && walk.next == items_.size();
}

OwnedRef ExpectedValue::Recall() const {
  switch (mode_) {
    case Mode::kOwned:
    case Mode::kPinned:
      return OwnedRef::New(pointer_);
    case Mode::kWeak:
      return PyWeakref_GET_OBJECT(keeper_) == pointer_ ? OwnedRef::New(pointer_) : OwnedRef();
    case Mode::kTuple: {
      OwnedRef tuple = OwnedRef::Steal(PyTuple_New(static_cast<Py_ssize_t>(items_.size())));
      for (size_t i = 0; tuple && i < items_.size(); ++i) {
        OwnedRef item = items_[i].Recall();
        if (!item) return OwnedRef();
        PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), item.release());
      }
      if (!tuple) PyErr_Clear();
      return tuple;
    }
    default:
      return OwnedRef();
  }
}

bool ExpectedValue::can_recall() const {
  if (mode_ != Mode::kTuple) return mode_ == Mode::kOwned || mode_ == Mode::kPinned || mode_ == Mode::kWeak;
  for (const ExpectedValue& item : items_) {
    if (!item.can_recall()) return false;
  }
  return type_ == &PyTuple_Type;
}

bool ExpectedValue::unknown() const {
  if (mode_ == Mode::kUnknown) return true;
  for (const ExpectedValue& item : items_) {
    if (item.unknown()) return true;
  }
  return false;
}

}  // namespace cuvil::agent
