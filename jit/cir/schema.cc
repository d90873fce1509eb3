#include "jit/cir/schema.h"

#include <charconv>
#include <cstdlib>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace cuvil::cir {
namespace {

constexpr std::string_view kArgKindNames[] = {
#define CUVIL_ARG_KIND(enumerator, text) text,
#include "jit/cir/arg_kinds.def"
#undef CUVIL_ARG_KIND
};

bool IsDigit(char c) { return c >= '0' && c <= '9'; }

// "SymInt[2]?" -> "SymInt[]?"
std::string WithoutListSizes(std::string_view text) {
  std::string out;
  bool in_brackets = false;
  for (char c : text) {
    if (c == '[') in_brackets = true;
    if (c == ']') in_brackets = false;
    if (in_brackets && IsDigit(c)) continue;
    out.push_back(c);
  }
  return out;
}

absl::Status Malformed(std::string_view text, std::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat("schema '", std::string(text), "': ", std::string(why)));
}

// Splits at commas outside of brackets, parentheses and quotes.
std::vector<std::string_view> SplitTopLevel(std::string_view text) {
  std::vector<std::string_view> parts;
  int depth = 0;
  char quote = 0;
  size_t begin = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quote != 0) {
      if (c == '\\') ++i;
      if (c == quote) quote = 0;
    } else if (c == '"' || c == '\'') {
      quote = c;
    } else if (c == '(' || c == '[') {
      ++depth;
    } else if (c == ')' || c == ']') {
      --depth;
    } else if (c == ',' && depth == 0) {
      parts.push_back(text.substr(begin, i - begin));
      begin = i + 1;
    }
  }
  if (begin < text.size()) parts.push_back(text.substr(begin));
  return parts;
}

std::string_view Strip(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

struct AnnotatedType {
  std::string text;  // without the annotation
  bool aliased = false;
  bool written = false;
};

// "Tensor(a! -> *)[]" -> {"Tensor[]", aliased, written}
AnnotatedType RemoveAnnotation(std::string_view text) {
  AnnotatedType out;
  const size_t open = text.find('(');
  const size_t close = text.find(')');
  if (open == std::string_view::npos || close == std::string_view::npos) {
    out.text = std::string(text);
    return out;
  }
  const std::string_view annotation = text.substr(open + 1, close - open - 1);
  out.aliased = true;
  out.written = annotation.find('!') != std::string_view::npos;
  out.text = absl::StrCat(std::string(text.substr(0, open)), std::string(text.substr(close + 1)));
  return out;
}

bool ParseNumber(std::string_view text, Attr* attr) {
  const bool integral = text.find_first_not_of("+-0123456789") == std::string_view::npos;
  if (integral) {
    int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size()) return false;
    *attr = value;
    return true;
  }
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return false;
  *attr = value;
  return true;
}

bool IsFloatKind(ArgKind kind) { return kind == ArgKind::kFloat || kind == ArgKind::kOptionalFloat; }

bool IsListKind(ArgKind kind) { return ArgKindName(kind).find('[') != std::string_view::npos; }

// Defaults as the printer of torch writes them: numbers, True, None, quoted strings, [..], names of constants. Codes of
// dtypes, layouts and memory formats are printed as numbers.
bool ParseDefault(std::string_view text, ArgKind kind, Attr* attr) {
  if (text == "None") {
    *attr = NoneAttr{};
    return true;
  }
  if (text == "True" || text == "False") {
    *attr = text == "True";
    return true;
  }
  if (text.size() >= 2 && (text.front() == '"' || text.front() == '\'')) {
    std::string unescaped;
    for (size_t i = 1; i + 1 < text.size(); ++i) {
      if (text[i] == '\\' && i + 2 < text.size()) ++i;
      unescaped.push_back(text[i]);
    }
    *attr = std::move(unescaped);
    return true;
  }
  if (text.front() == '[' && text.back() == ']') {
    std::vector<int64_t> ints;
    std::vector<double> floats;
    std::vector<bool> bools;
    for (std::string_view element : SplitTopLevel(text.substr(1, text.size() - 2))) {
      element = Strip(element);
      if (element == "True" || element == "False") {
        bools.push_back(element == "True");
        continue;
      }
      Attr number;
      if (!ParseNumber(element, &number)) return false;
      if (const auto* i = number.get_if<int64_t>()) {
        ints.push_back(*i);
        floats.push_back(static_cast<double>(*i));
      } else {
        floats.push_back(*number.get_if<double>());
      }
    }
    const std::string_view name = ArgKindName(kind);
    if (name.starts_with("float")) {
      *attr = std::move(floats);
    } else if (name.starts_with("bool")) {
      *attr = std::move(bools);
    } else {
      *attr = std::move(ints);
    }
    return true;
  }
  if (text == "contiguous_format") {
    *attr = MemoryFormat::kContiguous;
    return true;
  }
  if (text == "preserve_format") {
    *attr = MemoryFormat::kPreserve;
    return true;
  }
  if (text == "strided") {
    *attr = Layout::kStrided;
    return true;
  }
  if (text == "inf" || text == "-inf" || text == "nan") {
    *attr = std::strtod(std::string(text).c_str(), nullptr);
    return true;
  }
  if (!ParseNumber(text, attr)) return false;
  const auto* code = attr->get_if<int64_t>();
  if (code == nullptr) return true;
  if (IsFloatKind(kind)) {
    *attr = static_cast<double>(*code);
  } else if (kind == ArgKind::kScalarType || kind == ArgKind::kOptionalScalarType) {
    *attr = static_cast<DType>(*code);
  } else if (kind == ArgKind::kLayout || kind == ArgKind::kOptionalLayout) {
    *attr = static_cast<Layout>(*code);
  } else if (kind == ArgKind::kMemoryFormat || kind == ArgKind::kOptionalMemoryFormat) {
    *attr = static_cast<MemoryFormat>(*code);
  } else if (IsListKind(kind)) {
    // "int[2] stride=1": one number stands for every element.
    const std::string_view name = ArgKindName(kind);
    if (name.starts_with("float")) {
      *attr = std::vector<double>{static_cast<double>(*code)};
    } else {
      *attr = std::vector<int64_t>{*code};
    }
  }
  return true;
}

// The declared length of a list argument, zero if none ("SymInt[2]" -> 2).
size_t DeclaredLength(std::string_view type) {
  const size_t open = type.find('[');
  if (open == std::string_view::npos) return 0;
  size_t n = 0;
  for (size_t i = open + 1; i < type.size() && IsDigit(type[i]); ++i) n = n * 10 + static_cast<size_t>(type[i] - '0');
  return n;
}

absl::StatusOr<SchemaArgument> ParseArgument(std::string_view text) {
  // "SymInt[2] stride=[1, 1]", "Tensor(a!) self", "Tensor(a! -> *)[] self"
  size_t depth = 0;
  size_t type_end = std::string_view::npos;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '(' || text[i] == '[') ++depth;
    if (text[i] == ')' || text[i] == ']') --depth;
    if (text[i] == ' ' && depth == 0) {
      type_end = i;
      break;
    }
  }
  if (type_end == std::string_view::npos) return Malformed(text, "an argument needs a type and a name");
  const AnnotatedType type = RemoveAnnotation(text.substr(0, type_end));
  absl::StatusOr<ArgKind> kind = ParseArgKind(type.text);
  if (!kind.ok()) return kind.status();

  SchemaArgument argument;
  argument.kind = *kind;
  argument.is_aliased = type.aliased;
  argument.is_written = type.written;
  std::string_view rest = Strip(text.substr(type_end));
  const size_t equals = rest.find('=');
  argument.name = std::string(Strip(rest.substr(0, equals)));
  if (equals == std::string_view::npos) return argument;
  const std::string_view default_text = Strip(rest.substr(equals + 1));
  Attr value;
  if (default_text.empty() || !ParseDefault(default_text, *kind, &value)) return Malformed(text, "unreadable default");
  const size_t length = DeclaredLength(type.text);
  if (const auto* ints = value.get_if<std::vector<int64_t>>(); ints != nullptr && ints->size() == 1 && length > 1) {
    value = std::vector<int64_t>(length, ints->front());
  }
  argument.default_value = std::move(value);
  return argument;
}

absl::Status ParseReturn(std::string_view text, Schema* schema) {
  // A return may carry a name: "Tensor values".
  size_t depth = 0;
  size_t type_end = text.size();
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '(') ++depth;
    if (text[i] == ')') --depth;
    if (text[i] == ' ' && depth == 0) {
      type_end = i;
      break;
    }
  }
  const AnnotatedType type = RemoveAnnotation(text.substr(0, type_end));
  if (type.text == "Tensor") {
    schema->returns.push_back(type.written ? ReturnKind::kTensorAlias : ReturnKind::kTensor);
  } else if (WithoutListSizes(type.text) == "Tensor[]") {
    schema->returns.push_back(ReturnKind::kTensorList);
  } else {
    schema->returns_non_tensor = true;
    return absl::OkStatus();
  }
  schema->returns_view |= type.aliased && !type.written;
  return absl::OkStatus();
}

// Position of the parenthesis that closes the one at `open`.
size_t MatchingParenthesis(std::string_view text, size_t open) {
  int depth = 0;
  char quote = 0;
  for (size_t i = open; i < text.size(); ++i) {
    const char c = text[i];
    if (quote != 0) {
      if (c == '\\') ++i;
      if (c == quote) quote = 0;
      continue;
    }
    if (c == '"' || c == '\'') quote = c;
    if (c == '(') ++depth;
    if (c == ')' && --depth == 0) return i;
  }
  return std::string_view::npos;
}

}  // namespace

absl::StatusOr<ArgKind> ParseArgKind(std::string_view text) {
  const std::string exact(text);
  const std::string general = WithoutListSizes(text);
  std::optional<ArgKind> found;
  for (size_t i = 0; i < std::size(kArgKindNames); ++i) {
    if (kArgKindNames[i] == exact) return static_cast<ArgKind>(i);
    if (kArgKindNames[i] == general) found = static_cast<ArgKind>(i);
  }
  if (found.has_value()) return *found;
  return absl::UnimplementedError(absl::StrCat("no kind for arguments of type ", exact));
}

std::string_view ArgKindName(ArgKind kind) { return kArgKindNames[static_cast<size_t>(kind)]; }

uint64_t Schema::written_arguments() const {
  uint64_t mask = 0;
  for (size_t i = 0; i < arguments.size() && i < 64; ++i) {
    if (arguments[i].is_written) mask |= uint64_t{1} << i;
  }
  return mask;
}

absl::StatusOr<Schema> ParseSchema(std::string_view text) {
  Schema schema;
  const size_t open = text.find('(');
  if (open == std::string_view::npos) return Malformed(text, "no arguments");
  std::string_view head = Strip(text.substr(0, open));
  const size_t colons = head.find("::");
  if (colons == std::string_view::npos) return Malformed(text, "no namespace");
  const size_t dot = head.find('.', colons);
  schema.name = std::string(head.substr(0, dot));
  if (dot != std::string_view::npos) schema.overload = std::string(head.substr(dot + 1));

  const size_t close = MatchingParenthesis(text, open);
  if (close == std::string_view::npos) return Malformed(text, "unbalanced parentheses");
  bool kwarg_only = false;
  for (std::string_view part : SplitTopLevel(text.substr(open + 1, close - open - 1))) {
    part = Strip(part);
    if (part == "*") {
      kwarg_only = true;
      continue;
    }
    absl::StatusOr<SchemaArgument> argument = ParseArgument(part);
    if (!argument.ok()) {
      return absl::Status(argument.status().code(),
                          absl::StrCat(schema.name, ": ", std::string(argument.status().message())));
    }
    argument->kwarg_only = kwarg_only;
    schema.arguments.push_back(*std::move(argument));
  }
  if (schema.arguments.size() > 64)
    return absl::UnimplementedError(absl::StrCat(schema.name, ": more than 64 arguments"));

  std::string_view returns = Strip(text.substr(close + 1));
  if (!returns.starts_with("->")) return Malformed(text, "no returns");
  returns = Strip(returns.substr(2));
  if (returns.starts_with("(") && returns.ends_with(")") && MatchingParenthesis(returns, 0) == returns.size() - 1) {
    returns = returns.substr(1, returns.size() - 2);
  }
  for (std::string_view part : SplitTopLevel(returns)) {
    part = Strip(part);
    if (part.empty()) continue;
    if (absl::Status status = ParseReturn(part, &schema); !status.ok()) return status;
  }
  return schema;
}

}  // namespace cuvil::cir
