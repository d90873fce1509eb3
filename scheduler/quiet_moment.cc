#include "scheduler/quiet_moment.h"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <ctime>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "scheduler/cupti_records.h"
#include "scheduler/monotonic_clock.h"

namespace cuvil::scheduler {
namespace {

// An idle device is waited for in 10 µs (H200), and one that is kept busy by small kernels in more than that.
constexpr uint64_t kIdleWaitNs = 100'000;
constexpr int kIdleWaits = 3;
constexpr int64_t kClockDifferenceNs = 1'000'000'000;

// Entries of CUDA calls by others than the thread that waits here. Callbacks may come late: this is never destroyed.
std::atomic<uint64_t> num_calls{0};
thread_local constinit bool waits_here = false;

void OnCall(void*, int domain, uint32_t, const void* data) noexcept {
  if ((domain != kCuptiDriverDomain && domain != kCuptiRuntimeDomain) || waits_here) return;
  if (*static_cast<const int*>(data) == kCuptiApiEnter) num_calls.fetch_add(1, std::memory_order_seq_cst);
}

// Waits for the device and says how long it took to find it idle: on a thread of its own, which goes on when the limit
// is over.
absl::StatusOr<uint64_t> WaitForDevice(const SynchronizeFunction& synchronize, std::chrono::milliseconds limit) {
  struct State {
    std::mutex mutex;
    std::condition_variable ended;
    bool done = false;
    uint64_t waited_ns = 0;
    // Not a Status: ThreadSanitizer does not see how abseil's counts its owners.
    absl::StatusCode code = absl::StatusCode::kOk;
    std::string message;
  };
  const auto state = std::make_shared<State>();
  std::thread([state, synchronize] {
    waits_here = true;
    absl::Status status = synchronize();
    // Again, without what the driver does once for each thread.
    const uint64_t start_ns = MonotonicNs();
    if (status.ok()) status = synchronize();
    const uint64_t waited_ns = MonotonicNs() - start_ns;
    const std::lock_guard<std::mutex> lock(state->mutex);
    state->waited_ns = waited_ns;
    state->code = status.code();
    state->message = std::string(status.message());
    state->done = true;
    state->ended.notify_all();
  }).detach();
  std::unique_lock<std::mutex> lock(state->mutex);
  if (!state->ended.wait_for(lock, limit, [&] { return state->done; })) {
    return absl::UnavailableError("the device has more work than could be waited for");
  }
  if (state->code != absl::StatusCode::kOk) return absl::Status(state->code, state->message);
  return state->waited_ns;
}

absl::Status FindIdleDevice(const SynchronizeFunction& synchronize, const QuietMomentOptions& options) {
  int num_idle = 0;
  for (int round = 0; round < options.num_rounds; ++round) {
    // Whoever was in the middle of a call, or between two calls of one operator, has come to its end after this.
    std::this_thread::sleep_for(options.quiet);
    const auto waited_ns = WaitForDevice(synchronize, options.wait_limit);
    if (!waited_ns.ok()) return waited_ns.status();
    num_idle = *waited_ns < kIdleWaitNs ? num_idle + 1 : 0;
    if (num_idle == kIdleWaits) return absl::OkStatus();
  }
  return absl::UnavailableError("other threads keep using the device");
}

// OK at a moment when no call has been entered since `options.quiet` and the device is idle.
absl::Status FindMomentWithoutCalls(const SynchronizeFunction& synchronize, const QuietMomentOptions& options) {
  for (int round = 0; round < options.num_rounds; ++round) {
    const uint64_t before = num_calls.load();
    std::this_thread::sleep_for(options.quiet);
    if (num_calls.load() != before) continue;
    const auto waited_ns = WaitForDevice(synchronize, options.wait_limit);
    if (!waited_ns.ok()) return waited_ns.status();
    if (num_calls.load() == before) return absl::OkStatus();
  }
  return absl::UnavailableError("other threads keep using the device");
}

}  // namespace

absl::Status AtQuietMoment(const CuptiApi& api, const SynchronizeFunction& synchronize,
                           absl::FunctionRef<absl::Status()> action, const QuietMomentOptions& options) {
  if (absl::Status s = FindIdleDevice(synchronize, options); !s.ok()) return s;
  void* subscriber = nullptr;
  const int subscribed = api.cuptiSubscribe(&subscriber, OnCall, nullptr);
  if (subscribed == kCuptiMultipleSubscribers) {
    if (TorchLeftCupti(api)) return action();
    return absl::FailedPreconditionError("another tool holds CUPTI (a profiler or a debugger)");
  }
  if (absl::Status s = api.ToStatus("cuptiSubscribe", subscribed); !s.ok()) return s;
  absl::Status status;
  for (const int domain : {kCuptiDriverDomain, kCuptiRuntimeDomain}) {
    if (status.ok()) status = api.ToStatus("cuptiEnableDomain", api.cuptiEnableDomain(1, subscriber, domain));
  }
  if (status.ok()) status = FindMomentWithoutCalls(synchronize, options);
  api.cuptiUnsubscribe(subscriber);
  return status.ok() ? action() : status;
}

absl::Status AtIdleMoment(const SynchronizeFunction& synchronize, absl::FunctionRef<absl::Status()> action,
                          const QuietMomentOptions& options) {
  const absl::Status status = FindIdleDevice(synchronize, options);
  return status.ok() ? action() : status;
}

bool TorchLeftCupti(const CuptiApi& api) {
  uint64_t cupti = 0;
  timespec now{};
  if (api.cuptiGetTimestamp(&cupti) != 0 || clock_gettime(CLOCK_REALTIME, &now) != 0) return false;
  const int64_t real_time_ns = static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
  const int64_t difference = static_cast<int64_t>(cupti) - real_time_ns;
  return difference > kClockDifferenceNs || difference < -kClockDifferenceNs;
}

}  // namespace cuvil::scheduler
