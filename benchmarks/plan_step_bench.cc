// Question: what does a step of a plan cost beside the operator that it runs?
// Baseline: the same operator through the raw C++ entry point, and through the boxed C shim with handles made for it.
// Unit:     ns per operator (items are operators). Budget: at most 100 ns over the raw call.
// Run:      CUVIL_TEST_TORCH_LIBRARY=.../torch/lib/libtorch_cpu.so OMP_NUM_THREADS=1 plan_step_bench
//             --benchmark_repetitions=5 --benchmark_enable_random_interleaving=true

#include <benchmark/benchmark.h>

#include <string>

#include "jit/cir/text.h"
#include "scheduler/plan_executor.h"
#include "tests/testing/torch_library.h"

namespace cuvil {
namespace {

using torch_abi::OwnedTensor;

constexpr int kSteps = 20;
constexpr uint64_t kShimVersion = 0x020a000000000000;

OwnedTensor Matrix(const torch_abi::TorchApi& api) {
  OwnedTensor x = *api.MakeEmpty(cir::DType::kFloat32, {4, 4});
  void* data = nullptr;
  api.get_data_ptr(x.ref().handle(), &data);
  for (int i = 0; i < 16; ++i) static_cast<float*>(data)[i] = static_cast<float>(i) / 16;
  return x;
}

// `op` with %IN, %OUT and @STORAGE replaced, chained kSteps times.
std::string Chain(const std::string& op, bool makes_values, bool is_view) {
  std::string text = "cir 1\nsource 0 \"\"\n%0 : float32[4,4]{4,1} cpu @0 = input 0\n";
  for (int i = 0; i < kSteps; ++i) {
    std::string line = "#" + std::to_string(i) + " " + op + " source 0\n";
    const auto replace = [&line](const std::string& what, const std::string& with) {
      for (size_t at = line.find(what); at != std::string::npos; at = line.find(what)) {
        line.replace(at, what.size(), with);
      }
    };
    replace("%IN", "%" + std::to_string(makes_values ? i : 0));
    replace("%OUT", "%" + std::to_string(i + 1) + " : float32[4,4]{4,1} cpu @" + std::to_string(is_view ? 0 : i + 1));
    text += line;
  }
  return text + "return" + (makes_values ? " %" + std::to_string(kSteps) : "") + "\n";
}

void RunPlan(benchmark::State& state, const std::string& op, bool makes_values, bool is_view) {
  const auto api = testing::LoadTorch();
  if (!api.ok()) return state.SkipWithError(api.status().ToString().c_str());
  auto graph = cir::Parse(Chain(op, makes_values, is_view));
  if (!graph.ok()) return state.SkipWithError(graph.status().ToString().c_str());
  const auto plan = scheduler::ExecutionPlan::Build(*std::move(graph), *api, {});
  if (!plan.ok()) return state.SkipWithError(plan.status().ToString().c_str());
  const OwnedTensor x = Matrix(**api);
  std::vector<OwnedTensor> outputs;
  for (auto _ : state) {
    const absl::Status status = scheduler::PlanExecutor::Run(**plan, {x.ref()}, {}, &outputs);
    if (!status.ok()) return state.SkipWithError(status.ToString().c_str());
  }
  state.SetItemsProcessed(state.iterations() * kSteps);
}

void PlanRelu(benchmark::State& state) { RunPlan(state, "aten::relu(Tensor %IN) -> (%OUT)", true, false); }
void PlanReluInPlace(benchmark::State& state) {
  RunPlan(state, "aten::relu_(Tensor ! %IN) -> (& same %IN)", false, false);
}
void PlanTranspose(benchmark::State& state) {
  RunPlan(state, "aten::transpose.int(Tensor %IN, int 0, int 1) -> (%OUT) view", true, true);
}
void PlanLinear(benchmark::State& state) {
  RunPlan(state, "aten::linear(Tensor %IN, Tensor %0, Tensor? none) -> (%OUT)", true, false);
}
BENCHMARK(PlanRelu);
BENCHMARK(PlanReluInPlace);
BENCHMARK(PlanTranspose);
BENCHMARK(PlanLinear);

void RawRelu(benchmark::State& state) {
  const auto api = testing::LoadTorch();
  if (!api.ok()) return state.SkipWithError(api.status().ToString().c_str());
  const auto relu =
      reinterpret_cast<void* (*)(void*, void*)>((*api)->FindSymbol("_ZN2at4_ops4relu4callERKNS_6TensorE"));
  if (relu == nullptr) return state.SkipWithError("no entry point for relu");
  const OwnedTensor x = Matrix(**api);
  for (auto _ : state) {
    void* cell = nullptr;
    relu(&cell, x.ref().handle());
    (*api)->Drop(&cell);
  }
  state.SetItemsProcessed(state.iterations());
}
BENCHMARK(RawRelu);

void RawReluInPlace(benchmark::State& state) {
  const auto api = testing::LoadTorch();
  if (!api.ok()) return state.SkipWithError(api.status().ToString().c_str());
  const auto relu = reinterpret_cast<void* (*)(void*)>((*api)->FindSymbol("_ZN2at4_ops5relu_4callERNS_6TensorE"));
  if (relu == nullptr) return state.SkipWithError("no entry point for relu_");
  const OwnedTensor x = Matrix(**api);
  for (auto _ : state) relu(x.ref().handle());
  state.SetItemsProcessed(state.iterations());
}
BENCHMARK(RawReluInPlace);

void BoxedRelu(benchmark::State& state) {
  const auto api = testing::LoadTorch();
  if (!api.ok()) return state.SkipWithError(api.status().ToString().c_str());
  const OwnedTensor x = Matrix(**api);
  for (auto _ : state) {
    uint64_t stack[1] = {reinterpret_cast<uint64_t>((*api)->NewReference(x.ref()).release())};
    if ((*api)->call_dispatcher("aten::relu", "", stack, kShimVersion) != 0) return state.SkipWithError("relu failed");
    OwnedTensor::Steal(reinterpret_cast<void*>(stack[0])).reset();
  }
  state.SetItemsProcessed(state.iterations());
}
BENCHMARK(BoxedRelu);

}  // namespace
}  // namespace cuvil

BENCHMARK_MAIN();
