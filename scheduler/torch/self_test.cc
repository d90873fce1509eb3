#include "scheduler/torch/self_test.h"

#include <cmath>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "jit/cir/text.h"
#include "scheduler/torch/dispatcher_call.h"
#include "scheduler/torch/unboxed_call.h"
#include "scheduler/torch/warning_notice.h"

namespace cuvil::torch_abi {
namespace {

// Programs over %0 = [[1, -2], [3, -4]] and %1 = [10, 20], both float32. The last operator's first result is compared.
struct Case {
  const char* ops;
  std::vector<double> expected;
};

constexpr char kHeader[] =
    "cir 1\nsource 0 \"\"\n"
    "%0 : float32[2,2]{2,1} cpu @0 = input 0\n"
    "%1 : float32[2]{1} cpu @1 = input 1\n";
constexpr char kNew[] = " : float32[]{} cpu @9";  // result types are not looked at here

std::vector<Case> BasicCases() {
  return {
      {"aten::relu(Tensor %0) -> (%2$)", {1, 0, 3, 0}},
      {"aten::linear(Tensor %0, Tensor %0, Tensor? %1) -> (%2$)", {15, 31, 21, 45}},
      {"aten::linear(Tensor %0, Tensor %0, Tensor? none) -> (%2$)", {5, 11, 11, 25}},
      {"aten::transpose.int(Tensor %0, int 0, int -1) -> (%2$) view", {1, -2, 3, -4}},  // read in storage order
      {"aten::sum.dim_IntList(Tensor %0, int[]? ints[1], bool false, ScalarType? dtype(float64)) -> (%2$)", {-1, -1}},
      {"aten::sum.dim_IntList(Tensor %0, int[]? none, bool true, ScalarType? none) -> (%2$)", {-2}},
      {"aten::max.dim(Tensor %0, int 0, bool false) -> (_, %2$)", {1, 0}},
      {"aten::max.dim(Tensor %0, int 1, bool false) -> (%2$, _)", {1, 3}},
      {"aten::to.dtype(Tensor %0, ScalarType dtype(int64), bool false, bool false, MemoryFormat? none) -> (%2$)",
       {1, -2, 3, -4}},
      {"aten::to.device(Tensor %0, Device device(cpu), ScalarType dtype(int32), bool false, bool true, MemoryFormat? "
       "format(contiguous)) -> (%2$)",
       {1, -2, 3, -4}},
      {"aten::contiguous(Tensor %1, MemoryFormat format(contiguous)) -> (same %1)\n"
       "aten::relu(Tensor %1) -> (%2$)",
       {10, 20}},
      {"aten::batch_norm(Tensor %0, Tensor? %1, Tensor? none, Tensor? %1, Tensor? %1, bool false, float 0.1, float "
       "90.0, bool true) -> (%2$)",
       {-9, -41.9523539, -7, -45.7662043}},
      {"aten::relu(Tensor %0) -> (%2$)\naten::neg_(Tensor ! %2) -> (& same %2)", {-1, 0, -3, 0}},
      {"aten::std_mean.dim(Tensor %0, int[]? ints[0, 1], bool false, bool false) -> (_, %2$)", {-0.5}},
      {"aten::unsqueeze(Tensor %0, int 0) -> (%2$) view\n"
       "aten::scaled_dot_product_attention(Tensor %2, Tensor %2, Tensor %2, Tensor? none, float 0.0, bool true, float? "
       "1e-07, bool false) -> (%3$)",
       {1, -2, 2, -3}},
  };
}

std::vector<Case> SymIntCases() {
  return {
      {"aten::view(Tensor %0, SymInt[] ints[4]) -> (%2$) view\naten::relu(Tensor %2) -> (%3$)", {1, 0, 3, 0}},
      {"aten::select.int(Tensor %0, int 0, SymInt -1) -> (%2$) view\naten::neg(Tensor %2) -> (%3$)", {-3, 4}},
      {"aten::slice.Tensor(Tensor %1, int 0, SymInt? 1, SymInt? none, SymInt 1) -> (%2$) view\n"
       "aten::neg(Tensor %2) -> (%3$)",
       {-20}},
      {"aten::narrow(Tensor %1, int 0, SymInt 0, SymInt 1) -> (%2$) view\naten::neg(Tensor %2) -> (%3$)", {-10}},
      {"aten::layer_norm(Tensor %1, SymInt[] ints[2], Tensor? %1, Tensor? none, float 0.0, bool true) -> (%2$)",
       {-10, 20}},
      {"aten::repeat_interleave.self_int(Tensor %1, SymInt 2, int? 0, SymInt? none) -> (%2$)", {10, 10, 20, 20}},
      {"aten::ones(SymInt[] ints[2], ScalarType? dtype(float64), Layout? layout(strided), Device? device(cpu), bool? "
       "false) -> (%2$)",
       {1, 1}},
      {"aten::view(Tensor %0, SymInt[] ints[1, 1, 2, 2]) -> (%2$) view\n"
       "aten::upsample_nearest2d.vec(Tensor %2, SymInt[]? ints[4, 2], float[]? none) -> (%3$)",
       {1, -2, 1, -2, 3, -4, 3, -4}},
      {"aten::view(Tensor %0, SymInt[] ints[1, 1, 2, 2]) -> (%2$) view\n"
       "aten::upsample_nearest2d.vec(Tensor %2, SymInt[]? none, float[]? floats[2.0, 1.0]) -> (%3$)",
       {1, -2, 1, -2, 3, -4, 3, -4}},
      {"aten::view(Tensor %0, SymInt[] ints[1, 1, 2, 2]) -> (%2$) view\n"
       "aten::conv2d(Tensor %2, Tensor %2, Tensor? none, SymInt[] ints[1, 1], SymInt[] ints[0, 0], SymInt[] ints[1, "
       "1], "
       "SymInt 1) -> (%3$)",
       {30}},
      {"aten::expand(Tensor %1, SymInt[] ints[2, 2], bool false) -> (%2$) view\naten::neg(Tensor %2) -> (%3$)",
       {-10, -20, -10, -20}},
  };
}

std::vector<Case> ScalarCases() {
  return {
      {"aten::add.Tensor(Tensor %0, Tensor %1, Scalar 2) -> (%2$)", {21, 38, 23, 36}},
      {"aten::mul.Scalar(Tensor %0, Scalar 2.5) -> (%2$)", {2.5, -5, 7.5, -10}},
      {"aten::eq.Scalar(Tensor %0, Scalar 3) -> (%2$)", {0, 0, 1, 0}},
      {"aten::clamp(Tensor %0, Scalar? none, Scalar? 0.5) -> (%2$)", {0.5, -2, 0.5, -4}},
      {"aten::clamp(Tensor %0, Scalar? -3, Scalar? none) -> (%2$)", {1, -2, 3, -3}},
      {"aten::full(SymInt[] ints[2], Scalar true, ScalarType? none, Layout? none, Device? none, bool? none) -> (%2$)",
       {1, 1}},
      {"aten::mul.Scalar(Tensor %1, Scalar complex(0.0, 1.0)) -> (%2$)\naten::imag(Tensor %2) -> (%3$) view\n"
       "aten::neg(Tensor %3) -> (%4$)",
       {-10, -20}},
      {"aten::arange.start_step(Scalar 1, Scalar 2, Scalar 0.5, ScalarType? dtype(float64), Layout? none, Device? "
       "none, "
       "bool? none) -> (%2$)",
       {1, 1.5}},
      {"aten::addmm(Tensor %1, Tensor %0, Tensor %0, Scalar 1, Scalar 2) -> (%2$)", {0, 32, -8, 40}},
      {"aten::relu(Tensor %0) -> (%2$)\naten::add_.Tensor(Tensor ! %2, Tensor %1, Scalar -1) -> (& same %2)",
       {-9, -20, -7, -20}},
  };
}

std::vector<Case> TensorListCases() {
  return {
      {"aten::cat(Tensor[] [%1, %1, %1], int 0) -> (%2$)", {10, 20, 10, 20, 10, 20}},
      {"aten::stack(Tensor[] [%1, %1], int 0) -> (%2$)", {10, 20, 10, 20}},
      {"aten::chunk(Tensor %1, int 2, int 0) -> ([%2$, %3$]) view\naten::neg(Tensor %3) -> (%4$)", {-20}},
      {"aten::chunk(Tensor %1, int 2, int 0) -> ([_]) view\naten::neg(Tensor %1) -> (%2$)", {-10, -20}},
      {"aten::unbind.int(Tensor %0, int 0) -> ([%2$, %3$]) view\naten::cat(Tensor[] [%3, %2], int 0) -> (%4$)",
       {3, -4, 1, -2}},
  };
}

std::vector<Case> StringCases() {
  return {
      {"aten::div.Tensor_mode(Tensor %1, Tensor %0, str? \"floor\") -> (%2$)", {10, -10, 3, -5}},
      {"aten::div.Tensor_mode(Tensor %1, Tensor %0, str? none) -> (%2$)", {10, -10, 3.33333325, -5}},
      {"aten::gelu(Tensor %1, str \"tanh\") -> (%2$)", {10, 20}},
      {"aten::pad(Tensor %1, SymInt[] ints[1, 0], str \"constant\", float? 7.0) -> (%2$)", {7, 10, 20}},
  };
}

std::vector<Case> WrappedNumberCases() {
  return {
      // Of two 0-dim tensors the wider dtype wins; a wrapped number leaves the other's dtype alone.
      {"aten::select.int(Tensor %1, int 0, SymInt 0) -> (%2$) view\naten::mul.Tensor(Tensor %2, Tensor 0.5) -> (%3$)",
       {5}},
      {"aten::mul.Tensor(Tensor %0, Tensor 2) -> (%2$)", {2, -4, 6, -8}},
      {"aten::maximum(Tensor %0, Tensor 0.0) -> (%2$)", {1, 0, 3, 0}},
  };
}

// One program with its inputs, run operator by operator without a plan.
class Program {
 public:
  explicit Program(const TorchApi& api) : api_(api) {}
  ~Program() {
    for (void*& cell : owned_) api_.Drop(&cell);
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  absl::Status Load(const char* ops) {
    std::string text = kHeader;
    size_t number = 0;
    for (std::string_view rest = ops; !rest.empty(); ++number) {
      const size_t end = std::min(rest.find('\n'), rest.size());
      absl::StrAppend(&text, "#", number, " ");
      for (const char c : rest.substr(0, end)) {
        if (c == '$') {
          text += kNew;
        } else {
          text.push_back(c);
        }
      }
      text += " source 0\n";
      rest.remove_prefix(std::min(end + 1, rest.size()));
    }
    absl::StatusOr<cir::Graph> graph = cir::Parse(text + "return\n");
    if (!graph.ok()) return graph.status();
    graph_ = *std::move(graph);
    for (const auto& [sizes, values] : {std::pair<std::vector<int64_t>, std::vector<float>>{{2, 2}, {1, -2, 3, -4}},
                                        std::pair<std::vector<int64_t>, std::vector<float>>{{2}, {10, 20}}}) {
      absl::StatusOr<OwnedTensor> tensor = api_.MakeEmpty(cir::DType::kFloat32, sizes);
      if (!tensor.ok()) return tensor.status();
      void* data = nullptr;
      api_.get_data_ptr(tensor->ref().handle(), &data);
      if (data == nullptr) return absl::FailedPreconditionError("aoti_torch_get_data_ptr gave nothing");
      std::memcpy(data, values.data(), values.size() * sizeof(float));
      inputs_.push_back(*std::move(tensor));
    }
    owned_.assign(graph_.values.size(), nullptr);
    return absl::OkStatus();
  }

  template <typename Invoke>
  absl::Status Run(const Invoke& invoke) {
    std::vector<void*> cells = owned_;
    cells[0] = inputs_[0].ref().impl();
    cells[1] = inputs_[1].ref().impl();
    absl::Status status;
    for (const cir::Op& op : graph_.ops) {
      status = invoke(op, cells.data());
      if (!status.ok()) break;
    }
    for (size_t i = 2; i < cells.size(); ++i) owned_[i] = cells[i];
    return status;
  }

  // The last operator's first value, as numbers in storage order.
  std::optional<std::vector<double>> Output() {
    for (const cir::Result& result : graph_.ops.back().results) {
      if (result.values.empty()) continue;
      return Read(result.values[0].index);
    }
    return std::nullopt;
  }
  cir::DType OutputType() { return api_.DTypeOf(TensorRef(&owned_[graph_.ops.back().results[0].values[0].index])); }

 private:
  std::optional<std::vector<double>> Read(uint32_t cell) {
    if (owned_[cell] == nullptr) return std::nullopt;
    void* handle = &owned_[cell];
    int64_t dim = 0;
    int64_t* sizes = nullptr;
    void* data = nullptr;
    if (api_.get_dim(handle, &dim) != 0 || api_.get_sizes(handle, &sizes) != 0 ||
        api_.get_data_ptr(handle, &data) != 0) {
      return std::nullopt;
    }
    size_t count = 1;
    for (int64_t d = 0; d < dim; ++d) count *= static_cast<size_t>(sizes[d]);
    std::vector<double> values;
    for (size_t i = 0; i < count; ++i) {
      switch (api_.DTypeOf(TensorRef(handle))) {
        case cir::DType::kFloat32:
          values.push_back(static_cast<float*>(data)[i]);
          break;
        case cir::DType::kFloat64:
          values.push_back(static_cast<double*>(data)[i]);
          break;
        case cir::DType::kInt64:
          values.push_back(static_cast<double>(static_cast<int64_t*>(data)[i]));
          break;
        case cir::DType::kInt32:
          values.push_back(static_cast<int32_t*>(data)[i]);
          break;
        case cir::DType::kBool:
          values.push_back(static_cast<uint8_t*>(data)[i]);
          break;
        default:
          return std::nullopt;
      }
    }
    return values;
  }

  const TorchApi& api_;
  cir::Graph graph_;
  std::vector<OwnedTensor> inputs_;
  std::vector<void*> owned_;
};

bool Near(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!(std::abs(a[i] - b[i]) <= 1e-5 * std::max(1.0, std::abs(b[i])))) return false;
  }
  return true;
}

absl::Status Check(Program& program, const Case& c, const absl::Status& status) {
  const std::string ops = absl::StrReplaceAll(c.ops, {{"\n", ", "}});  // the message is one line
  if (!status.ok()) return absl::FailedPreconditionError(absl::StrCat(ops, ": ", status.message()));
  const std::optional<std::vector<double>> output = program.Output();
  if (!output.has_value()) return absl::FailedPreconditionError(absl::StrCat(ops, ": no readable result"));
  if (!Near(*output, c.expected)) {
    return absl::FailedPreconditionError(
        absl::StrCat(ops, ": got ", absl::StrJoin(*output, " "), ", expected ", absl::StrJoin(c.expected, " ")));
  }
  return absl::OkStatus();
}

absl::Status RunUnboxed(const TorchApi& api, const AbiFeatures& features, const Case& c) {
  Program program(api);
  if (absl::Status s = program.Load(c.ops); !s.ok()) return s;
  const absl::Status status = program.Run([&](const cir::Op& op, void** cells) -> absl::Status {
    absl::StatusOr<UnboxedCall> call = UnboxedCall::Create(api, op, features);
    if (!call.ok()) return call.status();
    return call->Invoke(api, cells);
  });
  return Check(program, c, status);
}

absl::Status RunDispatcher(const TorchApi& api, const Case& c) {
  Program program(api);
  if (absl::Status s = program.Load(c.ops); !s.ok()) return s;
  const absl::Status status = program.Run([&](const cir::Op& op, void** cells) -> absl::Status {
    absl::StatusOr<DispatcherCall> call = DispatcherCall::Create(api, op);
    if (!call.ok()) return call.status();
    return call->Invoke(api, cells);
  });
  return Check(program, c, status);
}

absl::Status RunCases(const TorchApi& api, const AbiFeatures& features, const std::vector<Case>& cases) {
  for (const Case& c : cases) {
    if (absl::Status s = RunUnboxed(api, features, c); !s.ok()) return s;
  }
  return absl::OkStatus();
}

absl::Status CheckExceptions(const TorchApi& api, const AbiFeatures& features) {
  Program program(api);
  // Seven elements do not fit; torch throws c10::Error.
  if (absl::Status s = program.Load("aten::linear(Tensor %0, Tensor %0, Tensor? none) -> (%2$)\n"
                                    "aten::bmm(Tensor %1, Tensor %2) -> (%3$)");
      !s.ok()) {
    return s;
  }
  const absl::Status status = program.Run([&](const cir::Op& op, void** cells) -> absl::Status {
    absl::StatusOr<UnboxedCall> call = UnboxedCall::Create(api, op, features);
    if (!call.ok()) return call.status();
    return call->Invoke(api, cells);
  });
  if (status.code() != absl::StatusCode::kAborted) return absl::FailedPreconditionError("no exception was seen");
  if (status.message().find("3D") == absl::string_view::npos) {
    return absl::FailedPreconditionError(absl::StrCat("the exception's text is ", status.message()));
  }
  return absl::OkStatus();
}

// A handler of ours is called in the place of torch's own, and torch's is there again afterwards.
absl::Status CheckWarnings(const TorchApi& api) {
  // offset to top, type, two destructors, process()
  auto* const table = static_cast<void**>(api.FindSymbol("_ZTVN3c1014WarningHandlerE"));
  void* const process = api.FindSymbol("_ZN3c1014WarningHandler7processERKNS_7WarningE");
  if (table == nullptr || process == nullptr || table[4] != process) {
    return absl::FailedPreconditionError("c10::WarningHandler has another form");
  }
  Program program(api);
  // The deviation of one element has no degrees of freedom: torch warns each time.
  if (absl::Status s = program.Load("aten::sum.dim_IntList(Tensor %0, int[]? none, bool false, ScalarType? none) -> "
                                    "(%2$)\naten::std(Tensor %2, bool true) -> (%3$)");
      !s.ok()) {
    return s;
  }
  void* const before = api.get_warning_handler();
  bool early = false;
  bool noticed = false;
  absl::Status status = absl::OkStatus();
  {
    const WarningNotice notice(api);
    status = program.Run([&](const cir::Op& op, void** cells) -> absl::Status {
      early = notice.noticed();
      absl::StatusOr<DispatcherCall> call = DispatcherCall::Create(api, op);
      if (!call.ok()) return call.status();
      return call->Invoke(api, cells);
    });
    noticed = notice.noticed();
  }
  if (!status.ok()) return status;
  if (early || !noticed) return absl::FailedPreconditionError("a warning is not noticed when it is given");
  if (api.get_warning_handler() != before) return absl::FailedPreconditionError("a warning handler cannot be undone");
  return absl::OkStatus();
}

}  // namespace

absl::Status SelfTest::CalibrateWrappedNumbers(TorchApi& api) {
  // TensorImpl holds, in this order: the dimension, five sizes, five strides, the storage offset, the number of
  // elements (all of eight bytes), the dtype (two), the device (two and a flag), and bit fields, of which the eighth is
  // is_wrapped_number. The search goes upwards and ends at the first match, so that it reads inside the object only:
  // 176 bytes in torch 2.15, 184 in 2.11.
  constexpr size_t kLastStart = 64;
  const auto find_count = [&](int64_t count, ptrdiff_t* offset) {
    absl::StatusOr<OwnedTensor> tensor = api.MakeEmpty(cir::DType::kUInt8, {count});
    if (!tensor.ok()) return false;
    const auto* bytes = static_cast<const uint8_t*>(tensor->ref().impl());
    for (size_t at = 32; at <= kLastStart; at += 8) {
      int64_t words[13];
      std::memcpy(words, bytes + at, sizeof(words));
      if (words[0] != 1 || words[1] != count || words[6] != 1 || words[11] != 0 || words[12] != count) continue;
      *offset = static_cast<ptrdiff_t>(at + 12 * sizeof(int64_t));
      return true;
    }
    return false;
  };
  ptrdiff_t count_offset = 0;
  ptrdiff_t again = 0;
  if (!find_count(100003, &count_offset) || !find_count(77773, &again) || count_offset != again) {
    return absl::FailedPreconditionError("the element count of a TensorImpl was not found");
  }
  const ptrdiff_t device = count_offset + 10;
  absl::StatusOr<OwnedTensor> probe = api.MakeNumber(0.5);
  if (!probe.ok()) return probe.status();
  const auto* bytes = static_cast<const uint8_t*>(probe->ref().impl());
  if (bytes[device] != 0 || bytes[device + 1] != 0xff || bytes[device + 2] != 1) {
    return absl::FailedPreconditionError("the device of a TensorImpl is not where it was expected");
  }
  api.wrapped_flag_byte_ = device + 3;
  api.wrapped_flag_bit_ = 0x80;
  if ((bytes[api.wrapped_flag_byte_] & api.wrapped_flag_bit_) != 0) {
    return absl::FailedPreconditionError("a plain tensor has the wrapped-number bit set");
  }
  api.abi_.wrapped_numbers = true;
  const Case promotion = WrappedNumberCases()[0];
  Program program(api);
  absl::Status status = program.Load(promotion.ops);
  if (status.ok()) {
    status = program.Run([&](const cir::Op& op, void** cells) -> absl::Status {
      absl::StatusOr<UnboxedCall> call = UnboxedCall::Create(api, op, api.abi_);
      if (!call.ok()) return call.status();
      return call->Invoke(api, cells);
    });
  }
  if (status.ok() && program.OutputType() != cir::DType::kFloat32) {
    status = absl::FailedPreconditionError("the bit does not make a wrapped number");
  }
  if (status.ok()) status = RunCases(api, api.abi_, WrappedNumberCases());
  api.abi_.wrapped_numbers = status.ok();
  return status;
}

absl::Status SelfTest::Run(TorchApi& api) {
  for (const Case& c : std::vector<Case>{
           {"aten::relu(Tensor %0) -> (%2$)", {1, 0, 3, 0}},
           {"aten::linear(Tensor %0, Tensor %0, Tensor? %1) -> (%2$)", {15, 31, 21, 45}},
           {"aten::cat(Tensor[] [%1, %1], int 0) -> (%2$)", {10, 20, 10, 20}},
           {"aten::chunk(Tensor %1, int 2, int 0) -> ([%2$, %3$]) view\naten::neg(Tensor %3) -> (%4$)", {-20}},
           {"aten::gelu(Tensor %1, str \"tanh\") -> (%2$)", {10, 20}},
           {"aten::max.dim(Tensor %0, int 1, bool false) -> (%2$, _)", {1, 3}},
           {"aten::sum.dim_IntList(Tensor %0, int[]? ints[1], bool false, ScalarType? dtype(float64)) -> (%2$)",
            {-1, -1}},
           {"aten::relu(Tensor %0) -> (%2$)\naten::neg_(Tensor ! %2) -> (& same %2)", {-1, 0, -3, 0}},
       }) {
    Case expected = c;
    if (expects_other_results) expected.expected[0] += 1;
    if (absl::Status s = RunDispatcher(api, expected); !s.ok()) {
      return absl::FailedPreconditionError(absl::StrCat("torch's C shim: ", s.message()));
    }
  }

  if (absl::Status s = CheckWarnings(api); !s.ok()) {
    return absl::FailedPreconditionError(absl::StrCat("torch's warnings: ", s.message()));
  }

  AbiFeatures features;
  const auto attempt = [&](const char* what, bool AbiFeatures::*feature, const std::vector<Case>& cases) {
    AbiFeatures with = features;
    with.*feature = true;
    const absl::Status status = RunCases(api, with, cases);
    if (status.ok()) {
      features = with;
    } else {
      absl::StrAppend(&api.abi_report_, what, ": ", status.message(), "\n");
    }
  };
  attempt("operators", &AbiFeatures::unboxed, BasicCases());
  if (features.unboxed) {
    attempt("SymInt", &AbiFeatures::symints, SymIntCases());
    attempt("Scalar", &AbiFeatures::scalars, ScalarCases());
    attempt("tensor lists", &AbiFeatures::tensor_lists, TensorListCases());
    attempt("strings", &AbiFeatures::strings, StringCases());
    const absl::Status exceptions = CheckExceptions(api, features);
    features.exceptions = exceptions.ok();
    if (!exceptions.ok()) absl::StrAppend(&api.abi_report_, "exceptions: ", exceptions.message(), "\n");
    // An exception that cannot be caught would end the process: then nothing is called unboxed.
    if (!features.exceptions) features = AbiFeatures{};
  }
  api.abi_ = features;
  if (!features.unboxed) return absl::OkStatus();
  const absl::Status wrapped = CalibrateWrappedNumbers(api);
  if (!wrapped.ok()) absl::StrAppend(&api.abi_report_, "wrapped numbers: ", wrapped.message(), "\n");
  return absl::OkStatus();
}

}  // namespace cuvil::torch_abi
