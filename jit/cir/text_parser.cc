#include <bit>
#include <charconv>
#include <cstdlib>
#include <limits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "jit/cir/text.h"

namespace cuvil::cir {
namespace {

bool IsWordChar(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
}

// One line and a position in it. Every Take... leaves the position alone when it fails.
class Cursor {
 public:
  explicit Cursor(std::string_view text) : text_(text) {}

  bool AtEnd() {
    SkipSpace();
    return text_.empty();
  }
  bool Take(std::string_view token) {
    SkipSpace();
    if (!text_.starts_with(token)) return false;
    // A word must not end inside a longer one.
    if (IsWordChar(token.back()) && text_.size() > token.size() && IsWordChar(text_[token.size()])) return false;
    text_.remove_prefix(token.size());
    return true;
  }
  bool Peek(std::string_view token) {
    SkipSpace();
    return text_.starts_with(token);
  }
  std::string_view TakeUntil(std::string_view stops) {
    SkipSpace();
    const size_t end = std::min(text_.find_first_of(stops), text_.size());
    const std::string_view taken = text_.substr(0, end);
    text_.remove_prefix(end);
    return taken;
  }
  template <typename Integer>
  bool TakeInteger(Integer* value) {
    SkipSpace();
    const auto [end, error] = std::from_chars(text_.data(), text_.data() + text_.size(), *value);
    if (error != std::errc()) return false;
    text_.remove_prefix(static_cast<size_t>(end - text_.data()));
    return true;
  }
  bool TakeDouble(double* value) {
    SkipSpace();
    if (Take("nan(")) {
      uint64_t bits = 0;
      const auto [end, error] = std::from_chars(text_.data(), text_.data() + text_.size(), bits, 16);
      if (error != std::errc()) return false;
      text_.remove_prefix(static_cast<size_t>(end - text_.data()));
      *value = std::bit_cast<double>(bits);
      return Take(")");
    }
    const auto [end, error] = std::from_chars(text_.data(), text_.data() + text_.size(), *value);
    if (error != std::errc()) return false;
    text_.remove_prefix(static_cast<size_t>(end - text_.data()));
    return true;
  }
  bool TakeQuoted(std::string* value) {
    SkipSpace();
    if (!text_.starts_with('"')) return false;
    size_t i = 1;
    for (; i < text_.size() && text_[i] != '"'; ++i) {
      if (text_[i] != '\\') {
        value->push_back(text_[i]);
        continue;
      }
      if (++i >= text_.size()) return false;
      if (text_[i] != 'x') {
        value->push_back(text_[i]);
        continue;
      }
      unsigned code = 0;
      if (i + 2 >= text_.size()) return false;
      const auto [end, error] = std::from_chars(text_.data() + i + 1, text_.data() + i + 3, code, 16);
      if (error != std::errc() || end != text_.data() + i + 3) return false;
      value->push_back(static_cast<char>(code));
      i += 2;
    }
    if (i >= text_.size()) return false;
    text_.remove_prefix(i + 1);
    return true;
  }
  bool LooksLikeFloat() {
    SkipSpace();
    const std::string_view word = text_.substr(0, text_.find_first_of(",)] "));
    return word.find_first_of(".en") != std::string_view::npos;  // 1.5, 1e9, inf, nan
  }

 private:
  void SkipSpace() {
    while (!text_.empty() && text_.front() == ' ') text_.remove_prefix(1);
  }
  std::string_view text_;
};

class Parser {
 public:
  absl::StatusOr<Graph> Run(std::string_view text) {
    bool returned = false;
    bool header = false;
    for (size_t begin = 0; begin < text.size();) {
      const size_t end = std::min(text.find('\n', begin), text.size());
      ++line_;
      Cursor cursor(text.substr(begin, end - begin));
      begin = end + 1;
      if (cursor.AtEnd() || cursor.Peek("//")) continue;
      if (!header) {
        if (!cursor.Take("cir 1") || !cursor.AtEnd()) return Error("expected 'cir 1'");
        header = true;
        continue;
      }
      if (returned) return Error("text after 'return'");
      absl::Status status;
      if (cursor.Peek("source")) {
        status = ParseSource(cursor);
      } else if (cursor.Peek("%")) {
        status = ParseLeaf(cursor);
      } else if (cursor.Peek("#")) {
        status = ParseOp(cursor);
      } else if (cursor.Peek("return")) {
        status = ParseReturn(cursor);
        returned = true;
      } else {
        status = Error("expected a source, a value, an operator or 'return'");
      }
      if (!status.ok()) return status;
      if (!cursor.AtEnd()) return Error("text after the end of the line's content");
    }
    if (!returned) return Error("no 'return'");
    return std::move(graph_);
  }

 private:
  absl::Status Error(std::string_view what) const {
    return absl::InvalidArgumentError(absl::StrCat("line ", line_, ": ", what));
  }

  absl::Status ParseSource(Cursor& cursor) {
    size_t index = 0;
    std::string text;
    if (!cursor.Take("source") || !cursor.TakeInteger(&index) || !cursor.TakeQuoted(&text)) {
      return Error("malformed source");
    }
    if (index != graph_.sources.size()) return Error("sources must count from 0");
    graph_.sources.push_back(std::move(text));
    return absl::OkStatus();
  }

  bool TakeIntegers(Cursor& cursor, std::string_view close, std::vector<int64_t>* out) {
    if (cursor.Take(close)) return true;
    do {
      int64_t value = 0;
      if (!cursor.TakeInteger(&value)) return false;
      out->push_back(value);
    } while (cursor.Take(","));
    return cursor.Take(close);
  }

  bool TakeValueId(Cursor& cursor, ValueId* id) { return cursor.Take("%") && cursor.TakeInteger(&id->index); }

  absl::Status ParseDeclaration(Cursor& cursor, Origin origin, ValueId* id) {
    Value value;
    value.origin = origin;
    if (!TakeValueId(cursor, id) || !cursor.Take(":")) return Error("expected '%n :'");
    const std::optional<DType> dtype = ParseDType(cursor.TakeUntil("["));
    if (!dtype.has_value()) return Error("unknown dtype");
    value.type.dtype = *dtype;
    if (!cursor.Take("[") || !TakeIntegers(cursor, "]", &value.type.sizes)) return Error("malformed sizes");
    if (!cursor.Take("{") || !TakeIntegers(cursor, "}", &value.type.strides)) return Error("malformed strides");
    const std::optional<Device> device = ParseDevice(cursor.TakeUntil(" "));
    if (!device.has_value()) return Error("unknown device");
    value.type.device = device->type;
    value.type.device_index = device->index;
    if (!cursor.Take("@") || !cursor.TakeInteger(&value.storage.index)) return Error("malformed storage");
    value.type.requires_grad = cursor.Take("requires_grad");
    value.type.is_inference = cursor.Take("inference");
    value.dynamic_shape = cursor.Take("dynamic");
    // A hole would be filled with values nobody defined; Verify finds them. The bound keeps a typo from eating memory.
    if (id->index > graph_.values.size() + 1000000) return Error("value number out of range");
    if (id->index >= graph_.values.size()) graph_.values.resize(id->index + 1);
    graph_.values[id->index] = std::move(value);
    return absl::OkStatus();
  }

  absl::Status ParseLeaf(Cursor& cursor) {
    ValueId id;
    if (absl::Status s = ParseDeclaration(cursor, Origin::kInput, &id); !s.ok()) return s;
    if (!cursor.Take("=")) return Error("expected '='");
    std::vector<ValueId>* list = nullptr;
    Origin origin{};
    if (cursor.Take("input")) {
      list = &graph_.inputs;
      origin = Origin::kInput;
    } else if (cursor.Take("captured")) {
      list = &graph_.captured;
      origin = Origin::kCaptured;
    } else if (cursor.Take("constant")) {
      list = &graph_.constants;
      origin = Origin::kConstant;
    } else {
      return Error("expected 'input', 'captured' or 'constant'");
    }
    uint32_t index = 0;
    if (!cursor.TakeInteger(&index) || index != list->size()) return Error("leaves must count from 0");
    graph_.values[id.index].origin = origin;
    graph_.values[id.index].origin_index = index;
    list->push_back(id);
    return absl::OkStatus();
  }

  template <typename T, typename ParseName>
  bool TakeNamed(Cursor& cursor, const ParseName& parse, Attr* attr) {
    if (cursor.Take("#")) {
      int code = 0;
      if (!cursor.TakeInteger(&code)) return false;
      *attr = static_cast<T>(code);
      return cursor.Take(")");
    }
    const std::optional<T> value = parse(cursor.TakeUntil(")"));
    if (!value.has_value()) return false;
    *attr = *value;
    return cursor.Take(")");
  }

  template <typename T, typename TakeElement>
  bool TakeList(Cursor& cursor, const TakeElement& take, Attr* attr) {
    std::vector<T> values;
    if (!cursor.Take("]")) {
      do {
        T value{};
        if (!take(&value)) return false;
        values.push_back(std::move(value));
      } while (cursor.Take(","));
      if (!cursor.Take("]")) return false;
    }
    *attr = std::move(values);
    return true;
  }

  bool TakeAttr(Cursor& cursor, Attr* attr) {
    if (cursor.Take("none")) {
      *attr = NoneAttr{};
      return true;
    }
    if (cursor.Take("true") || cursor.Peek("false")) {
      *attr = !cursor.Take("false");
      return true;
    }
    if (cursor.Take("generator")) {
      *attr = DefaultGenerator{};
      return true;
    }
    if (cursor.Take("complex(")) {
      double real = 0;
      double imag = 0;
      if (!cursor.TakeDouble(&real) || !cursor.Take(",") || !cursor.TakeDouble(&imag)) return false;
      *attr = std::complex<double>(real, imag);
      return cursor.Take(")");
    }
    if (cursor.Take("dtype(")) return TakeNamed<DType>(cursor, ParseDType, attr);
    if (cursor.Take("layout(")) return TakeNamed<Layout>(cursor, ParseLayout, attr);
    if (cursor.Take("format(")) return TakeNamed<MemoryFormat>(cursor, ParseMemoryFormat, attr);
    if (cursor.Take("device(")) {
      const std::optional<Device> device = ParseDevice(cursor.TakeUntil(")"));
      if (!device.has_value()) return false;
      *attr = *device;
      return cursor.Take(")");
    }
    if (cursor.Take("ints["))
      return TakeList<int64_t>(
          cursor, [&](int64_t* v) { return cursor.TakeInteger(v); }, attr);
    if (cursor.Take("floats["))
      return TakeList<double>(
          cursor, [&](double* v) { return cursor.TakeDouble(v); }, attr);
    if (cursor.Take("scalars["))
      return TakeList<Attr>(
          cursor, [&](Attr* v) { return TakeAttr(cursor, v); }, attr);
    if (cursor.Take("bools[")) {
      const auto take = [&](bool* v) {
        *v = cursor.Peek("true");
        return cursor.Take("true") || cursor.Take("false");
      };
      return TakeList<bool>(cursor, take, attr);
    }
    if (cursor.Peek("\"")) {
      std::string text;
      if (!cursor.TakeQuoted(&text)) return false;
      *attr = std::move(text);
      return true;
    }
    if (cursor.LooksLikeFloat()) {
      double value = 0;
      if (!cursor.TakeDouble(&value)) return false;
      *attr = value;
      return true;
    }
    int64_t value = 0;
    if (!cursor.TakeInteger(&value)) return false;
    *attr = value;
    return true;
  }

  absl::Status ParseOperand(Cursor& cursor, Op* op) {
    absl::StatusOr<ArgKind> kind = ParseArgKind(cursor.TakeUntil(" "));
    if (!kind.ok()) return Error(kind.status().message());
    const size_t i = op->operands.size();
    if (i >= 64) return Error("more than 64 operands");
    op->kinds.push_back(*kind);
    if (cursor.Take("!")) op->effects.writes |= uint64_t{1} << i;
    if (cursor.Peek("%")) {
      ValueId id;
      if (!TakeValueId(cursor, &id)) return Error("malformed value");
      op->operands.push_back(id);
      return absl::OkStatus();
    }
    if (cursor.Take("[")) {
      ValueList list;
      if (!cursor.Take("]")) {
        do {
          ValueId id;
          if (cursor.Take("none")) {
            list.push_back(std::nullopt);
          } else if (TakeValueId(cursor, &id)) {
            list.push_back(id);
          } else {
            return Error("malformed tensor list");
          }
        } while (cursor.Take(","));
        if (!cursor.Take("]")) return Error("unclosed tensor list");
      }
      op->operands.emplace_back(std::in_place_type<ValueList>, std::move(list));
      return absl::OkStatus();
    }
    Attr attr;
    if (!TakeAttr(cursor, &attr)) return Error(absl::StrCat("operand ", i, ": malformed constant"));
    op->operands.push_back(std::move(attr));
    return absl::OkStatus();
  }

  absl::Status ParseNewValue(Cursor& cursor, Result* result) {
    ValueId id;
    if (absl::Status s = ParseDeclaration(cursor, Origin::kResult, &id); !s.ok()) return s;
    graph_.values[id.index].origin_index = static_cast<uint32_t>(graph_.ops.size());
    result->values.push_back(id);
    return absl::OkStatus();
  }

  absl::Status ParseResult(Cursor& cursor, Op* op) {
    Result result;
    if (cursor.Take("&")) result.returned = ReturnKind::kTensorAlias;
    if (cursor.Take("[_]")) {
      result.returned = ReturnKind::kTensorList;
      result.form = ResultForm::kUnused;
    } else if (cursor.Take("_")) {
      result.form = ResultForm::kUnused;
    } else if (cursor.Take("same")) {
      ValueId id;
      if (!TakeValueId(cursor, &id)) return Error("malformed result");
      result.form = ResultForm::kSame;
      result.values.push_back(id);
    } else if (cursor.Take("[")) {
      result.returned = ReturnKind::kTensorList;
      result.form = ResultForm::kList;
      if (!cursor.Take("]")) {
        do {
          if (absl::Status s = ParseNewValue(cursor, &result); !s.ok()) return s;
        } while (cursor.Take(","));
        if (!cursor.Take("]")) return Error("unclosed result list");
      }
    } else {
      result.form = ResultForm::kNew;
      if (absl::Status s = ParseNewValue(cursor, &result); !s.ok()) return s;
    }
    op->results.push_back(std::move(result));
    return absl::OkStatus();
  }

  absl::Status ParseOp(Cursor& cursor) {
    size_t index = 0;
    if (!cursor.Take("#") || !cursor.TakeInteger(&index)) return Error("malformed operator number");
    if (index != graph_.ops.size()) return Error("operators must count from 0");
    Op op;
    const std::string_view name = cursor.TakeUntil("(");
    const size_t colons = name.find("::");
    if (colons == std::string_view::npos) return Error("an operator needs a namespace");
    const size_t dot = name.find('.', colons);
    op.name = std::string(name.substr(0, dot));
    if (dot != std::string_view::npos) op.overload = std::string(name.substr(dot + 1));
    if (!cursor.Take("(")) return Error("expected '('");
    if (!cursor.Take(")")) {
      do {
        if (absl::Status s = ParseOperand(cursor, &op); !s.ok()) return s;
      } while (cursor.Take(","));
      if (!cursor.Take(")")) return Error("expected ')' after the operands");
    }
    if (!cursor.Take("->") || !cursor.Take("(")) return Error("expected '-> ('");
    if (!cursor.Take(")")) {
      do {
        if (absl::Status s = ParseResult(cursor, &op); !s.ok()) return s;
      } while (cursor.Take(","));
      if (!cursor.Take(")")) return Error("expected ')' after the results");
    }
    op.effects.is_view = cursor.Take("view");
    op.effects.is_random = cursor.Take("random");
    if (!cursor.Take("source") || !cursor.TakeInteger(&op.source)) return Error("expected 'source n'");
    graph_.ops.push_back(std::move(op));
    return absl::OkStatus();
  }

  absl::Status ParseReturn(Cursor& cursor) {
    cursor.Take("return");
    if (cursor.AtEnd()) return absl::OkStatus();
    do {
      ValueId id;
      if (!TakeValueId(cursor, &id)) return Error("malformed output");
      graph_.outputs.push_back(id);
    } while (cursor.Take(","));
    return absl::OkStatus();
  }

  Graph graph_;
  size_t line_ = 0;
};

}  // namespace

absl::StatusOr<Graph> Parse(std::string_view text) { return Parser().Run(text); }

}  // namespace cuvil::cir
