// What a stream capture makes of events and work, in a few lines: a stream knows the nodes that its next node comes
// behind, an event takes them over, a wait adds an event's to another stream's.
//
// Source:    CUDA Programming Guide, "Cross-stream Dependencies and Events".
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

namespace cuvil::testing {

class CaptureModel {
 public:
  using Nodes = std::set<uint32_t>;

  uint32_t Launch(uintptr_t stream) {
    const uint32_t node = num_nodes_++;
    for (const uint32_t from : tails_[stream]) edges_.emplace_back(from, node);
    tails_[stream] = {node};
    return node;
  }
  void Record(uintptr_t event, uintptr_t stream) { events_[event] = tails_[stream]; }
  void Wait(uintptr_t stream, uintptr_t event) {
    tails_[stream].insert(events_[event].begin(), events_[event].end());
    captured_.insert(stream);
  }

  uint32_t num_nodes() const { return num_nodes_; }
  const std::vector<std::pair<uint32_t, uint32_t>>& edges() const { return edges_; }
  const Nodes& tail(uintptr_t stream) { return tails_[stream]; }
  // Streams that have waited for something.
  const std::set<uintptr_t>& captured() const { return captured_; }

 private:
  uint32_t num_nodes_ = 0;
  std::vector<std::pair<uint32_t, uint32_t>> edges_;
  std::map<uintptr_t, Nodes> tails_, events_;
  std::set<uintptr_t> captured_;
};

}  // namespace cuvil::testing
