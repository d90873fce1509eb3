#include "scheduler/stream_problem.h"

#include <algorithm>
#include <cmath>
#include <string_view>
#include <vector>

#include "scheduler/partition.h"

namespace cuvil::scheduler {
namespace {

using cir::Op;
using cir::ValueId;

// An H200: 132 multiprocessors, each about 3 Tflop/s in tiles of 128 by 64 of half precision, and a tenth of that
// without tensor cores; 3 TB/s of memory. A kernel that depends on the one before it costs 1.8 us by itself
// (0.7 to start, the rest to fill and drain). None of it is tuned: measurement decides.
constexpr double kProcessors = 132;
constexpr double kTileElements = 128 * 64;
constexpr double kHalfFlopsPerNs = 3000;
constexpr double kFloatFlopsPerNs = 300;
constexpr double kBytesPerNs = 3000;
constexpr double kKernelNs = 1800;

// Operators of one or a few kernels of torch's or cuDNN's own. What is not named here might multiply matrices.
constexpr std::string_view kWithoutBlas[] = {
    "aten::_softmax",
    "aten::_to_copy",
    "aten::abs",
    "aten::adaptive_avg_pool1d",
    "aten::adaptive_avg_pool2d",
    "aten::adaptive_max_pool2d",
    "aten::add",
    "aten::add_",
    "aten::avg_pool1d",
    "aten::avg_pool2d",
    "aten::batch_norm",
    "aten::cat",
    "aten::clamp",
    "aten::clamp_",
    "aten::clamp_min",
    "aten::clone",
    "aten::concat",
    "aten::constant_pad_nd",
    "aten::contiguous",
    "aten::conv1d",
    "aten::conv2d",
    "aten::convolution",
    "aten::copy_",
    "aten::cos",
    "aten::div",
    "aten::div_",
    "aten::elu",
    "aten::embedding",
    "aten::exp",
    "aten::gelu",
    "aten::group_norm",
    "aten::hardsigmoid",
    "aten::hardsigmoid_",
    "aten::hardswish",
    "aten::hardswish_",
    "aten::hardtanh",
    "aten::hardtanh_",
    "aten::index_select",
    "aten::layer_norm",
    "aten::leaky_relu",
    "aten::leaky_relu_",
    "aten::log",
    "aten::max_pool2d",
    "aten::maximum",
    "aten::mean",
    "aten::minimum",
    "aten::mul",
    "aten::mul_",
    "aten::native_batch_norm",
    "aten::native_group_norm",
    "aten::native_layer_norm",
    "aten::neg",
    "aten::pad",
    "aten::pow",
    "aten::relu",
    "aten::relu6",
    "aten::relu_",
    "aten::reshape",
    "aten::rsqrt",
    "aten::rsub",
    "aten::sigmoid",
    "aten::sigmoid_",
    "aten::silu",
    "aten::silu_",
    "aten::sin",
    "aten::softmax",
    "aten::sqrt",
    "aten::stack",
    "aten::sub",
    "aten::sub_",
    "aten::sum",
    "aten::tanh",
    "aten::tanh_",
    "aten::to",
    "aten::upsample_bilinear2d",
    "aten::upsample_nearest2d",
    "aten::where",
};
static_assert(std::ranges::is_sorted(kWithoutBlas));

double Elements(const cir::Graph& graph, const Op& op) {
  for (const cir::Result& result : op.results) {
    if (!result.values.empty()) return static_cast<double>(graph.value(result.values[0]).type.num_elements());
  }
  return 0;
}

bool IsHalf(const cir::Graph& graph, const Op& op) {
  const std::vector<ValueId> operands = cir::OperandValues(op);
  return !operands.empty() && cir::ElementSizeBytes(graph.value(operands[0]).type.dtype) == 2;
}

double EstimateNs(const cir::Graph& graph, const Op& op, uint32_t num_kernels) {
  const OpCost cost = EstimateCost(graph, op);
  const double outputs = Elements(graph, op);
  double ns = cost.bytes / kBytesPerNs;
  if (outputs > 0 && cost.flops > outputs) {
    const double waves = std::ceil(std::ceil(outputs / kTileElements) / kProcessors);
    const double tile_flops = cost.flops / outputs * kTileElements;
    ns = std::max(ns, waves * tile_flops / (IsHalf(graph, op) ? kHalfFlopsPerNs : kFloatFlopsPerNs));
  }
  return ns + kKernelNs * num_kernels;
}

void AddUnique(uint32_t storage, std::vector<uint32_t>* list) {
  if (std::find(list->begin(), list->end(), storage) == list->end()) list->push_back(storage);
}

ScheduleStep DescribeStep(const cir::Graph& graph, const Op& op) {
  ScheduleStep step;
  for (const ValueId id : cir::OperandValues(op)) AddUnique(graph.value(id).storage.index, &step.reads);
  const auto is_operand = [&](uint32_t storage) {
    return std::find(step.reads.begin(), step.reads.end(), storage) != step.reads.end();
  };
  for (size_t i = 0; i < op.operands.size(); ++i) {
    if (((op.effects.writes >> i) & 1) == 0) continue;
    if (const auto* id = std::get_if<ValueId>(&op.operands[i])) {
      AddUnique(graph.value(*id).storage.index, &step.writes);
    } else if (const auto* list = std::get_if<cir::ValueList>(&op.operands[i])) {
      for (const auto& element : *list) {
        if (element.has_value()) AddUnique(graph.value(*element).storage.index, &step.writes);
      }
    }
  }
  bool makes_memory = false;
  for (const cir::Result& result : op.results) {
    // A result that nobody looks at is memory too, but the operator's own.
    makes_memory |= result.form == cir::ResultForm::kUnused;
    if (result.form != cir::ResultForm::kNew && result.form != cir::ResultForm::kList) continue;
    for (const ValueId id : result.values) {
      const uint32_t storage = graph.value(id).storage.index;
      if (is_operand(storage)) {
        step.viewed = storage;
      } else {
        makes_memory = true;
        AddUnique(storage, &step.writes);
      }
    }
  }
  if (op.effects.is_view && step.viewed != UINT32_MAX && !makes_memory && step.writes.empty()) {
    step.reads.clear();
  } else {
    step.viewed = UINT32_MAX;
  }
  return step;
}

}  // namespace

std::vector<bool> StreamsOfLargeBlocks(const ExecutionPlan& plan, const StreamSchedule& schedule) {
  constexpr int64_t kSmallBytes = int64_t{1} << 20;
  const cir::Graph& graph = plan.graph();
  std::vector<bool> large(schedule.num_streams, false);
  for (uint32_t i = 0; i < plan.steps().size() && i < schedule.stream.size(); ++i) {
    const Op& op = graph.ops[plan.steps()[i].op];
    bool wants = std::string_view(op.name).starts_with("aten::conv");
    for (const cir::Result& result : op.results) {
      for (const ValueId id : result.values) wants |= graph.value(id).type.span_bytes() > kSmallBytes;
    }
    if (wants) large[schedule.stream[i]] = true;
  }
  return large;
}

bool RunsWithoutBlas(const Op& op) { return std::ranges::binary_search(kWithoutBlas, std::string_view(op.name)); }

ScheduleProblem DescribeSteps(const ExecutionPlan& plan, absl::Span<const uint32_t> num_kernels) {
  const cir::Graph& graph = plan.graph();
  ScheduleProblem problem;
  for (const cir::Value& value : graph.values) {
    problem.num_storages = std::max(problem.num_storages, value.storage.index + 1);
  }
  for (uint32_t i = 0; i < plan.steps().size(); ++i) {
    const PlanStep& planned = plan.steps()[i];
    const Op& op = graph.ops[planned.op];
    ScheduleStep step = DescribeStep(graph, op);
    step.on_main_stream = !RunsWithoutBlas(op);
    if (step.touches_memory()) {
      const uint32_t kernels = i < num_kernels.size() ? num_kernels[i] : 1;
      if (kernels > 0) step.cost_ns = EstimateNs(graph, op, kernels);
    }
    for (const uint32_t cell : planned.released_cells) {
      problem.cells.push_back({cell, graph.values[cell].storage.index, i});
    }
    problem.steps.push_back(std::move(step));
  }
  return problem;
}

}  // namespace cuvil::scheduler
