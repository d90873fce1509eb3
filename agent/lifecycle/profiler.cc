#include "agent/lifecycle/profiler.h"

#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "agent/boundary.h"
#include "agent/cpython_compat.h"
#include "agent/lifecycle/activation.h"
#include "agent/lifecycle/record.h"
#include "agent/module_path.h"
#include "agent/process_lifetime.h"
#include "jit/cir/graph.h"
#include "scheduler/monotonic_clock.h"

namespace cuvil::agent {
namespace {

using scheduler::ProfileKind;
using scheduler::ProfileRecorder;
using scheduler::ProfileSite;
using scheduler::ProfileTrack;

// GIL held.
struct ActiveProfile {
  std::shared_ptr<ProfileRecorder> recorder;  // null: there is none
  uint64_t number = 0;
  bool was_enabled = false;
};

ActiveProfile& TheProfile() {
  static ProcessLifetime<ActiveProfile> profile;
  return *profile;
}

std::string Text(PyObject* unicode) {
  const char* text = unicode == nullptr || !PyUnicode_Check(unicode) ? nullptr : PyUnicode_AsUTF8(unicode);
  if (text == nullptr) PyErr_Clear();
  return text == nullptr ? "" : text;
}

// The name that threading gave the calling thread; empty for a thread that Python did not start. Looks into threading's
// own table, because asking threading would register a foreign thread.
std::string NameOfThisThread() {
  const ErrorScope errors;
  PyObject* threading = PyDict_GetItemString(PyImport_GetModuleDict(), "threading");
  const OwnedRef table = threading == nullptr || !PyModule_CheckExact(threading)
                             ? OwnedRef()
                             : OwnedRef::New(PyDict_GetItemString(PyModule_GetDict(threading), "_active"));
  const OwnedRef key = OwnedRef::Steal(PyLong_FromUnsignedLong(PyThread_get_thread_ident()));
  if (!table || !PyDict_CheckExact(table.get()) || !key) return "";
  const OwnedRef thread = OwnedRef::New(PyDict_GetItem(table.get(), key.get()));
  if (!thread || Py_TYPE(thread.get())->tp_getattro != PyObject_GenericGetAttr) return "";
  const OwnedRef attributes = OwnedRef::Steal(PyObject_GenericGetDict(thread.get(), nullptr));
  if (!attributes || !PyDict_Check(attributes.get())) return "";
  return Text(PyDict_GetItemString(attributes.get(), "_name"));
}

ProfileTrack* TrackOfThisThread(ProfileRecorder& recorder) {
  ProfileTrack* track = recorder.FindTrack();
  return track != nullptr ? track : recorder.AddTrack(PyThread_get_thread_ident(), NameOfThisThread());
}

// The innermost frame outside of torch, where the user's line is; the innermost of all if there is none.
void LocateCaller(ProfileSite* site) {
  const FrameView innermost = CurrentFrame(PyThreadState_Get());
  FrameView user = innermost;
  while (user && absl::StrContains(Text(user.code()->co_filename), "/torch/")) user = user.previous();
  if (!user) user = innermost;
  if (!user) return;
  site->file = Text(user.code()->co_filename);
  site->line = user.line();
  site->function = Text(user.code()->co_qualname);
}

std::vector<ProfileSite> SitesOf(const scheduler::ExecutionPlan& plan, const trace::Trace& trace,
                                 const std::string& module) {
  std::vector<ProfileSite> sites;
  sites.reserve(plan.steps().size());
  for (const scheduler::PlanStep& step : plan.steps()) {
    ProfileSite& site = sites.emplace_back();
    // As the program called it: the plan may have made it an in-place operator.
    const cir::Op& op = trace.graph.ops[step.op];
    site.kind = ProfileKind::kStep;
    // A constant that each run gets a copy of stands where it is first used.
    site.op = step.mechanism == scheduler::Mechanism::kClone ? "aten::clone" : cir::QualifiedName(op);
    site.module = module;
    if (op.source >= trace.sources.size()) continue;
    const trace::SourceLocation& source = trace.sources[op.source];
    site.module = JoinModulePath(module, source.module);
    site.file = source.user_file;
    site.line = source.user_line;
    site.function = source.user_function;
  }
  return sites;
}

const char* KindName(ProfileKind kind) {
  switch (kind) {
    case ProfileKind::kCall:
      return "call";
    case ProfileKind::kPlan:
      return "plan";
    case ProfileKind::kPreparation:
      return "preparation";
    case ProfileKind::kStep:
      return "step";
  }
  return "";
}

OwnedRef Describe(const ProfileSite& site) {
  Record record;
  record.Set("kind", KindName(site.kind));
  record.Set("module", site.module);
  record.Set("type", site.module_type);
  record.Set("file", site.file);
  record.Set("line", static_cast<uint64_t>(site.line > 0 ? site.line : 0));
  record.Set("function", site.function);
  record.Set("operator", site.op);
  return record.Take();
}

OwnedRef Describe(const scheduler::Profile::Track& track) {
  static_assert(sizeof(scheduler::ProfileRecord) == 3 * sizeof(uint64_t));
  Record record;
  record.Set("name", track.name);
  record.Set("id", track.id);
  record.Set("records", OwnedRef::Steal(PyBytes_FromStringAndSize(
                            reinterpret_cast<const char*>(track.records.data()),
                            static_cast<Py_ssize_t>(track.records.size() * sizeof(scheduler::ProfileRecord)))));
  return record.Take();
}

}  // namespace

absl::StatusOr<uint64_t> Profiler::Start() {
  ActiveProfile& profile = TheProfile();
  if (profile.recorder != nullptr) {
    return absl::FailedPreconditionError(
        "a profile is being taken already, and a process has one at a time: end that one first");
  }
  profile.recorder = std::make_shared<ProfileRecorder>();
  profile.was_enabled = Enabled();
  active_.store(true, std::memory_order_relaxed);
  return ++profile.number;
}

OwnedRef Profiler::Stop(uint64_t number) {
  ActiveProfile& active = TheProfile();
  if (active.recorder == nullptr || active.number != number) return OwnedRef::New(Py_None);
  active_.store(false, std::memory_order_relaxed);
  const std::shared_ptr<ProfileRecorder> recorder = std::move(active.recorder);
  active.recorder = nullptr;
  const scheduler::Profile profile = recorder->Close();
  Record record;
  record.Set("start_ns", profile.start_ns);
  record.Set("end_ns", profile.end_ns);
  record.SetBool("enabled", active.was_enabled || Enabled());
  record.Set("dropped", profile.num_dropped);
  RecordList sites;
  for (const ProfileSite& site : profile.sites) sites.Add(Describe(site));
  record.Set("sites", sites.Take());
  RecordList threads;
  for (const scheduler::Profile::Track& track : profile.tracks) threads.Add(Describe(track));
  record.Set("threads", threads.Take());
  return record.Take();
}

void Profiler::AfterForkInChild() {
  active_.store(false, std::memory_order_relaxed);
  // Never destroyed: the lock of a track may be held by a thread that the fork left behind.
  static ProcessLifetime<std::vector<std::shared_ptr<ProfileRecorder>>> left_behind;
  ActiveProfile& profile = TheProfile();
  if (profile.recorder != nullptr) left_behind->push_back(std::move(profile.recorder));
  profile.recorder = nullptr;
}

ProfiledCall::ProfiledCall(PyObject* module) : module_(module), outer_(innermost_) {
  recorder_ = TheProfile().recorder;
  if (recorder_ != nullptr) {
    track_ = TrackOfThisThread(*recorder_);
    site_.module_type = ShortTypeName(module);
    if (outer_ == nullptr) {
      site_.module = site_.module_type;
    } else if (outer_->module_ == module) {
      site_.module = outer_->site_.module;
    } else {
      const std::string name = ModulePathBelow(outer_->module_, module);
      site_.module = JoinModulePath(outer_->site_.module, name.empty() ? "<" + site_.module_type + ">" : name);
    }
    LocateCaller(&site_);
  }
  innermost_ = this;
  start_ns_ = scheduler::MonotonicNs();
}

ProfiledCall::~ProfiledCall() {
  const uint64_t end_ns = scheduler::MonotonicNs();
  innermost_ = outer_;
  if (recorder_ == nullptr) return;
  uint64_t site = ProfileRecorder::kNoSite;  // without memory the interval counts as dropped
  static_cast<void>(ContainStatus([&] {
    site = recorder_->AddSite(std::move(site_));
    return absl::OkStatus();
  }));
  track_->Add({start_ns_, end_ns, site});
}

StepRecorder::StepRecorder(PyObject* module, uint64_t plan_number, const scheduler::ExecutionPlan& plan,
                           const trace::Trace& trace) {
  const ProfiledCall* call = ProfiledCall::innermost_;
  // A profile may have begun after the call had been intercepted.
  if (ProfilePause::paused() || call == nullptr || call->module_ != module || call->recorder_ == nullptr) return;
  recorder_ = call->recorder_;
  const std::string& path = call->site_.module;
  first_site_ = recorder_->AddSites(plan_number, path, [&] { return SitesOf(plan, trace, path); });
  track_ = call->track_;
}

void StepRecorder::OnStep(uint32_t index, uint64_t start_ns, uint64_t end_ns) noexcept {
  const bool has_site = first_site_ != ProfileRecorder::kNoSite;
  track_->Add({start_ns, end_ns, has_site ? first_site_ + index : ProfileRecorder::kNoSite});
}

}  // namespace cuvil::agent
