#include "agent/lifecycle/profiler.h"

#include <optional>
#include <utility>
#include <vector>

#include "agent/boundary.h"
#include "agent/cpython_compat.h"
#include "agent/lifecycle/activation.h"
#include "agent/lifecycle/device_profiler.h"
#include "agent/lifecycle/record.h"
#include "agent/module_path.h"
#include "agent/process_lifetime.h"
#include "agent/torch_files.h"
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
  std::optional<DeviceProfiler> device;       // there iff the recorder is
  bool ending = false;                        // the last one still waits for the device, without the GIL
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
  while (user && IsTorchFile(Text(user.code()->co_filename))) user = user.previous();
  if (!user) user = innermost;
  if (!user) return;
  site->file = Text(user.code()->co_filename);
  site->line = user.line();
  site->function = Text(user.code()->co_qualname);
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

absl::StatusOr<uint64_t> Profiler::Start(std::string no_kernels) {
  ActiveProfile& profile = TheProfile();
  if (profile.recorder == nullptr && no_kernels.empty()) no_kernels = DeviceProfiler::WaitForDevices();
  if (profile.recorder != nullptr || profile.ending) {
    return absl::FailedPreconditionError(
        "a profile is being taken already, and a process has one at a time: end that one first");
  }
  profile.recorder = std::make_shared<ProfileRecorder>();
  profile.device.emplace(std::move(no_kernels));
  profile.was_enabled = Enabled();
  active_.store(true, std::memory_order_relaxed);
  return ++profile.number;
}

OwnedRef Profiler::Stop(uint64_t number, bool shared) {
  ActiveProfile& active = TheProfile();
  if (active.recorder == nullptr || active.number != number) return OwnedRef::New(Py_None);
  active_.store(false, std::memory_order_relaxed);
  const std::shared_ptr<ProfileRecorder> recorder = std::exchange(active.recorder, nullptr);
  DeviceProfiler device = *std::move(active.device);
  active.device.reset();
  const scheduler::Profile profile = recorder->Close();
  active.ending = true;
  device.Finish(shared);
  active.ending = false;
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
  record.Set("device", device.Describe());
  record.Set("counters", device.DescribeCounters());
  RecordList notes;
  for (const std::string& note : device.notes()) notes.Add(Record::Text(note));
  record.Set("notes", notes.Take());
  return record.Take();
}

void Profiler::AfterForkInChild() {
  active_.store(false, std::memory_order_relaxed);
  // Never destroyed: the lock of a track may be held by a thread that the fork left behind.
  static ProcessLifetime<std::vector<std::shared_ptr<ProfileRecorder>>> left_behind;
  static ProcessLifetime<std::vector<DeviceProfiler>> devices_left_behind;
  ActiveProfile& profile = TheProfile();
  if (profile.recorder != nullptr) left_behind->push_back(std::move(profile.recorder));
  profile.recorder = nullptr;
  // CUPTI and the driver are the parent's: their functions may not be called here.
  if (profile.device.has_value()) {
    profile.device->AfterForkInChild();
    devices_left_behind->push_back(*std::move(profile.device));
  }
  profile.device.reset();
  profile.ending = false;
}

ProfiledCall::ProfiledCall(PyObject* module) : module_(module), outer_(innermost_) {
  recorder_ = TheProfile().recorder;
  if (recorder_ != nullptr) {
    TheProfile().device->AttachIfDue();
    kernels_ = TheProfile().device->kernels();
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
  if (kernels_ != nullptr) kernel_call_ = kernels_->EnterCall();
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
  if (kernel_call_ != scheduler::KernelProfile::kNoCall) kernels_->LeaveCall(kernel_call_, site);
  track_->Add({start_ns_, end_ns, site});
}

void StepRecorder::OnStepStart(uint32_t index) noexcept {
  entered_ = kernels_ != nullptr && kernels_->EnterStep(SiteOf(index));
}

void StepRecorder::OnStep(uint32_t index, uint64_t start_ns, uint64_t end_ns) noexcept {
  LeaveStep();
  track_->Add({start_ns, end_ns, SiteOf(index)});
}

}  // namespace cuvil::agent
