#include "scheduler/stream_schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "scheduler/graph_verifier.h"
#include "tests/testing/capture_model.h"

namespace cuvil::scheduler {
namespace {

using Lists = std::vector<std::vector<uint32_t>>;

ScheduleStep Step(std::vector<uint32_t> reads, std::vector<uint32_t> writes, double cost_ns = 5000) {
  ScheduleStep step;
  step.reads = std::move(reads);
  step.writes = std::move(writes);
  step.cost_ns = cost_ns;
  return step;
}

ScheduleStep View(uint32_t storage) {
  ScheduleStep step;
  step.viewed = storage;
  return step;
}

// Storage 0 is the input; step i makes storage i + 1 of it and `from`.
ScheduleProblem Branches() {
  ScheduleProblem problem;
  problem.steps = {Step({0}, {1}), Step({1}, {2}), Step({2}, {3}), Step({1}, {4}), Step({4}, {5}), Step({3, 5}, {6})};
  problem.num_storages = 7;
  problem.cells = {{1, 1, 3}, {2, 2, 2}, {3, 3, 5}, {4, 4, 4}, {5, 5, 5}};
  return problem;
}

TEST(StreamScheduleTest, BranchesRunSideBySideAndJoin) {
  const auto schedule = ScheduleStreams(Branches(), {.num_streams = 2, .edge_cost_ns = 1000});
  ASSERT_TRUE(schedule.ok()) << schedule.status();
  EXPECT_EQ(schedule->num_streams, 2u);
  EXPECT_EQ(schedule->stream[1], schedule->stream[2]);
  EXPECT_EQ(schedule->stream[3], schedule->stream[4]);
  EXPECT_NE(schedule->stream[1], schedule->stream[3]);
  size_t num_waits = schedule->joins.size();
  for (const auto& list : schedule->waits) num_waits += list.size();
  EXPECT_EQ(num_waits, 2u);  // one to fork, one to join
  // Four steps one after the other and two events, in the place of six steps.
  EXPECT_DOUBLE_EQ(schedule->estimate_ns, 22000);
}

TEST(StreamScheduleTest, SerialIsAScheduleWithoutEventsThatReleasesAsThePlanDoes) {
  const auto schedule = ScheduleStreams(Branches(), {});
  ASSERT_TRUE(schedule.ok()) << schedule.status();
  EXPECT_EQ(schedule->num_streams, 1u);
  EXPECT_EQ(schedule->waits, Lists(6));
  EXPECT_TRUE(schedule->joins.empty());
  EXPECT_EQ(schedule->released, (Lists{{}, {}, {2}, {1}, {4}, {3, 5}}));
  EXPECT_DOUBLE_EQ(schedule->estimate_ns, 30000);
}

TEST(StreamScheduleTest, MemoryThatAnotherStreamReadsIsHeldUntilItsOwnStreamComesBehindIt) {
  // Stream 0 makes storage 1, which stream 1 reads; stream 0 goes on by itself for two steps and then waits.
  ScheduleProblem problem;
  problem.steps = {Step({0}, {1}), Step({1}, {2}), Step({0}, {3}), Step({3}, {4}), Step({2, 4}, {5}), Step({5}, {6})};
  problem.num_storages = 7;
  problem.cells = {{1, 1, 1}, {2, 2, 4}, {3, 3, 3}, {4, 4, 4}, {5, 5, 5}};
  const auto schedule = CompleteSchedule(problem, {0, 1, 0, 0, 0, 0}, 1000);
  ASSERT_TRUE(schedule.ok()) << schedule.status();
  // Step 4 waits for step 1: what it allocates may lie where storage 1 was.
  EXPECT_EQ(schedule->waits, (Lists{{}, {0}, {}, {}, {1}, {}}));
  EXPECT_EQ(schedule->released[3], (std::vector<uint32_t>{1, 3}));
  // Storage 2 is stream 1's own, which has nothing left to allocate.
  EXPECT_EQ(schedule->released[4], (std::vector<uint32_t>{2, 4}));
}

TEST(StreamScheduleTest, WritesThroughAliasesWaitForReadersAndWriters) {
  // Step 2 writes what step 1 reads on another stream; step 3 reads it by a view.
  ScheduleProblem problem;
  problem.steps = {Step({0}, {1}), Step({1}, {2}), Step({1}, {1}), View(1), Step({1}, {3})};
  problem.num_storages = 4;
  const auto schedule = CompleteSchedule(problem, {0, 1, 0, 1, 1}, 1000);
  ASSERT_TRUE(schedule.ok()) << schedule.status();
  EXPECT_EQ(schedule->waits, (Lists{{}, {0}, {1}, {}, {2}}));
  EXPECT_EQ(schedule->stream[3], 0u);  // a view is made where its memory was written last
}

TEST(StreamScheduleTest, WhatNeedsTheMainStreamStaysThere) {
  ScheduleProblem problem = Branches();
  problem.steps[3].on_main_stream = problem.steps[1].on_main_stream = true;
  const auto schedule = ScheduleStreams(problem, {.num_streams = 4, .edge_cost_ns = 0});
  ASSERT_TRUE(schedule.ok()) << schedule.status();
  EXPECT_EQ(schedule->stream[1], 0u);
  EXPECT_EQ(schedule->stream[3], 0u);
}

TEST(StreamScheduleTest, ShortBranchesStayWhenAsked) {
  const auto schedule = ScheduleStreams(Branches(), {.num_streams = 2, .edge_cost_ns = 1000, .min_chain_ns = 20000});
  ASSERT_TRUE(schedule.ok()) << schedule.status();
  EXPECT_EQ(schedule->num_streams, 1u);
}

TEST(StreamScheduleTest, RefusesWhatDoesNotExist) {
  ScheduleProblem problem = Branches();
  problem.num_storages = 3;
  EXPECT_EQ(ScheduleStreams(problem, {}).status().code(), absl::StatusCode::kInvalidArgument);
  problem = Branches();
  problem.cells[0].last_step = 6;
  EXPECT_EQ(ScheduleStreams(problem, {}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ScheduleStreams(Branches(), {.num_streams = 0}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(CompleteSchedule(Branches(), {0}, 0).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(StreamScheduleTest, TheTimelineShowsEachStream) {
  const ScheduleProblem problem = Branches();
  const auto schedule = ScheduleStreams(problem, {.num_streams = 2, .edge_cost_ns = 1000});
  ASSERT_TRUE(schedule.ok()) << schedule.status();
  const std::string text = PrintTimeline(problem, *schedule, 2 * schedule->estimate_ns);
  EXPECT_NE(text.find("stream 0 |"), std::string::npos) << text;
  EXPECT_NE(text.find("stream 1 |"), std::string::npos) << text;
  EXPECT_NE(text.find("4 steps, 40 us"), std::string::npos) << text;
  EXPECT_NE(text.find("2 steps, 20 us"), std::string::npos) << text;
}

// Random programs with branches, views, writes in place and operands of the caller.
ScheduleProblem RandomProblem(std::mt19937* random) {
  const auto pick = [&](uint32_t count) { return static_cast<uint32_t>((*random)() % count); };
  ScheduleProblem problem;
  const uint32_t num_foreign = 1 + pick(3);
  problem.num_storages = num_foreign;
  const uint32_t n = 1 + pick(40);
  // How far back operands lie: short distances make chains, long ones make branches.
  const uint32_t distance = 1 + pick(12);
  std::map<uint32_t, uint32_t> last_use;
  for (uint32_t i = 0; i < n; ++i) {
    const auto operand = [&] {
      const uint32_t back = pick(distance);
      return back < problem.num_storages ? problem.num_storages - 1 - back : pick(problem.num_storages);
    };
    if (pick(8) == 0) {
      const uint32_t storage = operand();
      problem.steps.push_back(View(storage));
      if (storage >= num_foreign) last_use[storage] = i;
      continue;
    }
    ScheduleStep step = Step({}, {}, 500.0 * pick(20));
    std::set<uint32_t> reads;
    for (uint32_t k = 0; k <= pick(3); ++k) reads.insert(operand());
    step.reads.assign(reads.begin(), reads.end());
    const uint32_t written = operand();
    if (pick(5) == 0 && written >= num_foreign) {
      step.writes = {written};
    } else {
      step.writes = {problem.num_storages++};
    }
    step.on_main_stream = pick(6) == 0;
    for (const uint32_t storage : step.reads) last_use[storage] = i;
    for (const uint32_t storage : step.writes) last_use[storage] = i;
    problem.steps.push_back(std::move(step));
  }
  for (const auto& [storage, step] : last_use) {
    // Some are returned and never released; some have two tensors, one of which dies early.
    if (storage < num_foreign || pick(10) == 0) continue;
    problem.cells.push_back({storage, storage, step});
    if (pick(4) == 0 && step > 0) problem.cells.push_back({1000 + storage, storage, step - 1});
  }
  return problem;
}

// Runs a schedule against torch's allocator, as its documentation has it, and the rules of a capture. Blocks are of one
// size, so that every block that is free on a stream is taken by what the stream allocates next. `early`: tensors are
// released as on one stream.
GraphFacts Execute(const ScheduleProblem& problem, const StreamSchedule& schedule, std::mt19937* random, bool early,
                   bool show_scratch) {
  constexpr uint64_t kBlock = 512;
  GraphFacts facts;
  testing::CaptureModel capture;
  std::map<uint32_t, std::vector<uint64_t>> free;  // by stream
  uint64_t top = 1 << 20;
  const auto allocate = [&](uint32_t stream) {
    std::vector<uint64_t>& list = free[stream];
    if (list.empty()) return top += kBlock;
    const uint64_t block = list.back();
    list.pop_back();
    return block;
  };
  struct Place {
    uint64_t block = 0;
    uint32_t stream = 0;
    uint32_t num_cells = 0;
  };
  std::map<uint32_t, Place> places;  // by storage
  const auto range = [&](uint32_t storage) {
    if (!places.contains(storage)) places[storage].block = top += kBlock;  // the caller's
    return ByteRange{places[storage].block, places[storage].block + kBlock};
  };
  std::map<uint32_t, uint32_t> num_cells;
  for (const ScheduleCell& cell : problem.cells) ++num_cells[cell.storage];
  Lists released = schedule.released;
  if (early) {
    released.assign(problem.steps.size(), {});
    for (const ScheduleCell& cell : problem.cells) released[cell.last_step].push_back(cell.cell);
  }

  constexpr uintptr_t kRoot = 1'000'000;
  std::set<uint32_t> captured = {0};
  capture.Record(kRoot, 0);
  for (uint32_t i = 0; i < problem.steps.size(); ++i) {
    const ScheduleStep& step = problem.steps[i];
    const uint32_t stream = schedule.stream[i];
    EXPECT_TRUE(stream == 0 || !step.on_main_stream || !step.touches_memory());
    if (captured.insert(stream).second && schedule.waits[i].empty()) capture.Wait(stream, kRoot);
    for (const uint32_t earlier : schedule.waits[i]) {
      EXPECT_LT(earlier, i);
      capture.Wait(stream, earlier);
    }
    GraphFacts::Step& fact = facts.steps.emplace_back();
    fact.stream = stream;
    if (step.touches_memory()) {
      for (const uint32_t storage : step.reads) fact.reads.push_back(range(storage));
      const uint64_t scratch = allocate(stream);
      for (const uint32_t storage : step.writes) {
        if (!places.contains(storage)) places[storage] = {allocate(stream), stream, num_cells[storage]};
        fact.writes.push_back(range(storage));
      }
      free[stream].push_back(scratch);
      if (show_scratch) fact.writes.push_back({scratch, scratch + kBlock});
      const auto num_nodes = std::max<uint32_t>(1, (*random)() % 4);
      for (uint32_t k = 0; k < num_nodes; ++k) fact.nodes.push_back(capture.Launch(stream));
    }
    capture.Record(i, stream);
    for (const uint32_t cell : released[i]) {
      const uint32_t storage = cell >= 1000 ? cell - 1000 : cell;
      if (!places.contains(storage)) continue;
      Place& place = places[storage];
      facts.releases.push_back({range(storage), place.stream, i});
      if (--place.num_cells == 0) free[place.stream].push_back(place.block);
    }
  }
  for (const uint32_t step : schedule.joins) capture.Wait(0, step);
  // Whatever was captured has come back to the main stream.
  const uint32_t end = capture.Launch(0);
  facts.steps.emplace_back().nodes = {end};
  facts.num_nodes = capture.num_nodes();
  facts.edges = capture.edges();
  std::vector<bool> has_follower(facts.num_nodes, false);
  for (const auto& [from, to] : facts.edges) has_follower[from] = true;
  for (uint32_t node = 0; node + 1 < facts.num_nodes; ++node) EXPECT_TRUE(has_follower[node]) << node;
  return facts;
}

TEST(StreamScheduleTest, Trap20RandomProgramsNeverRace) {
  uint32_t num_parallel = 0;
  for (uint32_t seed = 0; seed < 6000; ++seed) {
    std::mt19937 random(seed);
    const ScheduleProblem problem = RandomProblem(&random);
    const ScheduleOptions options = {
        .num_streams = 1 + seed % 5, .edge_cost_ns = 500.0 * (seed % 4), .min_chain_ns = seed % 7 == 0 ? 4000.0 : 0.0};
    const auto schedule = ScheduleStreams(problem, options);
    ASSERT_TRUE(schedule.ok()) << seed << ": " << schedule.status();
    ASSERT_LE(schedule->num_streams, options.num_streams);
    num_parallel += schedule->num_streams > 1 ? 1 : 0;
    const GraphFacts facts = Execute(problem, *schedule, &random, false, true);
    const absl::Status verified = VerifyGraph(facts);
    ASSERT_TRUE(verified.ok()) << seed << ": " << verified;
    std::multiset<uint32_t> released, cells;
    for (const auto& list : schedule->released) released.insert(list.begin(), list.end());
    for (const ScheduleCell& cell : problem.cells) cells.insert(cell.cell);
    ASSERT_EQ(released, cells) << seed;
  }
  EXPECT_GT(num_parallel, 3000u);
}

TEST(StreamScheduleTest, AnyAssignmentOfStreamsIsMadeSound) {
  for (uint32_t seed = 0; seed < 3000; ++seed) {
    std::mt19937 random(seed);
    ScheduleProblem problem = RandomProblem(&random);
    std::vector<uint32_t> stream(problem.steps.size());
    for (uint32_t i = 0; i < stream.size(); ++i) {
      stream[i] = problem.steps[i].on_main_stream ? 0 : static_cast<uint32_t>(random() % 4);
    }
    const auto schedule = CompleteSchedule(problem, std::move(stream), 0);
    ASSERT_TRUE(schedule.ok()) << seed << ": " << schedule.status();
    const absl::Status verified = VerifyGraph(Execute(problem, *schedule, &random, false, true));
    ASSERT_TRUE(verified.ok()) << seed << ": " << verified;
  }
}

TEST(StreamScheduleTest, EveryWaitIsNeeded) {
  uint32_t num_waits = 0;
  for (uint32_t seed = 0; seed < 400; ++seed) {
    std::mt19937 random(seed);
    ScheduleProblem problem = RandomProblem(&random);
    problem.cells.clear();  // nothing is given back, so that only data is a reason to wait
    const auto schedule = ScheduleStreams(problem, {.num_streams = 4, .edge_cost_ns = 0});
    ASSERT_TRUE(schedule.ok()) << seed << ": " << schedule.status();
    for (uint32_t i = 0; i < problem.steps.size(); ++i) {
      for (size_t k = 0; k < schedule->waits[i].size(); ++k) {
        StreamSchedule without = *schedule;
        without.waits[i].erase(without.waits[i].begin() + static_cast<ptrdiff_t>(k));
        without.joins.clear();
        for (uint32_t last = 0; last < problem.steps.size(); ++last) {
          if (without.stream[last] != 0) without.joins.push_back(last);
        }
        std::mt19937 same(seed);
        EXPECT_FALSE(VerifyGraph(Execute(problem, without, &same, false, false)).ok()) << seed << " step " << i;
        ++num_waits;
      }
    }
  }
  EXPECT_GT(num_waits, 500u);
}

TEST(StreamScheduleTest, ReleasingAsOnOneStreamIsFound) {
  uint32_t num_found = 0;
  for (uint32_t seed = 0; seed < 500; ++seed) {
    std::mt19937 random(seed);
    const ScheduleProblem problem = RandomProblem(&random);
    const auto schedule = ScheduleStreams(problem, {.num_streams = 4, .edge_cost_ns = 0});
    ASSERT_TRUE(schedule.ok()) << seed << ": " << schedule.status();
    // Without the operators' own memory, as the verifier sees a real graph.
    num_found += VerifyGraph(Execute(problem, *schedule, &random, true, false)).ok() ? 0 : 1;
  }
  EXPECT_GT(num_found, 50u);
}

}  // namespace
}  // namespace cuvil::scheduler
