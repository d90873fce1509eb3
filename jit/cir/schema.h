// Reads an operator's schema text, as `str(op._schema)` prints it, into argument and return kinds.
//
// Threads:   pure; any thread.
// Errors:    InvalidArgument  the text is no schema
//            Unimplemented    a type that CIR has no kind for (Dimname, Stream, Dict, ...)
// Source:    the grammar of torch's schema parser (native_functions.yaml, "func").
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "jit/cir/attr.h"

namespace cuvil::cir {

enum class ArgKind : uint8_t {
#define CUVIL_ARG_KIND(enumerator, text) enumerator,
#include "jit/cir/arg_kinds.def"
#undef CUVIL_ARG_KIND
};

// Accepts list sizes ("SymInt[2]" is kSymIntList); "bool[2..4]" are kinds of their own, since torch passes them as
// fixed arrays. Alias annotations ("Tensor(a!)") must have been removed.
absl::StatusOr<ArgKind> ParseArgKind(std::string_view text);
std::string_view ArgKindName(ArgKind kind);

enum class ReturnKind : uint8_t {
  kTensor,       // a tensor by value (possibly a view, possibly the same object as an argument)
  kTensorAlias,  // Tensor(a!): a reference to an argument that was written
  kTensorList,   // Tensor[]
};

struct SchemaArgument {
  std::string name;
  ArgKind kind{};
  bool kwarg_only = false;
  bool is_written = false;  // annotated (a!)
  bool is_aliased = false;  // annotated (a) or (a!)
  std::optional<Attr> default_value;
};

struct Schema {
  std::string name;      // "aten::add"
  std::string overload;  // "Tensor", empty for the default
  std::vector<SchemaArgument> arguments;
  std::vector<ReturnKind> returns;
  // A return that is no tensor (int, bool, Scalar, ...): the operator's results leave the tensor world.
  bool returns_non_tensor = false;
  bool returns_view = false;  // some return aliases an argument without writing it

  uint64_t written_arguments() const;  // bit i: argument i
};

absl::StatusOr<Schema> ParseSchema(std::string_view text);

}  // namespace cuvil::cir
