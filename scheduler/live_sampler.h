// What the GPUs are doing, sampled at a bounded rate and cost while somebody wants to know.
//
// A thread of its own reads the counters round by round into a ring of fixed size. It measures what its rounds cost and
// makes them rarer when they would take more than `max_duty` of a core. It runs while a LiveSampler::Use lives and at
// no other time. In a child of fork() it is off: the thread is gone, and so are the driver's handles.
//
// A profile holds a Use for its extent and asks for Samples() of that extent afterwards:
//
//     LiveSampler::Use use = LiveSampler::ForProcess().Start();
//     ...
//     LiveSampler::Report report = LiveSampler::ForProcess().Samples(profile.start_ns, profile.end_ns);
//
// Threads:   any. Start() may create a thread. The end of the last Use waits for the round at hand, a few milliseconds
//            (40 on GPUs without GPM): do it without the GIL.
// Ownership: a Use must not outlive its sampler.
// Errors:    nothing fails: without NVML there are no samples, and Report::status says why
#pragma once

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace cuvil::scheduler {

enum class LiveCounter : uint8_t {
  kSmBusy,        // percent of the SMs' time with work; without GPM, percent of the time with a kernel on any SM
  kSmOccupancy,   // percent of the warps that the SMs could hold; GPM only
  kPcieReceived,  // bytes per second, to the GPU
  kPcieSent,      // bytes per second, from the GPU
  kMemoryUsed,    // bytes, by all processes
  kSmClock,       // Hz
  kMemoryClock,   // Hz
};
inline constexpr size_t kNumLiveCounters = 7;

const char* LiveCounterName(LiveCounter counter);  // "SM occupancy"
const char* LiveCounterUnit(LiveCounter counter);  // "%", "B/s", "B", "Hz"

struct LiveSample {
  uint64_t time_ns = 0;  // MonotonicNs()
  double value = 0;
  uint16_t device = 0;  // CUDA's number
  LiveCounter counter{};
};

// Reads the counters of some devices. Used by one thread.
class CounterReader {
 public:
  virtual ~CounterReader() = default;
  // Appends what can be read now; what a device does not have is left out.
  virtual void Read(uint64_t now_ns, std::vector<LiveSample>* samples) = 0;
};

// How long to wait between rounds, so that they take no more than a given share of a core.
//
// Threads:   thread-compatible.
class RateControl {
 public:
  RateControl(uint64_t period_ns, uint64_t max_period_ns, double max_duty)
      : min_ns_(period_ns), max_ns_(max_period_ns), max_duty_(max_duty), period_ns_(period_ns) {}
  // A round took so much of a core.
  void Observe(uint64_t cost_ns);
  uint64_t period_ns() const { return period_ns_; }

 private:
  const uint64_t min_ns_, max_ns_;
  const double max_duty_;
  double mean_cost_ns_ = -1;
  uint64_t period_ns_;
};

struct LiveSamplerOptions {
  // The driver refreshes its counters every 100 ms (NVML reference, nvmlGpmMetricsGet); half of that sees each refresh,
  // and memory, which has no such delay, at twice its rate.
  uint64_t period_ns = 50'000'000;
  // Beyond this samples say nothing of a profile; a round that costs more than 10 ms of a core exceeds the duty then.
  uint64_t max_period_ns = 1'000'000'000;
  double max_duty = 0.01;
  // At 20 rounds a second and seven counters: four minutes of two devices in 1.5 MiB.
  size_t capacity = size_t{1} << 16;
};

class LiveSampler {
 public:
  using MakeReader = std::function<absl::StatusOr<std::unique_ptr<CounterReader>>()>;

  // `make_reader` is called by the sampler's thread when it starts: NVML takes tens of milliseconds to do so.
  explicit LiveSampler(MakeReader make_reader, LiveSamplerOptions options = {});
  LiveSampler(const LiveSampler&) = delete;
  LiveSampler& operator=(const LiveSampler&) = delete;
  ~LiveSampler();

  // Of the GPUs that this process uses; never destroyed.
  static LiveSampler& ForProcess();

  // Samples are taken while it lives.
  class Use {
   public:
    Use() = default;
    Use(Use&& other) noexcept : sampler_(std::exchange(other.sampler_, nullptr)) {}
    Use& operator=(Use&& other) noexcept {
      std::swap(sampler_, other.sampler_);
      return *this;
    }
    ~Use() {
      if (sampler_ != nullptr) sampler_->Release();
    }

   private:
    friend class LiveSampler;
    explicit Use(LiveSampler* sampler) : sampler_(sampler) {}
    LiveSampler* sampler_ = nullptr;
  };
  Use Start();

  struct Report {
    std::vector<LiveSample> samples;  // by time
    absl::Status status;              // why there are none, or fewer than there could be
    bool overwritten = false;         // the ring was too small for the extent that was asked for
    // Of the thread that runs or ran last, its whole life.
    uint64_t num_rounds = 0;
    uint64_t cpu_ns = 0;   // of a core, reading
    uint64_t wall_ns = 0;  // alive
    uint64_t period_ns = 0;
  };
  // What was sampled in that time, both ends included.
  Report Samples(uint64_t begin_ns, uint64_t end_ns) const;

  // Ends the thread for good, whoever holds a Use: when the interpreter exits.
  void Stop();

 private:
  static void* Run(void* self);
  void Loop();
  void Release();
  void Join(std::unique_lock<std::mutex>& lock);
  bool IsForkedChild() const { return getpid() != process_; }

  const MakeReader make_reader_;
  const LiveSamplerOptions options_;
  const pid_t process_;

  // Not absl's: ThreadSanitizer does not know those of the abseil that is linked. In a forked child it may be held for
  // ever, so nothing of the below is touched there.
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  uint32_t num_uses_ = 0;
  bool stopped_ = false;  // for good
  bool ending_ = false;   // the thread is asked to end
  bool alive_ = false;    // there is a thread, to be joined by whoever ends it
  pthread_t thread_{};
  std::vector<LiveSample> ring_;
  size_t next_ = 0;  // where the oldest is, once the ring is full
  absl::Status status_;
  uint64_t overwritten_until_ns_ = 0;
  uint64_t num_rounds_ = 0, cpu_ns_ = 0, started_ns_ = 0, ended_ns_ = 0, period_ns_ = 0;
};

}  // namespace cuvil::scheduler
