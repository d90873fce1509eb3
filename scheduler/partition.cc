#include "scheduler/partition.h"

#include <algorithm>
#include <limits>
#include <map>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace cuvil::scheduler {
namespace {

using cir::Graph;
using cir::Op;
using cir::TensorType;
using cir::ValueId;

// One core of a current server: enough to tell a convolution from an addition. Not tuned, only compared with itself.
constexpr double kFlopsPerNs = 20.0;
constexpr double kBytesPerNs = 10.0;
constexpr double kCallNs = 1000.0;

constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();

const TensorType* OperandType(const Graph& graph, const Op& op, size_t i) {
  if (i >= op.operands.size()) return nullptr;
  const auto* value = std::get_if<ValueId>(&op.operands[i]);
  return value == nullptr ? nullptr : &graph.value(*value).type;
}

const TensorType* FirstResultType(const Graph& graph, const Op& op) {
  for (const cir::Result& result : op.results) {
    if (!result.values.empty()) return &graph.value(result.values[0]).type;
  }
  return nullptr;
}

// Multiplications and additions of the operators that are more than one pass over their operands.
double ContractionFlops(const Graph& graph, const Op& op) {
  const std::string_view name = op.name;
  const TensorType* out = FirstResultType(graph, op);
  const TensorType* a = OperandType(graph, op, 0);
  const TensorType* b = OperandType(graph, op, 1);
  if (out == nullptr || a == nullptr || b == nullptr) return 0;
  const auto outputs = static_cast<double>(out->num_elements());
  if (name == "aten::linear" || name == "aten::mm" || name == "aten::bmm" || name == "aten::matmul") {
    return a->sizes.empty() ? 0 : 2 * outputs * static_cast<double>(a->sizes.back());
  }
  if (name == "aten::addmm" || name == "aten::baddbmm") {
    return b->sizes.empty() ? 0 : 2 * outputs * static_cast<double>(b->sizes.back());
  }
  if (name.starts_with("aten::conv_transpose")) {
    // Each input element meets every tap of every output channel of its group.
    return b->sizes.empty() || b->sizes[0] == 0
               ? 0
               : 2 * static_cast<double>(a->num_elements()) * static_cast<double>(b->num_elements() / b->sizes[0]);
  }
  if (name.starts_with("aten::conv") || name == "aten::_convolution") {
    return b->sizes.empty() || b->sizes[0] == 0 ? 0
                                                : 2 * outputs * static_cast<double>(b->num_elements() / b->sizes[0]);
  }
  if (name.ends_with("scaled_dot_product_attention") && a->sizes.size() >= 2 && b->sizes.size() >= 2) {
    return 4 * static_cast<double>(a->num_elements()) * static_cast<double>(b->sizes[b->sizes.size() - 2]);
  }
  return 0;
}

class DependencyFinder {
 public:
  DependencyFinder(const Graph& graph, absl::Span<const uint32_t> ops)
      : graph_(graph), ops_(ops), producer_(graph.values.size(), kNone) {}

  // predecessors[i]: positions in `ops` that ops[i] depends on, ascending, without repeats.
  std::vector<std::vector<uint32_t>> Run() {
    std::vector<std::vector<uint32_t>> predecessors(ops_.size());
    for (uint32_t i = 0; i < ops_.size(); ++i) {
      std::vector<uint32_t>& list = predecessors[i];
      Visit(graph_.ops[ops_[i]], i, &list);
      std::sort(list.begin(), list.end());
      list.erase(std::unique(list.begin(), list.end()), list.end());
    }
    return predecessors;
  }

 private:
  struct Accesses {
    uint32_t last_write = kNone;
    std::vector<uint32_t> reads_since;
  };
  // The generator as one more storage.
  static constexpr uint64_t kGenerator = uint64_t{1} << 32;

  void Read(uint64_t storage, uint32_t i, std::vector<uint32_t>* list) {
    Accesses& accesses = accesses_[storage];
    if (accesses.last_write != kNone) list->push_back(accesses.last_write);
    accesses.reads_since.push_back(i);
  }
  void Write(uint64_t storage, uint32_t i, std::vector<uint32_t>* list) {
    Accesses& accesses = accesses_[storage];
    for (const uint32_t reader : accesses.reads_since) {
      if (reader != i) list->push_back(reader);
    }
    if (accesses.last_write != kNone && accesses.last_write != i) list->push_back(accesses.last_write);
    accesses.reads_since.clear();
    accesses.last_write = i;
  }

  void Visit(const Op& op, uint32_t i, std::vector<uint32_t>* list) {
    for (const ValueId id : cir::OperandValues(op)) {
      if (producer_[id.index] != kNone) list->push_back(producer_[id.index]);
      Read(graph_.value(id).storage.index, i, list);
    }
    for (size_t operand = 0; operand < op.operands.size(); ++operand) {
      if (((op.effects.writes >> operand) & 1) == 0) continue;
      if (const auto* value = std::get_if<ValueId>(&op.operands[operand])) {
        Write(graph_.value(*value).storage.index, i, list);
      } else if (const auto* elements = std::get_if<cir::ValueList>(&op.operands[operand])) {
        for (const auto& element : *elements) {
          if (element.has_value()) Write(graph_.value(*element).storage.index, i, list);
        }
      }
    }
    if (op.effects.is_random) Write(kGenerator, i, list);
    for (const cir::Result& result : op.results) {
      if (result.form != cir::ResultForm::kNew && result.form != cir::ResultForm::kList) continue;
      for (const ValueId id : result.values) {
        producer_[id.index] = i;
        // Memory that this operator made. A view's storage has its writer already.
        if (!op.effects.is_view) accesses_[graph_.value(id).storage.index].last_write = i;
      }
    }
  }

  const Graph& graph_;
  absl::Span<const uint32_t> ops_;
  std::vector<uint32_t> producer_;
  std::map<uint64_t, Accesses> accesses_;
};

// Removes what is implied by another predecessor: a write waits for the readers, and through them for the last writer.
void RemoveImplied(std::vector<std::vector<uint32_t>>* predecessors) {
  const size_t words = predecessors->size() / 64 + 1;
  std::vector<std::vector<uint64_t>> ancestors(predecessors->size());
  for (size_t i = 0; i < predecessors->size(); ++i) {
    std::vector<uint64_t> reached(words, 0);
    std::vector<uint32_t> kept;
    // Later ones first: only they can imply earlier ones.
    for (size_t k = (*predecessors)[i].size(); k-- > 0;) {
      const uint32_t p = (*predecessors)[i][k];
      if ((reached[p / 64] >> (p % 64)) & 1) continue;
      kept.push_back(p);
      for (size_t w = 0; w < words; ++w) reached[w] |= ancestors[p][w];
      reached[p / 64] |= uint64_t{1} << (p % 64);
    }
    (*predecessors)[i].assign(kept.rbegin(), kept.rend());
    ancestors[i] = std::move(reached);
  }
}

}  // namespace

double OpCost::estimate_ns() const { return std::max(flops / kFlopsPerNs, bytes / kBytesPerNs); }

OpCost EstimateCost(const Graph& graph, const Op& op) {
  OpCost cost;
  if (op.effects.is_view) return cost;
  double results = 0;
  const auto bytes_of = [&](ValueId id) {
    const TensorType& type = graph.value(id).type;
    return static_cast<double>(type.num_elements() * cir::ElementSizeBytes(type.dtype));
  };
  for (const ValueId id : cir::OperandValues(op)) cost.bytes += bytes_of(id);
  for (const cir::Result& result : op.results) {
    for (const ValueId id : result.values) {
      cost.bytes += bytes_of(id);
      results += static_cast<double>(graph.value(id).type.num_elements());
    }
  }
  cost.flops = std::max(ContractionFlops(graph, op), results);
  return cost;
}

Partition PartitionGraph(const Graph& graph, absl::Span<const uint32_t> ops) {
  std::vector<std::vector<uint32_t>> predecessors = DependencyFinder(graph, ops).Run();
  RemoveImplied(&predecessors);
  std::vector<uint32_t> num_successors(ops.size(), 0);
  for (const auto& list : predecessors) {
    for (const uint32_t p : list) ++num_successors[p];
  }

  Partition partition;
  std::vector<uint32_t> subgraph_of(ops.size(), kNone);
  for (uint32_t i = 0; i < ops.size(); ++i) {
    const auto& list = predecessors[i];
    if (list.size() == 1 && num_successors[list[0]] == 1) {
      subgraph_of[i] = subgraph_of[list[0]];
    } else {
      subgraph_of[i] = static_cast<uint32_t>(partition.subgraphs.size());
      partition.subgraphs.emplace_back();
      std::vector<uint32_t>& before = partition.subgraphs.back().predecessors;
      for (const uint32_t p : list) before.push_back(subgraph_of[p]);
      std::sort(before.begin(), before.end());
      before.erase(std::unique(before.begin(), before.end()), before.end());
    }
    Subgraph& subgraph = partition.subgraphs[subgraph_of[i]];
    subgraph.ops.push_back(ops[i]);
    const OpCost cost = EstimateCost(graph, graph.ops[ops[i]]);
    subgraph.cost.flops += cost.flops;
    subgraph.cost.bytes += cost.bytes;
  }

  std::vector<double> finish(partition.subgraphs.size(), 0);
  std::vector<uint32_t> level(partition.subgraphs.size(), 0);
  std::vector<uint32_t> width;
  for (size_t s = 0; s < partition.subgraphs.size(); ++s) {
    const Subgraph& subgraph = partition.subgraphs[s];
    double start = 0;
    for (const uint32_t p : subgraph.predecessors) {
      start = std::max(start, finish[p]);
      level[s] = std::max(level[s], level[p] + 1);
    }
    double cost = 0;
    for (const uint32_t op : subgraph.ops) cost += kCallNs + EstimateCost(graph, graph.ops[op]).estimate_ns();
    finish[s] = start + cost;
    partition.total_ns += cost;
    partition.critical_path_ns = std::max(partition.critical_path_ns, finish[s]);
    if (width.size() <= level[s]) width.resize(level[s] + 1, 0);
    partition.max_width = std::max(partition.max_width, ++width[level[s]]);
  }
  return partition;
}

std::string PrintPartition(const Graph& graph, const Partition& partition) {
  std::string out =
      absl::StrCat(partition.subgraphs.size(), " subgraphs, at most ", partition.max_width, " at a time, estimate ",
                   static_cast<int64_t>(partition.total_ns / 1000), " us in all, ",
                   static_cast<int64_t>(partition.critical_path_ns / 1000), " us on the critical path\n");
  for (size_t s = 0; s < partition.subgraphs.size(); ++s) {
    const Subgraph& subgraph = partition.subgraphs[s];
    absl::StrAppend(&out, "  subgraph ", s, ": #", subgraph.ops.front(), "..#", subgraph.ops.back(), ", ",
                    subgraph.ops.size(), " operators, ", static_cast<int64_t>(subgraph.cost.flops), " flops, ",
                    static_cast<int64_t>(subgraph.cost.bytes), " bytes, after [",
                    absl::StrJoin(subgraph.predecessors, " "), "], starts with ",
                    cir::QualifiedName(graph.ops[subgraph.ops.front()]), "\n");
  }
  return out;
}

}  // namespace cuvil::scheduler
