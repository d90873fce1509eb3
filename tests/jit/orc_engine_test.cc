#include "jit/orc_engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "jit/probe_kernel.h"

namespace cuvil::jit {
namespace {

std::unique_ptr<OrcEngine> NewEngine() {
  auto engine = OrcEngine::Create();
  EXPECT_TRUE(engine.ok()) << engine.status();
  return *std::move(engine);
}

CompiledModule LoadProbe(OrcEngine& engine) {
  auto image = CompileProbeKernel(engine.host());
  EXPECT_TRUE(image.ok()) << image.status();
  auto module = engine.Load(*image);
  EXPECT_TRUE(module.ok()) << module.status();
  return *std::move(module);
}

TEST(OrcEngineTest, NamesTheHost) {
  auto engine = NewEngine();
  EXPECT_FALSE(engine->host().name.empty());
  EXPECT_THAT(engine->host().vector_width_bytes, testing::AnyOf(16, 32, 64));
}

TEST(OrcEngineTest, KernelComputesEveryLengthAndTouchesNothingElse) {
  auto engine = NewEngine();
  CompiledModule module = LoadProbe(*engine);
  auto kernel = module.Get<ProbeKernel>(kProbeKernelName);
  ASSERT_TRUE(kernel.ok()) << kernel.status();
  for (int n = 0; n < 70; ++n) {
    std::vector<float> x(n), y(n + 1, -1.0f);
    for (int i = 0; i < n; ++i) x[i] = 0.1f * static_cast<float>(i);
    (*kernel)(x.data(), y.data(), 3.0f, 0.5f, n);
    for (int i = 0; i < n; ++i) ASSERT_EQ(y[i], std::fma(x[i], 3.0f, 0.5f)) << i << " of " << n;
    ASSERT_EQ(y[n], -1.0f) << n;
  }
}

TEST(OrcEngineTest, KernelRunsAtEveryVectorWidth) {
  auto engine = NewEngine();
  HostCpu host = engine->host();
  for (int width : {16, 32, 64}) {
    host.vector_width_bytes = width;
    auto image = CompileProbeKernel(host);
    ASSERT_TRUE(image.ok()) << image.status();
    auto module = engine->Load(*image);
    ASSERT_TRUE(module.ok()) << module.status();
    auto kernel = module->Get<ProbeKernel>(kProbeKernelName);
    ASSERT_TRUE(kernel.ok());
    std::vector<float> x(37, 2.0f), y(37);
    (*kernel)(x.data(), y.data(), 3.0f, 1.0f, 37);
    EXPECT_THAT(y, testing::Each(7.0f)) << width;
  }
}

TEST(OrcEngineTest, SameNamesDoNotClash) {
  auto engine = NewEngine();
  CompiledModule first = LoadProbe(*engine);
  CompiledModule second = LoadProbe(*engine);
  EXPECT_NE(*first.Get<ProbeKernel>(kProbeKernelName), *second.Get<ProbeKernel>(kProbeKernelName));
}

TEST(OrcEngineTest, ModuleOutlivesItsEngine) {
  auto engine = NewEngine();
  CompiledModule module = LoadProbe(*engine);
  engine.reset();
  float x = 2.0f, y = 0.0f;
  (**module.Get<ProbeKernel>(kProbeKernelName))(&x, &y, 5.0f, 1.0f, 1);
  EXPECT_EQ(y, 11.0f);
}

TEST(OrcEngineTest, LoadsAndDropsModulesFromManyThreads) {
  auto engine = NewEngine();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&engine] {
      for (int repeat = 0; repeat < 5; ++repeat) LoadProbe(*engine);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(OrcEngineTest, UnknownEntryPointIsNotFound) {
  auto engine = NewEngine();
  EXPECT_EQ(LoadProbe(*engine).Get<void()>("missing").status().code(), absl::StatusCode::kNotFound);
}

TEST(OrcEngineTest, RejectsWhatIsNoObject) {
  auto engine = NewEngine();
  auto module = engine->Load({"garbage", "not an object file", {"f"}});
  EXPECT_EQ(module.status().code(), absl::StatusCode::kInternal);
}

TEST(OrcEngineTest, RejectsAnObjectWithoutThePromisedEntryPoint) {
  auto engine = NewEngine();
  auto image = CompileProbeKernel(engine->host());
  ASSERT_TRUE(image.ok());
  image->entry_points.push_back("absent");
  EXPECT_EQ(engine->Load(*image).status().code(), absl::StatusCode::kInternal);
}

TEST(ProbeKernelTest, Passes) {
  auto result = RunProbeKernel();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_GT(result->compile_ms, 0);
  EXPECT_FALSE(result->llvm_version.empty());
}

}  // namespace
}  // namespace cuvil::jit
