#include "scheduler/kernel_profile.h"

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "memory/device/capture_mode.h"
#include "memory/device/synchronize.h"
#include "scheduler/monotonic_clock.h"

namespace cuvil::scheduler {
namespace {

// Instantiation clones every node once; CUPTI has been seen to tell of a node twice.
constexpr size_t kClonesPerNode = 2;

// An idle device is waited for in some 10 µs (H200); one sample in all may be disturbed.
constexpr int kIdleSamples = 10;
constexpr uint64_t kIdleWaitNs = 100'000;

std::vector<KernelAttribution::Node> NodesOf(const GraphPlan& plan) {
  std::vector<KernelAttribution::Node> nodes;
  const auto num_steps = static_cast<uint32_t>(plan.body().steps().size());
  uint32_t num_output_copies = 0;
  for (const GraphPlan::Node& node : plan.nodes()) {
    uint32_t offset = node.step;
    if (node.step == GraphPlan::Node::kInputCopy) offset = KernelAttribution::Node::kOfTheCall;
    if (node.step == GraphPlan::Node::kOutputCopy) offset = num_steps + num_output_copies++;
    nodes.push_back({node.node, offset});
  }
  return nodes;
}

// Never freed: threads may call it as long as the process lives.
const absl::StatusOr<device::DriverApi>& ProcessDriver() {
  static const auto* const driver = new absl::StatusOr<device::DriverApi>(device::DriverApi::Load());
  return *driver;
}

}  // namespace

absl::StatusOr<std::shared_ptr<KernelProfile>> KernelProfile::StartForProcess() {
  // Never freed: threads may call it as long as the process lives.
  static const auto* const cupti = new absl::StatusOr<CuptiApi>(CuptiApi::Load());
  if (!ProcessDriver().ok()) return ProcessDriver().status();
  if (!cupti->ok()) return cupti->status();
  return Start(**cupti, *ProcessDriver());
}

void KernelProfile::WaitForProcess() {
  if (ProcessDriver().ok()) static_cast<void>(device::SynchronizeDevices(*ProcessDriver()));
}

bool KernelProfile::IsProcessIdle() {
  if (!ProcessDriver().ok()) return true;
  int num_busy = 0;
  for (int i = 0; i < kIdleSamples; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const uint64_t start_ns = MonotonicNs();
    static_cast<void>(device::SynchronizeDevices(*ProcessDriver()));
    if (MonotonicNs() - start_ns > kIdleWaitNs) ++num_busy;
  }
  return num_busy <= 1;
}

absl::StatusOr<std::shared_ptr<KernelProfile>> KernelProfile::Start(const CuptiApi& cupti,
                                                                    const device::DriverApi& driver) {
  std::shared_ptr<KernelProfile> profile(new KernelProfile(cupti, driver));  // NOLINT: the constructor is private
  const absl::Status status = AtQuietMoment(cupti, profile->Synchronize(), [&]() -> absl::Status {
    absl::StatusOr<std::unique_ptr<CuptiSession>> session = CuptiSession::Attach(cupti);
    if (absl::IsFailedPrecondition(session.status()) && TorchLeftCupti(cupti)) {
      if (absl::Status s = cupti.ToStatus("cuptiFinalize", cupti.cuptiFinalize()); !s.ok()) return s;
      session = CuptiSession::Attach(cupti);
    }
    if (!session.ok()) return session.status();
    profile->session_ = *std::move(session);
    return absl::OkStatus();
  });
  if (!status.ok()) return status;
  return profile;
}

bool KernelProfile::EnterStep(uint64_t site) noexcept {
  return site != ProfileRecorder::kNoSite && session_->Push(KernelAttribution::IdOfStep(site));
}

bool KernelProfile::IsOnlyThread() {
  const std::lock_guard<std::mutex> lock(mutex_);
  threads_.insert(std::this_thread::get_id());
  return threads_.size() == 1;
}

uint64_t KernelProfile::EnterCall() {
  IsOnlyThread();
  const uint64_t id = attribution_.IdOfCall();
  return id != KernelAttribution::kNoRoom && session_->Push(id) ? id : kNoCall;
}

void KernelProfile::LeaveCall(uint64_t call, uint64_t site) noexcept {
  if (session_->Pop()) attribution_.EndCall(call, site);
}

bool KernelProfile::EnterLaunch(uint64_t first_site, uint64_t call) {
  const uint64_t id = attribution_.IdOfLaunch(first_site, call);
  return id != KernelAttribution::kNoRoom && session_->Push(id);
}

uint32_t KernelProfile::NumSites(const GraphPlan& plan) {
  auto count = static_cast<uint32_t>(plan.body().steps().size());
  for (const GraphPlan::Node& node : plan.nodes()) count += node.step == GraphPlan::Node::kOutputCopy;
  return count;
}

std::shared_ptr<const device::ExecutableGraph> KernelProfile::MakeTwin(const GraphPlan& plan) {
  std::shared_ptr<const device::ExecutableGraph> twin;
  const absl::Status status = AtQuietMoment(cupti_, Synchronize(), [&]() -> absl::Status {
    absl::Status made_status;
    const std::vector<CuptiSession::Clone> clones =
        session_->CollectClones(kClonesPerNode * plan.node_counts().total(), [&] {
          const device::RelaxedCaptureMode relaxed(driver_);  // captures of other threads go on
          absl::StatusOr<device::ExecutableGraph> made = plan.graph().Instantiate();
          made_status = made.status();
          if (made.ok()) twin = std::make_shared<const device::ExecutableGraph>(*std::move(made));
        });
    attribution_.AddClones(NodesOf(plan), clones);
    return made_status;
  });
  return status.ok() ? twin : nullptr;
}

std::shared_ptr<const device::ExecutableGraph> KernelProfile::ExecutableOf(
    const std::shared_ptr<const GraphPlan>& plan) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (finished_) return nullptr;
  threads_.insert(std::this_thread::get_id());
  const absl::StatusOr<device::StreamHandle> stream = plan->CurrentStream();
  if (!stream.ok()) return nullptr;
  const std::pair key(plan.get(), *stream);
  if (!twins_.contains(key) && twins_.size() >= kMaxTwins) return nullptr;
  Twin& twin = twins_[key];
  // Another plan may have been at this address.
  if (twin.plan.lock() != plan) twin = {plan, nullptr, 0};
  // To see one made takes CUPTI's subscriber, which is for processes with one thread.
  if (twin.executable == nullptr && twin.num_attempts < kMaxAttempts && threads_.size() <= 1) {
    ++twin.num_attempts;
    twin.executable = MakeTwin(*plan);
  }
  return twin.executable;
}

SynchronizeFunction KernelProfile::Synchronize() const {
  return [&driver = driver_] { return device::SynchronizeDevices(driver); };
}

void KernelProfile::Close() {
  session_->StopCorrelation();
  end_ns_ = MonotonicNs();
  const std::lock_guard<std::mutex> lock(mutex_);
  finished_ = true;
}

absl::Status KernelProfile::Stop() {
  if (stopped_.has_value()) return absl::OkStatus();
  const auto read = [this](absl::Span<const CuptiBufferView> buffers, const CuptiBufferCounts& counts) {
    activities_ = ReadCuptiBuffers(cupti_, buffers);
    counts_ = counts;
  };
  return AtIdleMoment(Synchronize(), [&] {
    stopped_ = session_->Stop(read);
    // None of them runs any more.
    const device::RelaxedCaptureMode relaxed(driver_);
    const std::lock_guard<std::mutex> lock(mutex_);
    twins_.clear();
    return absl::OkStatus();
  });
}

absl::StatusOr<DeviceProfile> KernelProfile::Finish() {
  if (absl::Status s = Stop(); !s.ok()) return s;
  // What several threads do not survive: CUPTI's subscriber, and its end.
  const bool removes = IsOnlyThread() && activities_.CountThreads() <= 1;
  if (removes) {
    absl::Status s =
        AtQuietMoment(cupti_, Synchronize(), [&] { return cupti_.ToStatus("cuptiFinalize", cupti_.cuptiFinalize()); });
    if (!s.ok()) return s;
  }
  DeviceProfile profile = Result();
  if (!stopped_->ok()) {
    profile.notes.push_back(absl::StrCat("Some kernels may be missing: ", std::string(stopped_->message()), "."));
  }
  if (!removes) {
    profile.notes.emplace_back(
        "Several threads used the GPU: CUPTI is still attached, and launches are slower until a profile ends in which "
        "one thread does.");
  }
  if (counts_.missing != 0) {
    profile.notes.emplace_back("Some kernels are missing: another tool took CUPTI over inside of the profile.");
  }
  return profile;
}

DeviceProfile KernelProfile::GiveUp() {
  if (stopped_.has_value()) return Result();
  session_->Abandon([this](absl::Span<const CuptiBufferView> buffers, const CuptiBufferCounts& counts) {
    activities_ = ReadCuptiBuffers(cupti_, buffers);
    counts_ = counts;
  });
  return Result();
}

DeviceProfile KernelProfile::Result() const {
  DeviceProfile profile = Attribute(activities_, session_->clock(), attribution_, end_ns_);
  profile.num_dropped += counts_.dropped;
  if (activities_.num_unreadable != 0) {
    profile.notes.push_back(absl::StrCat("Some kernels are missing: ", activities_.num_unreadable,
                                         " of CUPTI's buffers could not be read to their end."));
  }
  return profile;
}

}  // namespace cuvil::scheduler
