#include "jit/cir/empty_program.h"

#include <utility>
#include <vector>

namespace cuvil::cir {

absl::StatusOr<Graph> EmptyProgram(const Graph& graph, int num_detaches) {
  GraphBuilder builder;
  std::vector<ValueId> kept(graph.values.size());
  const auto keep = [&](const std::vector<ValueId>& ids, ValueId (GraphBuilder::*add)(TensorType, StorageId)) {
    for (const ValueId id : ids) kept[id.index] = (builder.*add)(graph.value(id).type, builder.NewStorage());
  };
  keep(graph.inputs, &GraphBuilder::AddInput);
  keep(graph.captured, &GraphBuilder::AddCaptured);
  keep(graph.constants, &GraphBuilder::AddConstant);

  for (const ValueId output : graph.outputs) {
    if (graph.value(output).origin != Origin::kResult) {
      builder.AddOutput(kept[output.index]);
      continue;
    }
    const std::vector<ValueId>& sources = graph.captured.empty() ? graph.inputs : graph.captured;
    if (sources.empty()) return absl::UnimplementedError("a program without tensors of the caller's");
    ValueId made = kept[sources.front().index];
    for (int i = 0; i < num_detaches; ++i) {
      const ValueId source = made;
      TensorType type = builder.graph().value(source).type;
      type.requires_grad = false;
      made = builder.AddResultValue(std::move(type), builder.graph().value(source).storage);
      Op op;
      op.name = "aten::detach";
      op.kinds = {ArgKind::kTensor};
      op.operands = {source};
      op.results = {Result{ReturnKind::kTensor, ResultForm::kNew, {made}}};
      builder.AddOp(std::move(op));
    }
    builder.AddOutput(made);
  }
  return std::move(builder).Build();
}

}  // namespace cuvil::cir
