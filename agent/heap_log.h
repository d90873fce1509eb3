#pragma once

#include <Python.h>

#include <cstdint>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace cuvil::agent {

// What part of an object's state an entry of the heap log covers.
enum class StateKind : uint8_t {
  kInstance,    // an object's type and the identity of its __dict__
  kDict,        // some keys of a dict, or all of it
  kType,        // class attributes looked up along a type's MRO
  kList,        // a list's items
  kSet,         // whether some keys are in a set, or its entries
  kCell,        // a closure cell's content
  kFunction,    // a function's code, defaults, keyword defaults and closure
  kMember,      // one pointer-sized C member of an object (a __slots__ attribute, default_factory, ...)
  kContextVar,  // a ContextVar's value in the current context
  kCall,        // the result of a C function that reads ambient state without changing it
  kWeakref,     // whether a weak reference's referent is alive
  kOpaque,      // state of a C object that cannot be compared: only allowed on objects that the call made
};

struct DictItem {
  PyObject* key = nullptr;
  Py_hash_t hash = 0;
  PyObject* value = nullptr;  // null: absent; of a set: True if it is there
};

// One touched piece of state with its baseline: the values before the first access.
struct HeapEntry {
  StateKind kind;
  PyObject* object = nullptr;
  bool whole = false;       // kDict: `items` is the complete content, in order; kSet: `pointers` is
  bool structural = false;  // covered by the input signature or torch's state: must not change, needs no guard
  bool written = false;
  // Found changed between two reads. If the call did not write it, another thread did, and the trace mixes two states.
  bool changed_meanwhile = false;
  uint32_t written_at = 0;          // source of the last modelled write
  std::vector<DictItem> items;      // kDict; kSet, unless whole; kType: {name, value looked up}
  std::vector<PyObject*> pointers;  // kList, kSet, kCell, kFunction, kMember, kInstance, kContextVar, kCall
  uint32_t tag = 0;                 // kType: version tag at first touch
  uint64_t dict_tag = 0;            // kDict: version tag when it was last found to equal the baseline
  Py_ssize_t offset = 0;            // kMember: byte offset; kInstance: offset of the __dict__ pointer (0: none)
};

// Records what a traced call reads and writes, with the state before the first access of each piece, so that the
// net effect can be judged at the end.
//
// A write is logged like a read, before it happens: an object whose state at the end equals its baseline was not
// written. A read of state that is logged already is compared with the baseline: what another thread replaces and puts
// back would otherwise be gone at the end, and the trace would mix two states that no eager call sees. Objects that
// only the call itself or its result own at the end were made by the call and do not matter.
//
// Threads: GIL held throughout; one log belongs to one trace.
// Ownership: holds strong references to everything logged until Release().
// Errors: a piece of state that cannot be watched sets problem(); the trace is then refused.
class HeapLog {
 public:
  HeapLog() = default;
  HeapLog(const HeapLog&) = delete;
  HeapLog& operator=(const HeapLog&) = delete;
  ~HeapLog() { Release(); }

  // `source` is what a later net-write refusal points to.
  void set_source(uint32_t source) { source_ = source; }

  // The instance's __dict__ (borrowed; null if the type has none), after logging type and __dict__ identity. The
  // dict is materialised and detached so that later attribute stores move its version tag.
  PyObject* TouchInstance(PyObject* object);
  void TouchDictKey(PyObject* dict, PyObject* key);
  void TouchDictAll(PyObject* dict);
  // The attribute the lookup finds (borrowed; null if none).
  PyObject* TouchType(PyTypeObject* type, PyObject* name);
  void TouchList(PyObject* list);
  void TouchSet(PyObject* set);
  // Whether the key is in the set, which is exactly a set or frozenset. False, and nothing is logged, if that takes a
  // comparison by code of a program, or the key cannot be kept.
  bool TouchSetKey(PyObject* set, PyObject* key);
  void TouchCell(PyObject* cell);
  void TouchFunction(PyObject* function);
  void TouchMember(PyObject* object, Py_ssize_t offset);
  void TouchContextVar(PyObject* variable);
  void TouchWeakref(PyObject* reference);
  void TouchOpaque(PyObject* object);
  // `shown`: other state that every check looks at tells whether the result is still the same, unless it is an object
  // with an identity of its own.
  void TouchCall(PyObject* callable, PyObject* args, PyObject* result, bool shown = false);

  // Marks the pieces of `object` logged so far as written by the call.
  void MarkWritten(PyObject* object);
  // Marks a container of the call's arguments: its content is part of the input signature.
  void MarkStructural(PyObject* container) { structural_.insert({container, true}); }

  bool IsStructural(PyObject* object) const { return structural_.count(object) != 0; }
  const std::unordered_map<PyObject*, bool>& structural() const { return structural_; }

  // Whether this very object is in its place decides something, not only its value: atoms and tuples.
  void PinIdentity(PyObject* object) {
    Hold(object);
    pinned_.insert(object);
  }
  const std::unordered_set<PyObject*>& pinned() const { return pinned_; }

  // Keeps a reference until Release(), accounted for when ownership is judged.
  void Hold(PyObject* object);

  const std::string& problem() const { return problem_; }
  void SetProblem(std::string problem) {
    if (problem_.empty()) problem_ = std::move(problem);
  }

  const std::vector<HeapEntry>& entries() const { return entries_; }
  // True iff the entry's state now equals its baseline.
  bool Unchanged(const HeapEntry& entry) const;
  // Empty if there is too much to look at. For each entry: whether the object existed before the call and lives on
  // outside `result`. `result` may be null.
  std::vector<bool> FindOld(PyObject* result) const;
  // True iff `object` is owned by nothing but `result` (or by objects that are); valid after FindOld().
  bool IsNew(PyObject* object) const { return new_.count(object) != 0; }
  // True iff some logged state holds exactly this object as a value.
  bool HasSeen(PyObject* value) const { return held_.count(value) != 0; }

  void Release();

 private:
  struct Cascade;
  static int VisitReferent(PyObject* object, void* context);
  void RunCascade(Cascade* cascade) const;
  // False if the result reaches too many objects to tell.
  bool FindDeadCycles(Cascade* cascade, PyObject* result) const;

  HeapEntry* Find(StateKind kind, PyObject* object, Py_ssize_t offset, bool* created);
  // A further read of logged state: notes whether it still is as logged.
  void ReadAgain(HeapEntry* entry) const;
  PyObject* Held(PyObject* object) {
    if (object != nullptr) Hold(object);
    return object;
  }

  std::vector<HeapEntry> entries_;
  std::unordered_map<uint64_t, std::vector<uint32_t>> index_;
  struct PairHash {
    size_t operator()(const std::pair<PyObject*, PyObject*>& pair) const {
      return (reinterpret_cast<uintptr_t>(pair.first) >> 4) * 0x9E3779B97F4A7C15ull +
             (reinterpret_cast<uintptr_t>(pair.second) >> 4);
    }
  };
  // (dict, key) and (type, name) pairs logged so far, with the index of their entry; both are held, so no address is
  // reused.
  std::unordered_map<std::pair<PyObject*, PyObject*>, uint32_t, PairHash> seen_keys_;
  std::unordered_map<PyObject*, Py_ssize_t> held_;
  std::unordered_map<PyObject*, bool> structural_;
  std::unordered_set<PyObject*> pinned_;
  mutable std::unordered_map<PyObject*, bool> new_;
  std::string problem_;
  uint32_t source_ = 0;
};

// Changes whenever an OrderedDict's order changes, move_to_end() included, which moves no version tag.
size_t OrderedDictState(PyObject* ordered_dict);

// Whether a key with this hash is in the set, as far as can be told without calling anything: kUnknown if that takes a
// comparison of objects that are not atoms.
enum class Membership : uint8_t { kAbsent, kPresent, kUnknown };
Membership FindInSet(PyObject* set, PyObject* key, Py_hash_t hash);

// True iff the object is immutable, has no identity that programs may rely on, and compares by type and bits:
// None, bool, int, float, complex, str, bytes.
bool IsAtom(PyObject* object);
// Same exact type and same bits (-0.0 differs from 0.0, True from 1; NaNs by bit pattern).
bool SameAtom(PyObject* a, PyObject* b);
// True iff hashing and comparing the key runs no Python code.
bool IsPlainKey(PyObject* key);
// Offset of the __dict__ pointer inside the object, 0 if its type has none.
Py_ssize_t DictPointerOffset(PyTypeObject* type, PyObject* object);

}  // namespace cuvil::agent
