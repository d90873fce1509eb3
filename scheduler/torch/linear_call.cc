#include "scheduler/torch/linear_call.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace cuvil::torch_abi {
namespace {

using cir::ValueId;

// Above this many multiplications the views are less than a hundredth of the layer's time (benchmarks/mlp_bench.py),
// and the comparison in Create would take milliseconds.
constexpr int64_t kMaxMultiplications = int64_t{1} << 20;

enum Cell : uint32_t { kInput, kWeight, kBias, kResult, kNumCells };

// addmm(bias, input, weight) with both factors 1, over the four cells.
cir::Op AddmmOp() {
  cir::Op op;
  op.name = "aten::addmm";
  op.kinds = {cir::ArgKind::kTensor, cir::ArgKind::kTensor, cir::ArgKind::kTensor, cir::ArgKind::kScalar,
              cir::ArgKind::kScalar};
  op.operands = {ValueId{kBias}, ValueId{kInput}, ValueId{kWeight}, cir::Attr(int64_t{1}), cir::Attr(int64_t{1})};
  op.results = {{cir::ReturnKind::kTensor, cir::ResultForm::kNew, {ValueId{kResult}}}};
  return op;
}

// Weights and arguments are compared before each run, other values need not have the type they had in the trace.
bool HasFixedType(const cir::Value& value) {
  return !value.dynamic_shape && value.origin != cir::Origin::kResult && value.type.device == cir::DeviceType::kCpu;
}

// Numbers of all magnitudes that addition in another order would round differently.
OwnedTensor MakeNumbers(const TorchApi& api, cir::DType dtype, const std::vector<int64_t>& sizes, uint32_t seed) {
  absl::StatusOr<OwnedTensor> tensor = api.MakeEmpty(dtype, sizes);
  void* data = nullptr;
  if (!tensor.ok() || api.get_data_ptr(tensor->ref().handle(), &data) != 0 || data == nullptr) return {};
  int64_t count = 1;
  for (const int64_t size : sizes) count *= size;
  uint32_t state = seed;
  for (int64_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    const double number = (static_cast<double>(state >> 8) / (1 << 23) - 1.0) * static_cast<double>(1 + state % 7);
    if (dtype == cir::DType::kFloat32) {
      static_cast<float*>(data)[i] = static_cast<float>(number);
    } else {
      static_cast<double*>(data)[i] = number;
    }
  }
  return std::move(*tensor);
}

}  // namespace

absl::StatusOr<LinearCall> LinearCall::Create(const TorchApi& api, const cir::Graph& graph, const cir::Op& op,
                                              const AbiFeatures& features) {
  if (op.name != "aten::linear" || !op.overload.empty() || op.operands.size() != 3 || op.results.size() != 1 ||
      op.results[0].form != cir::ResultForm::kNew) {
    return absl::NotFoundError("no linear layer");
  }
  const auto* input = std::get_if<ValueId>(&op.operands[0]);
  const auto* weight = std::get_if<ValueId>(&op.operands[1]);
  const auto* bias = std::get_if<ValueId>(&op.operands[2]);
  if (input == nullptr || weight == nullptr || bias == nullptr || api.reinterpret_tensor == nullptr) {
    return absl::NotFoundError("no bias, or no way to make views");
  }
  const cir::TensorType& x = graph.value(*input).type;
  const cir::TensorType& w = graph.value(*weight).type;
  const cir::TensorType& b = graph.value(*bias).type;
  const bool is_float = w.dtype == cir::DType::kFloat32 || w.dtype == cir::DType::kFloat64;
  if (!HasFixedType(graph.value(*weight)) || !HasFixedType(graph.value(*bias)) || graph.value(*input).dynamic_shape ||
      x.device != cir::DeviceType::kCpu || !is_float || x.dtype != w.dtype || b.dtype != w.dtype ||
      x.sizes.size() != 2 || w.sizes.size() != 2 || b.sizes.size() != 1) {
    return absl::NotFoundError("operands of other types");
  }
  const int64_t rows = x.sizes[0], features_in = w.sizes[1], features_out = w.sizes[0];
  if (rows < 1 || features_in < 1 || features_out < 1 || x.sizes[1] != features_in || b.sizes[0] != features_out ||
      w.strides != std::vector<int64_t>{features_in, 1} || b.strides != std::vector<int64_t>{1} ||
      rows > kMaxMultiplications / features_in / features_out) {
    return absl::NotFoundError("empty, large or unfit operands");
  }
  absl::StatusOr<UnboxedCall> product = UnboxedCall::Create(api, AddmmOp(), features);
  if (!product.ok()) return product.status();
  LinearCall call(*std::move(product));
  call.transposed_ = {{features_in, features_out}, {1, features_in}};
  call.rows_of_bias_ = {{rows, features_out}, {0, 1}};
  call.input_ = input->index;
  call.weight_ = weight->index;
  call.bias_ = bias->index;
  call.result_ = op.results[0].values[0].index;
  if (absl::Status s = call.SameBitsAsLinear(api, op, w.dtype, features); !s.ok()) return s;
  return call;
}

absl::Status LinearCall::Invoke(const TorchApi& api, void** cells) const {
  const auto view = [&](uint32_t cell, const View& shape, OwnedTensor* made) {
    void* handle = nullptr;
    const int32_t error = api.reinterpret_tensor(cells + cell, 2, shape.sizes, shape.strides, 0, &handle);
    *made = OwnedTensor::Steal(handle);
    return error == 0;
  };
  OwnedTensor weight, bias;
  if (!view(weight_, transposed_, &weight) || !view(bias_, rows_of_bias_, &bias)) {
    return absl::AbortedError("aoti_torch__reinterpret_tensor failed");
  }
  std::array<void*, kNumCells> inner = {cells[input_], weight.ref().impl(), bias.ref().impl(), nullptr};
  absl::Status status = product_.Invoke(api, inner.data());
  if (status.ok()) cells[result_] = inner[kResult];
  return status;
}

absl::Status LinearCall::SameBitsAsLinear(const TorchApi& api, const cir::Op& op, cir::DType dtype,
                                          const AbiFeatures& features) const {
  const int64_t rows = rows_of_bias_.sizes[0];
  const int64_t features_in = transposed_.sizes[0], features_out = transposed_.sizes[1];
  // What torch adds to a view's offset must be the tensor's own: the numbers of the weight do not start at the first.
  const OwnedTensor input = MakeNumbers(api, dtype, {rows, features_in}, 1);
  const OwnedTensor weight_and_more = MakeNumbers(api, dtype, {features_out + 1, features_in}, 2);
  const OwnedTensor bias_and_more = MakeNumbers(api, dtype, {features_out + 1}, 3);
  if (!input || !weight_and_more || !bias_and_more) return absl::NotFoundError("no memory for the comparison");
  const int64_t weight_sizes[2] = {features_out, features_in}, weight_strides[2] = {features_in, 1};
  const int64_t bias_strides[1] = {1};
  void* handles[2] = {nullptr, nullptr};
  if (api.reinterpret_tensor(weight_and_more.ref().handle(), 2, weight_sizes, weight_strides, features_in,
                             &handles[0]) != 0) {
    return absl::NotFoundError("aoti_torch__reinterpret_tensor failed");
  }
  const OwnedTensor weight = OwnedTensor::Steal(handles[0]);
  if (api.reinterpret_tensor(bias_and_more.ref().handle(), 1, weight_sizes, bias_strides, 1, &handles[1]) != 0) {
    return absl::NotFoundError("aoti_torch__reinterpret_tensor failed");
  }
  const OwnedTensor bias = OwnedTensor::Steal(handles[1]);

  cir::Op linear = op;
  linear.operands = {ValueId{kInput}, ValueId{kWeight}, ValueId{kBias}};
  linear.results[0].values = {ValueId{kResult}};
  absl::StatusOr<UnboxedCall> reference = UnboxedCall::Create(api, linear, features);
  if (!reference.ok()) return reference.status();

  absl::StatusOr<UnboxedCall> product = UnboxedCall::Create(api, AddmmOp(), features);
  if (!product.ok()) return product.status();
  LinearCall subject(*std::move(product));
  subject.transposed_ = transposed_;
  subject.rows_of_bias_ = rows_of_bias_;
  subject.input_ = kInput;
  subject.weight_ = kWeight;
  subject.bias_ = kBias;
  subject.result_ = kResult;
  std::vector<OwnedTensor> results;
  const auto run = [&](const auto& call) {
    std::array<void*, kNumCells> cells = {input.ref().impl(), weight.ref().impl(), bias.ref().impl(), nullptr};
    absl::Status status = call.Invoke(api, cells.data());
    if (status.ok()) results.push_back(api.TakeCell(&cells[kResult]));
    return status;
  };
  if (absl::Status s = run(*reference); !s.ok()) return s;
  if (absl::Status s = run(subject); !s.ok()) return s;

  void* data[2] = {nullptr, nullptr};
  for (size_t i = 0; i < 2; ++i) {
    int64_t dim = 0;
    int64_t *sizes = nullptr, *strides = nullptr;
    if (api.get_data_ptr(results[i].ref().handle(), &data[i]) != 0 ||
        api.get_dim(results[i].ref().handle(), &dim) != 0 || api.get_sizes(results[i].ref().handle(), &sizes) != 0 ||
        api.get_strides(results[i].ref().handle(), &strides) != 0 || dim != 2 || sizes[0] != rows ||
        sizes[1] != features_out || strides[0] != features_out || strides[1] != 1 ||
        api.DTypeOf(results[i].ref()) != dtype) {
      return absl::NotFoundError("the result has another shape");
    }
  }
  const auto bytes = static_cast<size_t>(rows * features_out * cir::ElementSizeBytes(dtype));
  if (std::memcmp(data[0], data[1], bytes) != 0) {
    return absl::NotFoundError(
        absl::StrCat("addmm differs from linear for ", rows, " rows of ", features_in, " features to ", features_out));
  }
  return absl::OkStatus();
}

}  // namespace cuvil::torch_abi
