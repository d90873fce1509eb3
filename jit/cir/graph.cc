#include "jit/cir/graph.h"

#include <bit>
#include <utility>

#include "jit/cir/verifier.h"

namespace cuvil::cir {
namespace {

bool SameBits(double a, double b) { return std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b); }

bool SameBits(const std::complex<double>& a, const std::complex<double>& b) {
  return SameBits(a.real(), b.real()) && SameBits(a.imag(), b.imag());
}

bool SameBits(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!SameBits(a[i], b[i])) return false;
  }
  return true;
}

}  // namespace

bool Attr::is_number() const {
  return get_if<bool>() != nullptr || get_if<int64_t>() != nullptr || get_if<double>() != nullptr ||
         get_if<std::complex<double>>() != nullptr;
}

bool operator==(const Attr& a, const Attr& b) {
  if (a.value.index() != b.value.index()) return false;
  return std::visit(
      [&b](const auto& x) {
        using T = std::decay_t<decltype(x)>;
        const T& y = std::get<T>(b.value);
        if constexpr (std::same_as<T, double> || std::same_as<T, std::complex<double>> ||
                      std::same_as<T, std::vector<double>>) {
          return SameBits(x, y);
        } else {
          return x == y;
        }
      },
      a.value);
}

bool operator==(const Op& a, const Op& b) {
  return a.name == b.name && a.overload == b.overload && a.kinds == b.kinds && a.operands == b.operands &&
         a.results == b.results && a.effects == b.effects && a.source == b.source;
}

std::string QualifiedName(const Op& op) { return op.overload.empty() ? op.name : op.name + "." + op.overload; }

std::vector<ValueId> OperandValues(const Op& op) {
  std::vector<ValueId> values;
  for (const Operand& operand : op.operands) {
    if (const auto* value = std::get_if<ValueId>(&operand)) {
      values.push_back(*value);
    } else if (const auto* list = std::get_if<ValueList>(&operand)) {
      for (const auto& element : *list) {
        if (element.has_value()) values.push_back(*element);
      }
    }
  }
  return values;
}

std::vector<ValueId> WrittenValues(const Op& op) {
  std::vector<ValueId> written;
  for (size_t i = 0; i < op.operands.size(); ++i) {
    if (((op.effects.writes >> i) & 1) == 0) continue;
    if (const auto* id = std::get_if<ValueId>(&op.operands[i])) {
      written.push_back(*id);
    } else if (const auto* list = std::get_if<ValueList>(&op.operands[i])) {
      for (const auto& element : *list) {
        if (element.has_value()) written.push_back(*element);
      }
    }
  }
  return written;
}

bool MakesValues(const Result& result) { return result.form == ResultForm::kNew || result.form == ResultForm::kList; }

void RenameOperands(Op* op, absl::FunctionRef<ValueId(ValueId)> rename) {
  for (Operand& operand : op->operands) {
    if (auto* value = std::get_if<ValueId>(&operand)) {
      *value = rename(*value);
    } else if (auto* list = std::get_if<ValueList>(&operand)) {
      for (auto& element : *list) {
        if (element.has_value()) element = rename(*element);
      }
    }
  }
}

GraphBuilder::GraphBuilder() { AddSource(""); }

StorageId GraphBuilder::NewStorage() { return StorageId{num_storages_++}; }

ValueId GraphBuilder::AddValue(TensorType type, Origin origin, uint32_t origin_index, StorageId storage,
                               bool dynamic_shape) {
  const ValueId id{static_cast<uint32_t>(graph_.values.size())};
  graph_.values.push_back(Value{std::move(type), origin, origin_index, storage, dynamic_shape});
  return id;
}

ValueId GraphBuilder::AddInput(TensorType type, StorageId storage) {
  const auto index = static_cast<uint32_t>(graph_.inputs.size());
  graph_.inputs.push_back(AddValue(std::move(type), Origin::kInput, index, storage, false));
  return graph_.inputs.back();
}

ValueId GraphBuilder::AddCaptured(TensorType type, StorageId storage) {
  const auto index = static_cast<uint32_t>(graph_.captured.size());
  graph_.captured.push_back(AddValue(std::move(type), Origin::kCaptured, index, storage, false));
  return graph_.captured.back();
}

ValueId GraphBuilder::AddConstant(TensorType type, StorageId storage) {
  const auto index = static_cast<uint32_t>(graph_.constants.size());
  graph_.constants.push_back(AddValue(std::move(type), Origin::kConstant, index, storage, false));
  return graph_.constants.back();
}

ValueId GraphBuilder::AddResultValue(TensorType type, StorageId storage, bool dynamic_shape) {
  return AddValue(std::move(type), Origin::kResult, static_cast<uint32_t>(graph_.ops.size()), storage, dynamic_shape);
}

uint32_t GraphBuilder::AddSource(const std::string& text) {
  const auto [found, inserted] = source_index_.try_emplace(text, static_cast<uint32_t>(graph_.sources.size()));
  if (inserted) graph_.sources.push_back(text);
  return found->second;
}

uint32_t GraphBuilder::AddOp(Op op) {
  const auto index = static_cast<uint32_t>(graph_.ops.size());
  const std::vector<ValueId> operands = OperandValues(op);
  for (const Result& result : op.results) {
    if (!MakesValues(result)) continue;
    for (ValueId id : result.values) {
      if (id.index >= graph_.values.size()) continue;  // Verify will say so.
      graph_.values[id.index].origin_index = index;
      for (ValueId operand : operands) {
        if (operand.index < graph_.values.size() && graph_.value(operand).storage == graph_.value(id).storage) {
          op.effects.is_view = true;
        }
      }
    }
  }
  graph_.ops.push_back(std::move(op));
  return index;
}

void GraphBuilder::AddOutput(ValueId value) { graph_.outputs.push_back(value); }

absl::StatusOr<Graph> GraphBuilder::Build() && {
  if (absl::Status status = Verify(graph_); !status.ok()) return status;
  return std::move(graph_);
}

}  // namespace cuvil::cir
