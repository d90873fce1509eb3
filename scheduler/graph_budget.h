// How much memory the CUDA graphs of one device hold, against a limit, and whose graph goes when another needs room.
//
// Graphs of one model share a pool of memory (graph_arena.h). What a graph holds for itself, the copies of its inputs
// and the results that it keeps, goes back to the pool with it; the pool's memory, in which all graphs of the model do
// their work, goes back to the device with the last of them. So a graph of the same model makes room inside of the
// pool, and other models make room as a whole. The least recently used goes first, a model being as recent as its most
// recently used graph.
//
// What a model's pool had when the model's last graph died is torch's cache then: it counts as cached until torch has
// emptied its caches.
//
// This is bookkeeping: bytes come from whoever asks torch, and graphs are given up by their holders.
//
// Threads:   thread-safe. The mutex is held while holders are asked for their graphs, which take their own lock only;
//            no graph dies under it. Touch() is one relaxed store.
// Ownership: entries and accounts are borrowed: they leave when they die. The budget outlives them.
// Source:    docs/design/0012-graph-memory.md
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace cuvil::scheduler {

// CLOCK_MONOTONIC_COARSE: a few nanoseconds to read, and good to some milliseconds. Between captures, which take as
// long, no order is needed.
uint64_t CoarseNs();

// What the device can still give, as torch's allocator sees it.
struct DeviceRoom {
  uint64_t free_bytes = 0;   // of the device, and of what this process may have of it
  uint64_t total_bytes = 0;  // of the device
};

class GraphBudget {
 public:
  // Has a graph and can do without.
  //
  // Threads: GiveUpGraph is called under the budget's lock, on any thread, without the GIL.
  class Holder {
   public:
    virtual ~Holder() = default;
    // The graph, which dies at the caller's; null if there is none any more.
    virtual std::shared_ptr<void> GiveUpGraph() = 0;
  };

  // The memory of one arena. Lives as long as the arena.
  class Account {
   public:
    explicit Account(GraphBudget& budget);
    ~Account();
    Account(const Account&) = delete;
    Account& operator=(const Account&) = delete;
    // What its pool has of the device, and what its workspaces are.
    void Set(uint64_t pool_bytes, uint64_t workspace_bytes);
    uint64_t pool_bytes() const;

   private:
    friend class GraphBudget;
    GraphBudget& budget_;
    uint64_t pool_bytes_ = 0;       // under the budget's lock, as all below
    uint64_t workspace_bytes_ = 0;  // the stream's, which outlives the arena
  };

  // One graph. Lives as long as the graph, which has nothing in flight when it dies.
  class Entry {
   public:
    // `own_bytes` of the account's pool are the graph's alone.
    Entry(Account& account, uint64_t own_bytes);
    ~Entry();
    Entry(const Entry&) = delete;
    Entry& operator=(const Entry&) = delete;

    // The graph is used. Any thread, no lock.
    void Touch(uint64_t now_ns) { last_used_ns_.store(now_ns, std::memory_order_relaxed); }
    uint64_t own_bytes() const { return own_bytes_; }
    // From now on the graph can be given up. `holder` calls Forget() before it dies.
    void SetHolder(Holder* holder);

   private:
    friend class GraphBudget;
    Account& account_;
    const uint64_t own_bytes_;
    // Relaxed: it orders nothing, and an old value makes a worse choice and nothing else.
    std::atomic<uint64_t> last_used_ns_;
    Holder* holder_ = nullptr;  // under the budget's lock
    std::list<Entry*>::iterator place_;
  };

  // Graphs that were given up: they die with it, which waits for the device. Without locks, without the GIL.
  using GivenUp = std::vector<std::shared_ptr<void>>;

  // Room that a capture may fill; it counts as used until it dies.
  class Reservation {
   public:
    Reservation() = default;
    Reservation(Reservation&& other) noexcept
        : budget_(std::exchange(other.budget_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
    Reservation& operator=(Reservation&& other) noexcept {
      std::swap(budget_, other.budget_);
      std::swap(bytes_, other.bytes_);
      return *this;
    }
    ~Reservation();
    uint64_t bytes() const { return bytes_; }

   private:
    friend class GraphBudget;
    Reservation(GraphBudget* budget, uint64_t bytes) : budget_(budget), bytes_(bytes) {}
    GraphBudget* budget_ = nullptr;
    uint64_t bytes_ = 0;
  };

  enum class Verdict {
    kAdmitted,
    kTooBig,  // it would not fit if it were alone
    kLater,   // the device is short of memory that is not ours to give
  };
  struct Admission {
    Verdict verdict = Verdict::kAdmitted;
    std::string reason;  // of a refusal, a sentence
    Reservation reservation;
    GivenUp given_up;
    // The asking account has lost all its graphs: a new arena has the room, the old one would keep its pool.
    bool arena_is_empty = false;
  };

  explicit GraphBudget(uint64_t limit_bytes = ~uint64_t{0}) : limit_bytes_(limit_bytes) {}
  GraphBudget(const GraphBudget&) = delete;
  GraphBudget& operator=(const GraphBudget&) = delete;

  void SetLimit(uint64_t bytes);

  // May a graph be captured that needs so much? `account` is its arena's; null for a model without one. Nothing is
  // given up for a graph that is refused.
  Admission Admit(const Account* account, uint64_t need_bytes, const DeviceRoom& room);

  // What a graph of the account, with so many bytes of its own, has been seen to need at most: all of the pool but what
  // is others' own. No more than could be granted, since a part of it may be torn up into pieces that nobody can use.
  uint64_t NeedAtMost(const Account& account, uint64_t own_bytes) const;

  // After a capture that took more than was thought: gives up others until the limit holds, and the account's own
  // graphs, the new one with them, if that is not enough. True in `arena_is_empty` then.
  Admission Settle(const Account& account);

  // Gives up every graph of the device.
  GivenUp GiveUpAll();
  // A pool without an account of its own, which is about to die, has so much.
  void AddCached(uint64_t bytes);
  // Torch has given its caches back to the device.
  void CachesAreEmpty();
  // Whether torch's caches have to be emptied so that the limit holds, or so that the device has `need_bytes` and its
  // headroom.
  bool WantsEmptyCaches(uint64_t need_bytes, const DeviceRoom& room) const;
  // The holder is about to die.
  void Forget(Holder* holder);

  struct Usage {
    uint64_t limit_bytes = 0;
    uint64_t pool_bytes = 0;
    uint64_t workspace_bytes = 0;
    uint64_t reserved_bytes = 0;  // for captures under way
    uint64_t cached_bytes = 0;    // of pools that are gone, if torch has not given them back by itself
    uint64_t num_graphs = 0;
    uint64_t num_given_up = 0;  // ever
    uint64_t used_bytes() const { return pool_bytes + workspace_bytes + reserved_bytes; }
  };
  Usage usage() const;

  // What is left to eager and to other threads when the device is nearly full: a capture keeps torch from giving its
  // caches back meanwhile.
  static uint64_t HeadroomBytes(const DeviceRoom& room) { return room.total_bytes / 64; }

 private:
  struct Choice {
    std::vector<Entry*> entries;
    uint64_t growth_bytes = 0;  // of the account's pool, or of a new one
    bool enough = false;
    bool arena_is_empty = false;
  };
  // Which graphs have to go, the least recently used first, so that `need_bytes` more fit. Changes nothing.
  Choice Choose(const Account* account, uint64_t need_bytes, const DeviceRoom* room) const;
  void GiveUp(const std::vector<Entry*>& entries, GivenUp* given_up);
  uint64_t UsedBytes() const;
  uint64_t OwnBytes(const Account* account) const;

  mutable std::mutex mutex_;
  uint64_t limit_bytes_;
  uint64_t reserved_bytes_ = 0;
  uint64_t num_given_up_ = 0;
  uint64_t cached_bytes_ = 0;
  std::list<Entry*> entries_;
  std::list<Account*> accounts_;
  // Workspaces stay with their streams when an arena is gone: the most that arenas have had at one time.
  uint64_t workspace_bytes_ = 0;
};

}  // namespace cuvil::scheduler
