#include "jit/cir/op_traits.h"

#include <algorithm>
#include <array>
#include <complex>
#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"

namespace cuvil::cir {
namespace {

enum class TraitKind : uint8_t {
  kRandom,
  kRandomIf,
  kDynamic,
  kDynamicIfNone,
  kDynamicIfNegative,
  kDynamicIfMask,
  kWritesIf,
  kUninitialized,
  kMetadataQuery,
  kDenied,
};

struct TraitRow {
  std::string_view name;
  std::string_view overload;
  TraitKind kind;
  uint8_t a = 0, b = 0, c = 0;
  std::string_view text = {};
};

constexpr auto SortedRows() {
  std::array rows = {
#define CUVIL_OP_RANDOM(name, overload) TraitRow{name, overload, TraitKind::kRandom},
#define CUVIL_OP_RANDOM_IF(name, overload, a, b) TraitRow{name, overload, TraitKind::kRandomIf, a, b},
#define CUVIL_OP_DYNAMIC(name, overload) TraitRow{name, overload, TraitKind::kDynamic},
#define CUVIL_OP_DYNAMIC_IF_NONE(name, overload, a) TraitRow{name, overload, TraitKind::kDynamicIfNone, a},
#define CUVIL_OP_DYNAMIC_IF_NEGATIVE(name, overload, a) TraitRow{name, overload, TraitKind::kDynamicIfNegative, a},
#define CUVIL_OP_DYNAMIC_IF_MASK(name, overload, a) TraitRow{name, overload, TraitKind::kDynamicIfMask, a},
#define CUVIL_OP_WRITES_IF(name, overload, a, first, last) \
  TraitRow{name, overload, TraitKind::kWritesIf, a, first, last},
#define CUVIL_OP_UNINITIALIZED(name, overload) TraitRow{name, overload, TraitKind::kUninitialized},
#define CUVIL_OP_METADATA_QUERY(name, overload) TraitRow{name, overload, TraitKind::kMetadataQuery},
#define CUVIL_OP_DENIED(name, overload, reason) TraitRow{name, overload, TraitKind::kDenied, 0, 0, 0, reason},
#include "jit/cir/ops.def"
#undef CUVIL_OP_RANDOM
#undef CUVIL_OP_RANDOM_IF
#undef CUVIL_OP_DYNAMIC
#undef CUVIL_OP_DYNAMIC_IF_NONE
#undef CUVIL_OP_DYNAMIC_IF_NEGATIVE
#undef CUVIL_OP_DYNAMIC_IF_MASK
#undef CUVIL_OP_WRITES_IF
#undef CUVIL_OP_UNINITIALIZED
#undef CUVIL_OP_METADATA_QUERY
#undef CUVIL_OP_DENIED
  };
  std::sort(rows.begin(), rows.end(), [](const TraitRow& x, const TraitRow& y) { return x.name < y.name; });
  return rows;
}

constexpr auto kRows = SortedRows();

constexpr std::string_view kAllowedNamespaces[] = {"aten", "prims", "torchvision", "mkldnn"};

// Calls `visit(row)` for every row of the operator until it returns true; gives that row or null.
template <typename Predicate>
const TraitRow* FindRow(std::string_view name, std::string_view overload, const Predicate& matches) {
  auto row = std::lower_bound(kRows.begin(), kRows.end(), name,
                              [](const TraitRow& x, std::string_view n) { return x.name < n; });
  for (; row != kRows.end() && row->name == name; ++row) {
    if ((row->overload == "*" || row->overload == overload) && matches(*row)) return &*row;
  }
  return nullptr;
}

const Attr* AttrAt(const Op& op, size_t i) {
  return i < op.operands.size() ? std::get_if<Attr>(&op.operands[i]) : nullptr;
}

// A flag or probability that was given as a tensor, or not at all, counts as set: the cautious reading.
bool IsTruthy(const Op& op, size_t i) {
  const Attr* attr = AttrAt(op, i);
  if (attr == nullptr) return true;
  if (const auto* flag = attr->get_if<bool>()) return *flag;
  if (const auto* number = attr->get_if<double>()) return *number != 0.0;
  if (const auto* number = attr->get_if<int64_t>()) return *number != 0;
  return true;
}

bool IsMask(const Graph& graph, ValueId id) {
  const DType dtype = graph.value(id).type.dtype;
  return dtype == DType::kBool || dtype == DType::kUInt8;
}

bool HoldsMask(const Graph& graph, const Operand& operand) {
  if (const auto* value = std::get_if<ValueId>(&operand)) return IsMask(graph, *value);
  const auto* list = std::get_if<ValueList>(&operand);
  if (list == nullptr) return false;
  return std::any_of(list->begin(), list->end(),
                     [&](const std::optional<ValueId>& id) { return id.has_value() && IsMask(graph, *id); });
}

uint64_t HiddenWrites(const Op& op) {
  const TraitRow* row = FindRow(op.name, op.overload, [](const TraitRow& r) { return r.kind == TraitKind::kWritesIf; });
  if (row == nullptr || !IsTruthy(op, row->a)) return 0;
  uint64_t writes = 0;
  for (size_t i = row->b; i <= row->c && i < op.operands.size(); ++i) {
    if (std::holds_alternative<ValueId>(op.operands[i])) writes |= uint64_t{1} << i;
  }
  return writes;
}

std::string NameOf(const Schema& schema) {
  return schema.overload.empty() ? schema.name : absl::StrCat(schema.name, ".", schema.overload);
}

}  // namespace

absl::Status CheckAllowed(const Schema& schema) {
  const TraitRow* denied =
      FindRow(schema.name, schema.overload, [](const TraitRow& r) { return r.kind == TraitKind::kDenied; });
  if (denied != nullptr) {
    return absl::UnimplementedError(absl::StrCat("the operator ", NameOf(schema), " ", std::string(denied->text)));
  }
  if (schema.returns_non_tensor) {
    return absl::UnimplementedError(
        absl::StrCat("the operator ", NameOf(schema), " returns something else than tensors"));
  }
  const std::string_view name = schema.name;
  const std::string_view name_space = name.substr(0, name.find("::"));
  if (std::find(std::begin(kAllowedNamespaces), std::end(kAllowedNamespaces), name_space) ==
      std::end(kAllowedNamespaces)) {
    return absl::UnimplementedError(
        absl::StrCat("the operator ", NameOf(schema), " is from a namespace whose operators may hide state"));
  }
  return absl::OkStatus();
}

bool IsMetadataQuery(const Schema& schema) {
  return FindRow(schema.name, schema.overload, [](const TraitRow& r) { return r.kind == TraitKind::kMetadataQuery; }) !=
         nullptr;
}

Effects DeriveEffects(const Schema& schema, const Op& op) {
  Effects effects;
  effects.writes = HiddenWrites(op);
  for (size_t i = 0; i < schema.arguments.size() && i < op.operands.size(); ++i) {
    // An optional argument that is written when present.
    if (schema.arguments[i].is_written && !std::holds_alternative<Attr>(op.operands[i])) {
      effects.writes |= uint64_t{1} << i;
    }
  }
  effects.is_random = IsRandom(op);
  return effects;
}

bool IsRandom(const Op& op) {
  return FindRow(op.name, op.overload, [&op](const TraitRow& r) {
           return r.kind == TraitKind::kRandom ||
                  (r.kind == TraitKind::kRandomIf && IsTruthy(op, r.a) && IsTruthy(op, r.b));
         }) != nullptr;
}

bool HasDynamicShape(const Graph& graph, const Op& op) {
  for (ValueId id : OperandValues(op)) {
    if (graph.value(id).dynamic_shape) return true;
  }
  return FindRow(op.name, op.overload, [&](const TraitRow& r) {
           switch (r.kind) {
             case TraitKind::kDynamic:
               return true;
             case TraitKind::kDynamicIfNone:
               return AttrAt(op, r.a) != nullptr && AttrAt(op, r.a)->is_none();
             case TraitKind::kDynamicIfNegative: {
               const Attr* attr = AttrAt(op, r.a);
               const auto* number = attr == nullptr ? nullptr : attr->get_if<int64_t>();
               return number == nullptr || *number < 0;
             }
             case TraitKind::kDynamicIfMask:
               return r.a < op.operands.size() && HoldsMask(graph, op.operands[r.a]);
             default:
               return false;
           }
         }) != nullptr;
}

bool IsUntrackedFactory(const Op& op) {
  constexpr std::string_view kLike = "_like";
  const std::string_view name = op.name;
  if (op.effects.writes != 0) return false;
  const bool like = name.size() > kLike.size() && name.substr(name.size() - kLike.size()) == kLike;
  return like || OperandValues(op).empty();
}

bool MayWarn(const Op& op) {
  constexpr std::string_view kDeprecatedForSomeShapes[] = {"aten::numpy_T", "aten::matrix_H", "aten::mT", "aten::mH",
                                                           "aten::adjoint"};
  for (const std::string_view name : kDeprecatedForSomeShapes) {
    if (op.name == name) return true;
  }
  return false;
}

bool IsUninitialized(const Op& op) {
  return FindRow(op.name, op.overload, [](const TraitRow& r) { return r.kind == TraitKind::kUninitialized; }) !=
         nullptr;
}

bool IsPure(const Op& op) {
  return op.effects.writes == 0 && !op.effects.is_random && !op.results.empty() && !IsRandom(op) &&
         !IsUninitialized(op);
}

bool IsDeterministicFactory(const Op& op) { return IsPure(op) && OperandValues(op).empty(); }

}  // namespace cuvil::cir
