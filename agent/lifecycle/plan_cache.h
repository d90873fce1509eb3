#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace cuvil::agent {

// A bounded set of entries in which a new one displaces the least recently used; readers see one immutable list.
//
// The list is replaced as a whole by a pointer swap, so a reader that is in the middle of a call goes on with the
// list, and the entries, that it took. The mutex guards that swap and nothing else: no entry is destroyed under it,
// hence no Python code runs and the GIL is not taken while it is held. It is a leaf in the lock order.
//
// `Entry` has a public `std::atomic<uint64_t> last_used`.
//
// Threads:   thread-safe.
// Ownership: shared; what Insert() and Clear() drop is returned, so that the caller chooses where it dies.
template <typename Entry>
class PlanCache {
 public:
  using EntryPtr = std::shared_ptr<Entry>;
  using List = std::vector<EntryPtr>;

  explicit PlanCache(size_t capacity) : capacity_(capacity), list_(std::make_shared<const List>()) {}
  PlanCache(const PlanCache&) = delete;
  PlanCache& operator=(const PlanCache&) = delete;

  std::shared_ptr<const List> Snapshot() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return list_;
  }

  // Where in a snapshot the entry stands that was used last; may be out of range after a concurrent change.
  size_t most_recent() const { return most_recent_.load(std::memory_order_relaxed); }

  void Touch(const EntryPtr& entry, size_t index) {
    // Relaxed: a lost update costs a worse choice of victim, nothing else.
    entry->last_used.store(clock_.fetch_add(1, std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    if (most_recent_.load(std::memory_order_relaxed) != index) most_recent_.store(index, std::memory_order_relaxed);
  }

  // Returns what had to go.
  [[nodiscard]] List Insert(EntryPtr entry) {
    List dropped;
    auto next = std::make_shared<List>();
    std::shared_ptr<const List> old;
    const std::lock_guard<std::mutex> lock(mutex_);
    *next = *list_;
    while (next->size() >= capacity_ && !next->empty()) {
      auto victim = next->begin();
      for (auto it = next->begin(); it != next->end(); ++it) {
        if ((*it)->last_used.load(std::memory_order_relaxed) < (*victim)->last_used.load(std::memory_order_relaxed)) {
          victim = it;
        }
      }
      dropped.push_back(std::move(*victim));
      next->erase(victim);
    }
    entry->last_used.store(clock_.fetch_add(1, std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    next->push_back(std::move(entry));
    most_recent_.store(next->size() - 1, std::memory_order_relaxed);
    // `old` may be the last owner of the list but never of an entry: `next` and `dropped` hold them all.
    old = std::exchange(list_, std::move(next));
    return dropped;
  }

  // Takes one entry out; the caller holds it. Without effect if it is not there any more.
  void Remove(const Entry* entry) {
    auto next = std::make_shared<List>();
    std::shared_ptr<const List> old;
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const EntryPtr& kept : *list_) {
      if (kept.get() != entry) next->push_back(kept);
    }
    old = std::exchange(list_, std::move(next));
  }

  // Puts an entry in the place of another; the caller holds both. Without effect if that one is not there any more.
  void Replace(const Entry* before, const EntryPtr& after) {
    auto next = std::make_shared<List>();
    std::shared_ptr<const List> old;
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const EntryPtr& kept : *list_) next->push_back(kept.get() == before ? after : kept);
    old = std::exchange(list_, std::move(next));
  }

  // Removes everything; returns it.
  [[nodiscard]] std::shared_ptr<const List> Clear() {
    auto empty = std::make_shared<const List>();
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(list_, std::move(empty));
  }

  size_t size() const { return Snapshot()->size(); }
  size_t capacity() const { return capacity_; }

 private:
  const size_t capacity_;
  mutable std::mutex mutex_;
  std::shared_ptr<const List> list_;  // guarded by mutex_
  std::atomic<size_t> most_recent_{0};
  std::atomic<uint64_t> clock_{0};
};

}  // namespace cuvil::agent
