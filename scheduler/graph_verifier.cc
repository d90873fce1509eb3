#include "scheduler/graph_verifier.h"

#include <algorithm>
#include <optional>
#include <string_view>

#include "absl/strings/str_cat.h"

namespace cuvil::scheduler {
namespace {

// A square matrix of bits: row `node` says which nodes are done before it starts.
class Ancestors {
 public:
  // Nullopt if the edges go round in a circle.
  static std::optional<Ancestors> Of(const GraphFacts& facts) {
    Ancestors ancestors(facts.num_nodes);
    std::vector<std::vector<uint32_t>> followers(facts.num_nodes);
    std::vector<uint32_t> missing(facts.num_nodes, 0);
    for (const auto& [from, to] : facts.edges) {
      followers[from].push_back(to);
      ++missing[to];
    }
    std::vector<uint32_t> ready;
    for (uint32_t node = 0; node < facts.num_nodes; ++node) {
      if (missing[node] == 0) ready.push_back(node);
    }
    for (size_t done = 0; done < ready.size(); ++done) {
      const uint32_t node = ready[done];
      for (const uint32_t next : followers[node]) {
        ancestors.Inherit(next, node);
        if (--missing[next] == 0) ready.push_back(next);
      }
    }
    if (ready.size() != facts.num_nodes) return std::nullopt;
    return ancestors;
  }

  bool Precedes(uint32_t earlier, uint32_t later) const {
    return ((rows_[size_t{later} * width_ + earlier / 64] >> (earlier % 64)) & 1) != 0;
  }

 private:
  explicit Ancestors(uint32_t num_nodes) : width_(num_nodes / 64 + 1), rows_(num_nodes * width_, 0) {}
  void Inherit(uint32_t to, uint32_t from) {
    for (size_t w = 0; w < width_; ++w) rows_[to * width_ + w] |= rows_[from * width_ + w];
    rows_[to * width_ + from / 64] |= uint64_t{1} << (from % 64);
  }

  size_t width_;
  std::vector<uint64_t> rows_;
};

struct Touch {
  ByteRange range;
  uint32_t step;
  bool writes;
};

class Verifier {
 public:
  Verifier(const GraphFacts& facts, const Ancestors& ancestors) : facts_(facts), ancestors_(ancestors) {}

  absl::Status Run() const {
    if (absl::Status s = CheckStreams(); !s.ok()) return s;
    std::vector<Touch> touches;
    for (uint32_t i = 0; i < facts_.steps.size(); ++i) {
      for (const ByteRange& range : facts_.steps[i].reads) Add(range, i, false, &touches);
      for (const ByteRange& range : facts_.steps[i].writes) Add(range, i, true, &touches);
    }
    std::sort(touches.begin(), touches.end(),
              [](const Touch& a, const Touch& b) { return a.range.begin < b.range.begin; });
    if (absl::Status s = CheckBytes(touches); !s.ok()) return s;
    return CheckReleases(touches);
  }

 private:
  static void Add(const ByteRange& range, uint32_t step, bool writes, std::vector<Touch>* touches) {
    if (range.begin < range.end) touches->push_back({range, step, writes});
  }

  // Every node of one step before every node of the other.
  bool Ordered(uint32_t earlier, uint32_t later) const {
    for (const uint32_t a : facts_.steps[earlier].nodes) {
      for (const uint32_t b : facts_.steps[later].nodes) {
        if (!ancestors_.Precedes(a, b)) return false;
      }
    }
    return true;
  }

  absl::Status Unordered(uint32_t earlier, uint32_t later, std::string_view why) const {
    return absl::FailedPreconditionError(
        absl::StrCat("steps ", earlier, " and ", later, " of the graph are in no order, but ", why));
  }

  // With all neighbours on a stream in order, so are any two steps of it.
  absl::Status CheckStreams() const {
    std::vector<std::pair<uint32_t, uint32_t>> latest;  // stream, step
    for (uint32_t i = 0; i < facts_.steps.size(); ++i) {
      const GraphFacts::Step& step = facts_.steps[i];
      if (step.nodes.empty()) continue;
      const auto found =
          std::find_if(latest.begin(), latest.end(), [&](const auto& entry) { return entry.first == step.stream; });
      if (found == latest.end()) {
        latest.emplace_back(step.stream, i);
        continue;
      }
      if (!Ordered(found->second, i)) return Unordered(found->second, i, "run on one stream");
      found->second = i;
    }
    return absl::OkStatus();
  }

  absl::Status CheckBytes(const std::vector<Touch>& touches) const {
    std::vector<const Touch*> open;  // may reach into what comes
    for (const Touch& touch : touches) {
      std::erase_if(open, [&](const Touch* each) { return each->range.end <= touch.range.begin; });
      for (const Touch* other : open) {
        if (other->step == touch.step || !(other->writes || touch.writes)) continue;
        const auto [earlier, later] = std::minmax(other->step, touch.step);
        if (!Ordered(earlier, later)) return Unordered(earlier, later, "touch the same memory");
      }
      open.push_back(&touch);
    }
    return absl::OkStatus();
  }

  absl::Status CheckReleases(const std::vector<Touch>& touches) const {
    for (const GraphFacts::Release& release : facts_.releases) {
      uint32_t next = release.after_step + 1;
      while (next < facts_.steps.size() &&
             (facts_.steps[next].nodes.empty() || facts_.steps[next].stream != release.stream)) {
        ++next;
      }
      if (next >= facts_.steps.size()) continue;  // nobody takes it any more
      for (const Touch& touch : touches) {
        if (touch.range.begin >= release.range.end) break;
        if (touch.range.end <= release.range.begin || touch.step > release.after_step) continue;
        if (!Ordered(touch.step, next)) return Unordered(touch.step, next, "the second may get the first one's memory");
      }
    }
    return absl::OkStatus();
  }

  const GraphFacts& facts_;
  const Ancestors& ancestors_;
};

}  // namespace

absl::Status VerifyGraph(const GraphFacts& facts) {
  for (const auto& [from, to] : facts.edges) {
    if (from >= facts.num_nodes || to >= facts.num_nodes) {
      return absl::InvalidArgumentError("an edge of the graph names a node that does not exist");
    }
  }
  std::vector<uint32_t> makers(facts.num_nodes, 0);
  for (const GraphFacts::Step& step : facts.steps) {
    for (const uint32_t node : step.nodes) {
      if (node >= facts.num_nodes) return absl::InvalidArgumentError("a step names a node that does not exist");
      ++makers[node];
    }
  }
  for (uint32_t node = 0; node < facts.num_nodes; ++node) {
    if (makers[node] != 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("node ", node, " of the graph was made by ", makers[node], " steps"));
    }
  }
  const std::optional<Ancestors> ancestors = Ancestors::Of(facts);
  if (!ancestors.has_value()) return absl::FailedPreconditionError("the graph has a cycle");
  return Verifier(facts, *ancestors).Run();
}

}  // namespace cuvil::scheduler
