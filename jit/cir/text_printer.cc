#include <bit>
#include <charconv>
#include <cmath>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "jit/cir/text.h"

namespace cuvil::cir {
namespace {

std::string PrintDouble(double value) {
  if (std::isnan(value)) {
    char text[32];
    std::snprintf(text, sizeof(text), "nan(%016llx)",
                  static_cast<unsigned long long>(std::bit_cast<uint64_t>(value)));  // NOLINT: printf's own type
    return text;
  }
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  char text[32];
  const auto [end, error] = std::to_chars(text, text + sizeof(text), value);
  std::string out(text, end);
  // An integer without a point would be read back as an int.
  if (out.find_first_of(".e") == std::string::npos) out += ".0";
  return out;
}

std::string PrintQuoted(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out.push_back('\\');
      out.push_back(c);
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      char escape[8];
      std::snprintf(escape, sizeof(escape), "\\x%02x", static_cast<unsigned>(static_cast<unsigned char>(c)));
      out += escape;
    } else {
      out.push_back(c);
    }
  }
  out.push_back('"');
  return out;
}

// A name, or '#' and the number where torch knows a value that we have no name for.
std::string NameOrCode(std::string_view name, int code) {
  return name == "unknown" ? absl::StrCat("#", code) : std::string(name);
}

struct AttrPrinter {
  std::string operator()(const NoneAttr&) const { return "none"; }
  std::string operator()(bool v) const { return v ? "true" : "false"; }
  std::string operator()(int64_t v) const { return absl::StrCat(v); }
  std::string operator()(double v) const { return PrintDouble(v); }
  std::string operator()(const std::complex<double>& v) const {
    return absl::StrCat("complex(", PrintDouble(v.real()), ", ", PrintDouble(v.imag()), ")");
  }
  std::string operator()(const std::string& v) const { return PrintQuoted(v); }
  std::string operator()(const std::vector<int64_t>& v) const {
    return absl::StrCat("ints[", absl::StrJoin(v, ", "), "]");
  }
  std::string operator()(const std::vector<double>& v) const {
    return absl::StrCat("floats[",
                        absl::StrJoin(v, ", ", [](std::string* out, double x) { out->append(PrintDouble(x)); }), "]");
  }
  std::string operator()(const std::vector<bool>& v) const {
    return absl::StrCat(
        "bools[", absl::StrJoin(v, ", ", [](std::string* out, bool x) { out->append(x ? "true" : "false"); }), "]");
  }
  std::string operator()(DType v) const {
    return absl::StrCat("dtype(", NameOrCode(DTypeName(v), static_cast<int>(v)), ")");
  }
  std::string operator()(Layout v) const {
    return absl::StrCat("layout(", NameOrCode(LayoutName(v), static_cast<int>(v)), ")");
  }
  std::string operator()(MemoryFormat v) const {
    return absl::StrCat("format(", NameOrCode(MemoryFormatName(v), static_cast<int>(v)), ")");
  }
  std::string operator()(const Device& v) const { return absl::StrCat("device(", DeviceName(v), ")"); }
  std::string operator()(const DefaultGenerator&) const { return "generator"; }
  std::string operator()(const std::vector<Attr>& v) const {
    return absl::StrCat(
        "scalars[", absl::StrJoin(v, ", ", [](std::string* out, const Attr& x) { out->append(PrintAttr(x)); }), "]");
  }
};

std::string PrintValueId(ValueId id) { return absl::StrCat("%", id.index); }

std::string PrintDeclaration(const Graph& graph, ValueId id) {
  const Value& value = graph.value(id);
  std::string out =
      absl::StrCat(PrintValueId(id), " : ", DTypeName(value.type.dtype), "[", absl::StrJoin(value.type.sizes, ","),
                   "]{", absl::StrJoin(value.type.strides, ","), "} ",
                   DeviceName(Device{value.type.device, value.type.device_index}), " @", value.storage.index);
  if (value.type.requires_grad) out += " requires_grad";
  if (value.type.is_inference) out += " inference";
  if (value.dynamic_shape) out += " dynamic";
  return out;
}

std::string PrintOperand(const Operand& operand) {
  if (const auto* value = std::get_if<ValueId>(&operand)) return PrintValueId(*value);
  if (const auto* attr = std::get_if<Attr>(&operand)) return PrintAttr(*attr);
  return absl::StrCat("[",
                      absl::StrJoin(std::get<ValueList>(operand), ", ",
                                    [](std::string* out, const std::optional<ValueId>& id) {
                                      out->append(id.has_value() ? PrintValueId(*id) : "none");
                                    }),
                      "]");
}

std::string PrintResult(const Graph& graph, const Result& result) {
  const std::string prefix = result.returned == ReturnKind::kTensorAlias ? "& " : "";
  switch (result.form) {
    case ResultForm::kUnused:
      return prefix + (result.returned == ReturnKind::kTensorList ? "[_]" : "_");
    case ResultForm::kSame:
      return absl::StrCat(prefix, "same ", PrintValueId(result.values[0]));
    case ResultForm::kNew:
      return prefix + PrintDeclaration(graph, result.values[0]);
    case ResultForm::kList:
      return absl::StrCat(
          "[",
          absl::StrJoin(result.values, ", ",
                        [&graph](std::string* out, ValueId id) { out->append(PrintDeclaration(graph, id)); }),
          "]");
  }
  return "?";
}

void PrintLeaves(const Graph& graph, const std::vector<ValueId>& ids, std::string_view what, std::string* out) {
  for (size_t i = 0; i < ids.size(); ++i) {
    absl::StrAppend(out, PrintDeclaration(graph, ids[i]), " = ", what, " ", i, "\n");
  }
}

}  // namespace

std::string PrintAttr(const Attr& attr) { return std::visit(AttrPrinter{}, attr.value); }

std::string PrintOp(const Graph& graph, uint32_t op_index) {
  const Op& op = graph.ops[op_index];
  std::string out = absl::StrCat("#", op_index, " ", QualifiedName(op), "(");
  for (size_t i = 0; i < op.operands.size(); ++i) {
    absl::StrAppend(&out, i == 0 ? "" : ", ", ArgKindName(op.kinds[i]), ((op.effects.writes >> i) & 1) != 0 ? " !" : "",
                    " ", PrintOperand(op.operands[i]));
  }
  out += ") -> (";
  for (size_t i = 0; i < op.results.size(); ++i) {
    absl::StrAppend(&out, i == 0 ? "" : ", ", PrintResult(graph, op.results[i]));
  }
  out += ")";
  if (op.effects.is_view) out += " view";
  if (op.effects.is_random) out += " random";
  absl::StrAppend(&out, " source ", op.source);
  return out;
}

std::string Print(const Graph& graph) {
  std::string out = "cir 1\n";
  for (size_t i = 0; i < graph.sources.size(); ++i) {
    absl::StrAppend(&out, "source ", i, " ", PrintQuoted(graph.sources[i]), "\n");
  }
  PrintLeaves(graph, graph.inputs, "input", &out);
  PrintLeaves(graph, graph.captured, "captured", &out);
  PrintLeaves(graph, graph.constants, "constant", &out);
  for (uint32_t i = 0; i < graph.ops.size(); ++i) absl::StrAppend(&out, PrintOp(graph, i), "\n");
  absl::StrAppend(
      &out, "return ",
      absl::StrJoin(graph.outputs, ", ", [](std::string* text, ValueId id) { text->append(PrintValueId(id)); }), "\n");
  return out;
}

}  // namespace cuvil::cir
