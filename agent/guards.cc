#include "agent/guards.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <unordered_map>
#include <utility>

#include "agent/call_table.h"
#include "agent/cpython_compat.h"
#include "agent/cpython_private.h"
#include "agent/dict_watch.h"

namespace cuvil::agent {
namespace {

// A function's guarded fields, as AddPlaces() and Passes() count them.
static_assert(offsetof(PyFunctionObject, func_defaults) == offsetof(PyFunctionObject, func_code) + sizeof(void*));
static_assert(offsetof(PyFunctionObject, func_kwdefaults) == offsetof(PyFunctionObject, func_code) + 2 * sizeof(void*));

// How many words ahead objects are fetched: benchmarks/guards_bench.py, "in calls".
constexpr ptrdiff_t kAhead = 24;

PyObject* LoadPointer(PyObject* object, Py_ssize_t offset) {
  PyObject* value;
  std::memcpy(&value, reinterpret_cast<char*>(object) + offset, sizeof value);
  return value;
}

uintptr_t LoadWord(PyObject* object, Py_ssize_t offset) {
  return reinterpret_cast<uintptr_t>(LoadPointer(object, offset));
}

const char* KindName(StateKind kind) {
  switch (kind) {
    case StateKind::kInstance:
      return "instances";
    case StateKind::kDict:
      return "dicts";
    case StateKind::kType:
      return "classes";
    case StateKind::kList:
      return "lists";
    case StateKind::kSet:
      return "sets";
    case StateKind::kCell:
      return "closure cells";
    case StateKind::kFunction:
      return "functions";
    case StateKind::kMember:
      return "members";
    case StateKind::kContextVar:
      return "context variables";
    case StateKind::kCall:
      return "ambient states";
    case StateKind::kWeakref:
      return "weak references";
    case StateKind::kOpaque:
      return "opaque objects";
  }
  return "unknown";
}

std::string Text(PyObject* object) {
  if (object == nullptr) return "nothing";
  if (PyUnicode_CheckExact(object)) {
    const char* text = PyUnicode_AsUTF8(object);
    if (text == nullptr) PyErr_Clear();
    return text == nullptr ? "str" : text;
  }
  return std::string(Py_TYPE(object)->tp_name) + " object";
}

// Comparing it with another object calls nothing that a program can define.
bool ComparesWithoutPython(PyObject* key) {
  PyTypeObject* const type = Py_TYPE(key);
  if (type == &PyTuple_Type) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(key); ++i) {
      if (!ComparesWithoutPython(PyTuple_GET_ITEM(key, i))) return false;
    }
    return true;
  }
  return type == &PyUnicode_Type || type == &PyLong_Type || type == &PyBool_Type || type == &PyFloat_Type ||
         type == &PyBytes_Type || type == &PyType_Type || key == Py_None ||
         type->tp_richcompare == PyBaseObject_Type.tp_richcompare;
}

bool KeysCompareWithoutPython(PyObject* dict) {
  if (HasOnlyStringKeys(reinterpret_cast<PyDictObject*>(dict))) return true;
  Py_ssize_t position = 0;
  PyObject* key;
  PyObject* value;
  while (PyDict_Next(dict, &position, &key, &value)) {
    if (!ComparesWithoutPython(key)) return false;
  }
  return true;
}

}  // namespace

GuardSet::Details::~Details() {
  for (PyObject* object : owned) Py_XDECREF(object);
}

GuardSet::GuardSet(const HeapLog& log, const std::vector<bool>& old) {
  const std::vector<HeapEntry>& entries = log.entries();
  // Objects that a dict holds, or an instance as its attributes, and the check of that dict or instance.
  std::unordered_map<PyObject*, size_t> holders;
  for (size_t i = 0; i < entries.size(); ++i) {
    const HeapEntry& entry = entries[i];
    if (!old[i] || entry.structural) continue;
    Check check{};
    check.kind = entry.kind;
    check.offset = static_cast<int16_t>(entry.offset);
    check.details = static_cast<uint32_t>(details_.size());
    PyObject* const object = entry.object;
    check.type = reinterpret_cast<uintptr_t>(Py_TYPE(entry.object));
    // An object with thousands of slots: the check cannot say where to look, so it never passes.
    if (check.offset != entry.offset) check.kind = StateKind::kOpaque;
    Details details;
    details.whole = entry.whole;
    details.what = std::string(KindName(entry.kind)) + ": " + Py_TYPE(entry.object)->tp_name;
    auto note_unknown = [&](const ExpectedValue& value, PyObject* object) {
      if (!why_not_.empty() || !value.unknown()) return;
      why_not_ = std::string("a ") + Py_TYPE(object)->tp_name + " cannot be told from another one";
    };
    auto add_value = [&](PyObject* value) {
      details.values.emplace_back(value, &log.pinned());
      note_unknown(details.values.back(), value);
    };
    auto own = [&](PyObject* object) { details.owned.push_back(Py_NewRef(object)); };
    switch (check.kind) {
      case StateKind::kInstance:
        check.plain = true;
        check.type = reinterpret_cast<uintptr_t>(entry.pointers[0]);
        check.value = reinterpret_cast<uintptr_t>(entry.pointers[1]);
        if (entry.pointers[1] != nullptr) holders.emplace(entry.pointers[1], all_.size());
        if (check.offset == 0) {  // no __dict__: the type is compared twice
          check.offset = offsetof(PyObject, ob_type);
          check.value = check.type;
        }
        break;
      case StateKind::kDict:
      case StateKind::kType:
        for (const DictItem& item : entry.items) {
          details.keys.push_back(entry.whole ? ExpectedValue(item.key) : ExpectedValue::ForKey(item.key));
          details.hashes.push_back(item.hash);
          // A lookup needs the key itself; a whole dict is walked.
          if (entry.kind == StateKind::kDict && !entry.whole && !details.keys.back().can_recall() && why_not_.empty()) {
            why_not_ = std::string("a key of type ") + Py_TYPE(item.key)->tp_name + " cannot be kept";
          }
          // A class's attributes are covered by its tag.
          if (entry.kind != StateKind::kDict) continue;
          add_value(item.value);
          if (item.value != nullptr) holders.emplace(item.value, all_.size());
        }
        if (entry.kind == StateKind::kType) {
          details.what = std::string("class ") + reinterpret_cast<PyTypeObject*>(entry.object)->tp_name;
          check.offset = kTypeTagOffset;
          check.plain = TypeTag(reinterpret_cast<PyTypeObject*>(object)) != 0;
          check.value = LoadWord(object, kTypeTagOffset);
        } else {
          check.offset = kDictTagOffset;
          check.plain = true;
          if (entry.whole && entry.items.size() > 1 && PyODict_Check(entry.object)) {
            check.plain = false;
            check.ordered = true;
            details.order_state = OrderedDictState(entry.object);
          }
          // The class of an instance of a class statement's can be assigned, which moves no tag.
          const bool fixed_type = (Py_TYPE(object)->tp_flags & Py_TPFLAGS_HEAPTYPE) == 0;
          if (const auto holder = holders.find(object); fixed_type && holder != holders.end()) {
            check.implied = true;
            all_.checks[holder->second].holds = true;
          }
          check.watched = check.plain && DictWatch::Watch(object);
          // Behind the watch, which leaves its mark in the word.
          check.value = LoadWord(object, kDictTagOffset);
        }
        break;
      case StateKind::kList:
      case StateKind::kSet:
        for (const DictItem& item : entry.items) {
          details.keys.push_back(ExpectedValue::ForKey(item.key));
          details.hashes.push_back(item.hash);
          details.values.emplace_back(item.value);
        }
        details.whole = entry.whole;
        for (PyObject* value : entry.pointers) add_value(value);
        break;
      case StateKind::kFunction:
        // The closure tuple cannot be replaced; its cells have checks of their own.
        for (size_t k = 0; k < 3; ++k) add_value(entry.pointers[k]);
        check.offset = offsetof(PyFunctionObject, func_code);
        break;
      case StateKind::kCell:
      case StateKind::kMember:
        add_value(entry.pointers[0]);
        if (entry.kind == StateKind::kCell) check.offset = offsetof(PyCellObject, ob_ref);
        break;
      case StateKind::kContextVar:
        add_value(entry.pointers[0]);
        break;
      case StateKind::kCall:
        own(entry.object);  // a C function, cannot reach a module
        own(entry.pointers[0]);
        if (!ExpectedValue::MayOwn(entry.pointers[0]) && why_not_.empty()) {
          why_not_ = "ambient state is asked for with an argument that cannot be kept";
        }
        add_value(entry.pointers[1]);
        break;
      case StateKind::kWeakref:
        check.value = reinterpret_cast<uintptr_t>(entry.pointers[0]);
        break;
      case StateKind::kOpaque:
        break;  // never old: the trace would have been refused
    }
    // A context variable that a C function handed out has no place that keeps it.
    if (entry.kind == StateKind::kContextVar && ExpectedValue::MayOwn(entry.object)) own(entry.object);
    check.word = reinterpret_cast<const char*>(object) + check.offset;
    if (check.kind == StateKind::kFunction || check.kind == StateKind::kCell || check.kind == StateKind::kMember) {
      AddPlaces(check, &details);
    } else {
      all_.Add(check);
    }
    details_.push_back(std::move(details));
  }
  all_.Complete(this);
  ChooseUnwatched();
}

void GuardSet::CheckList::Add(const Check& check) {
  const auto index = static_cast<uint32_t>(checks.size());
  const auto add_word = [&](const char* at, uintptr_t value) {
    words.push_back({at, value});
    check_of.push_back(index);
  };
  if (!check.plain) {
    stops.push_back({static_cast<uint32_t>(words.size()), index});
  } else if (!check.implied) {
    // Several places of one object follow each other.
    const char* const type = reinterpret_cast<const char*>(check.object()) + offsetof(PyObject, ob_type);
    const bool compared = check.further && checks.back().plain && checks.back().object() == check.object();
    if (!compared) add_word(type, check.type);
  }
  word_of.push_back(static_cast<uint32_t>(words.size()));
  if (check.plain) add_word(check.word, check.value);
  checks.push_back(check);
}

void GuardSet::CheckList::Complete(const void* any_memory) {
  stops.push_back({static_cast<uint32_t>(words.size()), static_cast<uint32_t>(checks.size())});
  words.insert(words.end(), kAhead, {static_cast<const char*>(any_memory), 0});
}

void GuardSet::ChooseUnwatched() {
  num_noisy_ = DictWatch::num_noisy();
  choose_again_ = false;
  unwatched_ = {};
  for (Check& check : all_.checks) {
    if (check.watched && DictWatch::IsNoisy(check.object())) check.watched = false;
    if (!check.watched) unwatched_.Add(check);
  }
  unwatched_.Complete(this);
}

void GuardSet::AddPlaces(Check check, Details* details) {
  for (const ExpectedValue& value : details->values) {
    PyObject* held = value.pointer();
    // Where the same address is the same value, or one more word tells, comparing the address comes first.
    const ExpectedValue::Witness witness = value.witness();
    const bool owned_tuple = held != nullptr && PyTuple_CheckExact(held) && ExpectedValue::MayOwn(held);
    if (owned_tuple) details->owned.push_back(Py_NewRef(held));
    check.value = reinterpret_cast<uintptr_t>(held);
    check.plain = value.address_suffices() || owned_tuple || witness.object != nullptr;
    all_.Add(check);
    check.further = true;
    if (witness.object != nullptr) {
      Check second = check;
      second.kind = StateKind::kOpaque;  // there is nothing else to look at
      second.word = reinterpret_cast<const char*>(witness.object) + witness.offset;
      second.offset = witness.offset;
      second.type = reinterpret_cast<uintptr_t>(witness.type);
      second.value = witness.word;
      second.plain = true;
      all_.Add(second);
    }
    check.word += sizeof(void*);
    check.offset = static_cast<int16_t>(check.offset + sizeof(void*));
  }
}

void GuardSet::KeepWatch(Check& check) {
  if (check.watched && !DictWatch::Watch(check.object())) {
    check.watched = false;
    choose_again_ = true;
  }
  check.value = LoadWord(check.object(), kDictTagOffset);  // a watch leaves its mark in it
}

bool GuardSet::DictStillMatches(Check& check) {
  Details& details = details_[check.details];
  PyObject* dict = check.object();
  const uintptr_t word = LoadWord(dict, kDictTagOffset);
  // Beside the tag there are bits that say who watches the dict.
  if (word >> kDictTagShift == check.value >> kDictTagShift) {
    KeepWatch(check);
    return true;
  }
  careful_ = careful_ || check.holds;
  if (details.whole) {
    if (check.ordered || static_cast<size_t>(PyDict_GET_SIZE(dict)) != details.keys.size()) return false;
    Py_ssize_t position = 0;
    PyObject* key;
    PyObject* value;
    size_t i = 0;
    while (PyDict_Next(dict, &position, &key, &value)) {
      if (!details.keys[i].MatchesHeld(key)) return false;
      if (!details.values[i].MatchesHeld(value)) return false;
      ++i;
    }
  } else {
    // Lookups must run no Python code.
    if (!KeysCompareWithoutPython(dict)) return false;
    for (size_t i = 0; i < details.keys.size(); ++i) {
      const OwnedRef key = details.keys[i].Recall();
      if (!key) return false;
      PyObject* value = _PyDict_GetItem_KnownHash(dict, key.get(), details.hashes[i]);
      if (value == nullptr) PyErr_Clear();
      if (!details.values[i].MatchesHeld(value)) return false;
    }
  }
  // It may be another dict, at the old one's address.
  KeepWatch(check);
  return true;
}

bool GuardSet::HasTheKeys(PyObject* set, const Details& details) {
  for (size_t i = 0; i < details.keys.size(); ++i) {
    PyObject* const key = details.keys[i].Borrow();
    if (key == nullptr) return false;
    const Membership before = details.values[i].pointer() != nullptr ? Membership::kPresent : Membership::kAbsent;
    if (FindInSet(set, key, details.hashes[i]) != before) return false;
  }
  return true;
}

bool GuardSet::Passes(Check& check) {
  PyObject* object = check.object();
  // An object without weak references may have been replaced by one of another type at the same address.
  if (reinterpret_cast<uintptr_t>(Py_TYPE(object)) != check.type) return false;
  switch (check.kind) {
    case StateKind::kInstance:
      return false;  // plain, and its __dict__ is another one
    case StateKind::kDict: {
      if (!DictStillMatches(check)) return false;
      // The details are another cache line for each of a thousand dicts: only where order counts.
      return !check.ordered || OrderedDictState(object) == details_[check.details].order_state;
    }
    case StateKind::kType: {
      // No second look at the names that were read: a special method, a base or an attribute hook may have come or
      // gone.
      uint32_t tag = CurrentTypeTag(reinterpret_cast<PyTypeObject*>(object));
      return tag != 0 && tag == check.value >> kTypeTagShift;
    }
    case StateKind::kList: {
      const Details& details = details_[check.details];
      if (static_cast<size_t>(PyList_GET_SIZE(object)) != details.values.size()) return false;
      for (size_t i = 0; i < details.values.size(); ++i) {
        if (!details.values[i].MatchesHeld(PyList_GET_ITEM(object, i))) return false;
      }
      return true;
    }
    case StateKind::kSet: {
      const Details& details = details_[check.details];
      if (!details.whole) return HasTheKeys(object, details);
      if (static_cast<size_t>(PySet_GET_SIZE(object)) != details.values.size()) return false;
      Py_ssize_t position = 0;
      PyObject* key;
      Py_hash_t hash;
      size_t i = 0;
      while (_PySet_NextEntry(object, &position, &key, &hash)) {
        if (!details.values[i++].MatchesHeld(key)) return false;
      }
      return true;
    }
    case StateKind::kFunction:
    case StateKind::kCell:
    case StateKind::kMember: {
      size_t k = 0;
      if (check.kind == StateKind::kFunction) {
        k = (static_cast<size_t>(check.offset) - offsetof(PyFunctionObject, func_code)) / sizeof(void*);
      }
      return details_[check.details].values[k].MatchesHeld(LoadPointer(object, check.offset));
    }
    case StateKind::kContextVar: {
      PyObject* value = nullptr;
      if (PyContextVar_Get(object, nullptr, &value) < 0) PyErr_Clear();
      bool same = details_[check.details].values[0].MatchesHeld(value);
      Py_XDECREF(value);
      return same;
    }
    case StateKind::kCall: {
      const Details& details = details_[check.details];
      PyObject* result = PyObject_CallObject(object, details.owned[1]);
      if (result == nullptr) {
        PyErr_Clear();
        return false;
      }
      bool same = details.values[0].MatchesHeld(result);
      Py_DECREF(result);
      return same;
    }
    case StateKind::kWeakref:
      // The reference object itself is alive, so its referent either is the same or is gone.
      return reinterpret_cast<uintptr_t>(PyWeakref_GET_OBJECT(object)) == check.value;
    case StateKind::kOpaque:
      return false;
  }
  return false;
}

const GuardSet::Check* GuardSet::FirstFailing(CheckList* list) {
  if (careful_) return FirstFailingFrom(0, list);
  const Word* const words = list->words.data();
  const Word* word = words;
  for (const CheckList::Stop* stop = list->stops.data();; ++stop) {
    for (const Word* const end = words + stop->word; word != end; ++word) {
      // Operators have emptied the caches since the last call. Prefetching an address is no access: what lies there may
      // be gone already. The value mostly shares its cache line with the type.
      __builtin_prefetch(word[kAhead].at);
      uintptr_t value;
      std::memcpy(&value, word->at, sizeof value);
      if (value == word->value) [[likely]]
        continue;
      const auto index = static_cast<size_t>(word - words);
      const size_t i = list->check_of[index];
      Check& check = list->checks[i];
      if (!Passes(check)) return &check;
      list->words[list->word_of[i]].value = check.value;
      if (careful_) return FirstFailingFrom(i + 1, list);
    }
    if (stop->check == list->checks.size()) return nullptr;
    Check& check = list->checks[stop->check];
    if (!Passes(check)) return &check;
    if (careful_) return FirstFailingFrom(stop->check + 1, list);
  }
}

const GuardSet::Check* GuardSet::FirstFailingFrom(size_t begin, CheckList* list) {
  for (size_t i = begin; i < list->checks.size(); ++i) {
    Check& check = list->checks[i];
    if (check.plain) {
      uintptr_t value;
      std::memcpy(&value, check.word, sizeof value);
      if (reinterpret_cast<uintptr_t>(Py_TYPE(check.object())) == check.type && value == check.value) continue;
    }
    if (!Passes(check)) return &check;
    if (check.plain) list->words[list->word_of[i]].value = check.value;
  }
  return nullptr;
}

bool GuardSet::Hold() {
  // Before the checks: what a C function that they call changes counts for the next time.
  const uint64_t epoch = DictWatch::epoch();
  if (epoch == good_epoch_ && FirstFailing(&unwatched_) == nullptr) {
    careful_ = false;
    return true;
  }
  if (const Check* failing = FirstFailing(&all_); failing != nullptr) {
    last_failure_ = failing - all_.checks.data();
    return false;
  }
  careful_ = false;
  if (choose_again_ || DictWatch::num_noisy() != num_noisy_) ChooseUnwatched();
  if (!DictWatch::ChangeIsPending()) good_epoch_ = epoch;
  return true;
}

std::string GuardSet::Describe() const {
  std::map<std::string, int> counts;
  for (size_t i = 0; i < all_.size(); ++i) {
    const Check& check = all_.checks[i];
    counts[check.watched ? "watched dicts" : KindName(check.kind)] += check.further ? 0 : 1;
  }
  std::string text;
  for (const auto& [name, count] : counts) text += (text.empty() ? "" : ", ") + std::to_string(count) + " " + name;
  return text;
}

std::string GuardSet::LastFailure() const {
  if (last_failure_ < 0) return "";
  const Details& details = details_[all_.checks[last_failure_].details];
  std::string text = details.what;
  if (!details.keys.empty()) text += " (read: ";
  for (size_t i = 0; i < details.keys.size() && i < 4; ++i)
    text += (i ? ", " : "") + Text(details.keys[i].Recall().get());
  if (!details.keys.empty()) text += details.keys.size() > 4 ? ", …)" : ")";
  return text;
}

}  // namespace cuvil::agent
