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
  // A plain check is a compare of one word of the object, the one that holds a version tag or the pointer that a place
  // holds, and of its type where nothing else implies that; there is no look at the kind while they are what they were.
  struct Check {
    const char* word = nullptr;  // in the object, which is borrowed: alive while the checks before this one hold
    uintptr_t type = 0;
    uintptr_t value = 0;   // of the word; kWeakref: referent
    uint32_t details = 0;  // index into details_: only looked at when a word has moved
    int16_t offset = 0;    // of the word, in bytes
    StateKind kind{};
    bool plain : 1 = false;
    bool further : 1 = false;  // one more check of the entry that the check before it is of
    bool ordered : 1 = false;  // kDict: an OrderedDict with several entries read as a whole: order counts
    bool watched : 1 = false;  // kDict: its changes are told
    bool implied : 1 = false;  // kDict: held by a dict, or as an instance's attributes (see Words)
    bool holds : 1 = false;    // kDict: of others that are implied

    PyObject* object() const { return const_cast<PyObject*>(reinterpret_cast<const PyObject*>(word - offset)); }
  };
  struct Details {
    std::vector<ExpectedValue> keys;  // kDict, kSet and kType
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
  // What a place of memory must hold.
  struct Word {
    const char* at = nullptr;
    uintptr_t value = 0;
  };
  // Checks in the order of first access, and beside them the words of those that are plain, which is all that is looked
  // at while nothing has changed: two loads for each, and one check takes a word or two.
  //
  // The type of a dict is no word of its own where it is implied: it is a builtin one, to whose instances no other
  // class can be assigned; an instance's attributes are a dict of some type, and no two dicts ever have the same tag;
  // and a dict whose tag has not moved since all was compared holds the very objects that it held then. Once a dict
  // that holds such ones has been found to match by its keys, it may hold another object at the same address, so that
  // from there on checks are made one by one (careful_).
  struct CheckList {
    struct Stop {
      uint32_t word;   // behind the words of all checks before
      uint32_t check;  // which is not plain
    };
    std::vector<Check> checks;
    std::vector<uint32_t> word_of;   // by check, if plain: of its value
    std::vector<Word> words;         // followed by kAhead more, only to be prefetched, once it is complete
    std::vector<uint32_t> check_of;  // by word
    std::vector<Stop> stops;         // and one behind all

    void Add(const Check& check);
    void Complete(const void* any_memory);
    size_t size() const { return checks.size(); }
  };
  bool Passes(Check& check);
  // The first check that fails, or null.
  const Check* FirstFailing(CheckList* list);
  // The same from `begin` on, each check by itself.
  const Check* FirstFailingFrom(size_t begin, CheckList* list);
  bool DictStillMatches(Check& check);
  // Those that were in the set, and not the others.
  static bool HasTheKeys(PyObject* set, const Details& details);
  // Of a dict that matches: it may be another one than before, at the same address.
  void KeepWatch(Check& check);
  // Again from `all_`: some watched dicts have become noisy.
  void ChooseUnwatched();

  CheckList all_;
  CheckList unwatched_;        // those of all_ that the epoch says nothing about
  uint64_t good_epoch_ = 0;    // of DictWatch, at which all have passed
  uint64_t num_noisy_ = 0;     // of DictWatch, when unwatched_ was chosen
  bool choose_again_ = false;  // a check of all_ has lost its watch
  bool careful_ = false;  // since a dict that holds others was found to match by its keys, not all has been compared
  std::vector<Details> details_;
  std::string why_not_;
  int64_t last_failure_ = -1;
};

}  // namespace cuvil::agent
