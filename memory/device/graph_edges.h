// The nodes of a graph and the order among them, as the driver reports it.
//
// Threads:   thread-compatible; the graph must not be changed meanwhile.
// Errors:    ReadGraphEdges: Unavailable  the driver refused, or has no function for it
//                            Internal     an edge between nodes that the graph does not have
// Source:    CUDA Driver API, cuGraphGetEdges. Kernels may be launched so that the next one starts before they have
//            ended (programmatic dependent launch); such a kernel waits for the end of the one before it by itself, so
//            those edges count like others. Only the second version of the function reports them.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "memory/device/driver_api.h"

namespace cuvil::device {

struct GraphEdges {
  std::vector<void*> nodes;                          // CUgraphNode
  std::vector<std::pair<uint32_t, uint32_t>> edges;  // from, to: positions in `nodes`
};

// `graph` is a CUgraph.
absl::StatusOr<GraphEdges> ReadGraphEdges(const DriverApi& api, void* graph);

}  // namespace cuvil::device
