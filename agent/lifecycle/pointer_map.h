#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace cuvil::agent {

// Maps addresses to owned values; a hit is one multiplication and, nearly always, one cache line.
//
// Linear probing over a power of two, at most half full; deletion closes the gap, so there are no tombstones.
//
// Threads: thread-compatible (the agent uses it under the GIL).
template <typename Value>
class PointerMap {
 public:
  Value* Find(const void* key) const {
    if (slots_.empty()) return nullptr;
    for (size_t i = Home(key);; i = (i + 1) & mask_) {
      if (slots_[i].key == key) return slots_[i].value.get();
      if (slots_[i].key == nullptr) return nullptr;
    }
  }

  // `key` is not null and not present.
  Value* Insert(const void* key, std::unique_ptr<Value> value) {
    if ((size_ + 1) * 2 > slots_.size()) Grow();
    size_t i = Home(key);
    while (slots_[i].key != nullptr) i = (i + 1) & mask_;
    slots_[i].key = key;
    slots_[i].value = std::move(value);
    ++size_;
    return slots_[i].value.get();
  }

  // The value leaves the map before anything else happens to it; null if absent.
  std::unique_ptr<Value> Take(const void* key) {
    if (slots_.empty()) return nullptr;
    size_t i = Home(key);
    while (slots_[i].key != key) {
      if (slots_[i].key == nullptr) return nullptr;
      i = (i + 1) & mask_;
    }
    std::unique_ptr<Value> taken = std::move(slots_[i].value);
    slots_[i].key = nullptr;
    --size_;
    for (size_t j = (i + 1) & mask_; slots_[j].key != nullptr; j = (j + 1) & mask_) {
      const size_t home = Home(slots_[j].key);
      // Movable iff its home does not lie cyclically in (i, j].
      if (((j - home) & mask_) >= ((j - i) & mask_)) {
        slots_[i] = std::move(slots_[j]);
        slots_[j].key = nullptr;
        i = j;
      }
    }
    return taken;
  }

  std::vector<Value*> Values() const {
    std::vector<Value*> values;
    values.reserve(size_);
    for (const Slot& slot : slots_) {
      if (slot.key != nullptr) values.push_back(slot.value.get());
    }
    return values;
  }

  size_t size() const { return size_; }

 private:
  struct Slot {
    const void* key = nullptr;
    std::unique_ptr<Value> value;
  };

  size_t Home(const void* key) const {
    // Fibonacci hashing (Knuth, TAOCP 6.4): the high bits of the product depend on all bits of the address.
    return (reinterpret_cast<uintptr_t>(key) * uint64_t{0x9E3779B97F4A7C15}) >> shift_;
  }

  void Grow() {
    std::vector<Slot> old = std::move(slots_);
    const size_t capacity = old.empty() ? 16 : old.size() * 2;
    slots_ = std::vector<Slot>(capacity);
    mask_ = capacity - 1;
    shift_ = 64;
    for (size_t c = capacity; c > 1; c /= 2) --shift_;
    for (Slot& slot : old) {
      if (slot.key == nullptr) continue;
      size_t i = Home(slot.key);
      while (slots_[i].key != nullptr) i = (i + 1) & mask_;
      slots_[i] = std::move(slot);
    }
  }

  std::vector<Slot> slots_;
  size_t mask_ = 0;
  unsigned shift_ = 64;
  size_t size_ = 0;
};

}  // namespace cuvil::agent
