#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <unordered_set>
#include <utility>
#include <vector>

#include "agent/heap_log.h"
#include "agent/py_ref.h"

namespace cuvil::agent {

// A value that a guard expects at some place, without keeping alive anything through which the model, or memory that
// eager would free, could be reached.
//
// Identity must be proof against an object that is freed and replaced by another at the same address:
// - Atoms, and objects that reach nothing but such, are owned. Atoms compare by type and bits, NaNs by identity.
// - Objects with weak references must still be alive.
// - Tuples compare item by item.
// - For lists, dicts, sets, tensors and instances whose attributes the trace reads one by one the address and type
//   suffice: whatever it read of their content has a check of its own, and a program that reads the place again gets
//   the object that is there. (A weak reference to a tensor would also make torch.utils.swap_tensors fail.)
// - Objects that the trace takes for immutable (slices, properties, mapping proxies, bound slot wrappers, …) compare by
//   address, type and what they refer to.
// - Instances of classes derived from int and bytes (enum.IntEnum) compare by address, type and value.
// Anything else is unknown: it never matches, and a capture that would need it is refused.
//
// Threads: GIL held.
class ExpectedValue {
 public:
  using Pinned = std::unordered_set<PyObject*>;

  ExpectedValue() = default;
  // Atoms and tuples among `pinned`, at any depth of tuples, must be the very object.
  explicit ExpectedValue(PyObject* value, const Pinned* pinned = nullptr, int depth = 0);
  // A dict's key that a lookup will need: owned where that is possible.
  static ExpectedValue ForKey(PyObject* key);
  ExpectedValue(ExpectedValue&& other) noexcept { Swap(other); }
  ExpectedValue& operator=(ExpectedValue&& other) noexcept {
    Swap(other);
    return *this;
  }
  ~ExpectedValue();

  // `now` may be null (absent).
  bool Matches(PyObject* now) const {
    if (mode_ == Mode::kTuple) return MatchesItems(now);
    if (now != pointer_) return mode_ == Mode::kOwned && now != nullptr && SameAtom(now, pointer_);
    if (mode_ == Mode::kWeak) return PyWeakref_GET_OBJECT(keeper_) == pointer_;
    if (mode_ >= Mode::kReferents) return MatchesParts(now);
    return mode_ != Mode::kPlain || Py_TYPE(now) == type_;
  }
  // The same for what was read just now from a place that holds a reference to it: such an object is not about to die,
  // so that its reference count, in a cache line that nothing else needs, is not looked at.
  bool MatchesHeld(PyObject* now) const {
    if (mode_ != Mode::kWeak) return Matches(now);
    return now == pointer_ && reinterpret_cast<PyWeakReference*>(keeper_)->wr_object == pointer_;
  }
  // The value is owned, or must be absent: nothing else can have its address.
  bool address_suffices() const { return mode_ == Mode::kOwned || mode_ == Mode::kPinned || mode_ == Mode::kAbsent; }
  // A further word that, compared after the value's address, proves what MatchesHeld() proves: the weak reference's
  // referent, or the value's type. Without an object: there is no such word.
  struct Witness {
    PyObject* object = nullptr;  // owned by this, or the value itself: alive where its address was found
    PyTypeObject* type = nullptr;
    int16_t offset = 0;
    uintptr_t word = 0;
  };
  Witness witness() const {
    if (mode_ == Mode::kWeak) {
      return {keeper_, Py_TYPE(keeper_), offsetof(PyWeakReference, wr_object), reinterpret_cast<uintptr_t>(pointer_)};
    }
    if (mode_ == Mode::kPlain) {
      return {pointer_, type_, offsetof(PyObject, ob_type), reinterpret_cast<uintptr_t>(type_)};
    }
    return {};
  }
  // Only the place that holds the value proves that it is alive.
  bool needs_place() const { return mode_ == Mode::kPlain || mode_ == Mode::kReferents || mode_ == Mode::kDerived; }
  // Owning it shows nowhere: it reaches nothing but atoms, builtin types and objects without references.
  static bool MayOwn(PyObject* object);
  // The value of the trace; may have died. For comparing addresses.
  PyObject* pointer() const { return pointer_; }
  // There is no way to tell whether it is still the same.
  bool unknown() const;
  // An equal object for as long as there is one, without a place that holds it; null if there is none.
  OwnedRef Recall() const;
  bool can_recall() const;
  // The same, borrowed, where that takes no new object; null otherwise.
  PyObject* Borrow() const {
    if (mode_ == Mode::kWeak)
      return reinterpret_cast<PyWeakReference*>(keeper_)->wr_object == pointer_ ? pointer_ : nullptr;
    return can_borrow() ? pointer_ : nullptr;
  }
  bool can_borrow() const { return mode_ == Mode::kOwned || mode_ == Mode::kPinned || mode_ == Mode::kWeak; }

 private:
  enum class Mode : uint8_t { kAbsent, kOwned, kPinned, kWeak, kPlain, kTuple, kReferents, kDerived, kUnknown };

  bool MatchesItems(PyObject* now) const;
  bool MatchesParts(PyObject* now) const;
  void Swap(ExpectedValue& other) {
    std::swap(mode_, other.mode_);
    std::swap(pointer_, other.pointer_);
    std::swap(keeper_, other.keeper_);
    std::swap(type_, other.type_);
    std::swap(items_, other.items_);
  }

  Mode mode_ = Mode::kAbsent;
  PyObject* pointer_ = nullptr;
  // kOwned, kPinned: the value; kWeak: a weak reference to it; kDerived: the plain int or bytes of the same value.
  PyObject* keeper_ = nullptr;
  PyTypeObject* type_ = nullptr;  // of the value
  std::vector<ExpectedValue> items_;
};

}  // namespace cuvil::agent
