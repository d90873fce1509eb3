#include "scheduler/torch/linear_call.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "jit/cir/text.h"
#include "scheduler/torch/prepared_call.h"
#include "tests/testing/torch_library.h"

namespace cuvil::torch_abi {
namespace {

struct Sizes {
  int64_t rows, in, out;
};

std::string Header(const char* dtype, Sizes s, const std::string& weight_strides = "") {
  return absl::StrCat("cir 1\nsource 0 \"\"\n%0 : ", dtype, "[", s.rows, ",", s.in, "]{", s.in,
                      ",1} cpu @0 = input 0\n", "%1 : ", dtype, "[", s.out, ",", s.in, "]{",
                      weight_strides.empty() ? absl::StrCat(s.in, ",1") : weight_strides,
                      "} cpu @1 = captured 0\n%2 : ", dtype, "[", s.out, "]{1} cpu @2 = captured 1\n");
}

std::string Linear(const char* dtype, Sizes s) {
  return absl::StrCat("#0 aten::linear(Tensor %0, Tensor %1, Tensor? %2) -> (%3 : ", dtype, "[", s.rows, ",", s.out,
                      "]{", s.out, ",1} cpu @3) source 0\nreturn %3\n");
}

class LinearCallTest : public testing::TorchTest {
 protected:
  absl::StatusOr<LinearCall> Create(const std::string& text) {
    auto graph = cir::Parse(text);
    if (!graph.ok()) return graph.status();
    return LinearCall::Create(*api_, *graph, graph->ops[0], api_->abi());
  }

  OwnedTensor Numbers(cir::DType dtype, const std::vector<int64_t>& sizes, int seed) {
    OwnedTensor tensor = *api_->MakeEmpty(dtype, sizes);
    void* data = nullptr;
    api_->get_data_ptr(tensor.ref().handle(), &data);
    int64_t count = 1;
    for (const int64_t size : sizes) count *= size;
    for (int64_t i = 0; i < count; ++i) {
      const double number = static_cast<double>((i * 7919 + seed * 104729) % 2003) / 77.7 - 11.1;
      if (dtype == cir::DType::kFloat32) {
        static_cast<float*>(data)[i] = static_cast<float>(number);
      } else {
        static_cast<double*>(data)[i] = number;
      }
    }
    return tensor;
  }
};

TEST_F(LinearCallTest, GivesTheBitsOfLinear) {
  for (const auto& [dtype, name] : {std::pair{cir::DType::kFloat32, "float32"}, {cir::DType::kFloat64, "float64"}}) {
    for (const Sizes s : {Sizes{1, 64, 64}, {1, 1, 1}, {3, 5, 7}, {32, 17, 33}, {2, 300, 1000}}) {
      auto graph = cir::Parse(Header(name, s) + Linear(name, s));
      ASSERT_TRUE(graph.ok()) << graph.status();
      const auto subject = LinearCall::Create(*api_, *graph, graph->ops[0], api_->abi());
      ASSERT_TRUE(subject.ok()) << subject.status();
      const auto reference = UnboxedCall::Create(*api_, graph->ops[0], api_->abi());
      ASSERT_TRUE(reference.ok()) << reference.status();
      const OwnedTensor x = Numbers(dtype, {s.rows, s.in}, 1);
      const OwnedTensor w = Numbers(dtype, {s.out, s.in}, 2);
      const OwnedTensor b = Numbers(dtype, {s.out}, 3);
      void* ours[] = {x.ref().impl(), w.ref().impl(), b.ref().impl(), nullptr};
      void* theirs[] = {x.ref().impl(), w.ref().impl(), b.ref().impl(), nullptr};
      ASSERT_TRUE(subject->Invoke(*api_, ours).ok());
      ASSERT_TRUE(reference->Invoke(*api_, theirs).ok());
      void *our_data = nullptr, *their_data = nullptr;
      api_->get_data_ptr(ours + 3, &our_data);
      api_->get_data_ptr(theirs + 3, &their_data);
      EXPECT_EQ(std::memcmp(our_data, their_data, s.rows * s.out * cir::ElementSizeBytes(dtype)), 0)
          << name << " " << s.rows << " " << s.in << " " << s.out;
      api_->Drop(ours + 3);
      api_->Drop(theirs + 3);
    }
  }
}

TEST_F(LinearCallTest, ReportsAddmmsErrorAndFillsNothing) {
  const Sizes s = {2, 4, 3};
  const auto call = Create(Header("float32", s) + Linear("float32", s));
  ASSERT_TRUE(call.ok()) << call.status();
  const OwnedTensor x = Numbers(cir::DType::kFloat32, {2, 5}, 1);
  const OwnedTensor w = Numbers(cir::DType::kFloat32, {3, 4}, 2);
  const OwnedTensor b = Numbers(cir::DType::kFloat32, {3}, 3);
  void* cells[] = {x.ref().impl(), w.ref().impl(), b.ref().impl(), nullptr};
  EXPECT_EQ(call->Invoke(*api_, cells).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(cells[3], nullptr);
}

TEST_F(LinearCallTest, LeavesOtherLayersToTorch) {
  const Sizes s = {2, 4, 3};
  EXPECT_EQ(Create(Header("int64", s) + Linear("int64", s)).status().message(), "operands of other types");
  EXPECT_EQ(Create(Header("bfloat16", s) + Linear("bfloat16", s)).status().message(), "operands of other types");
  EXPECT_EQ(Create(Header("float32", s, "1,3") + Linear("float32", s)).status().message(),
            "empty, large or unfit operands");
  const Sizes large = {1024, 1024, 1024};
  EXPECT_EQ(Create(Header("float32", large) + Linear("float32", large)).status().message(),
            "empty, large or unfit operands");
  EXPECT_EQ(Create(Header("float32", s) +
                   "#0 aten::linear(Tensor %0, Tensor %1, Tensor? none) -> (%3 : float32[2,3]{3,1} cpu @3) source 0\n"
                   "return %3\n")
                .status()
                .message(),
            "no bias, or no way to make views");
  EXPECT_EQ(Create(Header("float32", s) + "#0 aten::relu(Tensor %0) -> (%3 : float32[2,4]{4,1} cpu @3) source 0\n"
                                          "return %3\n")
                .status()
                .message(),
            "no linear layer");
}

TEST_F(LinearCallTest, IsTheFirstWayOfAPreparedCall) {
  const Sizes s = {2, 4, 3};
  auto graph = cir::Parse(Header("float32", s) + Linear("float32", s));
  ASSERT_TRUE(graph.ok()) << graph.status();
  const auto call = PreparedCall::CreateIn(*graph, *api_, graph->ops[0], api_->abi());
  ASSERT_TRUE(call.ok()) << call.status();
  EXPECT_TRUE(call->is_linear());
  const auto boxed = PreparedCall::CreateIn(*graph, *api_, graph->ops[0], AbiFeatures{});
  ASSERT_TRUE(boxed.ok()) << boxed.status();
  EXPECT_FALSE(boxed->is_linear());
}

}  // namespace
}  // namespace cuvil::torch_abi
