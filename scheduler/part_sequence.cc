#include "scheduler/part_sequence.h"

#include <map>
#include <utility>

#include "absl/strings/str_cat.h"

namespace cuvil::scheduler {

using cir::Origin;
using cir::ValueId;
using torch_abi::OwnedTensor;
using torch_abi::TensorRef;

PartSequence::PartSequence(const cir::Graph& program, std::vector<ProgramPart> parts) {
  for (ProgramPart& part : parts) parts_.push_back(std::make_shared<const ProgramPart>(std::move(part)));
  if (parts_.size() == 1) return;  // the program itself
  std::map<ValueId, uint32_t> made;
  std::vector<size_t> last_taker;
  const auto source_of = [&](ValueId id) -> Source {
    const cir::Value& value = program.value(id);
    if (value.origin == Origin::kInput) return {Source::Kind::kInput, value.origin_index};
    if (value.origin == Origin::kCaptured) return {Source::Kind::kCaptured, value.origin_index};
    return {Source::Kind::kMade, made.at(id)};
  };
  flows_.resize(parts_.size());
  for (size_t p = 0; p < parts_.size(); ++p) {
    for (const ValueId id : parts_[p]->inputs) {
      const Source source = source_of(id);
      if (source.kind == Source::Kind::kMade) last_taker[source.index] = p;
      flows_[p].inputs.push_back(source);
    }
    flows_[p].first_made = num_made_;
    for (const ValueId id : parts_[p]->outputs) {
      made[id] = num_made_++;
      last_taker.push_back(p);
    }
  }
  for (const ValueId id : program.outputs) {
    outputs_.push_back(source_of(id));
    if (outputs_.back().kind == Source::Kind::kMade) last_taker[outputs_.back().index] = parts_.size();
  }
  for (uint32_t i = 0; i < num_made_; ++i) {
    if (last_taker[i] < parts_.size()) flows_[last_taker[i]].released.push_back(i);
  }
}

TensorRef PartSequence::Find(const Source& source, absl::Span<const TensorRef> inputs,
                             absl::Span<const TensorRef> captured, absl::Span<const OwnedTensor> made) {
  switch (source.kind) {
    case Source::Kind::kInput:
      return inputs[source.index];
    case Source::Kind::kCaptured:
      return captured[source.index];
    case Source::Kind::kMade:
      break;
  }
  return made[source.index].ref();
}

absl::Status PartSequence::Run(const torch_abi::TorchApi& api, absl::Span<const TensorRef> inputs,
                               absl::Span<const TensorRef> captured, std::vector<OwnedTensor>* outputs,
                               RunPart run_part) const {
  if (parts_.size() == 1) return run_part(0, inputs, captured, outputs);
  outputs->clear();
  std::vector<OwnedTensor> made(num_made_);
  std::vector<TensorRef> part_inputs, part_captured;
  std::vector<OwnedTensor> part_outputs;
  for (size_t p = 0; p < parts_.size(); ++p) {
    part_inputs.clear();
    part_captured.clear();
    for (const Source& source : flows_[p].inputs) part_inputs.push_back(Find(source, inputs, captured, made));
    for (const uint32_t i : parts_[p]->captured) part_captured.push_back(captured[i]);
    if (absl::Status s = run_part(p, part_inputs, part_captured, &part_outputs); !s.ok()) return s;
    if (part_outputs.size() != parts_[p]->outputs.size()) {
      return absl::InternalError(
          absl::StrCat("part ", p, " made ", part_outputs.size(), " tensors, not ", parts_[p]->outputs.size()));
    }
    for (size_t i = 0; i < part_outputs.size(); ++i) made[flows_[p].first_made + i] = std::move(part_outputs[i]);
    for (const uint32_t i : flows_[p].released) made[i].reset();
  }
  for (const Source& source : outputs_) outputs->push_back(api.NewReference(Find(source, inputs, captured, made)));
  return absl::OkStatus();
}

}  // namespace cuvil::scheduler
