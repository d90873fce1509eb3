// Proves of a captured graph that its nodes cannot race: whatever touches the same bytes, one of them writing, is
// connected by a path of the graph, in the order that the program has.
//
// Shares no code with stream_schedule.h and knows nothing of its reasons: it looks at the nodes and edges that the
// driver reports and at the addresses that tensors had when their step was captured. Memory that an operator takes and
// gives back by itself has no tensor; it stays on its stream, because the allocator keeps a free list for each stream.
// So the steps of one stream must be in order as well, and what is given back must be done with before the next step on
// its stream.
//
// Shapes:    nodes are 0 .. num_nodes - 1; steps in program order, the copies of inputs and outputs among them.
// Threads:   pure; any thread.
// Errors:    InvalidArgument     a node that does not exist, or that no step or more than one step has made
//            FailedPrecondition  the graph can race, or has a cycle; the message names the two steps
// Source:    docs/design/0010-parallel-subgraphs.md; the rule is trap 20 of the design: racecheck tools see shared
//            memory only.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"

namespace cuvil::scheduler {

struct ByteRange {
  uint64_t begin = 0;
  uint64_t end = 0;  // exclusive; an empty range touches nothing
};

struct GraphFacts {
  struct Step {
    std::vector<uint32_t> nodes;
    std::vector<ByteRange> reads, writes;
    uint32_t stream = 0;
  };
  // Memory that went back to the allocator.
  struct Release {
    ByteRange range;
    uint32_t stream = 0;      // that it had been allocated on
    uint32_t after_step = 0;  // the last step that had been issued
  };

  uint32_t num_nodes = 0;
  std::vector<std::pair<uint32_t, uint32_t>> edges;  // from, to
  std::vector<Step> steps;
  std::vector<Release> releases;
};

absl::Status VerifyGraph(const GraphFacts& facts);

}  // namespace cuvil::scheduler
