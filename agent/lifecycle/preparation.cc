#include "agent/lifecycle/preparation.h"

#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "agent/boundary.h"
#include "agent/fault_injection.h"
#include "agent/forward_place.h"
#include "agent/gil.h"
#include "agent/interception.h"
#include "agent/lifecycle/comparison.h"
#include "agent/lifecycle/lifecycle.h"
#include "agent/lifecycle/log.h"
#include "agent/lifecycle/plan_builder.h"
#include "agent/lifecycle/plan_entry.h"
#include "agent/lifecycle/random_state.h"
#include "agent/lifecycle/session.h"
#include "agent/lifecycle/thread_extent.h"
#include "scheduler/plan_executor.h"

namespace cuvil::agent {
namespace {

// Comparing calls that may end without a verdict before the plan is given up.
constexpr uint32_t kMaxInconclusive = 3;

class TracingScope {
 public:
  explicit TracingScope(Lifecycle& lifecycle) : lifecycle_(lifecycle), extent_(Extent::kTracing) {
    lifecycle_.tracing = true;
    entered_opted_out = false;
  }
  ~TracingScope() { lifecycle_.tracing = false; }

 private:
  Lifecycle& lifecycle_;
  ExtentScope extent_;
};

PyObject* RunOriginal(PyObject* callable, const CallArgs& call) {
  const ExtentScope extent(Extent::kEager);
  return Interception::original()(callable, call.args, call.nargsf, call.kwnames);
}

constexpr char kInternal[] = "internal";

Refusal InternalRefusal(std::string message) {
  Refusal refusal;
  refusal.code = kInternal;
  refusal.message = std::move(message);
  refusal.retry = true;
  refusal.advice = "this is a limit or a defect of Cuvil; CUVIL_LOG=debug tells more";
  return refusal;
}

// What a trace that has returned leads to. Throws nothing but bad_alloc.
absl::Status Digest(ModuleState& state, const CallArgs& call, uint64_t hash, SignatureBook::Mode mode,
                    TracedCall& outcome, std::shared_ptr<PlanEntry>* inserted) {
  Lifecycle& lifecycle = TheLifecycle();
  Count(lifecycle.statistics.trace_ns, outcome.trace_ns);
  state.branches.Add(outcome.branches);
  if (FaultInjected(FaultPoint::kTraceEnd)) {
    outcome.plan.reset();
    outcome.refusal = InternalRefusal("injected fault: trace-end");
  } else if (outcome.plan != nullptr && FaultInjected(FaultPoint::kCapture)) {
    outcome.plan.reset();
    outcome.refusal = InternalRefusal("injected fault: capture");
  } else if (entered_opted_out) {
    outcome.plan.reset();
    outcome.refusal = Refusal();
    outcome.refusal.code = "opted-out";
    outcome.refusal.message = "a module inside was opted out with cuvil.opt_out()";
    outcome.refusal.advice = "the modules beside it are planned on their own";
  }

  if (outcome.plan == nullptr) {
    if (outcome.refusal.empty()) outcome.refusal = InternalRefusal("the trace ended without a capture or a reason");
    PlaceAtForward(call.args[0], &outcome.refusal);
    const Refusal& refusal = outcome.refusal;
    // Nothing that the program does; the next call may fare better.
    if (refusal.code == kInternal) NoteFault(call, "the trace", refusal.message);
    Count(lifecycle.statistics.refused);
    ++lifecycle.refusals_by_code[refusal.code];
    state.AddRefusal(refusal);
    state.book.Refused(hash, mode, refusal.retry);
    if (prepare_session != nullptr && !refusal.retry) state.refused_in_session = prepare_session->id;
    if (LogEnabled(LogLevel::kInfo)) {
      const std::string name = ModuleName(call.args[0]);
      const std::string place = refusal.file.empty() ? "" : absl::StrCat(" at ", refusal.file, ":", refusal.line);
      Log(LogLevel::kInfo, LogEnabled(LogLevel::kDebug) ? "" : absl::StrCat(name, refusal.code, place),
          absl::StrCat(name, ": not planned [", refusal.code, "]", place, ": ", refusal.message,
                       refusal.retry ? " (the next call is tried)" : ""));
    }
    return absl::OkStatus();
  }

  Count(lifecycle.statistics.captures);
  const bool always = lifecycle.settings.adopt == AdoptMode::kAlways;
  auto entry = std::make_shared<PlanEntry>(std::move(outcome.plan), hash,
                                           always ? Adoption::Policy::kAlways : Adoption::Policy::kMeasure);
  entry->trace_ns = outcome.trace_ns;
  state.book.Captured(hash);
  // The graph is complete: what is dropped here may be freed before the build.
  PlanCache<PlanEntry>::List evicted = state.plans.Insert(entry);
  *inserted = entry;
  if (!evicted.empty()) {
    Count(lifecycle.statistics.evicted, evicted.size());
    if (FaultInjected(FaultPoint::kEvict)) return absl::InternalError("injected fault: evict");
  }
  if (LogEnabled(LogLevel::kInfo)) {
    Log(LogLevel::kInfo, "",
        absl::StrCat(ModuleName(call.args[0]), ": traced in ", outcome.trace_ns / 1000, " us, ",
                     entry->plan->Summary()));
  }
  Build(entry, call);
  return absl::OkStatus();
}

// What the plan's run left behind for the comparison.
struct PlannedRun {
  OwnedRef result;
  absl::Status status;
};

PlannedRun RunOnce(PlanEntry& entry, const CallArgs& call) {
  PlannedRun run;
  absl::StatusOr<OwnedRef> result = RunPlan(entry, call);
  if (result.ok()) {
    run.result = *std::move(result);
  } else {
    run.status = result.status();
  }
  return run;
}

// `type` is that of the pending exception, or null.
bool IsOutOfMemory(PyObject* type) {
  return type != nullptr && PyType_Check(type) &&
         std::string_view(reinterpret_cast<PyTypeObject*>(type)->tp_name).ends_with("OutOfMemoryError");
}

Refusal DifferenceRefusal(const std::string& difference) {
  Refusal refusal;
  refusal.code = "differs";
  refusal.message = absl::StrCat("the plan's result was not eager's: ", difference);
  refusal.advice = "the plan was never used; please report this";
  return refusal;
}

// The plan may be right: what such memory holds is nobody's promise.
Refusal UninitializedRefusal(const trace::SourceLocation& place) {
  Refusal refusal;
  refusal.code = "uninitialized";
  refusal.file = place.user_file;
  refusal.line = place.user_line;
  refusal.message = "makes memory that holds anything until it is written, and the plan's values were not eager's";
  refusal.advice = "write all of it before it is read, or make it with torch.zeros";
  return refusal;
}

// Judges a finished comparing call; called with both results.
absl::Status Judge(ModuleState& state, const CallArgs& call, const std::shared_ptr<PlanEntry>& entry, PyObject* eager,
                   PlannedRun planned, const std::optional<RandomState>& before,
                   const std::optional<RandomState>& after_plan) {
  Lifecycle& lifecycle = TheLifecycle();
  std::string difference;
  std::optional<trace::SourceLocation> uninitialized;  // where, if that may be why values differ
  if (absl::IsUnimplemented(planned.status)) {
    DropEntry(state, entry, WarningRefusal(planned.status));
    return absl::OkStatus();
  }
  // A tensor may have changed since the guards were checked.
  if (absl::IsFailedPrecondition(planned.status) && ++entry->inconclusive < kMaxInconclusive) return absl::OkStatus();
  // Eager did what the plan could not, which says nothing about values.
  if (!planned.status.ok()) return planned.status;
  uninitialized = entry->plan->UninitializedMemory();
  const auto values = uninitialized.has_value() ? Comparison::Values::kBits : Comparison::Values::kRounded;
  absl::StatusOr<Comparison::Result> compared = Comparison::Compare(call, eager, planned.result.get(), nullptr, values);
  if (!compared.ok()) return compared.status();
  if (compared->verdict != Comparison::Verdict::kValuesDiffer) uninitialized.reset();
  if (compared->verdict == Comparison::Verdict::kValuesDiffer && !uninitialized.has_value()) {
    // How much do these operators vary by themselves? The generator must stand where it stood.
    OwnedRef rerun;
    std::optional<RandomState> after_eager;
    if (before.has_value()) {
      absl::StatusOr<RandomState> saved = RandomState::Save();
      if (!saved.ok()) return saved.status();
      after_eager.emplace(*std::move(saved));
      if (absl::Status status = before->Restore(); !status.ok()) return status;
    }
    if (FitOf(*entry, call) == Fit::kFits) rerun = RunOnce(*entry, call).result;
    if (after_eager.has_value()) {
      if (absl::Status status = after_eager->Restore(); !status.ok()) return status;
    }
    if (rerun) compared = Comparison::Compare(call, eager, planned.result.get(), rerun.get(), values);
    if (!compared.ok()) return compared.status();
    if (compared->verdict == Comparison::Verdict::kEqual) {
      Log(LogLevel::kDebug, "", absl::StrCat(ModuleName(call.args[0]), ": equal to eager within rounding"));
    }
  }
  if (compared->verdict != Comparison::Verdict::kEqual) difference = compared->difference;
  if (difference.empty() && after_plan.has_value()) {
    absl::StatusOr<bool> same = after_plan->IsCurrent();
    if (!same.ok()) return same.status();
    if (!*same) difference = "it left the random generator in another state";
  }
  if (FaultInjected(FaultPoint::kDiffer)) difference = "injected fault: differ";

  if (!difference.empty()) {
    // Another thread, or the call itself, may have changed what the plan was compared under.
    if (FitOf(*entry, call) != Fit::kFits && ++entry->inconclusive < kMaxInconclusive) return absl::OkStatus();
    if (uninitialized.has_value()) {
      DropEntry(state, entry, UninitializedRefusal(*uninitialized));
      return absl::OkStatus();
    }
    Count(lifecycle.statistics.compare_failures);
    Log(LogLevel::kWarning, "",
        absl::StrCat(ModuleName(call.args[0]), ": a plan is refused for good, its result was not eager's: ", difference,
                     " (eager's was returned)"));
    DropEntry(state, entry, DifferenceRefusal(difference));
    return absl::OkStatus();
  }
  entry->stage.store(PlanEntry::Stage::kServing, std::memory_order_release);
  if (prepare_session != nullptr) {
    if (lifecycle.settings.adopt == AdoptMode::kMeasure) entry->adoption.Decide(Adoption::State::kAdopted);
    if (prepare_session->model == call.args[0]) prepare_session->model_ready = true;
  }
  if (entry->adoption.state() == Adoption::State::kAdopted) Count(lifecycle.statistics.adopted);
  Log(LogLevel::kInfo, "", absl::StrCat(ModuleName(call.args[0]), ": plan equal to eager"));
  return absl::OkStatus();
}

// The code object that a module's calls run, by name and place; the class where forward is not written in Python.
std::string CodeText(PyObject* module) {
  const ErrorScope errors;
  const PyCodeObject* code = ForwardCode(module);
  const char* function = code == nullptr ? nullptr : PyUnicode_AsUTF8(code->co_qualname);
  const char* file = function == nullptr ? nullptr : PyUnicode_AsUTF8(code->co_filename);
  PyErr_Clear();
  if (file == nullptr) return ModuleName(module);
  return absl::StrCat(function, " (", file, ":", code->co_firstlineno, ")");
}

}  // namespace

std::string ModuleName(PyObject* module) { return Py_TYPE(module)->tp_name; }

void NoteFault(const CallArgs& call, const char* stage, std::string_view message) noexcept {
  Lifecycle& lifecycle = TheLifecycle();
  Count(lifecycle.statistics.faults);
  static_cast<void>(ContainStatus([&] {
    const std::string place = CodeText(call.args[0]);
    Log(LogLevel::kWarning, LogEnabled(LogLevel::kDebug) ? "" : place,
        absl::StrCat(place, ": ", stage, " failed, the call ran as CPython would: ", std::string(message)));
    return absl::OkStatus();
  }));
}

Refusal WarningRefusal(const absl::Status& status) {
  Refusal refusal;
  refusal.code = "warning";
  refusal.message = std::string(status.message());
  refusal.advice = "call the operator in a way that does not warn; the modules inside are planned where they can be";
  if (const std::optional<absl::Cord> source = status.GetPayload(scheduler::kSourcePayload)) {
    // "file:line in function"
    const std::string text(*source);
    const size_t end = text.rfind(" in ");
    const size_t colon = end == std::string::npos ? end : text.rfind(':', end);
    if (colon != std::string::npos && absl::SimpleAtoi(text.substr(colon + 1, end - colon - 1), &refusal.line)) {
      refusal.file = text.substr(0, colon);
    }
  }
  return refusal;
}

void GiveUp(ModuleState& state, const std::shared_ptr<PlanEntry>& entry, const char* stage,
            const absl::Status& status) noexcept {
  static_cast<void>(ContainStatus([&] {
    DropEntry(state, entry,
              InternalRefusal(absl::StrCat(stage, " failed again and again: ", std::string(status.message()))));
    return absl::OkStatus();
  }));
}

void DropEntry(ModuleState& state, const std::shared_ptr<PlanEntry>& entry, Refusal refusal) {
  Lifecycle& lifecycle = TheLifecycle();
  entry->stage.store(PlanEntry::Stage::kDropped, std::memory_order_release);
  PlaceAtForward(reinterpret_cast<PyWeakReference*>(state.weak.get())->wr_object, &refusal);
  ++lifecycle.refusals_by_code[refusal.code];
  state.AddRefusal(refusal);
  state.book.Ban(entry->hash);
  if (prepare_session != nullptr) state.refused_in_session = prepare_session->id;
  state.plans.Remove(entry.get());
}

PyObject* TraceCall(ModuleState& state, PyObject* callable, const CallArgs& call, uint64_t hash,
                    SignatureBook::Mode mode) noexcept {
  Lifecycle& lifecycle = TheLifecycle();
  Count(lifecycle.statistics.eager);
  if (FaultInjected(FaultPoint::kTraceBegin)) {
    NoteFault(call, "starting a trace", "injected fault: trace-begin");
    return RunOriginal(callable, call);
  }
  Count(lifecycle.statistics.traces);
  if (prepare_session != nullptr) ++prepare_session->num_steps;
  TracedCall outcome;
  {
    const TracingScope tracing(lifecycle);
    outcome = lifecycle.tracer.trace(callable, call, Interception::original());
  }
  // From here on the call is over; only its result and its exception count.
  const ErrorScope errors;
  std::shared_ptr<PlanEntry> entry;
  const absl::Status status = ContainStatus([&] { return Digest(state, call, hash, mode, outcome, &entry); });
  if (!status.ok()) {
    NoteFault(call, "keeping the capture", status.message());
    // Nobody would build it. The signature may be traced again.
    static_cast<void>(ContainStatus([&] {
      if (entry != nullptr) state.plans.Remove(entry.get());
      return absl::OkStatus();
    }));
  }
  return outcome.result;
}

PyObject* CompareCall(ModuleState& state, PyObject* callable, const CallArgs& call,
                      const std::shared_ptr<PlanEntry>& entry) noexcept {
  Lifecycle& lifecycle = TheLifecycle();
  Count(lifecycle.statistics.eager);
  if (FaultInjected(FaultPoint::kCompare)) {
    NoteFault(call, "the comparison", "injected fault: compare");
    return RunOriginal(callable, call);
  }
  Count(lifecycle.statistics.compared);
  if (prepare_session != nullptr) ++prepare_session->num_steps;
  const uint64_t start_ns = MonotonicNs();
  entry->comparing = true;

  // The plan first: its guards have just been checked, and the original may then take all the time it wants.
  PlannedRun planned;
  std::optional<RandomState> before, after_plan;
  absl::Status ready = ContainStatus([&]() -> absl::Status {
    if (entry->plan->is_random()) {
      absl::StatusOr<RandomState> saved = RandomState::Save();
      if (!saved.ok()) return saved.status();
      before.emplace(*std::move(saved));
    }
    planned = RunOnce(*entry, call);
    if (PyErr_Occurred() != nullptr) return planned.status;  // RunPlan() has put the generator back.
    if (!before.has_value()) return absl::OkStatus();
    absl::StatusOr<RandomState> saved = RandomState::Save();
    if (saved.ok()) after_plan.emplace(*std::move(saved));
    // Whatever happened, eager starts from the generator that the call found.
    absl::Status restored = before->Restore();
    return saved.ok() ? restored : saved.status();
  });

  if (PyErr_Occurred() != nullptr) {
    entry->comparing = false;
    return nullptr;
  }

  PyObject* result = RunOriginal(callable, call);
  if (result == nullptr && planned.result && IsOutOfMemory(PyErr_Occurred())) {
    // Alone it may have found the memory that the plan's result holds. The trace has shown that a second run leaves
    // behind what one does; graphs went when torch ran out of memory.
    PyErr_Clear();
    planned.result.reset();
    ready = absl::ResourceExhaustedError("no memory for eager's result beside the plan's");
    absl::Status restored = absl::OkStatus();
    if (before.has_value()) restored = ContainStatus([&] { return before->Restore(); });
    if (!restored.ok()) ready = restored;
    result = RunOriginal(callable, call);
  }
  const ErrorScope errors;
  if (result != nullptr && ready.ok()) {
    ready = ContainStatus([&] { return Judge(state, call, entry, result, std::move(planned), before, after_plan); });
  }
  if (!ready.ok()) {
    NoteFault(call, "the comparison", ready.message());
    if (!TryAgain(*entry) && entry->stage == PlanEntry::Stage::kBuilt) GiveUp(state, entry, "comparison", ready);
  }
  entry->comparing = false;
  entry->compare_ns = MonotonicNs() - start_ns;
  Count(lifecycle.statistics.compare_ns, entry->compare_ns);
  return result;
}

}  // namespace cuvil::agent
