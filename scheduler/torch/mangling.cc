#include "scheduler/torch/mangling.h"

#include <optional>
#include <string_view>

namespace cuvil::torch_abi {
namespace {

using cir::ArgKind;

// A C++ type as far as operator signatures need it.
struct Type {
  enum class Form : uint8_t { kBuiltin, kNested, kStd, kConst, kReference, kLiteral };
  Form form;
  std::string_view name_space;  // kNested: "at" or "c10"
  std::string_view name;        // kBuiltin, kLiteral: the mangled text
  std::vector<Type> arguments;  // template arguments; the referred type for kConst and kReference
};

Type Builtin(std::string_view text) { return {Type::Form::kBuiltin, {}, text, {}}; }
Type Nested(std::string_view name_space, std::string_view name, std::vector<Type> arguments = {}) {
  return {Type::Form::kNested, name_space, name, std::move(arguments)};
}
Type Std(std::string_view name, std::vector<Type> arguments) {
  return {Type::Form::kStd, {}, name, std::move(arguments)};
}
Type Const(Type type) { return {Type::Form::kConst, {}, {}, {std::move(type)}}; }
Type Reference(Type type) { return {Type::Form::kReference, {}, {}, {std::move(type)}}; }
Type ConstReference(Type type) { return Reference(Const(std::move(type))); }
Type Optional(Type type) { return Std("optional", {std::move(type)}); }
Type ArrayRef(Type type) { return Nested("c10", "ArrayRef", {std::move(type)}); }

std::string SourceName(std::string_view name) { return std::to_string(name.size()).append(name); }

class Mangler {
 public:
  explicit Mangler(std::string_view struct_name) {
    out_ = "_ZN2at4_ops";
    out_ += SourceName(struct_name);
    out_ += "4callE";
    // The prefixes of the function's own name come first in the table of substitutions.
    substitutions_ = {"2at", "2at4_ops", ""};
  }

  void Add(const Type& type) { out_ += Mangle(type); }
  std::string Finish(bool no_arguments) && { return no_arguments ? out_ + "v" : std::move(out_); }

 private:
  // "S_", "S0_", ..., "SA_": what entry `i` is referred to by.
  static std::string Reference(size_t i) {
    if (i == 0) return "S_";
    std::string digits;
    for (size_t n = i - 1;; n = n / 36 - 1) {
      const size_t digit = n % 36;
      digits.insert(digits.begin(), static_cast<char>(digit < 10 ? '0' + digit : 'A' + (digit - 10)));
      if (n < 36) break;
    }
    return std::string("S").append(digits).append("_");
  }

  std::optional<std::string> Find(const std::string& key) const {
    for (size_t i = 0; i < substitutions_.size(); ++i) {
      if (!substitutions_[i].empty() && substitutions_[i] == key) return Reference(i);
    }
    return std::nullopt;
  }

  // The type's name without substitutions: what identifies it in the table.
  static std::string Key(const Type& type) {
    switch (type.form) {
      case Type::Form::kBuiltin:
      case Type::Form::kLiteral:
        return std::string(type.name);
      case Type::Form::kConst:
        return std::string("K").append(Key(type.arguments[0]));
      case Type::Form::kReference:
        return std::string("R").append(Key(type.arguments[0]));
      case Type::Form::kNested:
      case Type::Form::kStd:
        return TemplateKey(type) + ArgumentKeys(type);
    }
    return {};
  }
  static std::string TemplateKey(const Type& type) {
    if (type.form == Type::Form::kStd) return std::string("St").append(SourceName(type.name));
    return SourceName(type.name_space) + SourceName(type.name);
  }
  static std::string ArgumentKeys(const Type& type) {
    if (type.arguments.empty()) return {};
    std::string key = "I";
    for (const Type& argument : type.arguments) key += Key(argument);
    return key + "E";
  }

  std::string Arguments(const Type& type) {
    std::string out = "I";
    for (const Type& argument : type.arguments) out += Mangle(argument);
    return out + "E";
  }

  std::string Mangle(const Type& type) {
    if (type.form == Type::Form::kBuiltin || type.form == Type::Form::kLiteral) return std::string(type.name);
    const std::string key = Key(type);
    if (const auto found = Find(key)) return *found;
    std::string out;
    switch (type.form) {
      case Type::Form::kConst:
        out.append("K").append(Mangle(type.arguments[0]));
        break;
      case Type::Form::kReference:
        out.append("R").append(Mangle(type.arguments[0]));
        break;
      case Type::Form::kStd: {
        const std::string template_key = TemplateKey(type);
        if (const auto found = Find(template_key)) {
          out = *found;
        } else {
          out = template_key;
          substitutions_.push_back(template_key);
        }
        out += Arguments(type);
        break;
      }
      case Type::Form::kNested: {
        const std::string template_key = TemplateKey(type);
        if (const auto found = Find(template_key); found.has_value() && !type.arguments.empty()) {
          out.append("N").append(*found);
        } else {
          const std::string prefix = SourceName(type.name_space);
          out.append("N");
          if (const auto found_prefix = Find(prefix)) {
            out += *found_prefix;
          } else {
            out += prefix;
            substitutions_.push_back(prefix);
          }
          out += SourceName(type.name);
          if (!type.arguments.empty()) substitutions_.push_back(template_key);
        }
        if (!type.arguments.empty()) out += Arguments(type);
        out += "E";
        break;
      }
      default:
        break;
    }
    substitutions_.push_back(key);
    return out;
  }

  std::string out_;
  std::vector<std::string> substitutions_;
};

Type TensorType() { return Nested("at", "Tensor"); }
Type ScalarType() { return Nested("c10", "Scalar"); }
Type SymInt() { return Nested("c10", "SymInt"); }
Type StringView() { return Std("basic_string_view", {Builtin("c"), Std("char_traits", {Builtin("c")})}); }

std::optional<Type> CppType(ArgKind kind, bool written, SignatureVariant variant) {
  switch (kind) {
    case ArgKind::kTensor:
      return written && !variant.const_written ? Reference(TensorType()) : ConstReference(TensorType());
    case ArgKind::kOptionalTensor:
      return ConstReference(Optional(TensorType()));
    case ArgKind::kTensorList:
      if (variant.list_ref) return ConstReference(Nested("c10", "IListRef", {TensorType()}));
      return ArrayRef(TensorType());
    case ArgKind::kOptionalTensorElementList:
      return ConstReference(Nested("c10", "List", {Optional(TensorType())}));
    case ArgKind::kOptionalTensorList:
      return std::nullopt;
    case ArgKind::kInt:
      return Builtin("l");
    case ArgKind::kOptionalInt:
      return Optional(Builtin("l"));
    case ArgKind::kIntList:
      return ArrayRef(Builtin("l"));
    case ArgKind::kOptionalIntList:
      return Nested("c10", "OptionalArrayRef", {Builtin("l")});
    case ArgKind::kSymInt:
      return SymInt();
    case ArgKind::kOptionalSymInt:
      return Optional(SymInt());
    case ArgKind::kSymIntList:
      return ArrayRef(SymInt());
    case ArgKind::kOptionalSymIntList:
      return Nested("c10", "OptionalArrayRef", {SymInt()});
    case ArgKind::kFloat:
      return Builtin("d");
    case ArgKind::kOptionalFloat:
      return Optional(Builtin("d"));
    case ArgKind::kFloatList:
      return ArrayRef(Builtin("d"));
    case ArgKind::kOptionalFloatList:
      return Optional(ArrayRef(Builtin("d")));
    case ArgKind::kBool:
      return Builtin("b");
    case ArgKind::kOptionalBool:
      return Optional(Builtin("b"));
    case ArgKind::kBoolList:
      return std::nullopt;
    case ArgKind::kBoolArray2:
      return Std("array", {Builtin("b"), {Type::Form::kLiteral, {}, "Lm2E", {}}});
    case ArgKind::kBoolArray3:
      return Std("array", {Builtin("b"), {Type::Form::kLiteral, {}, "Lm3E", {}}});
    case ArgKind::kBoolArray4:
      return Std("array", {Builtin("b"), {Type::Form::kLiteral, {}, "Lm4E", {}}});
    case ArgKind::kString:
      return StringView();
    case ArgKind::kOptionalString:
      return Optional(StringView());
    case ArgKind::kScalar:
      return ConstReference(ScalarType());
    case ArgKind::kOptionalScalar:
      return ConstReference(Optional(ScalarType()));
    case ArgKind::kScalarList:
      return ArrayRef(ScalarType());
    case ArgKind::kScalarType:
      return Nested("c10", "ScalarType");
    case ArgKind::kOptionalScalarType:
      return Optional(Nested("c10", "ScalarType"));
    case ArgKind::kLayout:
      return Nested("c10", "Layout");
    case ArgKind::kOptionalLayout:
      return Optional(Nested("c10", "Layout"));
    case ArgKind::kDevice:
      return Nested("c10", "Device");
    case ArgKind::kOptionalDevice:
      return Optional(Nested("c10", "Device"));
    case ArgKind::kMemoryFormat:
      return Nested("c10", "MemoryFormat");
    case ArgKind::kOptionalMemoryFormat:
      return Optional(Nested("c10", "MemoryFormat"));
    case ArgKind::kGenerator:
      return Nested("at", "Generator");
    case ArgKind::kOptionalGenerator:
      return Optional(Nested("at", "Generator"));
  }
  return std::nullopt;
}

}  // namespace

std::string UnboxedSymbol(const cir::Op& op, SignatureVariant variant) {
  constexpr std::string_view kNamespace = "aten::";
  if (!op.name.starts_with(kNamespace)) return {};
  std::string struct_name = op.name.substr(kNamespace.size());
  if (!op.overload.empty()) struct_name.append("_").append(op.overload);
  Mangler mangler(struct_name);
  for (size_t i = 0; i < op.kinds.size(); ++i) {
    const bool written = ((op.effects.writes >> i) & 1) != 0;
    const std::optional<Type> type = CppType(op.kinds[i], written, variant);
    if (!type.has_value()) return {};
    mangler.Add(*type);
  }
  return std::move(mangler).Finish(op.kinds.empty());
}

std::vector<SignatureVariant> SignatureVariants(const cir::Op& op) {
  bool has_list = false;
  bool has_written = false;
  for (size_t i = 0; i < op.kinds.size(); ++i) {
    has_list |= op.kinds[i] == ArgKind::kTensorList;
    has_written |= op.kinds[i] == ArgKind::kTensor && ((op.effects.writes >> i) & 1) != 0;
  }
  std::vector<SignatureVariant> variants = {{}};
  if (has_list) variants.push_back({.list_ref = true});
  if (has_written) variants.push_back({.const_written = true});
  if (has_list && has_written) variants.push_back({.list_ref = true, .const_written = true});
  return variants;
}

}  // namespace cuvil::torch_abi
