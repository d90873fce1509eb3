#pragma once

#include <Python.h>

#include <cstdint>
#include <string>
#include <vector>

#include "agent/expected_value.h"
#include "agent/heap_log.h"

namespace cuvil::agent {

// True iff a cached plan is valid for the process state as it is; runs no Python code.
//
// Checks run in the order of first access and stop at the first difference: an object is looked at only after the
// guard on whatever held it has passed, so that no freed object is ever dereferenced. Dicts and types compare
// version tags; when a dict's tag moved, the keys that the trace read are compared and the tag is refreshed
// (docs/design/0008-guards.md lists what tags do not notice; those states have guards of their own). Where CPython
// tells of changes (dict_watch.h), dicts are looked at only after one of them has changed.
//
// Threads: GIL held for every member.
// Ownership: owns no reference through which a module could be reached (ExpectedValue).
class GuardSet {
 public:
  // Keeps the entries of `log` that are old and not structural, in order.
  GuardSet(const HeapLog& log, const std::vector<bool>& old);
  GuardSet(const GuardSet&) = delete;
  GuardSet& operator=(const GuardSet&) = delete;

  // Not empty: something that the trace read cannot be told apart later, so the set must not be used.
  const std::string& why_not() const { return why_not_; }

  bool Hold();

  // Pieces of state; some take several checks.
  size_t size() const { return details_.size(); }
  std::string Describe() const;
  std::string LastFailure() const;

 private:
  // 32 bytes, so that two share a cache line. A plain check is two compares without a look at the kind: the object's
  // type, and one word of the object (the one that holds a version tag, or the pointer that a place holds).
  struct Check {
    const char* word = nullptr;  // in the object, which is borrowed: alive while the checks before this one hold
    uintptr_t type = 0;
    uintptr_t value = 0;    // of the word; kWeakref: referent
    uint32_t details : 29;  // index into details_: only looked at when a word has moved
    uint32_t further : 1;   // one more check of the entry that the check before it is of
    uint32_t ordered : 1;   // kDict: an OrderedDict with several entries read as a whole: order counts
    uint32_t watched : 1;   // kDict: its changes are told
    int16_t offset = 0;     // of the word, in bytes
    StateKind kind;

    PyObject* object() const { return const_cast<PyObject*>(reinterpret_cast<const PyObject*>(word - offset)); }
  };
  static_assert(sizeof(void*) != 8 || sizeof(Check) == 32);
  struct Details {
    std::vector<ExpectedValue> keys;  // kDict and kType
    std::vector<Py_hash_t> hashes;
    // kCall: the callable and its arguments; kContextVar: itself, if it may be owned; places: tuples that may be.
    std::vector<PyObject*> owned;
    std::vector<ExpectedValue> values;
    bool whole = false;
    uintptr_t order_state = 0;
    std::string what;  // for LastFailure()
    ~Details();
    Details() = default;
    Details(Details&&) = default;
    Details& operator=(Details&&) = default;
  };

  // The checks of the places in `object` that hold `details.values`, one word after the other from `offset` on.
  void AddPlaces(Check check, Details* details);
  // In the order of first access.
  struct CheckList {
    std::vector<Check> checks;    // followed by kAhead more, only to be prefetched, once it is complete
    std::vector<uint32_t> stops;  // those that are not plain, then how many there are

    void Add(const Check& check, bool plain);
    void Complete(const void* any_memory);
    size_t size() const { return stops.back(); }
  };
  bool Passes(Check& check);
  // The first check that fails, or null.
  const Check* FirstFailing(CheckList* list);
  bool DictStillMatches(Check& check);
  // Of a dict that matches: it may be another one than before, at the same address.
  void KeepWatch(Check& check);
  // Again from `all_`: some watched dicts have become noisy.
  void ChooseUnwatched();

  CheckList all_;
  CheckList unwatched_;        // those of all_ that the epoch says nothing about
  uint64_t good_epoch_ = 0;    // of DictWatch, at which all have passed
  uint64_t num_noisy_ = 0;     // of DictWatch, when unwatched_ was chosen
  bool choose_again_ = false;  // a check of all_ has lost its watch
  std::vector<Details> details_;
  std::string why_not_;
  int64_t last_failure_ = -1;
};

}  // namespace cuvil::agent
