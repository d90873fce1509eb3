#include "jit/cir/verifier.h"

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace cuvil::cir {
namespace {

bool IsTensorKind(ArgKind kind) { return kind == ArgKind::kTensor || kind == ArgKind::kOptionalTensor; }

bool IsTensorListKind(ArgKind kind) {
  return kind == ArgKind::kTensorList || kind == ArgKind::kOptionalTensorElementList ||
         kind == ArgKind::kOptionalTensorList;
}

bool IsOptionalKind(ArgKind kind) { return ArgKindName(kind).ends_with('?'); }

template <typename T>
bool Holds(const Attr& attr) {
  return attr.get_if<T>() != nullptr;
}

bool AttrFits(ArgKind kind, const Attr& attr) {
  if (attr.is_none()) return IsOptionalKind(kind);
  switch (kind) {
    case ArgKind::kTensor:
    case ArgKind::kOptionalTensor:
    case ArgKind::kScalar:
    case ArgKind::kOptionalScalar:
      return attr.is_number();
    case ArgKind::kTensorList:
    case ArgKind::kOptionalTensorElementList:
    case ArgKind::kOptionalTensorList:
      return false;
    case ArgKind::kInt:
    case ArgKind::kOptionalInt:
    case ArgKind::kSymInt:
    case ArgKind::kOptionalSymInt:
      return Holds<int64_t>(attr);
    case ArgKind::kIntList:
    case ArgKind::kOptionalIntList:
    case ArgKind::kSymIntList:
    case ArgKind::kOptionalSymIntList:
      return Holds<std::vector<int64_t>>(attr);
    case ArgKind::kFloat:
    case ArgKind::kOptionalFloat:
      return Holds<double>(attr);
    case ArgKind::kFloatList:
    case ArgKind::kOptionalFloatList:
      return Holds<std::vector<double>>(attr);
    case ArgKind::kBool:
    case ArgKind::kOptionalBool:
      return Holds<bool>(attr);
    case ArgKind::kBoolList:
      return Holds<std::vector<bool>>(attr);
    case ArgKind::kBoolArray2:
    case ArgKind::kBoolArray3:
    case ArgKind::kBoolArray4: {
      const size_t n = kind == ArgKind::kBoolArray2 ? 2 : kind == ArgKind::kBoolArray3 ? 3 : 4;
      return Holds<std::vector<bool>>(attr) && attr.get_if<std::vector<bool>>()->size() == n;
    }
    case ArgKind::kString:
    case ArgKind::kOptionalString:
      return Holds<std::string>(attr);
    case ArgKind::kScalarList: {
      const auto* list = attr.get_if<std::vector<Attr>>();
      if (list == nullptr) return false;
      for (const Attr& element : *list) {
        if (!element.is_number()) return false;
      }
      return true;
    }
    case ArgKind::kScalarType:
    case ArgKind::kOptionalScalarType:
      return Holds<DType>(attr);
    case ArgKind::kLayout:
    case ArgKind::kOptionalLayout:
      return Holds<Layout>(attr);
    case ArgKind::kDevice:
    case ArgKind::kOptionalDevice:
      return Holds<Device>(attr);
    case ArgKind::kMemoryFormat:
    case ArgKind::kOptionalMemoryFormat:
      return Holds<MemoryFormat>(attr);
    case ArgKind::kGenerator:
    case ArgKind::kOptionalGenerator:
      return Holds<DefaultGenerator>(attr);
  }
  return false;
}

class GraphVerifier {
 public:
  explicit GraphVerifier(const Graph& graph) : graph_(graph), defined_(graph.values.size(), false) {}

  absl::Status Run() {
    for (size_t i = 0; i < graph_.values.size(); ++i) {
      if (absl::Status s = CheckType(i); !s.ok()) return s;
    }
    if (absl::Status s = DefineLeaves(graph_.inputs, Origin::kInput, "input"); !s.ok()) return s;
    if (absl::Status s = DefineLeaves(graph_.captured, Origin::kCaptured, "captured"); !s.ok()) return s;
    if (absl::Status s = DefineLeaves(graph_.constants, Origin::kConstant, "constant"); !s.ok()) return s;
    for (size_t i = 0; i < graph_.ops.size(); ++i) {
      if (absl::Status s = CheckOp(i); !s.ok()) {
        return absl::Status(s.code(), absl::StrCat("op ", i, " ", QualifiedName(graph_.ops[i]), ": ",
                                                   std::string(s.message().data(), s.message().size())));
      }
    }
    for (size_t i = 0; i < defined_.size(); ++i) {
      if (!defined_[i]) return Bad("value %", i, " is never defined");
    }
    for (ValueId id : graph_.outputs) {
      if (!IsDefined(id)) return Bad("output %", id.index, " is not defined");
    }
    return absl::OkStatus();
  }

 private:
  template <typename... Args>
  static absl::Status Bad(const Args&... args) {
    return absl::InvalidArgumentError(absl::StrCat(args...));
  }

  bool IsDefined(ValueId id) const { return id.index < defined_.size() && defined_[id.index]; }

  absl::Status CheckType(size_t i) const {
    const TensorType& type = graph_.values[i].type;
    if (!IsKnownDType(static_cast<int64_t>(type.dtype))) {
      return Bad("value %", i, ": unknown dtype code ", static_cast<int>(type.dtype));
    }
    if (type.sizes.size() != type.strides.size()) return Bad("value %", i, ": sizes and strides differ in length");
    for (size_t d = 0; d < type.sizes.size(); ++d) {
      if (type.sizes[d] < 0 || type.strides[d] < 0) return Bad("value %", i, ": negative size or stride");
    }
    return absl::OkStatus();
  }

  absl::Status DefineLeaves(const std::vector<ValueId>& ids, Origin origin, const char* what) {
    for (size_t i = 0; i < ids.size(); ++i) {
      const ValueId id = ids[i];
      if (id.index >= graph_.values.size()) return Bad(what, " ", i, ": no value %", id.index);
      const Value& value = graph_.value(id);
      if (value.origin != origin || value.origin_index != i)
        return Bad(what, " ", i, ": %", id.index, " says otherwise");
      if (defined_[id.index]) return Bad(what, " ", i, ": %", id.index, " is defined twice");
      defined_[id.index] = true;
    }
    return absl::OkStatus();
  }

  absl::Status CheckOp(size_t index) {
    const Op& op = graph_.ops[index];
    if (op.name.find("::") == std::string::npos) return Bad("the name has no namespace");
    if (op.source >= graph_.sources.size()) return Bad("no source ", op.source);
    if (op.kinds.size() != op.operands.size()) return Bad("as many kinds as operands expected");
    if (op.operands.size() > 64) return Bad("more than 64 operands");
    if (op.operands.size() < 64 && (op.effects.writes >> op.operands.size()) != 0) return Bad("writes no operand");
    bool dynamic_operand = false;
    for (size_t i = 0; i < op.operands.size(); ++i) {
      if (absl::Status s = CheckOperand(op, i, &dynamic_operand); !s.ok()) return s;
    }
    for (size_t i = 0; i < op.results.size(); ++i) {
      if (absl::Status s = CheckResult(index, i, dynamic_operand); !s.ok()) return s;
    }
    return absl::OkStatus();
  }

  absl::Status CheckOperand(const Op& op, size_t i, bool* dynamic_operand) const {
    const bool written = (op.effects.writes >> i) & 1;
    const ArgKind kind = op.kinds[i];
    if (const auto* attr = std::get_if<Attr>(&op.operands[i])) {
      if (!AttrFits(kind, *attr)) return Bad("operand ", i, " does not fit ", ArgKindName(kind));
      if (written && !attr->is_none()) return Bad("operand ", i, " is written but is no value");
      return absl::OkStatus();
    }
    if (const auto* value = std::get_if<ValueId>(&op.operands[i])) {
      if (!IsTensorKind(kind)) return Bad("operand ", i, " is a tensor, ", ArgKindName(kind), " expected");
      if (!IsDefined(*value)) return Bad("operand ", i, ": %", value->index, " is used before it is defined");
      *dynamic_operand |= graph_.value(*value).dynamic_shape;
      return absl::OkStatus();
    }
    if (!IsTensorListKind(kind)) return Bad("operand ", i, " is a tensor list, ", ArgKindName(kind), " expected");
    for (const auto& element : std::get<ValueList>(op.operands[i])) {
      if (!element.has_value()) {
        if (kind != ArgKind::kOptionalTensorElementList) return Bad("operand ", i, " has an absent element");
        continue;
      }
      if (!IsDefined(*element)) return Bad("operand ", i, ": %", element->index, " is used before it is defined");
      *dynamic_operand |= graph_.value(*element).dynamic_shape;
    }
    return absl::OkStatus();
  }

  bool SharesOperandStorage(const Op& op, ValueId id) const {
    for (ValueId operand : OperandValues(op)) {
      if (graph_.value(operand).storage == graph_.value(id).storage) return true;
    }
    return false;
  }

  bool NamesWrittenOperand(const Op& op, ValueId id) const {
    for (size_t i = 0; i < op.operands.size(); ++i) {
      if (((op.effects.writes >> i) & 1) == 0) continue;
      const auto* value = std::get_if<ValueId>(&op.operands[i]);
      if (value != nullptr && *value == id) return true;
    }
    return false;
  }

  absl::Status CheckResult(size_t op_index, size_t i, bool dynamic_operand) {
    const Op& op = graph_.ops[op_index];
    const Result& result = op.results[i];
    switch (result.form) {
      case ResultForm::kUnused:
        if (!result.values.empty()) return Bad("result ", i, " is unused but names values");
        return absl::OkStatus();
      case ResultForm::kSame: {
        if (result.values.size() != 1) return Bad("result ", i, " must name one value");
        if (result.returned == ReturnKind::kTensorList) return Bad("result ", i, ": a list cannot be one object");
        const ValueId id = result.values[0];
        if (!IsDefined(id)) return Bad("result ", i, ": %", id.index, " is not defined yet");
        if (result.returned == ReturnKind::kTensorAlias) {
          if (!NamesWrittenOperand(op, id)) return Bad("result ", i, ": %", id.index, " is no written operand");
          return absl::OkStatus();
        }
        if (!SharesOperandStorage(op, id)) return Bad("result ", i, ": %", id.index, " has no part in the operands");
        if (dynamic_operand) {
          return absl::UnimplementedError(
              absl::StrCat("result ", i, " is an argument itself, but sizes depend on tensor data"));
        }
        return absl::OkStatus();
      }
      case ResultForm::kNew:
        if (result.values.size() != 1) return Bad("result ", i, " must name one value");
        if (result.returned != ReturnKind::kTensor) return Bad("result ", i, " is new, but no tensor by value");
        return Define(op_index, i, result.values[0]);
      case ResultForm::kList:
        if (result.returned != ReturnKind::kTensorList) return Bad("result ", i, " is no list");
        for (ValueId id : result.values) {
          if (absl::Status s = Define(op_index, i, id); !s.ok()) return s;
        }
        return absl::OkStatus();
    }
    return Bad("result ", i, ": unknown form");
  }

  absl::Status Define(size_t op_index, size_t i, ValueId id) {
    if (id.index >= graph_.values.size()) return Bad("result ", i, ": no value %", id.index);
    const Value& value = graph_.value(id);
    if (value.origin != Origin::kResult || value.origin_index != op_index) {
      return Bad("result ", i, ": %", id.index, " has another origin");
    }
    if (defined_[id.index]) return Bad("result ", i, ": %", id.index, " is defined twice");
    defined_[id.index] = true;
    const Op& op = graph_.ops[op_index];
    if (SharesOperandStorage(op, id) && !op.effects.is_view) {
      return Bad("result ", i, ": %", id.index, " shares an operand's storage, but the operator is no view");
    }
    return absl::OkStatus();
  }

  const Graph& graph_;
  std::vector<bool> defined_;
};

}  // namespace

absl::Status Verify(const Graph& graph) { return GraphVerifier(graph).Run(); }

}  // namespace cuvil::cir
