#include "scheduler/live_sampler.h"

#include <signal.h>
#include <time.h>

#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"
#include "scheduler/monotonic_clock.h"
#include "scheduler/nvml_counters.h"

namespace cuvil::scheduler {
namespace {

uint64_t ThreadCpuNs() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace

const char* LiveCounterName(LiveCounter counter) {
  switch (counter) {
    case LiveCounter::kSmBusy:
      return "SM busy";
    case LiveCounter::kSmOccupancy:
      return "SM occupancy";
    case LiveCounter::kPcieReceived:
      return "PCIe received";
    case LiveCounter::kPcieSent:
      return "PCIe sent";
    case LiveCounter::kMemoryUsed:
      return "memory used";
    case LiveCounter::kSmClock:
      return "SM clock";
    case LiveCounter::kMemoryClock:
      return "memory clock";
  }
  return "unknown";
}

const char* LiveCounterUnit(LiveCounter counter) {
  switch (counter) {
    case LiveCounter::kSmBusy:
    case LiveCounter::kSmOccupancy:
      return "%";
    case LiveCounter::kPcieReceived:
    case LiveCounter::kPcieSent:
      return "B/s";
    case LiveCounter::kMemoryUsed:
      return "B";
    case LiveCounter::kSmClock:
    case LiveCounter::kMemoryClock:
      return "Hz";
  }
  return "";
}

void RateControl::Observe(uint64_t cost_ns) {
  // A mean over some ten rounds: one round that the scheduler disturbed says little, and a rise is answered at once.
  const double cost = static_cast<double>(cost_ns);
  mean_cost_ns_ = mean_cost_ns_ < 0 ? cost : mean_cost_ns_ + 0.1 * (cost - mean_cost_ns_);
  const double wanted = mean_cost_ns_ / max_duty_;
  period_ns_ = wanted >= static_cast<double>(max_ns_) ? max_ns_ : std::max(min_ns_, static_cast<uint64_t>(wanted));
}

LiveSampler::LiveSampler(MakeReader make_reader, LiveSamplerOptions options)
    : make_reader_(std::move(make_reader)), options_(options), process_(getpid()) {}

LiveSampler::~LiveSampler() { Stop(); }

LiveSampler& LiveSampler::ForProcess() {
  static LiveSampler* const sampler = new LiveSampler(MakeNvmlCounters);
  return *sampler;
}

LiveSampler::Use LiveSampler::Start() {
  if (IsForkedChild()) return Use();
  std::unique_lock<std::mutex> lock(mutex_);
  if (stopped_) return Use();
  ++num_uses_;
  // One that is about to end still has to be waited for: by whoever ended it, who holds no lock meanwhile.
  while (alive_ && ending_) wake_.wait(lock);
  if (alive_ || stopped_) return Use(this);

  ring_.reserve(options_.capacity);
  status_ = absl::OkStatus();
  num_rounds_ = cpu_ns_ = ended_ns_ = 0;
  period_ns_ = options_.period_ns;
  started_ns_ = MonotonicNs();
  // Signals are for the program's own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const int error = pthread_create(&thread_, nullptr, &LiveSampler::Run, this);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (error != 0) {
    status_ = absl::UnavailableError(absl::StrCat("pthread_create: error ", error));
    ended_ns_ = started_ns_;
  } else {
    alive_ = true;
  }
  return Use(this);
}

void LiveSampler::Release() {
  if (IsForkedChild()) return;
  std::unique_lock<std::mutex> lock(mutex_);
  if (--num_uses_ == 0) Join(lock);
}

void LiveSampler::Stop() {
  if (IsForkedChild()) return;
  std::unique_lock<std::mutex> lock(mutex_);
  stopped_ = true;
  Join(lock);
}

void LiveSampler::Join(std::unique_lock<std::mutex>& lock) {
  while (alive_ && ending_) wake_.wait(lock);  // somebody else is at it
  if (!alive_) return;
  ending_ = true;
  wake_.notify_all();
  const pthread_t thread = thread_;
  lock.unlock();
  pthread_join(thread, nullptr);
  lock.lock();
  alive_ = false;
  ending_ = false;
  ended_ns_ = MonotonicNs();
  wake_.notify_all();
}

void* LiveSampler::Run(void* self) {
  static_cast<LiveSampler*>(self)->Loop();
  return nullptr;
}

void LiveSampler::Loop() {
  absl::StatusOr<std::unique_ptr<CounterReader>> reader = make_reader_();
  RateControl rate(options_.period_ns, options_.max_period_ns, options_.max_duty);
  std::vector<LiveSample> round;
  std::unique_lock<std::mutex> lock(mutex_);
  if (!reader.ok()) {
    status_ = reader.status();
    wake_.wait(lock, [this] { return ending_; });
    return;
  }
  while (!ending_) {
    lock.unlock();
    round.clear();
    const uint64_t before_ns = ThreadCpuNs();
    (*reader)->Read(MonotonicNs(), &round);
    const uint64_t cost_ns = ThreadCpuNs() - before_ns;
    rate.Observe(cost_ns);
    lock.lock();
    for (const LiveSample& sample : round) {
      if (ring_.size() < options_.capacity) {
        ring_.push_back(sample);
        continue;
      }
      overwritten_until_ns_ = std::max(overwritten_until_ns_, ring_[next_].time_ns);
      ring_[next_] = sample;
      next_ = (next_ + 1) % options_.capacity;
    }
    ++num_rounds_;
    cpu_ns_ += cost_ns;
    period_ns_ = rate.period_ns();
    wake_.wait_for(lock, std::chrono::nanoseconds(period_ns_), [this] { return ending_; });
  }
  // What the driver gave back is given up by the thread that asked for it.
  lock.unlock();
  reader->reset();
  lock.lock();
}

LiveSampler::Report LiveSampler::Samples(uint64_t begin_ns, uint64_t end_ns) const {
  Report report;
  if (IsForkedChild()) {
    report.status = absl::FailedPreconditionError("the sampler does not run in a forked process");
    return report;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  report.status = status_;
  report.overwritten = overwritten_until_ns_ != 0 && overwritten_until_ns_ >= begin_ns;
  report.num_rounds = num_rounds_;
  report.cpu_ns = cpu_ns_;
  report.wall_ns = started_ns_ == 0 ? 0 : (ended_ns_ != 0 ? ended_ns_ : MonotonicNs()) - started_ns_;
  report.period_ns = period_ns_;
  for (size_t i = 0; i < ring_.size(); ++i) {
    const LiveSample& sample = ring_[(next_ + i) % ring_.size()];
    if (sample.time_ns >= begin_ns && sample.time_ns <= end_ns) report.samples.push_back(sample);
  }
  std::stable_sort(report.samples.begin(), report.samples.end(),
                   [](const LiveSample& a, const LiveSample& b) { return a.time_ns < b.time_ns; });
  return report;
}

}  // namespace cuvil::scheduler
