#include "scheduler/cupti_session.h"

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <new>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "scheduler/cupti_records.h"
#include "scheduler/monotonic_clock.h"

namespace cuvil::scheduler {
namespace {

// External correlation comes first, so that no kernel is recorded without it. Kernels of any concurrency, because the
// older kind makes them run one after the other.
constexpr CuptiActivityKind kKinds[] = {CuptiActivityKind::kExternalCorrelation,
                                        CuptiActivityKind::kDriver,
                                        CuptiActivityKind::kRuntime,
                                        CuptiActivityKind::kConcurrentKernel,
                                        CuptiActivityKind::kMemcpy,
                                        CuptiActivityKind::kMemcpyPeer,
                                        CuptiActivityKind::kMemset};

constexpr size_t kBufferAlignment = 64;
constexpr int kClockReadings = 16;

// Memory for records: a head, and behind it what CUPTI writes to.
struct alignas(kBufferAlignment) Buffer {
  Buffer* next = nullptr;
  size_t valid_bytes = 0;
  uint8_t* data() { return reinterpret_cast<uint8_t*>(this + 1); }
};

// CUPTI's buffer callbacks have no argument of ours, and may come at any time: this outlives every session, and has
// nothing to destroy.
struct BufferPool {
  std::mutex mutex;               // of all below
  const CuptiApi* api = nullptr;  // null: no session
  size_t buffer_bytes = 0, room_bytes = 0;
  Buffer* lent = nullptr;    // CUPTI writes to these
  Buffer* filled = nullptr;  // newest first
  uint64_t num_dropped = 0;

  void Free(Buffer* list) {
    while (list != nullptr) std::free(std::exchange(list, list->next));
  }
};

constinit BufferPool the_pool;
static_assert(std::is_trivially_destructible_v<BufferPool>);

void OnBufferRequested(uint8_t** buffer, size_t* size_bytes, size_t* max_records) noexcept {
  *buffer = nullptr;
  *size_bytes = 0;
  *max_records = 0;  // as many as fit
  BufferPool& pool = the_pool;
  const std::lock_guard<std::mutex> lock(pool.mutex);
  if (pool.api == nullptr || pool.room_bytes < pool.buffer_bytes) return;
  void* memory = std::aligned_alloc(kBufferAlignment, sizeof(Buffer) + pool.buffer_bytes);
  if (memory == nullptr) return;
  pool.room_bytes -= pool.buffer_bytes;
  auto* made = ::new (memory) Buffer;
  made->next = std::exchange(pool.lent, made);
  *buffer = made->data();
  *size_bytes = pool.buffer_bytes;
}

void OnBufferCompleted(void* context, uint32_t stream_id, uint8_t* data, size_t, size_t valid_bytes) noexcept {
  BufferPool& pool = the_pool;
  const std::lock_guard<std::mutex> lock(pool.mutex);
  for (Buffer** place = &pool.lent; *place != nullptr; place = &(*place)->next) {
    Buffer* buffer = *place;
    if (buffer->data() != data) continue;
    *place = buffer->next;
    if (pool.api == nullptr) {
      std::free(buffer);
      return;
    }
    buffer->valid_bytes = std::min(valid_bytes, pool.buffer_bytes);
    buffer->next = std::exchange(pool.filled, buffer);
    size_t dropped = 0;
    if (pool.api->cuptiActivityGetNumDroppedRecords(context, stream_id, &dropped) == 0) pool.num_dropped += dropped;
    return;
  }
  // Another tool's, whose callbacks were here before ours: not ours to free.
}

// What CollectClones of this thread collects to; null: nobody asks.
struct CloneList {
  std::vector<CuptiSession::Clone>* clones;  // reserved: a callback may not allocate
  const CuptiApi* api;
};
thread_local constinit CloneList* collecting = nullptr;

void OnResource(void*, int domain, uint32_t callback_id, const void* data) noexcept {
  if (domain != kCuptiResourceDomain || callback_id != kCuptiGraphNodeCloned || collecting == nullptr) return;
  const CuptiGraphData* graph = static_cast<const CuptiResourceData*>(data)->graph_data;
  std::vector<CuptiSession::Clone>& clones = *collecting->clones;
  if (graph == nullptr || clones.size() == clones.capacity()) return;
  CuptiSession::Clone clone;
  clone.original = graph->original_node;
  if (collecting->api->cuptiGetGraphNodeId(graph->node, &clone.id) != 0) return;
  if (collecting->api->cuptiGetGraphNodeId(graph->original_node, &clone.original_id) != 0) clone.original_id = 0;
  clones.push_back(clone);
}

absl::Status Earlier(absl::Status first, const absl::Status& second) { return first.ok() ? second : first; }

}  // namespace

uint64_t CuptiClock::ToMonotonicNs(uint64_t cupti) const {
  const auto offset = [](const Reading& reading) {
    return static_cast<int64_t>(reading.monotonic_ns) - static_cast<int64_t>(reading.cupti);
  };
  int64_t shift = offset(first);
  if (last.cupti > first.cupti) {
    const double share =
        (static_cast<double>(cupti) - static_cast<double>(first.cupti)) / static_cast<double>(last.cupti - first.cupti);
    shift += static_cast<int64_t>(share * static_cast<double>(offset(last) - offset(first)));
  }
  return static_cast<uint64_t>(static_cast<int64_t>(cupti) + shift);
}

CuptiClock::Reading CuptiClock::Read(const CuptiApi& api) {
  Reading best;
  uint64_t shortest = ~uint64_t{0};
  for (int i = 0; i < kClockReadings; ++i) {
    uint64_t cupti = 0;
    const uint64_t before = MonotonicNs();
    if (api.cuptiGetTimestamp(&cupti) != 0) return Reading();
    const uint64_t after = MonotonicNs();
    if (after - before >= shortest) continue;
    shortest = after - before;
    best = {cupti, before + shortest / 2};
  }
  return best;
}

absl::StatusOr<std::unique_ptr<CuptiSession>> CuptiSession::Attach(const CuptiApi& api, Limits limits) {
  std::unique_ptr<CuptiSession> session(new CuptiSession(api));  // NOLINT: the constructor is private
  session->ended_ = true;
  // Before anything else, because it tells whether somebody was here first.
  void* subscriber = nullptr;
  const int subscribed = api.cuptiSubscribe(&subscriber, OnResource, nullptr);
  if (subscribed == kCuptiMultipleSubscribers) {
    return absl::FailedPreconditionError("another tool holds CUPTI (a profiler or a debugger)");
  }
  if (absl::Status s = api.ToStatus("cuptiSubscribe", subscribed); !s.ok()) return s;
  api.cuptiUnsubscribe(subscriber);
  BufferPool& pool = the_pool;
  {
    const std::lock_guard<std::mutex> lock(pool.mutex);
    pool.api = &api;
    pool.buffer_bytes = limits.buffer_bytes;
    pool.room_bytes = limits.max_bytes;
    pool.num_dropped = 0;
  }
  session->ended_ = false;
  if (absl::Status s = session->Enable(); !s.ok()) {
    static_cast<void>(session->Disable());
    session->Abandon([](absl::Span<const CuptiBufferView>, const CuptiBufferCounts&) {});
    return s;
  }
  session->clock_.first = CuptiClock::Read(api);
  session->correlating_.store(true, std::memory_order_relaxed);
  return session;
}

CuptiSession::~CuptiSession() {
  if (!ended_) Abandon([](absl::Span<const CuptiBufferView>, const CuptiBufferCounts&) {});
}

absl::Status CuptiSession::Enable() {
  const int registered = api_.cuptiActivityRegisterCallbacks(OnBufferRequested, OnBufferCompleted);
  if (absl::Status s = api_.ToStatus("cuptiActivityRegisterCallbacks", registered); !s.ok()) return s;
  for (const CuptiActivityKind kind : kKinds) {
    const int number = static_cast<int>(kind);
    if (absl::Status s = api_.ToStatus("cuptiActivityEnable", api_.cuptiActivityEnable(number)); !s.ok()) return s;
    enabled_kinds_.push_back(number);
  }
  return absl::OkStatus();
}

absl::Status CuptiSession::Disable() {
  absl::Status status;
  for (; !enabled_kinds_.empty(); enabled_kinds_.pop_back()) {
    const int result = api_.cuptiActivityDisable(enabled_kinds_.back());
    status = Earlier(std::move(status), api_.ToStatus("cuptiActivityDisable", result));
  }
  return status;
}

bool CuptiSession::Push(uint64_t id) noexcept {
  if (!correlating_.load(std::memory_order_relaxed)) return false;
  const std::shared_lock<std::shared_mutex> lock(gate_);
  return correlating_.load(std::memory_order_relaxed) &&
         api_.cuptiActivityPushExternalCorrelationId(kCuptiOwnCorrelation, id) == 0;
}

bool CuptiSession::Pop() noexcept {
  if (!correlating_.load(std::memory_order_relaxed)) return false;
  const std::shared_lock<std::shared_mutex> lock(gate_);
  if (!correlating_.load(std::memory_order_relaxed)) return false;
  uint64_t id = 0;
  return api_.cuptiActivityPopExternalCorrelationId(kCuptiOwnCorrelation, &id) == 0;
}

void CuptiSession::StopCorrelation() {
  const std::unique_lock<std::shared_mutex> lock(gate_);
  correlating_.store(false, std::memory_order_relaxed);
}

void CuptiSession::AfterForkInChild() {
  correlating_.store(false, std::memory_order_relaxed);
  ended_ = true;
}

std::vector<CuptiSession::Clone> CuptiSession::CollectClones(size_t max_clones, absl::FunctionRef<void()> instantiate) {
  std::vector<Clone> clones;
  clones.reserve(max_clones);
  CloneList list{&clones, &api_};
  void* subscriber = nullptr;
  const bool subscribed = api_.cuptiSubscribe(&subscriber, OnResource, nullptr) == 0;
  if (subscribed) api_.cuptiEnableCallback(1, subscriber, kCuptiResourceDomain, kCuptiGraphNodeCloned);
  collecting = &list;
  instantiate();
  collecting = nullptr;
  if (subscribed) api_.cuptiUnsubscribe(subscriber);
  return clones;
}

absl::Status CuptiSession::Stop(
    absl::FunctionRef<void(absl::Span<const CuptiBufferView>, const CuptiBufferCounts&)> read) {
  if (ended_) return absl::FailedPreconditionError("the session has ended");
  absl::Status status = Disable();
  const int flushed = api_.cuptiActivityFlushAll(kCuptiFlushForced);
  status = Earlier(std::move(status), api_.ToStatus("cuptiActivityFlushAll", flushed));
  Abandon(read);
  return status;
}

void CuptiSession::Abandon(absl::FunctionRef<void(absl::Span<const CuptiBufferView>, const CuptiBufferCounts&)> read) {
  StopCorrelation();
  clock_.last = CuptiClock::Read(api_);
  size_t dropped = 0;  // for want of a buffer
  if (api_.cuptiActivityGetNumDroppedRecords(nullptr, 0, &dropped) != 0) dropped = 0;
  Buffer* filled = nullptr;
  CuptiBufferCounts counts;
  BufferPool& pool = the_pool;
  {
    const std::lock_guard<std::mutex> lock(pool.mutex);
    filled = std::exchange(pool.filled, nullptr);
    counts.dropped = pool.num_dropped + dropped;
    for (const Buffer* buffer = pool.lent; buffer != nullptr; buffer = buffer->next) ++counts.missing;
    pool.api = nullptr;
  }
  std::vector<CuptiBufferView> views;
  for (Buffer* buffer = filled; buffer != nullptr; buffer = buffer->next) {
    views.emplace_back(buffer->data(), buffer->valid_bytes);
  }
  std::reverse(views.begin(), views.end());
  read(views, counts);
  pool.Free(filled);
  ended_ = true;
}

}  // namespace cuvil::scheduler
