// A tensor program in SSA form over tensor objects: what one traced call did, in program order.
//
// A value is a tensor *object*. An operator that returns one of its arguments (in-place operators, `contiguous` of a
// contiguous tensor, `dropout` in evaluation) yields no new value but names the old one; two values may share storage.
//
// Threads:   built by one thread; const afterwards and then safe to share.
// Ownership: plain values throughout; no pointer, no device handle.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <variant>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "jit/cir/attr.h"
#include "jit/cir/schema.h"
#include "jit/cir/tensor_type.h"

namespace cuvil::cir {

struct ValueId {
  uint32_t index = 0;
  auto operator<=>(const ValueId&) const = default;
};

// Values with equal StorageId share memory (views, detach, in-place chains). Never compared across graphs.
struct StorageId {
  uint32_t index = 0;
  auto operator<=>(const StorageId&) const = default;
};

enum class Origin : uint8_t {
  kInput,     // an argument of the call; origin_index: position in Graph::inputs
  kCaptured,  // a tensor that existed before the call (weights, buffers); position in Graph::captured
  kConstant,  // a tensor made by the call from Python numbers; position in Graph::constants
  kResult,    // made by an operator; origin_index: position in Graph::ops
};

struct Value {
  TensorType type;
  Origin origin = Origin::kInput;
  uint32_t origin_index = 0;
  StorageId storage;
  // The sizes depend on tensor data (nonzero, boolean index, ...): `type` is only what this one trace saw.
  bool dynamic_shape = false;

  bool operator==(const Value&) const = default;
};

// A Tensor[] or Tensor?[] argument; nullopt is an absent element.
using ValueList = std::vector<std::optional<ValueId>>;

// One schema argument. A number (Attr) where the kind says Tensor is torch's wrapped number: it takes part in type
// promotion as a Python number does.
using Operand = std::variant<ValueId, ValueList, Attr>;

enum class ResultForm : uint8_t {
  kNew,     // values[0], made here
  kSame,    // values[0], an object that existed: an argument, or an earlier value the operator hands back
  kList,    // values, all made here (Tensor[])
  kUnused,  // nobody looks at it, or an undefined tensor
};

struct Result {
  ReturnKind returned = ReturnKind::kTensor;
  ResultForm form = ResultForm::kUnused;
  std::vector<ValueId> values;

  bool operator==(const Result&) const = default;
};

// Whether the values are made here, and not named.
bool MakesValues(const Result& result);

struct Effects {
  uint64_t writes = 0;     // bit i: operand i (for lists: every element) is written
  bool is_view = false;    // a result shares storage with an operand
  bool is_random = false;  // draws from a generator: order and count are part of the meaning

  bool operator==(const Effects&) const = default;
};

struct Op {
  std::string name;      // "aten::linear"
  std::string overload;  // "" for the default
  std::vector<ArgKind> kinds;
  std::vector<Operand> operands;  // one per schema argument, schema order, defaults filled in
  std::vector<Result> results;    // one per schema return
  Effects effects;
  uint32_t source = 0;  // position in Graph::sources
};

bool operator==(const Op& a, const Op& b);

struct Graph {
  std::vector<Value> values;
  std::vector<Op> ops;
  std::vector<ValueId> inputs;
  std::vector<ValueId> captured;
  std::vector<ValueId> constants;
  std::vector<ValueId> outputs;      // may repeat, may name inputs, captured values and constants
  std::vector<std::string> sources;  // "file.py:12 in forward"; sources[0] always exists

  const Value& value(ValueId id) const { return values[id.index]; }
  bool operator==(const Graph&) const = default;
};

// "aten::add.Tensor", "aten::relu"
std::string QualifiedName(const Op& op);

// The values an operator reads, in operand order, repeats included.
std::vector<ValueId> OperandValues(const Op& op);

// The values an operator writes, likewise; of a list every element counts as written.
std::vector<ValueId> WrittenValues(const Op& op);

// Has the operator read other values: `rename` says which, and is called in operand order.
void RenameOperands(Op* op, absl::FunctionRef<ValueId(ValueId)> rename);

// Builds a graph front to back. Values are declared before the operator that makes them is added.
//
// Threads:   thread-compatible.
// Errors:    Build: InvalidArgument as Verify reports it.
class GraphBuilder {
 public:
  GraphBuilder();

  StorageId NewStorage();
  ValueId AddInput(TensorType type, StorageId storage);
  ValueId AddCaptured(TensorType type, StorageId storage);
  ValueId AddConstant(TensorType type, StorageId storage);
  // The next AddOp must name it in a result of form kNew or kList.
  ValueId AddResultValue(TensorType type, StorageId storage, bool dynamic_shape = false);
  // Equal texts share one entry.
  uint32_t AddSource(const std::string& text);
  // Gives the op's index. Result values are bound to this op here, and is_view is set if one shares an operand's
  // storage: schemas do not always tell (einsum, meshgrid).
  uint32_t AddOp(Op op);
  void AddOutput(ValueId value);

  const Graph& graph() const { return graph_; }
  absl::StatusOr<Graph> Build() &&;

 private:
  ValueId AddValue(TensorType type, Origin origin, uint32_t origin_index, StorageId storage, bool dynamic_shape);

  Graph graph_;
  std::unordered_map<std::string, uint32_t> source_index_;
  uint32_t num_storages_ = 0;
};

}  // namespace cuvil::cir
