#pragma once

#include <Python.h>

#include <cstdint>
#include <string>
#include <vector>

#include "agent/heap_log.h"

namespace cuvil::agent {

// A value that a guard expects at some place, without keeping alive anything through which the model could be
// reached.
//
// Identity must be proof against an object that is freed and replaced by another at the same address. Atoms are
// owned. Objects with weak references must still be alive. Tuples compare item by item. For lists, dicts, sets and
// tensors the address and type suffice: whatever the trace read of their content has a check of its own, and a program
// that reads the place again gets the object that is there. (A weak reference to a tensor would also make
// torch.utils.swap_tensors fail.) Anything else is owned.
//
// Threads: GIL held.
class ExpectedValue {
 public:
  ExpectedValue() = default;
  explicit ExpectedValue(PyObject* value);
  ExpectedValue(ExpectedValue&& other) noexcept { Swap(other); }
  ExpectedValue& operator=(ExpectedValue&& other) noexcept {
    Swap(other);
    return *this;
  }
  ~ExpectedValue();

  // `now` may be null (absent).
  bool Matches(PyObject* now) const {
    if (mode_ == Mode::kTuple) return MatchesTuple(now);
    if (now != pointer_) return mode_ == Mode::kOwned && now != nullptr && SameAtom(now, pointer_);
    if (mode_ == Mode::kWeak) return PyWeakref_GET_OBJECT(keeper_) == pointer_;
    return mode_ != Mode::kPlain || Py_TYPE(now) == type_;
  }
  // Only the place that holds the value proves that it is alive.
  bool needs_place() const { return mode_ == Mode::kPlain; }

 private:
  enum class Mode : uint8_t { kAbsent, kOwned, kWeak, kPlain, kTuple };

  bool MatchesTuple(PyObject* now) const;
  void Swap(ExpectedValue& other) {
    std::swap(mode_, other.mode_);
    std::swap(pointer_, other.pointer_);
    std::swap(keeper_, other.keeper_);
    std::swap(type_, other.type_);
    std::swap(items_, other.items_);
  }

  Mode mode_ = Mode::kAbsent;
  PyObject* pointer_ = nullptr;
  PyObject* keeper_ = nullptr;    // kOwned: the value; kWeak: a weak reference to it
  PyTypeObject* type_ = nullptr;  // kPlain, kTuple
  std::vector<ExpectedValue> items_;
};

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

  bool Hold();

  size_t size() const { return checks_.size(); }
  std::string Describe() const;
  std::string LastFailure() const;

 private:
  // 32 bytes, so that two share a cache line. A plain check is two compares without a look at the kind:
  // the object's type, and one word of the object, shifted (a dict's version tag, an instance's __dict__ pointer).
  struct Check {
    StateKind kind;
    uint8_t shift = 0;
    int16_t offset = 0;     // in bytes: of that word; kMember: of the member
    uint32_t details : 30;  // index into details_: only looked at when a tag has moved
    uint32_t plain : 1;
    uint32_t ordered : 1;        // kDict: an OrderedDict with several entries read as a whole: order counts
    PyObject* object = nullptr;  // borrowed: alive while the checks before this one hold
    uintptr_t type = 0;
    uintptr_t value = 0;  // the word, shifted; kType: version tag; kWeakref: referent
  };
  static_assert(sizeof(void*) != 8 || sizeof(Check) == 32);
  struct Details {
    std::vector<PyObject*> keys;  // owned; kDict and kType
    std::vector<Py_hash_t> hashes;
    std::vector<ExpectedValue> values;
    bool whole = false;
    uintptr_t order_state = 0;
    std::string what;  // for LastFailure()
    ~Details();
    Details() = default;
    Details(Details&&) = default;
    Details& operator=(Details&&) = default;
  };

  bool Passes(Check& check);
  bool DictStillMatches(Check& check);

  std::vector<Check> checks_;
  std::vector<Details> details_;
  int64_t last_failure_ = -1;
};

}  // namespace cuvil::agent
