#include "agent/heap_log.h"

#include <cstring>
#include <utility>

#include "agent/call_table.h"
#include "agent/cpython_compat.h"
#include "agent/cpython_private.h"
#include "agent/expected_value.h"
#include "agent/object_layouts.h"

namespace cuvil::agent {
namespace {

PyObject* LookUp(PyObject* dict, const DictItem& item) {
  PyObject* value = _PyDict_GetItem_KnownHash(dict, item.key, item.hash);
  if (value == nullptr) PyErr_Clear();  // a comparison that raised counts as absent: the guard then fails
  return value;
}

bool SameObject(PyObject* a, PyObject* b) { return a == b || (a != nullptr && b != nullptr && SameAtom(a, b)); }

PyObject* CallNow(PyObject* callable, PyObject* args) {
  PyObject* result = PyObject_CallObject(callable, args);
  if (result == nullptr) PyErr_Clear();
  return result;
}

}  // namespace

bool IsAtom(PyObject* object) {
  if (object == Py_None || object == Py_Ellipsis || object == Py_NotImplemented) return true;
  PyTypeObject* type = Py_TYPE(object);
  return type == &PyUnicode_Type || type == &PyLong_Type || type == &PyBool_Type || type == &PyFloat_Type ||
         type == &PyBytes_Type || type == &PyComplex_Type;
}

bool SameAtom(PyObject* a, PyObject* b) {
  if (a == b) return true;
  PyTypeObject* type = Py_TYPE(a);
  if (type != Py_TYPE(b)) return false;
  if (type == &PyFloat_Type) {
    double x = PyFloat_AS_DOUBLE(a);
    double y = PyFloat_AS_DOUBLE(b);
    return std::memcmp(&x, &y, sizeof x) == 0;
  }
  if (type == &PyComplex_Type) {
    Py_complex x = PyComplex_AsCComplex(a);
    Py_complex y = PyComplex_AsCComplex(b);
    return std::memcmp(&x, &y, sizeof x) == 0;
  }
  if (type == &PyUnicode_Type || type == &PyLong_Type || type == &PyBytes_Type) {
    return PyObject_RichCompareBool(a, b, Py_EQ) == 1;  // exact builtin types: no Python code, cannot raise
  }
  return false;
}

size_t OrderedDictState(PyObject* ordered_dict) {
  size_t state;
  std::memcpy(&state, reinterpret_cast<char*>(ordered_dict) + kOrderedDictStateOffset, sizeof state);
  return state;
}

Membership FindInSet(PyObject* set, PyObject* key, Py_hash_t hash) {
  // The order in which sets look at their entries (Objects/setobject.c): a stretch of neighbours, then on by the hash's
  // upper bits; an entry that was never used ends it. layout_self_test.cc compares it with the set's own answers.
  constexpr size_t kNeighbours = 9;
  constexpr unsigned kShift = 5;
  const auto* const object = reinterpret_cast<const PySetObject*>(set);
  const auto mask = static_cast<size_t>(object->mask);
  size_t upper = static_cast<size_t>(hash);
  for (size_t i = upper & mask;; i = (i * 5 + 1 + upper) & mask) {
    const size_t end = i + kNeighbours <= mask ? i + kNeighbours : i;
    for (size_t at = i; at <= end; ++at) {
      const setentry& entry = object->table[at];
      if (entry.key == nullptr) return Membership::kAbsent;
      if (entry.hash != hash) continue;
      const bool is_it = entry.key == key || SameAtom(entry.key, key);
      return is_it ? Membership::kPresent : Membership::kUnknown;
    }
    upper >>= kShift;
  }
}

bool IsPlainKey(PyObject* key) {
  if (IsAtom(key)) return true;
  PyTypeObject* type = Py_TYPE(key);
  if (type == &PyTuple_Type) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(key); ++i) {
      if (!IsPlainKey(PyTuple_GET_ITEM(key, i))) return false;
    }
    return true;
  }
  if (type->tp_hash == PyBaseObject_Type.tp_hash && type->tp_richcompare == PyBaseObject_Type.tp_richcompare) {
    return true;
  }
  return PyFunction_Check(key) || PyCFunction_Check(key) || type == &PyType_Type;
}

Py_ssize_t DictPointerOffset(PyTypeObject* type, PyObject* object) {
  if (type->tp_flags & Py_TPFLAGS_MANAGED_DICT) return -3 * static_cast<Py_ssize_t>(sizeof(PyObject*));
  Py_ssize_t offset = type->tp_dictoffset;
  if (offset >= 0) return offset;
  Py_ssize_t size = Py_SIZE(object);
  if (size < 0) size = -size;
  return offset + static_cast<Py_ssize_t>(_PyObject_VAR_SIZE(type, size));
}

void HeapLog::Hold(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  if (type->tp_finalize != nullptr && (type->tp_flags & Py_TPFLAGS_HEAPTYPE)) {
    // Kept alive, it would be finalized later than in eager. The entry is of no use without the reference.
    SetProblem(std::string("an object of class ") + type->tp_name + " has a finalizer");
  }
  Py_INCREF(object);
  if (++held_[object] > 1 || !PyTuple_Check(object)) return;
  // A tuple's items are read without a trace of their own.
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(object); ++i) {
    PyObject* item = PyTuple_GET_ITEM(object, i);
    if (item != nullptr && !IsAtom(item)) Hold(item);
  }
}

void HeapLog::Release() {
  if (held_.empty()) return;
  std::unordered_map<PyObject*, Py_ssize_t> held = std::move(held_);
  held_.clear();
  entries_.clear();
  index_.clear();
  new_.clear();
  seen_keys_.clear();
  structural_.clear();
  pinned_.clear();
  for (auto& [object, count] : held) {
    for (Py_ssize_t i = 0; i < count; ++i) Py_DECREF(object);
  }
}

HeapEntry* HeapLog::Find(StateKind kind, PyObject* object, Py_ssize_t offset, bool* created) {
  uint64_t hash = (reinterpret_cast<uintptr_t>(object) >> 4) * 0x9E3779B97F4A7C15ull + static_cast<uint64_t>(kind);
  std::vector<uint32_t>& slot = index_[hash];
  for (uint32_t i : slot) {
    HeapEntry& entry = entries_[i];
    if (entry.object == object && entry.kind == kind && (kind != StateKind::kMember || entry.offset == offset)) {
      *created = false;
      return &entry;
    }
  }
  *created = true;
  slot.push_back(static_cast<uint32_t>(entries_.size()));
  entries_.emplace_back();
  HeapEntry& entry = entries_.back();
  entry.kind = kind;
  entry.object = Held(object);
  entry.offset = offset;
  entry.structural = structural_.count(object) != 0;
  return &entry;
}

PyObject* HeapLog::TouchInstance(PyObject* object) {
  bool created;
  HeapEntry* entry = Find(StateKind::kInstance, object, 0, &created);
  if (!created) {
    ReadAgain(entry);
    return entry->pointers[1];
  }
  PyObject* dict = reinterpret_cast<PyObject*>(InstanceDict(object));
  entry->pointers = {Held(reinterpret_cast<PyObject*>(Py_TYPE(object))), Held(dict)};
  entry->offset = DictPointerOffset(Py_TYPE(object), object);
  if (entry->offset != 0 && dict == nullptr) SetProblem("an object's attribute dictionary cannot be read");
  return dict;
}

void HeapLog::TouchDictKey(PyObject* dict, PyObject* key) {
  // Most reads repeat an earlier one with the same interned name.
  if (auto seen = seen_keys_.find({dict, key}); seen != seen_keys_.end()) {
    ReadAgain(&entries_[seen->second]);
    return;
  }
  if (!IsPlainKey(key)) {
    TouchDictAll(dict);
    return;
  }
  bool created;
  HeapEntry* entry = Find(StateKind::kDict, dict, 0, &created);
  seen_keys_.emplace(std::make_pair(dict, key), static_cast<uint32_t>(entry - entries_.data()));
  if (created) {
    if (!HasTableOfItsOwn(reinterpret_cast<PyDictObject*>(dict))) SetProblem("a dict shares its values with an object");
    entry->dict_tag = DictTag(reinterpret_cast<PyDictObject*>(dict));
  } else {
    ReadAgain(entry);
  }
  if (entry->whole) return;
  DictItem item;
  item.hash = PyObject_Hash(key);
  if (item.hash == -1) {
    PyErr_Clear();  // unhashable: the instruction itself will raise
    return;
  }
  for (const DictItem& known : entry->items) {
    if (known.hash == item.hash && (known.key == key || SameAtom(known.key, key))) return;
  }
  item.key = Held(key);
  item.value = Held(LookUp(dict, item));
  entry->items.push_back(item);
}

void HeapLog::TouchDictAll(PyObject* dict) {
  bool created;
  HeapEntry* entry = Find(StateKind::kDict, dict, 0, &created);
  if (created) {
    if (!HasTableOfItsOwn(reinterpret_cast<PyDictObject*>(dict))) SetProblem("a dict shares its values with an object");
    entry->dict_tag = DictTag(reinterpret_cast<PyDictObject*>(dict));
  } else {
    ReadAgain(entry);
  }
  if (entry->whole) return;
  std::vector<DictItem> keyed = std::move(entry->items);
  entry->items.clear();
  entry->whole = true;
  Py_ssize_t position = 0;
  PyObject* key;
  PyObject* value;
  while (PyDict_Next(dict, &position, &key, &value)) {
    DictItem item;
    item.key = Held(key);
    // Not PyObject_Hash: a key with a Python-level __hash__ must not run here. Whole content compares by identity.
    item.hash = PyUnicode_CheckExact(key) ? PyObject_Hash(key) : 0;
    item.value = Held(value);
    // A key logged earlier keeps its first value: the call may have changed it in between.
    for (const DictItem& first : keyed) {
      if (first.key == key || SameAtom(first.key, key)) item.value = first.value;
    }
    if (item.value != nullptr) entry->items.push_back(item);
  }
  // Keys that were there at first touch and are gone now belong to the baseline; where they stood is unknown, so
  // the content can only compare unequal.
  for (const DictItem& first : keyed) {
    if (first.value == nullptr) continue;
    bool present = false;
    for (const DictItem& item : entry->items)
      present = present || item.key == first.key || SameAtom(item.key, first.key);
    if (!present) entry->items.push_back(first);
  }
}

PyObject* HeapLog::TouchType(PyTypeObject* type, PyObject* name) {
  // Builtin types cannot be changed, and their bases are builtin types.
  if (type->tp_flags & Py_TPFLAGS_IMMUTABLETYPE) return _PyType_Lookup(type, name);
  // A change in between leaves another tag behind, whatever is put back.
  if (seen_keys_.count({reinterpret_cast<PyObject*>(type), name}) != 0) return _PyType_Lookup(type, name);
  bool created;
  HeapEntry* entry = Find(StateKind::kType, reinterpret_cast<PyObject*>(type), 0, &created);
  seen_keys_.emplace(std::make_pair(reinterpret_cast<PyObject*>(type), name),
                     static_cast<uint32_t>(entry - entries_.data()));
  if (created) entry->tag = TypeTag(type);
  if (created && entry->tag == 0) {
    SetProblem(std::string("class ") + type->tp_name + " has been changed too often to be watched");
  }
  for (const DictItem& item : entry->items) {
    if (item.key == name) return item.value;
  }
  DictItem item;
  item.key = Held(name);
  item.value = Held(_PyType_Lookup(type, name));
  entry->items.push_back(item);
  return item.value;
}

void HeapLog::TouchList(PyObject* list) {
  bool created;
  HeapEntry* entry = Find(StateKind::kList, list, 0, &created);
  if (!created) return ReadAgain(entry);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) entry->pointers.push_back(Held(PyList_GET_ITEM(list, i)));
}

bool HeapLog::TouchSetKey(PyObject* set, PyObject* key) {
  if (const auto seen = seen_keys_.find({set, key}); seen != seen_keys_.end()) {
    ReadAgain(&entries_[seen->second]);
    return true;
  }
  if (!IsPlainKey(key) || !ExpectedValue::ForKey(key).can_borrow()) return false;
  DictItem item;
  item.key = key;
  item.hash = PyObject_Hash(key);
  if (item.hash == -1) {
    PyErr_Clear();
    return false;
  }
  const Membership membership = FindInSet(set, key, item.hash);
  if (membership == Membership::kUnknown) return false;
  bool created;
  HeapEntry* entry = Find(StateKind::kSet, set, 0, &created);
  if (!created) ReadAgain(entry);
  if (entry->whole) return true;
  seen_keys_.emplace(std::make_pair(set, Held(key)), static_cast<uint32_t>(entry - entries_.data()));
  item.value = membership == Membership::kPresent ? Held(Py_True) : nullptr;
  entry->items.push_back(item);
  return true;
}

void HeapLog::TouchSet(PyObject* set) {
  bool created;
  HeapEntry* entry = Find(StateKind::kSet, set, 0, &created);
  if (!created) ReadAgain(entry);
  if (entry->whole) return;
  entry->whole = true;
  // What it was before the keys that were asked for changed is unknown: then nothing compares equal.
  if (!created && (entry->written || entry->changed_meanwhile)) entry->pointers.push_back(nullptr);
  entry->items.clear();
  Py_ssize_t position = 0;
  PyObject* key;
  Py_hash_t hash;
  while (_PySet_NextEntry(set, &position, &key, &hash)) entry->pointers.push_back(Held(key));
}

void HeapLog::TouchCell(PyObject* cell) {
  bool created;
  HeapEntry* entry = Find(StateKind::kCell, cell, 0, &created);
  if (!created) return ReadAgain(entry);
  entry->pointers = {Held(PyCell_GET(cell))};
}

void HeapLog::TouchFunction(PyObject* function) {
  bool created;
  HeapEntry* entry = Find(StateKind::kFunction, function, 0, &created);
  if (!created) return ReadAgain(entry);
  PyObject* keyword_defaults = PyFunction_GET_KW_DEFAULTS(function);
  entry->pointers = {Held(PyFunction_GET_CODE(function)), Held(PyFunction_GET_DEFAULTS(function)),
                     Held(keyword_defaults), Held(PyFunction_GET_CLOSURE(function))};
  if (keyword_defaults != nullptr && PyDict_Check(keyword_defaults)) TouchDictAll(keyword_defaults);
}

void HeapLog::TouchMember(PyObject* object, Py_ssize_t offset) {
  bool created;
  HeapEntry* entry = Find(StateKind::kMember, object, offset, &created);
  if (!created) return ReadAgain(entry);
  PyObject* value;
  std::memcpy(&value, reinterpret_cast<char*>(object) + offset, sizeof value);
  entry->pointers = {Held(value)};
}

void HeapLog::TouchWeakref(PyObject* reference) {
  bool created;
  HeapEntry* entry = Find(StateKind::kWeakref, reference, 0, &created);
  // Borrowed, not held: while the log is alive the referent is held by what the call does with it.
  if (created) entry->pointers = {PyWeakref_GET_OBJECT(reference)};
}

void HeapLog::TouchOpaque(PyObject* object) {
  bool created;
  HeapEntry* entry = Find(StateKind::kOpaque, object, 0, &created);
  if (!created) return;
  entry->written = true;
  entry->written_at = source_;
}

void HeapLog::TouchContextVar(PyObject* variable) {
  bool created;
  HeapEntry* entry = Find(StateKind::kContextVar, variable, 0, &created);
  if (!created) return ReadAgain(entry);
  PyObject* value = nullptr;
  if (PyContextVar_Get(variable, nullptr, &value) < 0) PyErr_Clear();
  entry->pointers = {Held(value)};
  Py_XDECREF(value);
}

void HeapLog::TouchCall(PyObject* callable, PyObject* args, PyObject* result, bool shown) {
  for (const HeapEntry& entry : entries_) {
    if (entry.kind != StateKind::kCall || entry.object != callable) continue;
    if (entry.pointers[0] == args || PyTuple_GET_SIZE(args) + PyTuple_GET_SIZE(entry.pointers[0]) == 0) return;
    if (PyObject_RichCompareBool(entry.pointers[0], args, Py_EQ) == 1) return;
  }
  entries_.emplace_back();
  HeapEntry& entry = entries_.back();
  entry.kind = StateKind::kCall;
  entry.object = Held(callable);
  entry.pointers = {Held(args), Held(result)};
  entry.structural = shown && (IsAtom(result) || Py_TYPE(result) == Types().dtype);
}

void HeapLog::MarkWritten(PyObject* object) {
  for (StateKind kind : {StateKind::kDict, StateKind::kList, StateKind::kSet, StateKind::kCell, StateKind::kFunction,
                         StateKind::kType, StateKind::kInstance, StateKind::kMember, StateKind::kContextVar}) {
    uint64_t hash = (reinterpret_cast<uintptr_t>(object) >> 4) * 0x9E3779B97F4A7C15ull + static_cast<uint64_t>(kind);
    auto found = index_.find(hash);
    if (found == index_.end()) continue;
    for (uint32_t i : found->second) {
      if (entries_[i].object != object) continue;
      entries_[i].written = true;
      entries_[i].written_at = source_;
    }
  }
}

void HeapLog::ReadAgain(HeapEntry* entry) const {
  if (entry->written || entry->changed_meanwhile) return;
  const bool is_dict = entry->kind == StateKind::kDict;
  const uint64_t dict_tag = is_dict ? DictTag(reinterpret_cast<PyDictObject*>(entry->object)) : 0;
  if (is_dict && dict_tag == entry->dict_tag) return;
  entry->changed_meanwhile = !Unchanged(*entry);
  entry->dict_tag = dict_tag;
}

bool HeapLog::Unchanged(const HeapEntry& entry) const {
  PyObject* object = entry.object;
  switch (entry.kind) {
    case StateKind::kInstance: {
      if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != entry.pointers[0]) return false;
      if (entry.offset == 0) return true;
      PyObject* dict;
      std::memcpy(&dict, reinterpret_cast<char*>(object) + entry.offset, sizeof dict);
      return dict == entry.pointers[1];
    }
    case StateKind::kDict: {
      if (!entry.whole) {
        for (const DictItem& item : entry.items) {
          if (!SameObject(LookUp(object, item), item.value)) return false;
        }
        return true;
      }
      if (static_cast<size_t>(PyDict_GET_SIZE(object)) != entry.items.size()) return false;
      Py_ssize_t position = 0;
      PyObject* key;
      PyObject* value;
      size_t i = 0;
      while (PyDict_Next(object, &position, &key, &value)) {
        if (i >= entry.items.size() || !SameObject(key, entry.items[i].key)) return false;
        if (!SameObject(value, entry.items[i].value)) return false;
        ++i;
      }
      return true;
    }
    case StateKind::kType:
      // The call itself may have set and restored a class attribute; then the names that it read decide.
      if (!entry.written) return CurrentTypeTag(reinterpret_cast<PyTypeObject*>(object)) == entry.tag;
      for (const DictItem& item : entry.items) {
        if (_PyType_Lookup(reinterpret_cast<PyTypeObject*>(object), item.key) != item.value) return false;
      }
      return true;
    case StateKind::kList:
      return static_cast<size_t>(PyList_GET_SIZE(object)) == entry.pointers.size() &&
             std::memcmp(reinterpret_cast<PyListObject*>(object)->ob_item, entry.pointers.data(),
                         entry.pointers.size() * sizeof(PyObject*)) == 0;
    case StateKind::kSet: {
      for (const DictItem& item : entry.items) {
        const Membership before = item.value != nullptr ? Membership::kPresent : Membership::kAbsent;
        if (FindInSet(object, item.key, item.hash) != before) return false;
      }
      if (!entry.whole) return true;
      if (static_cast<size_t>(PySet_GET_SIZE(object)) != entry.pointers.size()) return false;
      Py_ssize_t position = 0;
      PyObject* key;
      Py_hash_t hash;
      size_t i = 0;
      while (_PySet_NextEntry(object, &position, &key, &hash)) {
        if (key != entry.pointers[i++]) return false;
      }
      return true;
    }
    case StateKind::kCell:
      return SameObject(PyCell_GET(object), entry.pointers[0]);
    case StateKind::kFunction:
      return PyFunction_GET_CODE(object) == entry.pointers[0] && PyFunction_GET_DEFAULTS(object) == entry.pointers[1] &&
             PyFunction_GET_KW_DEFAULTS(object) == entry.pointers[2] &&
             PyFunction_GET_CLOSURE(object) == entry.pointers[3];
    case StateKind::kMember: {
      PyObject* value;
      std::memcpy(&value, reinterpret_cast<char*>(object) + entry.offset, sizeof value);
      return SameObject(value, entry.pointers[0]);
    }
    case StateKind::kContextVar: {
      PyObject* value = nullptr;
      if (PyContextVar_Get(object, nullptr, &value) < 0) PyErr_Clear();
      bool same = SameObject(value, entry.pointers[0]);
      Py_XDECREF(value);
      return same;
    }
    case StateKind::kCall: {
      PyObject* result = CallNow(object, entry.pointers[0]);
      bool same = result != nullptr && SameObject(result, entry.pointers[1]);
      Py_XDECREF(result);
      return same;
    }
    case StateKind::kWeakref:
      return PyWeakref_GET_OBJECT(object) == entry.pointers[0];
    case StateKind::kOpaque:
      return false;
  }
  return false;
}

struct HeapLog::Cascade {
  const std::unordered_map<PyObject*, Py_ssize_t>* held;
  std::unordered_map<PyObject*, Py_ssize_t> external;
  std::vector<PyObject*> dead;

  Py_ssize_t& External(PyObject* object) {
    auto [found, inserted] = external.try_emplace(object, 0);
    if (inserted) {
      auto hold = held->find(object);
      found->second = Py_REFCNT(object) - (hold == held->end() ? 0 : hold->second);
    }
    return found->second;
  }
};

int HeapLog::VisitReferent(PyObject* object, void* context) {
  auto* cascade = static_cast<Cascade*>(context);
  if (--cascade->External(object) == 0) cascade->dead.push_back(object);
  return 0;
}

void HeapLog::RunCascade(Cascade* cascade) const {
  while (!cascade->dead.empty()) {
    PyObject* object = cascade->dead.back();
    cascade->dead.pop_back();
    if (!new_.insert({object, true}).second) continue;
    if (PyType_Check(object) || PyModule_Check(object)) continue;
    PyTypeObject* type = Py_TYPE(object);
    if (PyObject_IS_GC(object) && type->tp_traverse != nullptr) type->tp_traverse(object, VisitReferent, cascade);
  }
}

bool HeapLog::FindDeadCycles(Cascade* cascade, PyObject* result) const {
  // The collector's algorithm over the touched objects that are left: a function that names itself and its cell keep
  // each other alive. A reference from an object outside of the set counts as an owner.
  std::unordered_map<PyObject*, Py_ssize_t> outside;
  auto consider = [&](PyObject* object) {
    if (object == nullptr || new_.count(object) != 0 || PyType_Check(object) || PyModule_Check(object)) return;
    if (!PyObject_IS_GC(object) || Py_TYPE(object)->tp_traverse == nullptr) return;
    outside.try_emplace(object, cascade->External(object));
  };
  for (const HeapEntry& entry : entries_) {
    consider(entry.object);
    // A function that was made but never called is touched only as the content of its cell.
    PyObject* function = PyCell_Check(entry.object) ? PyCell_GET(entry.object) : entry.object;
    if (function == nullptr || !PyFunction_Check(function)) continue;
    consider(function);
    consider(PyFunction_GET_CLOSURE(function));
  }
  // What the result reaches: a cache and its layers may refer to each other. Functions lead to whole namespaces and
  // are not followed.
  constexpr size_t kMaxReached = 50000;
  std::vector<PyObject*> pending;
  if (result != nullptr) pending.push_back(result);
  std::unordered_set<PyObject*> followed;
  while (!pending.empty()) {
    PyObject* object = pending.back();
    pending.pop_back();
    if (!followed.insert(object).second || PyType_Check(object) || PyModule_Check(object) || PyFunction_Check(object) ||
        !PyObject_IS_GC(object) || Py_TYPE(object)->tp_traverse == nullptr) {
      continue;
    }
    if (followed.size() > kMaxReached) return false;
    consider(object);
    Py_TYPE(object)->tp_traverse(
        object,
        [](PyObject* referent, void* context) -> int {
          static_cast<std::vector<PyObject*>*>(context)->push_back(referent);
          return 0;
        },
        &pending);
  }
  struct Walk {
    std::unordered_map<PyObject*, Py_ssize_t>* outside;
    std::vector<PyObject*>* reached;
  };
  std::vector<PyObject*> reached;
  Walk walk{&outside, &reached};
  for (auto& [object, count] : outside) {
    Py_TYPE(object)->tp_traverse(
        object,
        [](PyObject* referent, void* context) -> int {
          auto* map = static_cast<Walk*>(context)->outside;
          if (auto found = map->find(referent); found != map->end()) --found->second;
          return 0;
        },
        &walk);
  }
  std::unordered_set<PyObject*> alive;
  for (auto& [object, count] : outside) {
    if (count > 0 && alive.insert(object).second) reached.push_back(object);
  }
  while (!reached.empty()) {
    PyObject* object = reached.back();
    reached.pop_back();
    std::vector<PyObject*> referents;
    Walk step{&outside, &referents};
    Py_TYPE(object)->tp_traverse(
        object,
        [](PyObject* referent, void* context) -> int {
          auto* walk = static_cast<Walk*>(context);
          if (walk->outside->count(referent) != 0) walk->reached->push_back(referent);
          return 0;
        },
        &step);
    for (PyObject* referent : referents) {
      if (alive.insert(referent).second) reached.push_back(referent);
    }
  }
  for (auto& [object, count] : outside) {
    if (alive.count(object) == 0) cascade->dead.push_back(object);
  }
  return true;
}

std::vector<bool> HeapLog::FindOld(PyObject* result) const {
  // Simulates what would be freed if the log and the result let go of everything: reference counts minus our own
  // references, cascading through tp_traverse exactly where a count falls to zero. What survives has another
  // owner, so it existed before the call or escaped into something that did.
  Cascade cascade;
  cascade.held = &held_;
  for (const auto& [object, count] : held_) {
    Py_ssize_t& external = cascade.External(object);
    if (object == result) continue;
    if (external == 0) cascade.dead.push_back(object);
  }
  if (result != nullptr && --cascade.External(result) == 0) cascade.dead.push_back(result);
  new_.clear();
  RunCascade(&cascade);
  if (!FindDeadCycles(&cascade, result)) return {};
  RunCascade(&cascade);
  std::vector<bool> old(entries_.size());
  for (size_t i = 0; i < entries_.size(); ++i) old[i] = new_.count(entries_[i].object) == 0;
  return old;
}

}  // namespace cuvil::agent
