#include "scheduler/torch/dispatcher_call.h"

#include <algorithm>
#include <bit>

#include "absl/strings/str_cat.h"
#include "scheduler/torch/boundary.h"

namespace cuvil::torch_abi {
namespace {

using cir::ArgKind;
using cir::Attr;

// The version of the shim's conventions that we speak: torch 2.10.
constexpr uint64_t kShimVersion = 0x020a000000000000;

bool IsOptional(ArgKind kind) {
  switch (kind) {
    case ArgKind::kOptionalTensor:
    case ArgKind::kOptionalInt:
    case ArgKind::kOptionalIntList:
    case ArgKind::kOptionalSymInt:
    case ArgKind::kOptionalSymIntList:
    case ArgKind::kOptionalFloat:
    case ArgKind::kOptionalFloatList:
    case ArgKind::kOptionalBool:
    case ArgKind::kOptionalString:
    case ArgKind::kOptionalScalar:
    case ArgKind::kOptionalScalarType:
    case ArgKind::kOptionalLayout:
    case ArgKind::kOptionalDevice:
    case ArgKind::kOptionalMemoryFormat:
    case ArgKind::kOptionalGenerator:
    case ArgKind::kOptionalTensorList:
      return true;
    default:
      return false;
  }
}

bool IsSupported(ArgKind kind, const cir::Operand& operand) {
  const auto* attr = std::get_if<Attr>(&operand);
  switch (kind) {
    case ArgKind::kScalar:
    case ArgKind::kScalarList:
    case ArgKind::kGenerator:
    case ArgKind::kOptionalTensorList:
      return false;
    case ArgKind::kOptionalScalar:
      return attr != nullptr && attr->is_none();
    default:
      return true;
  }
}

// The callee frees the cell with `delete`.
uint64_t OptionalCell(uint64_t value) {
  auto* cell = static_cast<uint64_t*>(::operator new(sizeof(uint64_t)));
  *cell = value;
  return reinterpret_cast<uint64_t>(cell);
}

template <typename T, typename Encode>
uint64_t EncodeList(const TorchApi& api, const std::vector<T>& list, const Encode& encode) {
  void* handle = nullptr;
  api.new_list(list.size(), &handle);
  for (const auto& element : list) api.list_push_back(handle, encode(element));
  return reinterpret_cast<uint64_t>(handle);
}

struct AttrEncoder {
  const TorchApi& api;

  uint64_t operator()(const cir::NoneAttr&) const { return 0; }
  uint64_t operator()(bool v) const { return v ? 1 : 0; }
  uint64_t operator()(int64_t v) const { return static_cast<uint64_t>(v); }
  uint64_t operator()(double v) const { return std::bit_cast<uint64_t>(v); }
  uint64_t operator()(const std::complex<double>&) const { return 0; }  // never: Scalar is refused
  uint64_t operator()(const std::string& v) const {
    void* handle = nullptr;
    api.new_string(v.data(), v.size(), &handle);
    return reinterpret_cast<uint64_t>(handle);
  }
  uint64_t operator()(const std::vector<int64_t>& v) const {
    return EncodeList(api, v, [](int64_t x) { return static_cast<uint64_t>(x); });
  }
  uint64_t operator()(const std::vector<double>& v) const {
    return EncodeList(api, v, [](double x) { return std::bit_cast<uint64_t>(x); });
  }
  uint64_t operator()(const std::vector<bool>& v) const {
    return EncodeList(api, v, [](bool x) { return uint64_t{x}; });
  }
  // The shim's codes are 32-bit; its numbers are torch's own.
  uint64_t operator()(cir::DType v) const { return static_cast<uint32_t>(static_cast<int32_t>(v)); }
  uint64_t operator()(cir::Layout v) const { return static_cast<uint32_t>(static_cast<int32_t>(v)); }
  uint64_t operator()(cir::MemoryFormat v) const { return static_cast<uint32_t>(static_cast<int32_t>(v)); }
  uint64_t operator()(const cir::Device& v) const {
    return static_cast<uint64_t>(static_cast<uint32_t>(static_cast<int32_t>(v.index))) |
           static_cast<uint64_t>(static_cast<uint32_t>(static_cast<int32_t>(v.type))) << 32;
  }
  uint64_t operator()(const cir::DefaultGenerator&) const { return 0; }
  uint64_t operator()(const std::vector<Attr>&) const { return 0; }  // never: Scalar[] is refused
};

std::string LastError(const TorchApi& api) {
  using Function = const char* (*)();
  const auto what = reinterpret_cast<Function>(api.FindSymbol("torch_exception_get_what_without_backtrace"));
  const char* text = what != nullptr ? what() : nullptr;
  if (text == nullptr || *text == '\0') return "the operator failed";
  return WithoutBacktrace(text);
}

}  // namespace

absl::StatusOr<DispatcherCall> DispatcherCall::Create(const TorchApi& api, const cir::Op& op) {
  DispatcherCall call;
  for (size_t i = 0; i < op.operands.size(); ++i) {
    if (!IsSupported(op.kinds[i], op.operands[i])) {
      return absl::UnimplementedError(
          absl::StrCat("the shim takes no argument of type ", cir::ArgKindName(op.kinds[i])));
    }
    call.numbers_.emplace_back();
    const auto* attr = std::get_if<Attr>(&op.operands[i]);
    const bool is_tensor = op.kinds[i] == ArgKind::kTensor || op.kinds[i] == ArgKind::kOptionalTensor;
    if (attr == nullptr || !is_tensor || attr->is_none()) continue;
    absl::StatusOr<OwnedTensor> number = api.MakeWrappedNumber(*attr);
    if (!number.ok()) return absl::UnimplementedError(number.status().message());
    call.numbers_.back() = *std::move(number);
  }
  call.name_ = op.name;
  call.overload_ = op.overload;
  call.kinds_ = op.kinds;
  call.operands_ = op.operands;
  call.results_ = op.results;
  return call;
}

uint64_t DispatcherCall::EncodeTensor(const TorchApi& api, void** cells, uint32_t cell) const {
  return reinterpret_cast<uint64_t>(api.NewReference(TensorRef(cells + cell)).release());
}

uint64_t DispatcherCall::EncodeOperand(const TorchApi& api, void** cells, size_t i) const {
  const ArgKind kind = kinds_[i];
  uint64_t value = 0;
  if (const auto* id = std::get_if<cir::ValueId>(&operands_[i])) {
    value = EncodeTensor(api, cells, id->index);
  } else if (const auto* list = std::get_if<cir::ValueList>(&operands_[i])) {
    const bool optional_elements = kind == ArgKind::kOptionalTensorElementList;
    return EncodeList(api, *list, [&](const std::optional<cir::ValueId>& id) -> uint64_t {
      if (!id.has_value()) return 0;
      const uint64_t handle = EncodeTensor(api, cells, id->index);
      return optional_elements ? OptionalCell(handle) : handle;
    });
  } else if (numbers_[i]) {
    value = reinterpret_cast<uint64_t>(api.NewReference(numbers_[i].ref()).release());
  } else {
    const Attr& attr = std::get<Attr>(operands_[i]);
    if (attr.is_none() || kind == ArgKind::kOptionalGenerator) return 0;
    value = std::visit(AttrEncoder{api}, attr.value);
  }
  return IsOptional(kind) ? OptionalCell(value) : value;
}

absl::Status DispatcherCall::Invoke(const TorchApi& api, void** cells) const {
  std::vector<uint64_t> stack(std::max(operands_.size(), results_.size()) + 1);
  for (size_t i = 0; i < operands_.size(); ++i) stack[i] = EncodeOperand(api, cells, i);
  if (api.call_dispatcher(name_.c_str(), overload_.c_str(), stack.data(), kShimVersion) != 0) {
    return absl::AbortedError(LastError(api));
  }
  absl::Status first_error;
  for (size_t i = 0; i < results_.size(); ++i) {
    const absl::Status status = StoreResult(api, cells, results_[i], stack[i]);
    if (!status.ok() && first_error.ok()) first_error = status;
  }
  return first_error;
}

absl::Status DispatcherCall::StoreResult(const TorchApi& api, void** cells, const cir::Result& result,
                                         uint64_t returned) const {
  const auto move_to_cell = [&api](OwnedTensor tensor, void** cell) {
    *cell = api.undefined_impl();
    api.assign_tensors(tensor.ref().handle(), cell);
  };
  if (result.returned != cir::ReturnKind::kTensorList) {
    OwnedTensor tensor = OwnedTensor::Steal(reinterpret_cast<void*>(returned));
    if (result.form == cir::ResultForm::kNew) {
      move_to_cell(std::move(tensor), cells + result.values[0].index);
    } else if (result.form == cir::ResultForm::kSame && tensor.ref().impl() != cells[result.values[0].index]) {
      return absl::InternalError("returned another object than in the trace");
    }
    return absl::OkStatus();
  }
  void* list = reinterpret_cast<void*>(returned);
  size_t count = 0;
  api.list_size(list, &count);
  const bool fits = result.form == cir::ResultForm::kList && count == result.values.size();
  for (size_t i = 0; i < count; ++i) {
    uint64_t item = 0;
    api.list_get_item(list, i, &item);
    OwnedTensor tensor = OwnedTensor::Steal(reinterpret_cast<void*>(item));
    if (fits) move_to_cell(std::move(tensor), cells + result.values[i].index);
  }
  api.delete_list(list);
  if (result.form == cir::ResultForm::kList && !fits) {
    return absl::InternalError(absl::StrCat("returned ", count, " tensors, ", result.values.size(), " in the trace"));
  }
  return absl::OkStatus();
}

}  // namespace cuvil::torch_abi
