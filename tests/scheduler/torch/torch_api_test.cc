#include "scheduler/torch/torch_api.h"

#include <gtest/gtest.h>

#include <cmath>

#include "jit/cir/text.h"
#include "scheduler/torch/dispatcher_call.h"
#include "scheduler/torch/unboxed_call.h"
#include "tests/testing/torch_library.h"

namespace cuvil::torch_abi {
namespace {

class TorchApiTest : public testing::TorchTest {
 protected:
  static cir::Op ParseOp(const std::string& op) {
    auto graph = cir::Parse("cir 1\nsource 0 \"\"\n#0 " + op + " source 0\nreturn\n");
    EXPECT_TRUE(graph.ok()) << graph.status();
    return graph->ops[0];
  }
};

TEST_F(TorchApiTest, TheWholeSelfTestPasses) {
  EXPECT_EQ(api_->abi_report(), "");
  const AbiFeatures& abi = api_->abi();
  EXPECT_TRUE(abi.unboxed && abi.scalars && abi.symints && abi.tensor_lists && abi.strings && abi.wrapped_numbers &&
              abi.exceptions);
}

TEST_F(TorchApiTest, ReportsAnOperatorsErrorWithItsText) {
  OwnedTensor x = *api_->MakeEmpty(cir::DType::kFloat32, {2, 3});
  void* cells[] = {x.ref().impl(), nullptr};
  const auto call = UnboxedCall::Create(
      *api_, ParseOp("aten::view(Tensor %0, SymInt[] ints[5]) -> (%1 : float32[5]{1} cpu @0)"), api_->abi());
  ASSERT_TRUE(call.ok()) << call.status();
  const absl::Status status = call->Invoke(*api_, cells);
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(status.message(), "shape '[5]' is invalid for input of size 6");
  EXPECT_EQ(cells[1], nullptr);
}

TEST_F(TorchApiTest, DropsResultsThatDifferFromTheTrace) {
  OwnedTensor x = *api_->MakeEmpty(cir::DType::kFloat32, {4});
  void* cells[] = {x.ref().impl(), nullptr, nullptr};
  const auto chunk = UnboxedCall::Create(
      *api_,
      ParseOp("aten::chunk(Tensor %0, int 3, int 0) -> ([%1 : float32[2]{1} cpu @0, %2 : float32[2]{1} cpu @0, %3 : "
              "float32[2]{1} cpu @0])"),
      api_->abi());
  ASSERT_TRUE(chunk.ok()) << chunk.status();
  EXPECT_EQ(chunk->Invoke(*api_, cells).message(), "returned 2 tensors, 3 in the trace");
  EXPECT_EQ(cells[1], nullptr);
  const auto relu = UnboxedCall::Create(*api_, ParseOp("aten::relu(Tensor %0) -> (same %0)"), api_->abi());
  ASSERT_TRUE(relu.ok()) << relu.status();
  EXPECT_EQ(relu->Invoke(*api_, cells).message(), "returned another object than in the trace");
}

TEST_F(TorchApiTest, TheDispatcherTakesOptionalElementsAndDevices) {
  OwnedTensor x = *api_->MakeEmpty(cir::DType::kFloat32, {2, 3});
  OwnedTensor i = *api_->MakeNumber(cir::Attr(int64_t{1}));
  void* cells[] = {x.ref().impl(), i.ref().impl(), nullptr};
  const auto index = DispatcherCall::Create(
      *api_, ParseOp("aten::index.Tensor(Tensor %0, Tensor?[] [none, %1]) -> (%2 : float32[2]{1} cpu @1)"));
  ASSERT_TRUE(index.ok()) << index.status();
  ASSERT_TRUE(index->Invoke(*api_, cells).ok());
  int64_t* sizes = nullptr;
  api_->get_sizes(&cells[2], &sizes);
  EXPECT_EQ(sizes[0], 2);
  api_->Drop(&cells[2]);
  const auto empty = DispatcherCall::Create(
      *api_, ParseOp("aten::empty.memory_format(SymInt[] ints[1, 2, 2, 2], ScalarType? dtype(int64), Layout? "
                     "layout(strided), Device? device(cpu), bool? false, MemoryFormat? format(channels_last)) -> (%2 : "
                     "int64[]{} cpu @1)"));
  ASSERT_TRUE(empty.ok()) << empty.status();
  ASSERT_TRUE(empty->Invoke(*api_, cells).ok());
  EXPECT_EQ(api_->DTypeOf(TensorRef(&cells[2])), cir::DType::kInt64);
  int64_t* strides = nullptr;
  api_->get_strides(&cells[2], &strides);
  EXPECT_EQ(strides[1], 1);
  api_->Drop(&cells[2]);
  EXPECT_EQ(DispatcherCall::Create(*api_, ParseOp("aten::mul.Scalar(Tensor %0, Scalar 2) -> (_)")).status().code(),
            absl::StatusCode::kUnimplemented);
}

TEST_F(TorchApiTest, CellsAndHandlesExchangeReferences) {
  OwnedTensor x = *api_->MakeEmpty(cir::DType::kFloat32, {2});
  void* impl = x.ref().impl();
  OwnedTensor second = api_->NewReference(x.ref());
  EXPECT_EQ(second.ref().impl(), impl);
  void* cell = impl;
  ::operator delete(x.release());  // the cell keeps this reference
  OwnedTensor taken = api_->TakeCell(&cell);
  EXPECT_EQ(cell, nullptr);
  EXPECT_EQ(taken.ref().impl(), impl);
  api_->Drop(&cell);
}

}  // namespace
}  // namespace cuvil::torch_abi
