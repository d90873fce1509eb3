#include "memory/device/graph_edges.h"

#include <unordered_map>

namespace cuvil::device {
namespace {

// cuda.h: CUgraphEdgeData; what it says is not looked at.
struct EdgeData {
  unsigned char bytes[8];
};

}  // namespace

absl::StatusOr<GraphEdges> ReadGraphEdges(const DriverApi& api, void* graph) {
  if (api.cuGraphGetNodes == nullptr || (api.cuGraphGetEdges == nullptr && api.cuGraphGetEdges_v2 == nullptr)) {
    return absl::UnavailableError("the CUDA driver does not tell the order of a graph's nodes");
  }
  GraphEdges result;
  size_t count = 0;
  if (auto s = api.ToStatus("cuGraphGetNodes", api.cuGraphGetNodes(graph, nullptr, &count)); !s.ok()) return s;
  result.nodes.resize(count);
  if (count != 0) {
    const int listed = api.cuGraphGetNodes(graph, result.nodes.data(), &count);
    if (auto s = api.ToStatus("cuGraphGetNodes", listed); !s.ok()) return s;
  }
  std::unordered_map<void*, uint32_t> positions;
  for (uint32_t i = 0; i < result.nodes.size(); ++i) positions.emplace(result.nodes[i], i);

  std::vector<void*> from, to;
  std::vector<EdgeData> data;
  const auto ask = [&](size_t* num_edges) {
    void** const sources = from.empty() ? nullptr : from.data();
    void** const targets = to.empty() ? nullptr : to.data();
    return api.cuGraphGetEdges_v2 != nullptr
               ? api.cuGraphGetEdges_v2(graph, sources, targets, data.empty() ? nullptr : data.data(), num_edges)
               : api.cuGraphGetEdges(graph, sources, targets, num_edges);
  };
  size_t num_edges = 0;
  if (auto s = api.ToStatus("cuGraphGetEdges", ask(&num_edges)); !s.ok()) return s;
  if (num_edges != 0) {
    from.resize(num_edges);
    to.resize(num_edges);
    data.resize(num_edges);
    if (auto s = api.ToStatus("cuGraphGetEdges", ask(&num_edges)); !s.ok()) return s;
  }
  for (size_t i = 0; i < from.size(); ++i) {
    const auto source = positions.find(from[i]);
    const auto target = positions.find(to[i]);
    if (source == positions.end() || target == positions.end()) {
      return absl::InternalError("an edge between nodes that the graph does not have");
    }
    result.edges.emplace_back(source->second, target->second);
  }
  return result;
}

}  // namespace cuvil::device
