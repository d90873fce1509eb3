#include "scheduler/stream_schedule.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"

namespace cuvil::scheduler {
namespace {

constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();
constexpr double kCrossingNs = 5;
// Moves of chains that are tried, each at the price of one estimate of the whole: bounded by what a call may wait for.
constexpr uint64_t kMaxStepVisits = 1'000'000;

// Which of the steps before a step are known to be done when it runs.
class Reach {
 public:
  explicit Reach(size_t num_steps) : words_(num_steps / 64 + 1), bits_(num_steps * words_, 0) {}

  bool Has(uint32_t step, uint32_t earlier) const {
    return ((bits_[step * words_ + earlier / 64] >> (earlier % 64)) & 1) != 0;
  }
  // `earlier` and all that it comes behind.
  void Add(uint32_t step, uint32_t earlier) {
    uint64_t* to = &bits_[step * words_];
    const uint64_t* from = &bits_[earlier * words_];
    for (size_t w = 0; w < words_; ++w) to[w] |= from[w];
    to[earlier / 64] |= uint64_t{1} << (earlier % 64);
  }

 private:
  const size_t words_;
  std::vector<uint64_t> bits_;
};

// Of `list`, ascending, what neither `reach` nor a later member implies; adds all of it to the step's reach.
std::vector<uint32_t> WithoutImplied(const std::vector<uint32_t>& list, uint32_t step, Reach* reach) {
  std::vector<uint32_t> kept;
  for (size_t k = list.size(); k-- > 0;) {
    if (reach->Has(step, list[k])) continue;
    kept.push_back(list[k]);
    reach->Add(step, list[k]);
  }
  std::reverse(kept.begin(), kept.end());
  return kept;
}

// Steps that only follow each other go together.
struct Chains {
  std::vector<uint32_t> of;  // by step; kNone for views
  std::vector<std::vector<uint32_t>> steps;
  std::vector<double> cost_ns;
  std::vector<bool> on_main_stream;
};

Chains FindChains(const ScheduleProblem& problem, const std::vector<std::vector<uint32_t>>& dependences) {
  const size_t n = problem.steps.size();
  std::vector<uint32_t> num_dependents(n, 0);
  for (const auto& list : dependences) {
    for (const uint32_t d : list) ++num_dependents[d];
  }
  Chains chains;
  chains.of.assign(n, kNone);
  for (uint32_t i = 0; i < n; ++i) {
    const ScheduleStep& step = problem.steps[i];
    if (!step.touches_memory()) continue;
    const auto& list = dependences[i];
    uint32_t chain = kNone;
    if (list.size() == 1 && num_dependents[list[0]] == 1 &&
        problem.steps[list[0]].on_main_stream == step.on_main_stream) {
      chain = chains.of[list[0]];
    } else {
      chain = static_cast<uint32_t>(chains.steps.size());
      chains.steps.emplace_back();
      chains.cost_ns.push_back(0);
      chains.on_main_stream.push_back(step.on_main_stream);
    }
    chains.of[i] = chain;
    chains.steps[chain].push_back(i);
    chains.cost_ns[chain] += step.cost_ns;
  }
  return chains;
}

// When each step would run if streams never got in each other's way.
class Simulation {
 public:
  Simulation(const ScheduleProblem& problem, const std::vector<std::vector<uint32_t>>& dependences, double edge_cost_ns)
      : problem_(problem),
        dependences_(dependences),
        edge_cost_ns_(edge_cost_ns),
        start_(problem.steps.size(), 0),
        end_(problem.steps.size(), 0) {}

  double Ready(uint32_t step, uint32_t on, const std::vector<uint32_t>& stream) const {
    double ready = on == 0 ? 0 : edge_cost_ns_;  // the fork
    for (const uint32_t d : dependences_[step]) {
      ready = std::max(ready, end_[d] + (stream[d] == on ? 0 : edge_cost_ns_));
    }
    return ready;
  }
  void Place(uint32_t step, double start) {
    start_[step] = start;
    end_[step] = start + problem_.steps[step].cost_ns;
  }
  // Until everything has come back to the main stream.
  double Run(const std::vector<uint32_t>& stream, uint32_t num_streams) {
    free_.assign(num_streams, 0);
    num_crossings_ = 0;
    for (uint32_t i = 0; i < problem_.steps.size(); ++i) {
      if (!problem_.steps[i].touches_memory()) continue;
      double& free = free_[stream[i]];
      Place(i, std::max(free, Ready(i, stream[i], stream)));
      free = end_[i];
      for (const uint32_t d : dependences_[i]) num_crossings_ += stream[d] != stream[i] ? 1 : 0;
    }
    double length = free_[0];
    for (uint32_t s = 1; s < num_streams; ++s) {
      if (free_[s] == 0) continue;
      length = std::max(length, free_[s] + edge_cost_ns_);
      num_crossings_ += free_[s] > free_[0] ? 1 : 0;
    }
    return length;
  }
  // What an assignment is judged by: of two that take equally long the one with fewer events.
  double Cost(const std::vector<uint32_t>& stream, uint32_t num_streams) {
    const double length = Run(stream, num_streams);
    return length + kCrossingNs * num_crossings_;
  }
  const std::vector<double>& start() const { return start_; }
  const std::vector<double>& end() const { return end_; }

 private:
  const ScheduleProblem& problem_;
  const std::vector<std::vector<uint32_t>>& dependences_;
  const double edge_cost_ns_;
  std::vector<double> start_, end_, free_;
  uint32_t num_crossings_ = 0;
};

class Assigner {
 public:
  Assigner(const ScheduleProblem& problem, const std::vector<std::vector<uint32_t>>& dependences,
           const ScheduleOptions& options)
      : problem_(problem),
        dependences_(dependences),
        options_(options),
        chains_(FindChains(problem, dependences)),
        simulation_(problem, dependences, options.edge_cost_ns),
        stream_(problem.steps.size(), 0) {}

  std::vector<uint32_t> Run() {
    FindWaysToEnd();
    Greedy();
    Improve();
    return std::move(stream_);
  }

 private:
  // By step, the cost of the longest way from its start to the end.
  void FindWaysToEnd() {
    to_end_.assign(problem_.steps.size(), 0);
    for (size_t i = problem_.steps.size(); i-- > 0;) {
      to_end_[i] += problem_.steps[i].cost_ns;
      for (const uint32_t d : dependences_[i]) to_end_[d] = std::max(to_end_[d], to_end_[i]);
    }
  }

  bool Stays(uint32_t chain) const { return chains_.cost_ns[chain] < options_.min_chain_ns; }

  // The stream of the dependence that ends last, which saves a wait.
  uint32_t StreamOfLatest(uint32_t step) const {
    uint32_t latest = kNone;
    for (const uint32_t d : dependences_[step]) {
      if (latest == kNone || simulation_.end()[d] > simulation_.end()[latest]) latest = d;
    }
    return latest == kNone ? 0 : stream_[latest];
  }

  // Chains in the order of their first steps, each where it can start first.
  void Greedy() {
    std::vector<double> free(options_.num_streams, 0);
    for (uint32_t i = 0; i < problem_.steps.size(); ++i) {
      const uint32_t chain = chains_.of[i];
      if (chain == kNone) continue;
      if (chains_.steps[chain].front() == i) {
        uint32_t best = StreamOfLatest(i);
        if (chains_.on_main_stream[chain]) {
          best = 0;
        } else if (!Stays(chain)) {
          double best_start = std::max(free[best], simulation_.Ready(i, best, stream_));
          for (uint32_t s = 0; s < options_.num_streams; ++s) {
            const double start = std::max(free[s], simulation_.Ready(i, s, stream_));
            if (start < best_start) {
              best = s;
              best_start = start;
            }
          }
        }
        for (const uint32_t step : chains_.steps[chain]) stream_[step] = best;
      }
      simulation_.Place(i, std::max(free[stream_[i]], simulation_.Ready(i, stream_[i], stream_)));
      free[stream_[i]] = simulation_.end()[i];
    }
  }

  // Moves chains, those with the longest way to the end first, while that shortens the whole.
  void Improve() {
    std::vector<uint32_t> order;
    for (uint32_t c = 0; c < chains_.steps.size(); ++c) {
      if (!chains_.on_main_stream[c] && !Stays(c)) order.push_back(c);
    }
    std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
      return to_end_[chains_.steps[a].front()] > to_end_[chains_.steps[b].front()];
    });
    double best = simulation_.Cost(stream_, options_.num_streams);
    uint64_t visits = 0;
    for (bool moved = true; moved;) {
      moved = false;
      for (const uint32_t chain : order) {
        const uint32_t home = stream_[chains_.steps[chain].front()];
        uint32_t kept = home;
        for (uint32_t s = 0; s < options_.num_streams; ++s) {
          if (s == home) continue;
          visits += problem_.steps.size();
          if (visits > kMaxStepVisits) break;
          for (const uint32_t step : chains_.steps[chain]) stream_[step] = s;
          const double cost = simulation_.Cost(stream_, options_.num_streams);
          // Less than a nanosecond is rounding, and would let moves go round in circles.
          if (cost + 1 < best) {
            best = cost;
            kept = s;
          }
        }
        for (const uint32_t step : chains_.steps[chain]) stream_[step] = kept;
        moved |= kept != home;
        if (visits > kMaxStepVisits) return;
      }
    }
  }

  const ScheduleProblem& problem_;
  const std::vector<std::vector<uint32_t>>& dependences_;
  const ScheduleOptions options_;
  const Chains chains_;
  Simulation simulation_;
  std::vector<uint32_t> stream_;
  std::vector<double> to_end_;
};

// Streams by first use, without gaps; 0 stays.
uint32_t Renumber(const ScheduleProblem& problem, std::vector<uint32_t>* stream) {
  std::vector<uint32_t> number(*std::max_element(stream->begin(), stream->end()) + 1, kNone);
  number[0] = 0;
  uint32_t count = 1;
  for (uint32_t i = 0; i < stream->size(); ++i) {
    if (!problem.steps[i].touches_memory()) continue;
    uint32_t& to = number[(*stream)[i]];
    if (to == kNone) to = count++;
    (*stream)[i] = to;
  }
  return count;
}

}  // namespace

absl::Status CheckProblem(const ScheduleProblem& problem) {
  const auto known = [&](uint32_t storage) { return storage < problem.num_storages; };
  for (const ScheduleStep& step : problem.steps) {
    if (!std::all_of(step.reads.begin(), step.reads.end(), known) ||
        !std::all_of(step.writes.begin(), step.writes.end(), known) || (step.viewed != kNone && !known(step.viewed))) {
      return absl::InvalidArgumentError("a step names a storage that does not exist");
    }
  }
  for (const ScheduleCell& cell : problem.cells) {
    if (!known(cell.storage) || cell.last_step >= problem.steps.size()) {
      return absl::InvalidArgumentError("a cell names a storage or a step that does not exist");
    }
  }
  return absl::OkStatus();
}

std::vector<std::vector<uint32_t>> FindDependences(const ScheduleProblem& problem) {
  struct Accesses {
    uint32_t last_write = kNone;
    std::vector<uint32_t> reads_since;
  };
  std::vector<Accesses> accesses(problem.num_storages);
  std::vector<std::vector<uint32_t>> dependences(problem.steps.size());
  Reach reach(problem.steps.size());
  for (uint32_t i = 0; i < problem.steps.size(); ++i) {
    const ScheduleStep& step = problem.steps[i];
    std::vector<uint32_t> list;
    for (const uint32_t storage : step.reads) {
      if (accesses[storage].last_write != kNone) list.push_back(accesses[storage].last_write);
    }
    for (const uint32_t storage : step.writes) {
      const Accesses& before = accesses[storage];
      list.insert(list.end(), before.reads_since.begin(), before.reads_since.end());
      if (before.last_write != kNone) list.push_back(before.last_write);
    }
    for (const uint32_t storage : step.reads) accesses[storage].reads_since.push_back(i);
    for (const uint32_t storage : step.writes) accesses[storage] = {i, {}};
    std::sort(list.begin(), list.end());
    dependences[i] = WithoutImplied(list, i, &reach);
  }
  return dependences;
}

absl::StatusOr<StreamSchedule> CompleteSchedule(const ScheduleProblem& problem, std::vector<uint32_t> stream,
                                                double edge_cost_ns) {
  if (absl::Status s = CheckProblem(problem); !s.ok()) return s;
  const auto n = static_cast<uint32_t>(problem.steps.size());
  if (stream.size() != n) return absl::InvalidArgumentError("another number of streams than steps");
  StreamSchedule schedule;
  schedule.released.resize(n);
  schedule.waits.resize(n);
  if (n == 0) return schedule;
  schedule.num_streams = Renumber(problem, &stream);

  const std::vector<std::vector<uint32_t>> dependences = FindDependences(problem);
  Simulation simulation(problem, dependences, edge_cost_ns);
  schedule.estimate_ns = simulation.Run(stream, schedule.num_streams);
  schedule.start_ns = simulation.start();
  schedule.end_ns = simulation.end();

  // Waits, and by them which steps are done when a step runs.
  Reach reach(n);
  std::vector<uint32_t> last_on(schedule.num_streams, kNone);
  std::vector<uint32_t> last_writer(problem.num_storages, kNone);
  for (uint32_t i = 0; i < n; ++i) {
    const ScheduleStep& step = problem.steps[i];
    if (!step.touches_memory()) {
      const uint32_t writer = step.viewed == kNone ? kNone : last_writer[step.viewed];
      stream[i] = writer == kNone ? 0 : stream[writer];
      continue;
    }
    uint32_t& previous = last_on[stream[i]];
    if (previous != kNone) reach.Add(i, previous);
    schedule.waits[i] = WithoutImplied(dependences[i], i, &reach);
    previous = i;
    for (const uint32_t storage : step.writes) last_writer[storage] = i;
  }
  // What the main stream's last step comes behind has come back to it already.
  std::vector<uint32_t> ends(last_on.begin() + 1, last_on.end());
  std::sort(ends.begin(), ends.end());
  for (size_t k = ends.size(); k-- > 0;) {
    const bool joined = last_on[0] != kNone && reach.Has(last_on[0], ends[k]);
    const bool implied = std::any_of(schedule.joins.begin(), schedule.joins.end(),
                                     [&](uint32_t later) { return reach.Has(later, ends[k]); });
    if (!joined && !implied) schedule.joins.push_back(ends[k]);
  }
  std::reverse(schedule.joins.begin(), schedule.joins.end());

  std::vector<uint32_t> maker(problem.num_storages, kNone);
  std::vector<std::vector<uint32_t>> users(problem.num_storages);
  for (uint32_t i = 0; i < n; ++i) {
    for (const uint32_t storage : problem.steps[i].reads) users[storage].push_back(i);
    for (const uint32_t storage : problem.steps[i].writes) {
      users[storage].push_back(i);
      if (maker[storage] == kNone) maker[storage] = i;
    }
  }
  std::vector<std::vector<uint32_t>> steps_on(schedule.num_streams);
  for (uint32_t i = 0; i < n; ++i) {
    if (problem.steps[i].touches_memory()) steps_on[stream[i]].push_back(i);
  }
  for (const ScheduleCell& cell : problem.cells) {
    uint32_t release = cell.last_step;
    // Memory that no step makes is held by somebody else.
    if (maker[cell.storage] != kNone) {
      const std::vector<uint32_t>& of_storage = users[cell.storage];
      release = std::max(release, of_storage.back());
      const std::vector<uint32_t>& line = steps_on[stream[maker[cell.storage]]];
      for (auto next = std::upper_bound(line.begin(), line.end(), release); next != line.end(); ++next) {
        const bool behind_all =
            std::all_of(of_storage.begin(), of_storage.end(), [&](uint32_t user) { return reach.Has(*next, user); });
        if (behind_all) break;
        release = *next;
      }
    }
    schedule.released[release].push_back(cell.cell);
  }
  schedule.stream = std::move(stream);
  return schedule;
}

absl::StatusOr<StreamSchedule> ScheduleStreams(const ScheduleProblem& problem, const ScheduleOptions& options) {
  if (absl::Status s = CheckProblem(problem); !s.ok()) return s;
  if (options.num_streams == 0) return absl::InvalidArgumentError("a schedule has at least one stream");
  std::vector<uint32_t> stream(problem.steps.size(), 0);
  if (options.num_streams > 1) stream = Assigner(problem, FindDependences(problem), options).Run();
  return CompleteSchedule(problem, std::move(stream), options.edge_cost_ns);
}

std::string PrintTimeline(const ScheduleProblem& problem, const StreamSchedule& schedule, double total_ns) {
  constexpr size_t kColumns = 60;
  std::string text;
  for (uint32_t s = 0; s < schedule.num_streams; ++s) {
    std::string line(kColumns, '.');
    double busy_ns = 0;
    uint32_t count = 0;
    for (uint32_t i = 0; i < problem.steps.size(); ++i) {
      if (schedule.stream[i] != s || !problem.steps[i].touches_memory()) continue;
      ++count;
      busy_ns += problem.steps[i].cost_ns;
      const auto column = [&](double ns) {
        return schedule.estimate_ns > 0 ? std::min(kColumns, static_cast<size_t>(ns / schedule.estimate_ns * kColumns))
                                        : 0;
      };
      const size_t first = std::min(column(schedule.start_ns[i]), kColumns - 1);
      for (size_t c = first; c < std::max(first + 1, column(schedule.end_ns[i])); ++c) line[c] = '#';
    }
    const double scale = schedule.estimate_ns > 0 ? total_ns / schedule.estimate_ns : 0;
    absl::StrAppend(&text, "stream ", s, " |", line, "| ", count, " steps, ",
                    static_cast<int64_t>(busy_ns * scale / 1000), " us\n");
  }
  return text;
}

}  // namespace cuvil::scheduler
