#include "agent/lifecycle/call_times.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "agent/lifecycle/lifecycle.h"
#include "agent/lifecycle/module_table.h"
#include "agent/lifecycle/plan_entry.h"
#include "agent/lifecycle/record.h"

namespace cuvil::agent {
namespace {

// One call as a vectorcall; the values are borrowed.
struct CallValues {
  std::vector<PyObject*> values;
  OwnedRef names;  // null without keywords
  CallArgs call{};

  // False with an exception set.
  bool Fill(PyObject* model, PyObject* args, PyObject* kwargs) {
    values.push_back(model);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i) values.push_back(PyTuple_GET_ITEM(args, i));
    const size_t num_positional = values.size();
    if (PyDict_GET_SIZE(kwargs) != 0) {
      names = OwnedRef::Steal(PyTuple_New(PyDict_GET_SIZE(kwargs)));
      if (!names) return false;
      PyObject *key, *value;
      for (Py_ssize_t position = 0, i = 0; PyDict_Next(kwargs, &position, &key, &value); ++i) {
        PyTuple_SET_ITEM(names.get(), i, Py_NewRef(key));
        values.push_back(value);
      }
    }
    call = {values.data(), num_positional, names.get()};
    return true;
  }
};

std::shared_ptr<PlanEntry> ServingEntry(const ModuleState& state, const CallArgs& call) {
  for (const auto& entry : *state.plans.Snapshot()) {
    if (entry->stage.load(std::memory_order_acquire) != PlanEntry::Stage::kServing) continue;
    if (FitOf(*entry, call) == Fit::kFits) return entry;
  }
  return nullptr;
}

// A plan whose answers are for one thread only: what it answers is no result of the program's.
class PrivatePlan : public CallPlan {
 public:
  explicit PrivatePlan(std::unique_ptr<CallPlan> plan) : plan_(std::move(plan)) {}

  bool MatchesInputs(const CallArgs& call) const override { return plan_->MatchesInputs(call); }
  bool GuardsHold() override { return plan_->GuardsHold(); }
  std::string LastGuardFailure() const override { return plan_->LastGuardFailure(); }
  bool is_random() const override { return plan_->is_random(); }
  std::optional<trace::SourceLocation> UninitializedMemory() const override { return plan_->UninitializedMemory(); }
  absl::Status Build() override { return absl::OkStatus(); }
  absl::StatusOr<OwnedRef> Run(const CallArgs& call) override {
    if (PyThread_get_thread_ident() != owner_) return absl::FailedPreconditionError("a plan of another thread");
    return plan_->Run(call);
  }
  void Describe(bool built, Record* record) const override { plan_->Describe(built, record); }
  std::string Summary() const override { return plan_->Summary(); }
  uint32_t num_python_steps() const override { return plan_->num_python_steps(); }

 private:
  const std::unique_ptr<CallPlan> plan_;
  const unsigned long owner_ = PyThread_get_thread_ident();
};

// Puts one entry in the place of another for as long as it lives. Whoever takes either of them out meanwhile has the
// last word.
class EntryInPlaceOf {
 public:
  EntryInPlaceOf(PlanCache<PlanEntry>* plans, std::shared_ptr<PlanEntry> entry, std::shared_ptr<PlanEntry> other)
      : plans_(plans), entry_(std::move(entry)), other_(std::move(other)) {
    plans_->Replace(other_.get(), entry_);
  }
  ~EntryInPlaceOf() { plans_->Replace(entry_.get(), other_); }
  EntryInPlaceOf(const EntryInPlaceOf&) = delete;
  EntryInPlaceOf& operator=(const EntryInPlaceOf&) = delete;

 private:
  PlanCache<PlanEntry>* const plans_;
  const std::shared_ptr<PlanEntry> entry_;
  const std::shared_ptr<PlanEntry> other_;
};

}  // namespace

OwnedRef CheckTimes(PyObject* model, PyObject* args, PyObject* kwargs, long count) {
  CallValues values;
  if (!values.Fill(model, args, kwargs)) return OwnedRef();
  RecordList times;
  ModuleState* state = TheLifecycle().modules.Find(model);
  if (state == nullptr) return times.Take();
  const std::shared_ptr<PlanEntry> entry = ServingEntry(*state, values.call);
  if (entry == nullptr) return times.Take();
  for (long i = 0; i < count; ++i) {
    const uint64_t start_ns = MonotonicNs();
    if (FitOf(*entry, values.call) != Fit::kFits) break;
    times.Add(OwnedRef::Steal(PyLong_FromUnsignedLongLong(MonotonicNs() - start_ns)));
  }
  return times.Take();
}

absl::StatusOr<OwnedRef> DispatchTimes(PyObject* model, PyObject* args, PyObject* kwargs, long count,
                                       int num_detaches) {
  CallValues values;
  if (!values.Fill(model, args, kwargs)) return OwnedRef();
  ModuleState* state = TheLifecycle().modules.Find(model);
  const std::shared_ptr<PlanEntry> entry = state == nullptr ? nullptr : ServingEntry(*state, values.call);
  if (entry == nullptr) return absl::FailedPreconditionError("no plan serves this call");
  absl::StatusOr<std::unique_ptr<CallPlan>> without = entry->plan->WithoutOperators(num_detaches);
  if (!without.ok()) return without.status();
  const auto probe = std::make_shared<PlanEntry>(std::make_unique<PrivatePlan>(*std::move(without)), entry->hash,
                                                 Adoption::Policy::kAlways);
  probe->stage.store(PlanEntry::Stage::kServing, std::memory_order_release);

  const EntryInPlaceOf served(&state->plans, probe, entry);
  RecordList times;
  // The first call of a plan is not like the others, and not timed.
  for (long i = -1; i < count; ++i) {
    const uint64_t start_ns = MonotonicNs();
    const OwnedRef result = OwnedRef::Steal(
        PyObject_Vectorcall(model, values.values.data() + 1, (values.call.nargsf - 1), values.call.kwnames));
    const uint64_t duration_ns = MonotonicNs() - start_ns;
    if (!result) return OwnedRef();
    if (i < 0) continue;
    times.Add(OwnedRef::Steal(PyLong_FromUnsignedLongLong(duration_ns)));
  }
  if (probe->num_planned != static_cast<uint64_t>(count) + 1) {
    return absl::FailedPreconditionError("calls were not answered by the plan");
  }
  return times.Take();
}

}  // namespace cuvil::agent
