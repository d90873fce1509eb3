#include "jit/cir/reproducible.h"

#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "jit/cir/text.h"

namespace cuvil::cir {
namespace {

// Of an operator with one operand and one result of these types.
bool Reproducible(const std::string& call, const std::string& from, const std::string& to, const std::string& end,
                  const std::string& device = "cpu") {
  const auto graph =
      Parse(absl::StrCat("cir 1\nsource 0 \"\"\n%0 : ", from, " ", device, " @0 = input 0\n#0 aten::", call,
                         "(Tensor %0) -> (%1 : ", to, " ", device, " ", end, " source 0\nreturn\n"));
  EXPECT_TRUE(graph.ok()) << graph.status();
  return graph.ok() && IsReproducible(*graph, graph->ops[0]);
}
bool Reproducible(const std::string& call, const std::string& type) { return Reproducible(call, type, type, "@1)"); }

TEST(ReproducibleTest, ComputesFloatingPointNumbersOnOneThreadOnly) {
  EXPECT_TRUE(Reproducible("exp", "float32[32767]{1}"));
  EXPECT_FALSE(Reproducible("exp", "float32[32768]{1}"));
  // A reduction to several elements takes more threads from here on.
  EXPECT_FALSE(Reproducible("sum", "float32[128,256]{256,1}", "float32[256]{1}", "@1)"));
  EXPECT_FALSE(Reproducible("exp", "complex64[32769]{1}"));
  EXPECT_FALSE(Reproducible("sum", "float32[32769]{1}", "float32[]{}", "@1)"));
  EXPECT_TRUE(Reproducible("sum", "int64[32769]{1}", "int64[]{}", "@1)"));
  EXPECT_TRUE(Reproducible("bitwise_not", "bool[32769]{1}"));
}

TEST(ReproducibleTest, MovesAnyNumberUnlessItIsConverted) {
  EXPECT_TRUE(Reproducible("clone", "float32[32769]{1}"));
  EXPECT_TRUE(Reproducible("ones_like", "int64[32769]{1}", "float32[32769]{1}", "@1)"));
  EXPECT_FALSE(Reproducible("clone", "float64[32769]{1}", "float32[32769]{1}", "@1)"));
  EXPECT_TRUE(Reproducible("numpy_T", "float32[32769]{1}", "float32[32769]{1}", "@0) view"));
}

TEST(ReproducibleTest, WhatDeterministicAlgorithmsChangeIsAsEverOnOneThreadOfACpuOnly) {
  for (const char* name : {"cumsum", "index_add", "index_copy", "index_put", "scatter", "scatter_add"}) {
    EXPECT_TRUE(Reproducible(name, "float32[8]{1}")) << name;
    EXPECT_FALSE(Reproducible(name, "int64[32768]{1}")) << name;
    EXPECT_FALSE(Reproducible(name, "int64[8]{1}", "int64[8]{1}", "@1)", "cuda:0")) << name;
  }
  EXPECT_TRUE(Reproducible("exp", "float32[8]{1}", "float32[8]{1}", "@1)", "cuda:0"));
}

TEST(ReproducibleTest, KnowsNothingOfOperatorsWithSwitchesAndOfOtherNamespaces) {
  EXPECT_FALSE(Reproducible("matrix_exp", "float32[2,2]{2,1}"));
  EXPECT_FALSE(Reproducible("gelu", "float32[2]{1}"));
  EXPECT_FALSE(Reproducible("gelu", "int64[2]{1}"));
  EXPECT_FALSE(Reproducible("no_such_operator", "int64[2]{1}"));
}

}  // namespace
}  // namespace cuvil::cir
