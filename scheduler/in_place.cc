#include "scheduler/in_place.h"

#include <algorithm>
#include <set>
#include <string_view>
#include <vector>

#include "jit/cir/op_traits.h"

namespace cuvil::scheduler {
namespace {

using cir::Graph;
using cir::Op;
using cir::Origin;
using cir::ResultForm;
using cir::ValueId;

// Each has a twin `name_` with the same arguments that runs the same kernel, element by element, on the operand's
// memory. Operators with a kernel of another library for some shapes (gelu) are not among them.
constexpr std::string_view kElementwise[] = {"aten::relu",     "aten::silu",      "aten::sigmoid",
                                             "aten::tanh",     "aten::hardswish", "aten::hardsigmoid",
                                             "aten::hardtanh", "aten::leaky_relu"};

bool IsElementwise(const Op& op) {
  return op.overload.empty() && std::ranges::find(kElementwise, op.name) != std::end(kElementwise);
}

class Rewriter {
 public:
  explicit Rewriter(Graph* graph) : graph_(*graph) {}

  uint32_t Run() {
    Look();
    uint32_t count = 0;
    for (Op& op : graph_.ops) {
      Rename(&op);
      if (!Qualifies(op)) continue;
      const ValueId operand = std::get<ValueId>(op.operands[0]);
      const ValueId result = op.results[0].values[0];
      TakeOver(operand, result);
      op.name += "_";
      op.results[0] = {cir::ReturnKind::kTensorAlias, ResultForm::kSame, {operand}};
      op.effects.writes = 1;
      ++count;
    }
    return count;
  }

 private:
  void Look() {
    const size_t count = graph_.values.size();
    uses_.assign(count, 0);
    varies_.assign(count, false);
    stands_for_.resize(count);
    for (uint32_t i = 0; i < count; ++i) {
      stands_for_[i] = ValueId{i};
      const uint32_t storage = graph_.values[i].storage.index;
      if (sharers_.size() <= storage) sharers_.resize(storage + 1, 0);
      ++sharers_[storage];
      varies_[i] = graph_.values[i].origin == Origin::kInput || graph_.values[i].origin == Origin::kCaptured;
    }
    for (const Op& op : graph_.ops) {
      bool varies = op.effects.is_random;
      for (const ValueId id : cir::OperandValues(op)) {
        ++uses_[id.index];
        varies |= varies_[id.index];
      }
      for (const cir::Result& result : op.results) {
        for (const ValueId id : result.values) {
          varies_[id.index] = varies_[id.index] || varies;
          // Handed back: an operator may make views of it that the storages do not show until they are used.
          if (result.form == ResultForm::kSame) ++uses_[id.index];
        }
      }
    }
    for (const ValueId id : graph_.outputs) returned_.insert(graph_.value(id).storage);
  }

  // From here on the operand's memory is the result's, with the result's uses and views to come.
  void TakeOver(ValueId operand, ValueId result) {
    stands_for_[result.index] = operand;
    uses_[operand.index] = uses_[result.index];
    const cir::StorageId storage = graph_.value(operand).storage;
    const cir::StorageId replaced = graph_.value(result).storage;
    sharers_[storage.index] = sharers_[replaced.index];
    for (cir::Value& value : graph_.values) {
      if (value.storage == replaced) value.storage = storage;
    }
  }

  // Names the values that earlier operators now write over.
  void Rename(Op* op) {
    for (cir::Operand& operand : op->operands) {
      if (auto* id = std::get_if<ValueId>(&operand)) {
        *id = stands_for_[id->index];
      } else if (auto* list = std::get_if<cir::ValueList>(&operand)) {
        for (auto& element : *list) {
          if (element.has_value()) element = stands_for_[element->index];
        }
      }
    }
    for (cir::Result& result : op->results) {
      if (result.form != ResultForm::kSame) continue;
      for (ValueId& id : result.values) id = stands_for_[id.index];
    }
  }

  bool IsPrivate(ValueId id) const {
    const cir::Value& value = graph_.value(id);
    return sharers_[value.storage.index] == 1 && !returned_.contains(value.storage) && !value.dynamic_shape;
  }

  bool Qualifies(const Op& op) const {
    if (!IsElementwise(op) || op.effects.writes != 0 || op.results.size() != 1) return false;
    if (op.results[0].form != ResultForm::kNew || op.results[0].returned != cir::ReturnKind::kTensor) return false;
    const auto* operand = std::get_if<ValueId>(&op.operands[0]);
    if (operand == nullptr || cir::OperandValues(op).size() != 1) return false;
    const ValueId result = op.results[0].values[0];
    // The result may have views: they become views of the operand, which is the same memory by then.
    const cir::Value& after = graph_.value(result);
    if (returned_.contains(after.storage) || after.dynamic_shape) return false;
    const cir::Value& before = graph_.value(*operand);
    const cir::TensorType& type = before.type;
    // What depends on nothing but constants may be computed once for all runs, and must then not be written.
    return type.device == cir::DeviceType::kCpu && before.origin == Origin::kResult && varies_[operand->index] &&
           uses_[operand->index] == 1 && IsPrivate(*operand) && type == after.type && !type.requires_grad &&
           type.span_bytes() == type.num_elements() * cir::ElementSizeBytes(type.dtype);
  }

  Graph& graph_;
  std::vector<uint32_t> uses_;       // by value: by operators, as operand or handed back
  std::vector<bool> varies_;         // by value: from run to run
  std::vector<ValueId> stands_for_;  // by value
  std::vector<uint32_t> sharers_;    // by storage: values
  std::set<cir::StorageId> returned_;
};

}  // namespace

uint32_t WriteInPlace(cir::Graph* graph) { return Rewriter(graph).Run(); }

}  // namespace cuvil::scheduler
