#include "jit/cir/reproducible.h"

#include <algorithm>
#include <array>
#include <string_view>

namespace cuvil::cir {
namespace {

template <size_t N>
constexpr std::array<std::string_view, N> Sorted(std::array<std::string_view, N> names) {
  std::sort(names.begin(), names.end());
  return names;
}

// They make or move elements and compute none.
constexpr auto kMoving = Sorted(std::to_array<std::string_view>({
    "_unsafe_index",
    "alias_copy",
    "broadcast_tensors",
    "cartesian_prod",
    "cat",
    "clone",
    "column_stack",
    "combinations",
    "concat",
    "concatenate",
    "constant_pad_nd",
    "contiguous",
    "copy",
    "diag",
    "diag_embed",
    "diagonal_copy",
    "diagflat",
    "dstack",
    "embedding",
    "expand_copy",
    "eye",
    "fill",
    "flatten",
    "flip",
    "fliplr",
    "flipud",
    "full",
    "full_like",
    "gather",
    "hstack",
    "index",
    "index_fill",
    "index_select",
    "lift",
    "lift_fresh",
    "lift_fresh_copy",
    "masked_fill",
    "masked_scatter",
    "meshgrid",
    "new_full",
    "new_ones",
    "new_zeros",
    "one_hot",
    "ones",
    "ones_like",
    "pad",
    "permute_copy",
    "repeat",
    "repeat_interleave",
    "reshape",
    "roll",
    "rot90",
    "row_stack",
    "scalar_tensor",
    "select_copy",
    "select_scatter",
    "slice_copy",
    "slice_scatter",
    "stack",
    "take",
    "take_along_dim",
    "tensor_split",
    "tile",
    "tril",
    "tril_indices",
    "triu",
    "triu_indices",
    "unfold_copy",
    "view_copy",
    "vstack",
    "where",
    "zero",
    "zeros",
    "zeros_like",
}));

// Each element, or each sum over elements, by torch's own code.
constexpr auto kComputing = Sorted(std::to_array<std::string_view>({
    "__and__",
    "__lshift__",
    "__or__",
    "__rshift__",
    "__xor__",
    "_cast_Float",
    "_cast_Long",
    "_to_copy",
    "abs",
    "absolute",
    "acos",
    "acosh",
    "add",
    "addcdiv",
    "addcmul",
    "all",
    "amax",
    "amin",
    "aminmax",
    "angle",
    "any",
    "arange",
    "arccos",
    "arccosh",
    "arcsin",
    "arcsinh",
    "arctan",
    "arctan2",
    "arctanh",
    "argmax",
    "argmin",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "bitwise_and",
    "bitwise_left_shift",
    "bitwise_not",
    "bitwise_or",
    "bitwise_right_shift",
    "bitwise_xor",
    "ceil",
    "celu",
    "clamp",
    "clamp_max",
    "clamp_min",
    "clip",
    "complex",
    "conj_physical",
    "copysign",
    "cos",
    "cosh",
    "count_nonzero",
    "deg2rad",
    "diff",
    "div",
    "divide",
    "elu",
    "eq",
    "erf",
    "erfc",
    "erfinv",
    "exp",
    "exp2",
    "expm1",
    "fix",
    "float_power",
    "floor",
    "floor_divide",
    "fmax",
    "fmin",
    "fmod",
    "frac",
    "ge",
    "greater",
    "greater_equal",
    "gt",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "heaviside",
    "hypot",
    "isclose",
    "isfinite",
    "isin",
    "isinf",
    "isnan",
    "isneginf",
    "isposinf",
    "ldexp",
    "le",
    "leaky_relu",
    "lerp",
    "less",
    "less_equal",
    "linspace",
    "log",
    "log10",
    "log1p",
    "log2",
    "logaddexp",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "logit",
    "logspace",
    "lt",
    "max",
    "maximum",
    "mean",
    "min",
    "minimum",
    "mul",
    "multiply",
    "nan_to_num",
    "ne",
    "neg",
    "negative",
    "nonzero",
    "not_equal",
    "outer",
    "polar",
    "positive",
    "pow",
    "prod",
    "rad2deg",
    "reciprocal",
    "relu",
    "relu6",
    "remainder",
    "round",
    "rsqrt",
    "rsub",
    "selu",
    "sgn",
    "sigmoid",
    "sign",
    "signbit",
    "silu",
    "sin",
    "sinc",
    "sinh",
    "softplus",
    "sqrt",
    "square",
    "std",
    "sub",
    "subtract",
    "sum",
    "tan",
    "tanh",
    "to",
    "true_divide",
    "trunc",
    "type_as",
    "var",
    "xlogy",
}));

// What torch.use_deterministic_algorithms() changes or forbids on a GPU, and what elements that are written twice make
// depend on the number of threads.
constexpr auto kSwitched = Sorted(std::to_array<std::string_view>({
    "cumsum",
    "index_add",
    "index_copy",
    "index_put",
    "scatter",
    "scatter_add",
}));

// "aten::mul_" writes what "aten::mul" makes.
std::string_view BaseName(const Op& op) {
  constexpr std::string_view kNamespace = "aten::";
  std::string_view name = op.name;
  if (!name.starts_with(kNamespace)) return {};
  name.remove_prefix(kNamespace.size());
  if (op.effects.writes != 0 && name.ends_with('_') && !name.ends_with("__")) name.remove_suffix(1);
  return name;
}

bool IsFloating(DType dtype) {
  const std::string_view name = DTypeName(dtype);
  return !(name.starts_with("int") || name.starts_with("uint") || name == "bool");
}

}  // namespace

bool IsReproducible(const Graph& graph, const Op& op) {
  if (op.effects.is_view && op.effects.writes == 0) return true;
  const std::string_view name = BaseName(op);
  bool converts = false, large = false, on_cpu = true;
  const DType* floating = nullptr;
  const auto look = [&](ValueId id) {
    const TensorType& type = graph.value(id).type;
    large |= type.num_elements() > kMaxElementsOfOneThread;
    on_cpu &= type.device == DeviceType::kCpu;
    if (!IsFloating(type.dtype)) return;
    converts |= floating != nullptr && *floating != type.dtype;
    floating = &type.dtype;
  };
  for (const ValueId id : OperandValues(op)) look(id);
  for (const Result& result : op.results) {
    for (const ValueId id : result.values) look(id);
  }
  if (std::ranges::binary_search(kSwitched, name)) return on_cpu && !large;
  if (std::ranges::binary_search(kMoving, name)) return !converts || !large;
  return std::ranges::binary_search(kComputing, name) && (floating == nullptr || !large);
}

}  // namespace cuvil::cir
