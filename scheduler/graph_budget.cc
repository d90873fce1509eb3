#include "scheduler/graph_budget.h"

#include <time.h>

#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"

namespace cuvil::scheduler {
namespace {

std::string Mebibytes(uint64_t bytes) { return absl::StrCat((bytes + (uint64_t{1} << 19)) >> 20, " MiB"); }

}  // namespace

uint64_t CoarseNs() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
}

GraphBudget::Account::Account(GraphBudget& budget) : budget_(budget) {
  const std::lock_guard<std::mutex> lock(budget_.mutex_);
  budget_.accounts_.push_back(this);
}

GraphBudget::Account::~Account() {
  const std::lock_guard<std::mutex> lock(budget_.mutex_);
  budget_.accounts_.remove(this);
  budget_.cached_bytes_ += pool_bytes_;
}

void GraphBudget::Account::Set(uint64_t pool_bytes, uint64_t workspace_bytes) {
  const std::lock_guard<std::mutex> lock(budget_.mutex_);
  pool_bytes_ = pool_bytes;
  workspace_bytes_ = workspace_bytes;
  uint64_t workspaces = 0;
  for (const Account* account : budget_.accounts_) workspaces += account->workspace_bytes_;
  budget_.workspace_bytes_ = std::max(budget_.workspace_bytes_, workspaces);
}

uint64_t GraphBudget::Account::pool_bytes() const {
  const std::lock_guard<std::mutex> lock(budget_.mutex_);
  return pool_bytes_;
}

GraphBudget::Entry::Entry(Account& account, uint64_t own_bytes)
    : account_(account), own_bytes_(own_bytes), last_used_ns_(CoarseNs()) {
  GraphBudget& budget = account_.budget_;
  const std::lock_guard<std::mutex> lock(budget.mutex_);
  place_ = budget.entries_.insert(budget.entries_.end(), this);
}

GraphBudget::Entry::~Entry() {
  GraphBudget& budget = account_.budget_;
  const std::lock_guard<std::mutex> lock(budget.mutex_);
  budget.entries_.erase(place_);
}

void GraphBudget::Entry::SetHolder(Holder* holder) {
  const std::lock_guard<std::mutex> lock(account_.budget_.mutex_);
  holder_ = holder;
}

GraphBudget::Reservation::~Reservation() {
  if (budget_ == nullptr) return;
  const std::lock_guard<std::mutex> lock(budget_->mutex_);
  budget_->reserved_bytes_ -= bytes_;
}

void GraphBudget::SetLimit(uint64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  limit_bytes_ = bytes;
}

uint64_t GraphBudget::UsedBytes() const {
  uint64_t bytes = workspace_bytes_ + reserved_bytes_;
  for (const Account* account : accounts_) bytes += account->pool_bytes_;
  return bytes;
}

uint64_t GraphBudget::OwnBytes(const Account* account) const {
  uint64_t bytes = 0;
  for (const Entry* entry : entries_) bytes += &entry->account_ == account ? entry->own_bytes_ : 0;
  return bytes;
}

GraphBudget::Choice GraphBudget::Choose(const Account* account, uint64_t need_bytes, const DeviceRoom* room) const {
  struct Candidate {
    uint64_t last_used_ns = 0;
    const Account* account = nullptr;
    std::vector<Entry*> entries;
    bool is_whole_arena = false;
  };
  std::vector<Candidate> candidates;
  std::map<const Account*, Candidate> arenas;
  uint64_t num_own = 0;
  for (Entry* entry : entries_) {
    // A graph that is not published yet, or that has been given up and is about to die, is nobody's to give.
    if (entry->holder_ == nullptr) continue;
    const uint64_t used_ns = entry->last_used_ns_.load(std::memory_order_relaxed);
    if (&entry->account_ == account) {
      candidates.push_back({used_ns, account, {entry}, false});
      ++num_own;
      continue;
    }
    Candidate& arena = arenas[&entry->account_];
    arena.account = &entry->account_;
    arena.is_whole_arena = true;
    arena.last_used_ns = std::max(arena.last_used_ns, used_ns);
    arena.entries.push_back(entry);
  }
  for (auto& [key, arena] : arenas) candidates.push_back(std::move(arena));
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const Candidate& a, const Candidate& b) { return a.last_used_ns < b.last_used_ns; });

  uint64_t used = UsedBytes();
  uint64_t free_in_device = room == nullptr ? ~uint64_t{0} : room->free_bytes;
  const uint64_t headroom = room == nullptr ? 0 : HeadroomBytes(*room);
  const uint64_t own = OwnBytes(account);
  uint64_t pool = account == nullptr ? 0 : account->pool_bytes_;
  uint64_t free_in_pool = pool > own ? pool - own : 0;
  Choice choice;
  const auto enough = [&] {
    const uint64_t growth = need_bytes > free_in_pool ? need_bytes - free_in_pool : 0;
    choice.growth_bytes = growth;
    const bool fits = used <= limit_bytes_ && growth <= limit_bytes_ - used;
    // A graph that fits into memory that the pool has already asks nothing of the device.
    const bool is_there = growth == 0 || room == nullptr || growth + headroom <= free_in_device;
    return fits && is_there;
  };
  choice.enough = enough();
  for (const Candidate& candidate : candidates) {
    if (choice.enough) break;
    choice.entries.insert(choice.entries.end(), candidate.entries.begin(), candidate.entries.end());
    if (candidate.is_whole_arena) {
      used -= candidate.account->pool_bytes_;
      free_in_device += room == nullptr ? 0 : candidate.account->pool_bytes_;
    } else if (--num_own == 0) {
      used -= pool;
      free_in_device += room == nullptr ? 0 : pool;
      free_in_pool = pool = 0;
      choice.arena_is_empty = true;
    } else {
      free_in_pool += candidate.entries.front()->own_bytes_;
    }
    choice.enough = enough();
  }
  return choice;
}

void GraphBudget::GiveUp(const std::vector<Entry*>& entries, GivenUp* given_up) {
  for (Entry* entry : entries) {
    Holder* holder = std::exchange(entry->holder_, nullptr);
    if (holder == nullptr) continue;
    std::shared_ptr<void> graph = holder->GiveUpGraph();
    if (graph == nullptr) continue;
    ++num_given_up_;
    given_up->push_back(std::move(graph));
  }
}

GraphBudget::Admission GraphBudget::Admit(const Account* account, uint64_t need_bytes, const DeviceRoom& room) {
  Admission admission;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (need_bytes > limit_bytes_ || workspace_bytes_ > limit_bytes_ - need_bytes) {
    admission.verdict = Verdict::kTooBig;
    admission.reason =
        absl::StrCat("the graph needs about ", Mebibytes(need_bytes), " and ", Mebibytes(workspace_bytes_),
                     " of workspaces, more than the budget of ", Mebibytes(limit_bytes_), " (CUVIL_GRAPH_MEMORY)");
    return admission;
  }
  const Choice choice = Choose(account, need_bytes, &room);
  if (!choice.enough) {
    admission.verdict = Verdict::kLater;
    admission.reason =
        absl::StrCat("the graph needs about ", Mebibytes(need_bytes), "; the device has ", Mebibytes(room.free_bytes),
                     " free, of which ", Mebibytes(HeadroomBytes(room)), " are left to others");
    return admission;
  }
  GiveUp(choice.entries, &admission.given_up);
  admission.arena_is_empty = choice.arena_is_empty;
  reserved_bytes_ += choice.growth_bytes;
  admission.reservation = Reservation(this, choice.growth_bytes);
  return admission;
}

uint64_t GraphBudget::NeedAtMost(const Account& account, uint64_t own_bytes) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t all = OwnBytes(&account);
  const uint64_t others = all > own_bytes ? all - own_bytes : 0;
  const uint64_t most = account.pool_bytes_ > others ? account.pool_bytes_ - others : 0;
  return std::min(most, limit_bytes_ > workspace_bytes_ ? limit_bytes_ - workspace_bytes_ : 0);
}

GraphBudget::Admission GraphBudget::Settle(const Account& account) {
  Admission admission;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (UsedBytes() <= limit_bytes_) return admission;
  // Others first: of its own graphs' giving up the pool would not become smaller.
  std::vector<Entry*> others, own;
  uint64_t others_bytes = 0;
  std::set<const Account*> counted;
  for (Entry* entry : entries_) {
    if (entry->holder_ == nullptr) continue;
    if (&entry->account_ == &account) {
      own.push_back(entry);
    } else {
      others.push_back(entry);
      if (counted.insert(&entry->account_).second) others_bytes += entry->account_.pool_bytes_;
    }
  }
  if (UsedBytes() - others_bytes > limit_bytes_) {
    admission.arena_is_empty = true;
    admission.reason = absl::StrCat("the graphs of this model hold ", Mebibytes(account.pool_bytes_),
                                    ", more than the budget of ", Mebibytes(limit_bytes_), " (CUVIL_GRAPH_MEMORY)");
    GiveUp(own, &admission.given_up);
    return admission;
  }
  std::stable_sort(others.begin(), others.end(), [](const Entry* a, const Entry* b) {
    return a->last_used_ns_.load(std::memory_order_relaxed) < b->last_used_ns_.load(std::memory_order_relaxed);
  });
  // Whole arenas, in the order of their most recent use: the position of their last entry.
  std::map<const Account*, std::vector<Entry*>> by_arena;
  std::vector<const Account*> order;
  for (Entry* entry : others) {
    std::erase(order, &entry->account_);
    order.push_back(&entry->account_);
    by_arena[&entry->account_].push_back(entry);
  }
  uint64_t used = UsedBytes();
  for (const Account* arena : order) {
    if (used <= limit_bytes_) break;
    used -= arena->pool_bytes_;
    GiveUp(by_arena[arena], &admission.given_up);
  }
  return admission;
}

GraphBudget::GivenUp GraphBudget::GiveUpAll() {
  GivenUp given_up;
  const std::lock_guard<std::mutex> lock(mutex_);
  GiveUp(std::vector<Entry*>(entries_.begin(), entries_.end()), &given_up);
  return given_up;
}

void GraphBudget::AddCached(uint64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  cached_bytes_ += bytes;
}

void GraphBudget::CachesAreEmpty() {
  const std::lock_guard<std::mutex> lock(mutex_);
  cached_bytes_ = 0;
}

bool GraphBudget::WantsEmptyCaches(uint64_t need_bytes, const DeviceRoom& room) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (cached_bytes_ == 0) return false;
  const uint64_t used = UsedBytes() + cached_bytes_;
  return used > limit_bytes_ || need_bytes > limit_bytes_ - used || need_bytes + HeadroomBytes(room) > room.free_bytes;
}

void GraphBudget::Forget(Holder* holder) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (Entry* entry : entries_) {
    if (entry->holder_ == holder) entry->holder_ = nullptr;
  }
}

GraphBudget::Usage GraphBudget::usage() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  Usage usage;
  usage.limit_bytes = limit_bytes_;
  usage.workspace_bytes = workspace_bytes_;
  usage.reserved_bytes = reserved_bytes_;
  usage.cached_bytes = cached_bytes_;
  usage.num_graphs = entries_.size();
  usage.num_given_up = num_given_up_;
  for (const Account* account : accounts_) usage.pool_bytes += account->pool_bytes_;
  return usage;
}

}  // namespace cuvil::scheduler
