#include "scheduler/scheduled_capture.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace cuvil::scheduler {
namespace {

using cir::ValueId;

constexpr uint32_t kNobody = UINT32_MAX;
// Of a tensor that torch does not describe.
constexpr ByteRange kEverything{0, UINT64_MAX};

}  // namespace

ScheduledCapture::ScheduledCapture(const ExecutionPlan& plan, const StreamSchedule& schedule,
                                   const device::DriverApi& driver, const torch_abi::CudaStreams& torch_streams,
                                   int32_t device_index, std::vector<device::StreamHandle> streams,
                                   StepObserver* observer)
    : plan_(plan),
      schedule_(schedule),
      driver_(driver),
      torch_streams_(torch_streams),
      device_index_(device_index),
      streams_(std::move(streams)),
      observer_(observer),
      joined_capture_(schedule.num_streams, false),
      is_waited_for_(plan.steps().size(), false),
      done_(plan.steps().size()),
      steps_(plan.steps().size()) {
  joined_capture_[0] = true;
  for (const auto& list : schedule.waits) {
    for (const uint32_t step : list) is_waited_for_[step] = true;
  }
  for (const uint32_t step : schedule.joins) is_waited_for_[step] = true;
  uint32_t num_storages = 0;
  for (const cir::Value& value : plan.graph().values) num_storages = std::max(num_storages, value.storage.index + 1);
  maker_stream_.assign(num_storages, kNobody);
}

absl::Status ScheduledCapture::Record(std::optional<device::Event>* event, uint32_t stream) {
  absl::StatusOr<device::Event> made = device::Event::Create(driver_);
  if (!made.ok()) return made.status();
  if (absl::Status s = made->Record(streams_[stream]); !s.ok()) return s;
  event->emplace(*std::move(made));
  return absl::OkStatus();
}

absl::Status ScheduledCapture::Enter(uint32_t stream) {
  if (stream == current_) return absl::OkStatus();
  if (absl::Status s = torch_streams_.Set(device_index_, streams_[stream]); !s.ok()) return s;
  current_ = stream;
  return absl::OkStatus();
}

absl::Status ScheduledCapture::Fork() {
  if (streams_.size() < schedule_.num_streams || schedule_.stream.size() != plan_.steps().size()) {
    return absl::InternalError("a schedule for another plan");
  }
  if (schedule_.num_streams == 1) return absl::OkStatus();
  return Record(&root_, 0);
}

absl::Status ScheduledCapture::Before(uint32_t step) {
  uint32_t stream = schedule_.stream[step];
  if (!joined_capture_[stream]) {
    if (!schedule_.waits[step].empty()) {
      joined_capture_[stream] = true;  // by what it waits for
    } else if (root_.has_value()) {
      if (absl::Status s = root_->MakeWait(streams_[stream]); !s.ok()) return s;
      joined_capture_[stream] = true;
    } else {
      // A stream outside of the capture would run the step now.
      return absl::InternalError("a step on a stream that is not captured");
    }
  }
  for (const uint32_t earlier : schedule_.waits[step]) {
    if (!done_[earlier].has_value()) return absl::InternalError("a step waits for one that comes later");
    if (absl::Status s = done_[earlier]->MakeWait(streams_[stream]); !s.ok()) return s;
  }
  steps_[step].stream = stream;
  if (absl::Status s = Enter(stream); !s.ok()) return s;
  running_step_ = step;
  return absl::OkStatus();
}

ByteRange ScheduledCapture::RangeOf(uint32_t cell, void** cells) const {
  const torch_abi::TorchApi& api = plan_.api();
  if (cells[cell] == nullptr || cells[cell] == api.undefined_impl()) return {};
  const torch_abi::TensorRef tensor(cells + cell);
  void* data = nullptr;
  int64_t dim = 0;
  int64_t* sizes = nullptr;
  int64_t* strides = nullptr;
  if (api.get_data_ptr(tensor.handle(), &data) != 0 || api.get_dim(tensor.handle(), &dim) != 0 ||
      api.get_sizes(tensor.handle(), &sizes) != 0 || api.get_strides(tensor.handle(), &strides) != 0) {
    return kEverything;
  }
  int64_t elements = 1;
  for (int64_t d = 0; d < dim; ++d) {
    if (sizes[d] == 0) return {};
    elements += (sizes[d] - 1) * strides[d];
  }
  const auto begin = static_cast<uint64_t>(reinterpret_cast<uintptr_t>(data));
  return {begin, begin + static_cast<uint64_t>(elements * cir::ElementSizeBytes(api.DTypeOf(tensor)))};
}

absl::Status ScheduledCapture::After(uint32_t step, void** cells) {
  running_step_.reset();
  const cir::Graph& graph = plan_.graph();
  const cir::Op& op = graph.ops[plan_.steps()[step].op];
  GraphFacts::Step& facts = steps_[step];
  std::vector<uint32_t> operand_storages;
  for (const ValueId id : cir::OperandValues(op)) {
    operand_storages.push_back(graph.value(id).storage.index);
    facts.reads.push_back(RangeOf(id.index, cells));
  }
  for (size_t i = 0; i < op.operands.size(); ++i) {
    if (((op.effects.writes >> i) & 1) == 0) continue;
    if (const auto* id = std::get_if<ValueId>(&op.operands[i])) {
      facts.writes.push_back(RangeOf(id->index, cells));
    } else if (const auto* list = std::get_if<cir::ValueList>(&op.operands[i])) {
      for (const auto& element : *list) {
        if (element.has_value()) facts.writes.push_back(RangeOf(element->index, cells));
      }
    }
  }
  for (const cir::Result& result : op.results) {
    if (result.form != cir::ResultForm::kNew && result.form != cir::ResultForm::kList) continue;
    for (const ValueId id : result.values) {
      const uint32_t storage = graph.value(id).storage.index;
      if (std::find(operand_storages.begin(), operand_storages.end(), storage) != operand_storages.end()) {
        facts.reads.push_back(RangeOf(id.index, cells));
        continue;
      }
      facts.writes.push_back(RangeOf(id.index, cells));
      maker_stream_[storage] = current_;
    }
  }
  for (const uint32_t cell : schedule_.released[step]) {
    const uint32_t stream = maker_stream_[graph.values[cell].storage.index];
    if (stream != kNobody) releases_.push_back({RangeOf(cell, cells), stream, step});
  }
  if (observer_ != nullptr) observer_->OnStep(step, 0, 0);
  return is_waited_for_[step] ? Record(&done_[step], current_) : absl::OkStatus();
}

absl::Status ScheduledCapture::Join() {
  for (const uint32_t step : schedule_.joins) {
    if (absl::Status s = done_[step]->MakeWait(streams_[0]); !s.ok()) return s;
  }
  return Enter(0);
}

}  // namespace cuvil::scheduler
