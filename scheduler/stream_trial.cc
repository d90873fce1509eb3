#include "scheduler/stream_trial.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "memory/device/event_timer.h"
#include "scheduler/monotonic_clock.h"
#include "scheduler/stream_problem.h"

namespace cuvil::scheduler {
namespace {

using torch_abi::TensorRef;

// Estimates know neither caches nor kernels that get in each other's way: a gain that is predicted to be small is none.
constexpr double kMinPredictedGain = 0.05;
// Another stream has to promise something beyond what one less does.
constexpr double kMinFurtherGain = 0.01;
// Tensors of this size have kernels that fill the device by themselves.
constexpr size_t kMaxPlanBytes = size_t{64} << 20;
// By estimate: so long a graph is not even launched to see how long it takes.
constexpr double kMaxSerialNs = 10e6;
constexpr uint32_t kMinRounds = 2, kMaxRounds = 5;
// Of the winner in its final memory; and the part of the gain that has to be left there, as one launch says little.
constexpr uint32_t kFinalRounds = 1;
constexpr double kFinalShare = 1.0 / 3;
// The part of the budget that captures may use.
constexpr double kCaptureShare = 0.6;
constexpr double kCoarseChainNs = 8000, kCoarseEdgeNs = 4000;
constexpr double kEdgeNs = 1500;

constexpr char kTooMuchMemory[] = "takes too much memory";

struct Samples {
  std::vector<double> device_ns, launch_ns;
};

// Launches of the plans in turn, so many each, behind one that is not counted: a graph's first launch uploads it.
absl::StatusOr<std::vector<Samples>> TimeReplays(GraphArena& arena, absl::Span<GraphPlan* const> plans, uint32_t rounds,
                                                 uint32_t* num_launches) {
  const absl::StatusOr<device::StreamHandle> stream = arena.streams().Current(arena.device().index);
  if (!stream.ok()) return stream.status();
  const device::RelaxedCaptureMode relaxed(arena.driver());  // a wait in any other ends captures of other threads
  std::vector<Samples> samples(plans.size());
  std::vector<std::pair<size_t, device::EventTimer>> timers;
  for (uint32_t round = 0; round <= rounds; ++round) {
    for (size_t i = 0; i < plans.size(); ++i) {
      absl::StatusOr<device::EventTimer> timer = device::EventTimer::Create(arena.driver());
      if (!timer.ok()) return timer.status();
      // Each launch by itself, so that nobody waits for the arena longer than that takes.
      GraphArena::Use use(arena, *stream);
      if (absl::Status s = use.Begin(); !s.ok()) return s;
      if (absl::Status s = timer->Start(*stream); !s.ok()) return s;
      const uint64_t start_ns = MonotonicNs();
      if (absl::Status s = plans[i]->Relaunch(*stream); !s.ok()) return s;
      const auto launch_ns = static_cast<double>(MonotonicNs() - start_ns);
      if (absl::Status s = timer->Stop(*stream); !s.ok()) return s;
      ++*num_launches;
      if (round == 0) continue;
      samples[i].launch_ns.push_back(launch_ns);
      timers.emplace_back(i, *std::move(timer));
    }
  }
  for (const auto& [plan, timer] : timers) {
    const absl::StatusOr<double> elapsed = timer.ElapsedNs();
    if (!elapsed.ok()) return elapsed.status();
    samples[plan].device_ns.push_back(*elapsed);
  }
  return samples;
}

std::vector<uint32_t> KernelsByStep(const GraphPlan& plan) {
  std::vector<uint32_t> kernels(plan.body().steps().size(), 0);
  for (const GraphPlan::Node& node : plan.nodes()) {
    if (node.step < kernels.size()) ++kernels[node.step];
  }
  return kernels;
}

class Trial {
 public:
  Trial(GraphPlan& serial, const GraphPlan::Parts& parts, absl::Span<const TensorRef> inputs,
        absl::Span<const TensorRef> captured, std::shared_ptr<GraphArena> arena, const StreamTrialOptions& options)
      : serial_(serial),
        parts_(parts),
        inputs_(inputs),
        captured_(captured),
        arena_(std::move(arena)),
        options_(options),
        start_ns_(MonotonicNs()) {}

  StreamTrialOutcome Run() {
    const torch_abi::CurrentDeviceScope current(arena_->streams(), arena_->device().index);
    const device::ContextScope context(arena_->driver(), arena_->context());
    StreamReport& report = outcome_.report;
    problem_ = DescribeSteps(serial_.body(), KernelsByStep(serial_));
    const absl::StatusOr<StreamSchedule> schedule = ScheduleStreams(problem_, {});
    if (schedule.ok()) {
      report.candidates.push_back({"serial", 1, schedule->estimate_ns, 0, 0, ""});
      report.skipped = Prepare(*schedule);
      if (report.skipped.empty()) {
        if (absl::Status s = Measure(); !s.ok()) {
          arena_->health().Note(s);
          report.skipped = std::string(s.message());
        }
      } else if (options_.max_streams > 1 && schedule->estimate_ns <= kMaxSerialNs) {
        TimeSerial();
      }
      // On every way out, before the pool.
      plans_.clear();
      for (const auto& pool : pools_) {
        const absl::StatusOr<uint64_t> bytes = pool->ReservedBytes();
        if (bytes.ok()) arena_->budget().AddCached(*bytes);
      }
      pools_.clear();
      if (report.skipped.empty() && report.chosen != 0) Adopt();
      const StreamSchedule& used = outcome_.schedule != nullptr ? *outcome_.schedule : *schedule;
      const double replay_ns = report.candidates[report.chosen].replay_ns;
      report.timeline = PrintTimeline(problem_, used, replay_ns > 0 ? replay_ns : used.estimate_ns);
    } else {
      report.skipped = std::string(schedule.status().message());
    }
    report.trial_ns = MonotonicNs() - start_ns_;
    return std::move(outcome_);
  }

 private:
  uint64_t Spent() const { return MonotonicNs() - budget_start_ns_; }

  // Schedules that are worth a capture; otherwise the reason why there are none.
  std::string Prepare(const StreamSchedule& serial) {
    if (options_.max_streams < 2) return "one stream was asked for";
    if (serial_.body().memory_plan().high_water_bytes > kMaxPlanBytes) {
      return "its tensors are large, so that kernels fill the device by themselves";
    }
    if (serial.estimate_ns > kMaxSerialNs) return "a launch takes too long for a trial";
    // The trial's pool may come to that, and then the arena's grows. Nobody else's graph has to go for a trial.
    const GraphBudget::Usage usage = arena_->budget().usage();
    const auto own = static_cast<double>(arena_->account().pool_bytes());
    const double need = own * options_.max_pool_factor + 2 * static_cast<double>(options_.max_pool_growth_bytes);
    if (static_cast<double>(usage.used_bytes()) + need > static_cast<double>(usage.limit_bytes)) {
      return "the budget of graphs' memory leaves no room for a trial";
    }
    const double limit_ns = serial.estimate_ns * (1 - kMinPredictedGain);
    // So many streams that one more promises nothing.
    std::vector<uint32_t> numbers;
    double best_ns = limit_ns;
    for (uint32_t n = 2; n <= options_.max_streams; ++n) {
      const absl::StatusOr<StreamSchedule> schedule = ScheduleStreams(problem_, {n, kEdgeNs, 0});
      if (!schedule.ok() || schedule->num_streams < n || schedule->estimate_ns > best_ns) continue;
      best_ns = schedule->estimate_ns * (1 - kMinFurtherGain);
      numbers.push_back(n);
    }
    if (numbers.empty()) return "its steps wait for each other: no gain to expect";
    // The most promising first, because time may run out: streams for long branches only, which costs fewer events, was
    // the fastest on GoogLeNet (0.463 ms, 0.499 for all branches, 0.882 serial).
    const uint32_t most = numbers.back();
    Consider(absl::StrCat(most, " streams, long branches only"), {most, kCoarseEdgeNs, kCoarseChainNs}, limit_ns);
    for (size_t i = numbers.size(); i-- > 0;) {
      Consider(absl::StrCat(numbers[i], " streams"), {numbers[i], kEdgeNs, 0}, limit_ns);
    }
    return "";
  }

  bool Consider(std::string name, const ScheduleOptions& options, double limit_ns) {
    absl::StatusOr<StreamSchedule> schedule = ScheduleStreams(problem_, options);
    if (!schedule.ok() || schedule->num_streams < 2 || schedule->estimate_ns > limit_ns) return false;
    for (const auto& other : schedules_) {
      if (other->stream == schedule->stream) return false;
    }
    outcome_.report.candidates.push_back({std::move(name), schedule->num_streams, schedule->estimate_ns, 0, 0, ""});
    schedules_.push_back(std::make_shared<const StreamSchedule>(*std::move(schedule)));
    return true;
  }

  absl::Status Measure() {
    StreamReport& report = outcome_.report;
    const absl::StatusOr<uint64_t> before = arena_->pool().ReservedBytes();
    if (!before.ok()) return before.status();
    report.candidates[0].pool_bytes = *before;
    GraphPlan* const serial[] = {&serial_};
    absl::StatusOr<std::vector<Samples>> first = TimeReplays(*arena_, serial, 1, &report.num_launches);
    if (!first.ok()) return first.status();
    // By now what the caller had queued before is done, whose time is not the trial's.
    budget_start_ns_ = MonotonicNs();
    const double launch_ns = first->front().device_ns.front();
    const double budget_ns = static_cast<double>(options_.budget_ns);
    if (launch_ns * 2 * (kMinRounds + 1) > budget_ns * (1 - kCaptureShare)) {
      return absl::ResourceExhaustedError("a launch takes too long for a trial");
    }
    if (absl::Status s = AddPool(); !s.ok()) return s;

    std::vector<GraphPlan*> running = {&serial_};
    std::vector<size_t> positions = {0};
    plans_.resize(report.candidates.size());
    for (size_t i = 1; i < report.candidates.size(); ++i) {
      StreamCandidate& candidate = report.candidates[i];
      if (candidate.num_streams >= num_too_many_) {
        candidate.rejected = kTooMuchMemory;
        continue;
      }
      // One candidate is measured if there is any time at all: captures of big programs take tens of milliseconds, and
      // the first may have taken too much memory.
      const double launches_ns = launch_ns * static_cast<double>(running.size() + 1) * (kMinRounds + 1);
      const bool fits = static_cast<double>(Spent() + serial_.capture_ns()) <= budget_ns * kCaptureShare &&
                        static_cast<double>(Spent()) + launches_ns <= budget_ns;
      if (!fits && (running.size() > 1 || Spent() > options_.budget_ns)) {
        candidate.rejected = "no time left";
        continue;
      }
      candidate.rejected = Capture(i, *before);
      if (candidate.rejected == kTooMuchMemory) num_too_many_ = candidate.num_streams;
      if (!candidate.rejected.empty()) continue;
      running.push_back(plans_[i].get());
      positions.push_back(i);
    }
    if (running.size() == 1) return absl::OkStatus();

    const double left_ns = std::max(0.0, budget_ns - static_cast<double>(Spent()));
    const auto by_time = static_cast<uint32_t>(left_ns / (launch_ns * static_cast<double>(running.size())));
    const uint32_t kept = report.num_launches + 2 * (kFinalRounds + 1);
    const auto by_count =
        (options_.max_launches - std::min(options_.max_launches, kept)) / static_cast<uint32_t>(running.size());
    const uint32_t rounds = std::clamp(std::min(by_time, by_count), kMinRounds + 1, kMaxRounds + 1) - 1;
    const auto samples = TimeReplays(*arena_, running, rounds, &report.num_launches);
    if (!samples.ok()) return samples.status();
    std::vector<std::vector<double>> times(report.candidates.size());
    for (size_t i = 0; i < running.size(); ++i) {
      times[positions[i]] = (*samples)[i].device_ns;
      report.candidates[positions[i]].replay_ns = Median((*samples)[i].device_ns);
    }
    report.launch_ns = Median(samples->front().launch_ns);
    report.chosen = ChooseFastest(times, options_.min_gain);
    return absl::OkStatus();
  }

  // Without a trial the report still says what a launch costs.
  void TimeSerial() {
    GraphPlan* const serial[] = {&serial_};
    const auto samples = TimeReplays(*arena_, serial, 1, &outcome_.report.num_launches);
    if (!samples.ok()) return;  // the call that follows has the same error
    outcome_.report.candidates[0].replay_ns = samples->front().device_ns.front();
    outcome_.report.launch_ns = samples->front().launch_ns.front();
  }

  absl::Status AddPool() {
    absl::StatusOr<std::unique_ptr<AllocationPool>> pool = arena_->allocator().MakePool();
    if (!pool.ok()) return pool.status();
    pools_.push_back(*std::move(pool));
    return absl::OkStatus();
  }

  // Why the candidate cannot be used, or nothing.
  std::string Capture(size_t i, uint64_t serial_bytes) {
    absl::StatusOr<std::unique_ptr<GraphPlan>> plan =
        GraphPlan::Create(parts_, inputs_, captured_, arena_, {schedules_[i - 1], pools_.back().get()});
    if (!plan.ok()) return std::string(plan.status().message());
    const absl::StatusOr<uint64_t> bytes = pools_.back()->ReservedBytes();
    if (!bytes.ok()) return std::string(bytes.status().message());
    outcome_.report.candidates[i].pool_bytes = *bytes;
    const double limit = static_cast<double>(serial_bytes) * options_.max_pool_factor +
                         static_cast<double>(options_.max_pool_growth_bytes);
    if (static_cast<double>(*bytes) > limit) {
      // What the pool has now would count for the next one as well.
      plan->reset();
      const absl::Status added = AddPool();
      return added.ok() ? kTooMuchMemory : std::string(added.message());
    }
    plans_[i] = *std::move(plan);
    return "";
  }

  // The winner once more, in the memory of the model's graphs, and compared once more.
  void Adopt() {
    StreamReport& report = outcome_.report;
    StreamCandidate& winner = report.candidates[report.chosen];
    const uint32_t chosen = std::exchange(report.chosen, 0);
    absl::StatusOr<std::unique_ptr<GraphPlan>> plan =
        GraphPlan::Create(parts_, inputs_, captured_, arena_, {schedules_[chosen - 1], nullptr});
    if (!plan.ok()) {
      winner.rejected = std::string(plan.status().message());
      return;
    }
    GraphPlan* const pair[] = {&serial_, plan->get()};
    const auto samples = TimeReplays(*arena_, pair, kFinalRounds, &report.num_launches);
    if (!samples.ok()) {
      arena_->health().Note(samples.status());
      winner.rejected = std::string(samples.status().message());
      return;
    }
    report.candidates[0].replay_ns = Median((*samples)[0].device_ns);
    winner.replay_ns = Median((*samples)[1].device_ns);
    if (const absl::StatusOr<uint64_t> bytes = arena_->pool().ReservedBytes(); bytes.ok()) winner.pool_bytes = *bytes;
    const std::vector<double> times[] = {(*samples)[0].device_ns, (*samples)[1].device_ns};
    if (ChooseFastest(times, options_.min_gain * kFinalShare) == 0) {
      winner.rejected = "was not faster when it was measured again";
      return;
    }
    report.launch_ns = Median((*samples)[1].launch_ns);
    report.chosen = chosen;
    outcome_.plan = *std::move(plan);
    outcome_.schedule = schedules_[chosen - 1];
  }

  GraphPlan& serial_;
  const GraphPlan::Parts& parts_;
  const absl::Span<const TensorRef> inputs_, captured_;
  const std::shared_ptr<GraphArena> arena_;
  const StreamTrialOptions options_;
  const uint64_t start_ns_;
  uint64_t budget_start_ns_ = 0;
  ScheduleProblem problem_;
  uint32_t num_too_many_ = UINT32_MAX;                            // streams, that took too much memory
  std::vector<std::shared_ptr<const StreamSchedule>> schedules_;  // of the candidates but the first
  std::vector<std::unique_ptr<AllocationPool>> pools_;
  std::vector<std::unique_ptr<GraphPlan>> plans_;  // of the candidates; their memory is the pools'
  StreamTrialOutcome outcome_;
};

}  // namespace

double Median(std::vector<double> samples) {
  if (samples.empty()) return 0;
  const size_t middle = samples.size() / 2;
  std::nth_element(samples.begin(), samples.begin() + static_cast<ptrdiff_t>(middle), samples.end());
  return samples[middle];
}

uint32_t ChooseFastest(absl::Span<const std::vector<double>> samples, double min_gain) {
  uint32_t best = 0;
  if (samples.empty() || samples[0].empty()) return best;
  double limit = Median(samples[0]) * (1 - min_gain);
  for (uint32_t i = 1; i < samples.size(); ++i) {
    if (samples[i].empty()) continue;
    const double median = Median(samples[i]);
    if (median > limit) continue;
    best = i;
    limit = median;
  }
  return best;
}

StreamTrialOutcome TryStreams(GraphPlan& serial, const GraphPlan::Parts& parts, absl::Span<const TensorRef> inputs,
                              absl::Span<const TensorRef> captured, const std::shared_ptr<GraphArena>& arena,
                              const StreamTrialOptions& options) {
  return Trial(serial, parts, inputs, captured, arena, options).Run();
}

}  // namespace cuvil::scheduler
