#include "agent/lifecycle/module_call.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "agent/boundary.h"
#include "agent/cpython_compat.h"
#include "agent/cuda_state.h"
#include "agent/fault_injection.h"
#include "agent/interception.h"
#include "agent/lifecycle/lifecycle.h"
#include "agent/lifecycle/log.h"
#include "agent/lifecycle/plan_builder.h"
#include "agent/lifecycle/plan_entry.h"
#include "agent/lifecycle/preparation.h"
#include "agent/lifecycle/profiler.h"
#include "agent/lifecycle/session.h"
#include "agent/lifecycle/thread_extent.h"
#include "agent/module_path.h"

namespace cuvil::agent {
namespace {

using EntryPtr = std::shared_ptr<PlanEntry>;

enum class Action {
  kOriginal,       // and leave the modules inside alone
  kChildren,       // the original, whose module calls get their own chance
  kTimedOriginal,  // the original, timed for the entry's adoption
  kTrace,
  kCompare,
  kPlan,
};

struct Decision {
  Action action = Action::kOriginal;
  EntryPtr entry;
  size_t index = 0;       // of the entry in its list
  bool timed = false;     // kPlan: report the time
  uint64_t start_ns = 0;  // kPlan, if timed: when the call arrived
  uint64_t hash = 0;      // kTrace
  SignatureBook::Mode mode = SignatureBook::Mode::kInference;
};

// A module whose only plan is retired is not looked at for so many calls at a time.
constexpr uint32_t kMaxIdleCalls = 100;

// One guard check in sixteen is timed: a clock costs as much as ten guards.
constexpr uint64_t kGuardSampleMask = 15;

PyObject* Original(PyObject* callable, const CallArgs& call, Extent extent) {
  const ExtentScope scope(extent);
  return Interception::original()(callable, call.args, call.nargsf, call.kwnames);
}

bool GuardsFit(PlanEntry& entry, const CallArgs& call, Fit* fit) {
  Lifecycle& lifecycle = TheLifecycle();
  if ((entry.num_guard_checks++ & kGuardSampleMask) != 0) {
    *fit = FitOf(entry, call);
  } else {
    const uint64_t start_ns = MonotonicNs();
    *fit = FitOf(entry, call);
    if (*fit == Fit::kFits) {
      Count(lifecycle.statistics.guard_samples);
      Count(lifecycle.statistics.guard_ns_total, MonotonicNs() - start_ns);
    }
  }
  return *fit == Fit::kFits;
}

// Decides by one entry; false if it does not fit the call, with `stale` set if only its guards failed.
bool DecideByEntry(ModuleState& state, const CallArgs& call, const EntryPtr& entry, bool* stale, Decision* decision) {
  const PlanEntry::Stage stage = entry->stage.load(std::memory_order_acquire);
  if (stage != PlanEntry::Stage::kServing) {
    if (stage == PlanEntry::Stage::kDropped || !entry->plan->MatchesInputs(call)) return false;
    if (stage == PlanEntry::Stage::kBuilding) {
      // A fork may have brought this entry into a process without a builder.
      if (!TheLifecycle().worker.EnsureRunning().ok()) return false;
      WaitForBuild(*entry);
      if (entry->stage.load(std::memory_order_acquire) != PlanEntry::Stage::kBuilt) return true;
    }
    if (!entry->build_status.ok() && !absl::IsUnimplemented(entry->build_status)) {
      // Not that there is no plan: making it failed.
      NoteFault(call, "making the plan", entry->build_status.message());
      if (TryAgain(*entry)) {
        entry->build_status = absl::OkStatus();
        entry->stage.store(PlanEntry::Stage::kBuilding, std::memory_order_relaxed);
        Build(entry, call);
      } else {
        Count(TheLifecycle().statistics.build_failures);
        GiveUp(state, entry, "making the plan", absl::Status(entry->build_status));
      }
      return true;
    }
    if (!entry->build_status.ok()) {
      Refusal refusal;
      refusal.code = "build";
      refusal.message = absl::StrCat("no execution plan: ", std::string(entry->build_status.message()));
      refusal.advice = "the modules inside are planned on their own where they can be";
      Count(TheLifecycle().statistics.build_failures);
      Log(LogLevel::kInfo, "", absl::StrCat(ModuleName(call.args[0]), ": ", refusal.message));
      DropEntry(state, entry, std::move(refusal));
      return false;
    }
    Fit fit;
    if (!GuardsFit(*entry, call, &fit)) {
      *stale = fit == Fit::kGuardFailed;
      return fit == Fit::kFailed;
    }
    decision->entry = entry;
    decision->action = entry->comparing ? Action::kOriginal : Action::kCompare;
    return true;
  }

  std::optional<Adoption::Choice> reopened;
  if (entry->adoption.state() == Adoption::State::kRetired && !entry->adoption.measuring()) {
    // Guards of a plan that is out of use are not worth their time, until it is measured again.
    if (!entry->plan->MatchesInputs(call)) return false;
    reopened = entry->adoption.Next();
    if (reopened->path == Adoption::Path::kEager) {
      if (state.plans.size() == 1) state.idle_calls = entry->adoption.Skip(kMaxIdleCalls);
      return true;
    }
  }
  Fit fit;
  if (!GuardsFit(*entry, call, &fit)) {
    *stale = fit == Fit::kGuardFailed;
    return fit == Fit::kFailed;
  }
  const Adoption::Choice choice = reopened.has_value() ? *reopened : entry->adoption.Next();
  decision->entry = entry;
  decision->timed = choice.timed;
  decision->action = choice.path == Adoption::Path::kPlan ? Action::kPlan
                     : choice.timed                       ? Action::kTimedOriginal
                                                          : Action::kOriginal;
  return true;
}

absl::Status DecideWithoutPlan(ModuleState& state, Decision* decision) {
  Lifecycle& lifecycle = TheLifecycle();
  const uint64_t hash = decision->hash;
  const bool in_session = prepare_session != nullptr;
  const bool wanted = state.book.ShouldTrace(hash) || in_session;
  const bool refused_here = in_session && state.refused_in_session == prepare_session->id;
  if (state.book.IsBanned(hash) || refused_here) {
    decision->action = Action::kChildren;
  } else if (wanted && !lifecycle.tracing) {
    decision->action = Action::kTrace;
  } else {
    // A seam: a refusal costs the module that it happens in, whose children get their chance. To break at the
    // statement, choose here a plan for what the call does before the refusal's line.
    decision->action = state.book.IsRefused(hash, decision->mode) ? Action::kChildren : Action::kOriginal;
  }
  return absl::OkStatus();
}

absl::Status Decide(Lifecycle& lifecycle, const CallArgs& call, ModuleState** found, Decision* decision) {
  if (FaultInjected(FaultPoint::kIntercept)) return absl::InternalError("injected fault: intercept");
  if (lifecycle.worker.HasFinished()) lifecycle.CollectFinishedJobs();
  ModuleState* state = lifecycle.modules.Find(call.args[0]);
  if (state == nullptr) {
    if (FaultInjected(FaultPoint::kLookup)) return absl::InternalError("injected fault: lookup");
    state = lifecycle.modules.FindOrAdd(call.args[0], lifecycle.settings);
    if (state == nullptr) return absl::OkStatus();  // An object that cannot be referenced weakly.
  }
  if (state->opted_out) return absl::OkStatus();
  *found = state;
  ++state->num_calls;
  decision->mode = CurrentMode();
  if (state->book.Skip(decision->mode) && prepare_session == nullptr) {
    decision->action = Action::kChildren;
    return absl::OkStatus();
  }
  if (state->idle_calls != 0 && prepare_session == nullptr) {
    --state->idle_calls;
    return absl::OkStatus();
  }
  if (ThreadIsObserved(PyThreadState_Get())) {
    Count(lifecycle.statistics.observed);
    return absl::OkStatus();
  }

  bool stale = false;
  const auto plans = state->plans.Snapshot();
  if (!plans->empty() && lifecycle.settings.adopt == AdoptMode::kMeasure) decision->start_ns = MonotonicNs();
  const size_t recent = state->plans.most_recent();
  if (recent < plans->size()) {
    decision->index = recent;
    if (DecideByEntry(*state, call, (*plans)[recent], &stale, decision)) return absl::OkStatus();
  }
  if (FaultInjected(FaultPoint::kSignature)) return absl::InternalError("injected fault: signature");
  decision->hash = lifecycle.tracer.hash(call);
  for (size_t i = 0; i < plans->size(); ++i) {
    const EntryPtr& entry = (*plans)[i];
    if (i == recent || entry->hash != decision->hash) continue;
    decision->index = i;
    if (DecideByEntry(*state, call, entry, &stale, decision)) return absl::OkStatus();
  }
  if (stale) {
    Count(lifecycle.statistics.guard_failures);
    if (LogEnabled(LogLevel::kDebug)) {
      for (const EntryPtr& entry : *plans) {
        if (entry->hash == decision->hash) {
          Log(LogLevel::kDebug, "",
              absl::StrCat(ModuleName(call.args[0]), ": guard failed: ", entry->plan->LastGuardFailure()));
        }
      }
    }
  }
  return DecideWithoutPlan(*state, decision);
}

void ReportTime(const CallArgs& call, PlanEntry& entry, Adoption::Path path, uint64_t duration_ns) {
  Lifecycle& lifecycle = TheLifecycle();
  if (FaultInjected(FaultPoint::kAdopt)) {
    NoteFault(call, "adopting the plan", "injected fault: adopt");
    return;  // the measurement is lost; later ones decide
  }
  if (FaultInjected(FaultPoint::kRetire) && path == Adoption::Path::kPlan) duration_ns *= 1000;
  if (!entry.adoption.Record(path, duration_ns)) return;
  const bool adopted = entry.adoption.state() == Adoption::State::kAdopted;
  Count(adopted ? lifecycle.statistics.adopted : lifecycle.statistics.retired);
  if (LogEnabled(LogLevel::kInfo)) {
    Log(LogLevel::kInfo, "",
        absl::StrCat(ModuleName(call.args[0]),
                     adopted ? ": plan adopted: " : ": plan retired: ", entry.adoption.plan_ns() / 1000,
                     " us by plan, ", entry.adoption.eager_ns() / 1000, " us by eager"));
  }
}

// Null with no exception set: the original has to answer. Null with an exception set: the call raises it.
PyObject* AnswerByPlan(ModuleState& state, const CallArgs& call, const Decision& decision) {
  Lifecycle& lifecycle = TheLifecycle();
  PlanEntry& entry = *decision.entry;
  OwnedRef result;
  const absl::Status status = ContainStatus([&]() -> absl::Status {
    absl::StatusOr<OwnedRef> answer = RunPlan(entry, call);
    if (!answer.ok()) return answer.status();
    result = *std::move(answer);
    return absl::OkStatus();
  });
  if (!status.ok()) {
    switch (status.code()) {
      case absl::StatusCode::kCancelled:
        if (PyErr_Occurred() != nullptr) Count(lifecycle.statistics.eager);
        break;
      case absl::StatusCode::kFailedPrecondition:
        Count(lifecycle.statistics.guard_failures);
        break;
      case absl::StatusCode::kUnimplemented:
        static_cast<void>(ContainStatus([&] {
          DropEntry(state, decision.entry, WarningRefusal(status));
          return absl::OkStatus();
        }));
        break;
      case absl::StatusCode::kAborted:
        // Most likely eager is about to raise; if not, the plan is a waste of time from now on.
        Count(lifecycle.statistics.replay_errors);
        break;
      default:
        if (status.code() == absl::StatusCode::kInternal) Count(lifecycle.statistics.rebuild_failures);
        NoteFault(call, "the plan", status.message());
        if (!TryAgain(entry)) GiveUp(state, decision.entry, "the plan", status);
    }
    return nullptr;
  }
  Count(lifecycle.statistics.planned);
  ++state.num_planned;
  entry.num_retries = 0;
  if (entry.num_planned++ == 0) state.book.Served(entry.hash);
  state.plans.Touch(decision.entry, decision.index);
  if (prepare_session != nullptr && prepare_session->model == call.args[0]) prepare_session->model_ready = true;
  return result.release();
}

using scheduler::ProfileKind;

// `kind` tells a profile how the call was answered.
PyObject* Answer(PyObject* callable, PyObject* const* args, size_t nargsf, PyObject* kwnames, ProfileKind* kind) {
  const CallArgs call{args, nargsf, kwnames};
  Lifecycle& lifecycle = TheLifecycle();
  if (thread_extent != Extent::kNone || !lifecycle.active.load(std::memory_order_relaxed) ||
      call.num_positional() < 1) {
    if (thread_extent == Extent::kTracing && call.num_positional() >= 1) {
      const ModuleState* state = lifecycle.modules.Find(args[0]);
      if (state != nullptr && state->opted_out) entered_opted_out = true;
      const ModuleCallScope scope(args[0]);
      return Interception::original()(callable, args, nargsf, kwnames);
    }
    return Interception::original()(callable, args, nargsf, kwnames);
  }

  Count(lifecycle.statistics.calls);
  ModuleState* state = nullptr;
  Decision decision;
  const absl::Status status = ContainStatus([&] { return Decide(lifecycle, call, &state, &decision); });
  if (!status.ok()) {
    NoteFault(call, "the decision", status.message());
    decision = Decision();
  }
  // Comparing values would wait for the device, which ends a capture of the program's own.
  if ((decision.action == Action::kTrace || decision.action == Action::kCompare) && CudaState::StreamIsCapturing()) {
    decision = Decision();
  }
  switch (decision.action) {
    case Action::kTrace:
      *kind = ProfileKind::kPreparation;
      return TraceCall(*state, callable, call, decision.hash, decision.mode);
    case Action::kCompare:
      *kind = ProfileKind::kPreparation;
      return CompareCall(*state, callable, call, decision.entry);
    case Action::kTimedOriginal: {
      Count(lifecycle.statistics.eager);
      const ProfilePause pause(true);
      // Without the matching and the guards, which eager alone would not pay for.
      const uint64_t start_ns = MonotonicNs();
      PyObject* result = Original(callable, call, Extent::kEager);
      const uint64_t duration_ns = MonotonicNs() - start_ns;
      const ErrorScope errors;
      if (result != nullptr) ReportTime(call, *decision.entry, Adoption::Path::kEager, duration_ns);
      return result;
    }
    case Action::kPlan: {
      const ProfilePause pause(decision.timed);
      PyObject* result = AnswerByPlan(*state, call, decision);
      if (result != nullptr) {
        *kind = ProfileKind::kPlan;
        if (decision.timed) {
          ReportTime(call, *decision.entry, Adoption::Path::kPlan, MonotonicNs() - decision.start_ns);
        }
        return result;
      }
      if (PyErr_Occurred() != nullptr) return nullptr;
      break;
    }
    case Action::kChildren:
      Count(lifecycle.statistics.eager);
      return Original(callable, call, Extent::kNone);
    case Action::kOriginal:
      break;
  }
  Count(lifecycle.statistics.eager);
  return Original(callable, call, Extent::kEager);
}

// The same for a profile. What recording cannot get memory for is not recorded.
PyObject* AnswerProfiled(PyObject* callable, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  std::optional<ProfiledCall> profiled;
  // A traced call is one interval: nothing of ours may run between its instructions.
  if (PyVectorcall_NARGS(nargsf) >= 1 && thread_extent != Extent::kTracing && !ProfilePause::paused()) {
    const absl::Status status = ContainStatus([&] {
      profiled.emplace(args[0]);
      return absl::OkStatus();
    });
    if (!status.ok()) NoteFault(CallArgs{args, nargsf, kwnames}, "the profile", status.message());
  }
  ProfileKind kind = ProfileKind::kCall;
  PyObject* result = Answer(callable, args, nargsf, kwnames, &kind);
  if (profiled) profiled->set_kind(kind);
  return result;
}

}  // namespace

PyObject* OnModuleCall(PyObject* callable, PyObject* const* args, size_t nargsf, PyObject* kwnames) noexcept {
  if (Profiler::active()) [[unlikely]]
    return AnswerProfiled(callable, args, nargsf, kwnames);
  ProfileKind kind = ProfileKind::kCall;
  return Answer(callable, args, nargsf, kwnames, &kind);
}

}  // namespace cuvil::agent
