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
// (cpython_facts.md §4 lists what tags do not notice; those states have guards of their own).
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
    uint32_t details : 30;  // index into details_: only looked at when a word has moved
    uint32_t further : 1;   // one more check of the entry that the check before it is of
    uint32_t ordered : 1;   // kDict: an OrderedDict with several entries read as a whole: order counts
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
  void Add(const Check& check, bool plain);
  bool Passes(Check& check);
  bool FailAt(const Check* check);
  bool DictStillMatches(Check& check);

  std::vector<Check> checks_;    // followed by kAhead more, only to be prefetched
  std::vector<uint32_t> stops_;  // those that are not plain, then how many there are
  std::vector<Details> details_;
  std::string why_not_;
  int64_t last_failure_ = -1;
};

}  // namespace cuvil::agent
