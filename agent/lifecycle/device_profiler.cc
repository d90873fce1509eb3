#include "agent/lifecycle/device_profiler.h"

#include <chrono>
#include <map>
#include <thread>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "agent/gil.h"
#include "agent/lifecycle/record.h"
#include "scheduler/monotonic_clock.h"

namespace cuvil::agent {
namespace {

// Other threads run in the pauses between attempts to find a quiet moment.
constexpr int kEndAttempts = 5;
constexpr std::chrono::milliseconds kEndPause{5};

// Whether a module that has been imported says so in a variable of its own.
bool IsTrueIn(const char* module_name, const char* variable) {
  PyObject* module = PyDict_GetItemString(PyImport_GetModuleDict(), module_name);
  return module != nullptr && PyModule_Check(module) &&
         PyDict_GetItemString(PyModule_GetDict(module), variable) == Py_True;
}

bool IsOnlyPythonThread() {
  PyThreadState* first = PyInterpreterState_ThreadHead(PyThreadState_GetInterpreter(PyThreadState_Get()));
  return first == nullptr || PyThreadState_Next(first) == nullptr;
}

bool TorchProfilerIsOn() { return IsTrueIn("torch.autograd.profiler", "_is_profiler_enabled"); }

}  // namespace

DeviceProfiler::DeviceProfiler(std::string refusal) : refusal_(std::move(refusal)) { Attach(); }

std::string DeviceProfiler::WaitForDevices() {
  if (!IsTrueIn("torch.cuda", "_initialized")) return "";
  AssertGilHeld();
  const GilRelease no_gil;
  scheduler::KernelProfile::WaitForProcess();
  if (scheduler::KernelProfile::IsProcessIdle()) return "";
  return "Kernels are not recorded: other threads use the GPU, and attaching CUPTI has been seen to lose it then.";
}

void DeviceProfiler::Attach() {
  if (!IsTrueIn("torch.cuda", "_initialized")) return;
  due_ = false;
  if (!refusal_.empty()) {
    notes_.push_back(refusal_);
  } else if (TorchProfilerIsOn()) {
    // Since the profile began.
    notes_.emplace_back("Kernels are not recorded: torch.profiler was at work when the GPU was first used.");
  } else {
    AttachCupti();
  }
  // Behind it, because the sampler's thread uses the driver when it starts.
  sampled_since_ns_ = scheduler::MonotonicNs();
  sampling_ = scheduler::LiveSampler::ForProcess().Start();
}

void DeviceProfiler::AttachLate() {
  if (IsTrueIn("torch.cuda", "_initialized") && refusal_.empty() && !IsOnlyPythonThread()) {
    refusal_ = "Kernels are not recorded: several threads ran when the GPU was first used inside of the profile.";
  }
  Attach();
}

void DeviceProfiler::AttachCupti() {
  absl::StatusOr<std::shared_ptr<scheduler::KernelProfile>> started = scheduler::KernelProfile::StartForProcess();
  if (!started.ok()) {
    notes_.push_back(absl::StrCat("Kernels are not recorded: ", std::string(started.status().message()), "."));
    return;
  }
  kernels_ = *std::move(started);
  watched_ = true;
}

void DeviceProfiler::Finish(bool shared) {
  due_ = false;
  const std::shared_ptr<scheduler::KernelProfile> kernels = std::move(kernels_);
  {
    AssertGilHeld();
    const GilRelease no_gil;
    if (kernels != nullptr) kernels->Close();
    FinishSampling();
    if (kernels != nullptr && !shared) scheduler::KernelProfile::WaitForProcess();
  }
  if (kernels == nullptr) return;
  absl::Status status;
  for (int attempt = 0; attempt < kEndAttempts; ++attempt) {
    // May have begun meanwhile.
    if (shared || TorchProfilerIsOn()) {
      Take(kernels->GiveUp());
      notes_.emplace_back("torch.profiler was started inside of the profile: kernels are missing from then on.");
      return;
    }
    absl::StatusOr<scheduler::DeviceProfile> finished = kernels->Finish();
    status = finished.status();
    if (finished.ok()) {
      Take(*std::move(finished));
      return;
    }
    if (!absl::IsUnavailable(status)) break;
    AssertGilHeld();
    const GilRelease no_gil;
    std::this_thread::sleep_for(kEndPause);
  }
  Take(kernels->GiveUp());
  notes_.push_back(
      absl::StrCat("Kernels are missing, and CUPTI is still attached, so that launches are slower until a "
                   "later profile ends: ",
                   std::string(status.message()), "."));
}

void DeviceProfiler::Take(scheduler::DeviceProfile result) {
  result_ = std::move(result);
  for (std::string& note : result_.notes) notes_.push_back(std::move(note));
}

void DeviceProfiler::FinishSampling() {
  if (sampled_since_ns_ == 0) return;
  const uint64_t end_ns = scheduler::MonotonicNs();
  sampling_ = scheduler::LiveSampler::Use();
  scheduler::LiveSampler::Report report = scheduler::LiveSampler::ForProcess().Samples(sampled_since_ns_, end_ns);
  samples_ = std::move(report.samples);
  if (samples_.empty() && !report.status.ok()) {
    notes_.push_back(absl::StrCat("Counters are missing: ", std::string(report.status.message()), "."));
  }
  if (report.overwritten) notes_.emplace_back("The first of the counters' samples found no room and are missing.");
}

OwnedRef DeviceProfiler::Describe() const {
  if (!watched_) return OwnedRef::New(Py_None);
  Record record;
  record.Set("activities",
             OwnedRef::Steal(PyBytes_FromStringAndSize(
                 reinterpret_cast<const char*>(result_.activities.data()),
                 static_cast<Py_ssize_t>(result_.activities.size() * sizeof(scheduler::DeviceActivity)))));
  RecordList names;
  for (const std::string& name : result_.names) names.Add(Record::Text(name));
  record.Set("names", names.Take());
  record.Set("recorded_ns", result_.recorded_ns);
  record.Set("dropped", result_.num_dropped);
  return record.Take();
}

OwnedRef DeviceProfiler::DescribeCounters() const {
  struct Point {
    uint64_t time_ns;
    double value;
  };
  static_assert(sizeof(Point) == 16);
  std::map<std::pair<uint16_t, scheduler::LiveCounter>, std::vector<Point>> counters;
  for (const scheduler::LiveSample& sample : samples_) {
    counters[{sample.device, sample.counter}].push_back({sample.time_ns, sample.value});
  }
  RecordList list;
  for (const auto& [key, points] : counters) {
    Record record;
    record.Set("device", uint64_t{key.first});
    record.Set("name", scheduler::LiveCounterName(key.second));
    record.Set("unit", scheduler::LiveCounterUnit(key.second));
    record.Set("samples",
               OwnedRef::Steal(PyBytes_FromStringAndSize(reinterpret_cast<const char*>(points.data()),
                                                         static_cast<Py_ssize_t>(points.size() * sizeof(Point)))));
    list.Add(record.Take());
  }
  return list.Take();
}

}  // namespace cuvil::agent
