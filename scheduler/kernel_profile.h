// The device's part of one profile: what it ran while the profile was taken, and for which line.
//
// Plans' graphs were instantiated before CUPTI was there, so that it does not know their nodes: while a profile is
// taken, a plan launches a second executable of its captured graph (docs/design/0011-kernel-profiles.md).
//
// Threads:   Start, Close, Finish and GiveUp by one thread; all else from any thread, also after the end.
// GIL:       Start, ExecutableOf and Finish should hold it (scheduler/quiet_moment.h); all else does not need it.
// Ownership: the second executables; plans are not kept alive.
// Errors:    Start, Finish: as AtQuietMoment and CuptiSession::Attach
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "memory/device/copy_kernel.h"
#include "memory/device/cuda_graph.h"
#include "memory/device/driver_api.h"
#include "scheduler/cupti_api.h"
#include "scheduler/cupti_reader.h"
#include "scheduler/cupti_session.h"
#include "scheduler/device_activity.h"
#include "scheduler/graph_plan.h"
#include "scheduler/kernel_attribution.h"
#include "scheduler/quiet_moment.h"

namespace cuvil::scheduler {

class KernelProfile {
 public:
  // With the CUPTI and the driver of this process, which are found at first use.
  static absl::StatusOr<std::shared_ptr<KernelProfile>> StartForProcess();
  // Waits for all that this process has queued, however long it takes; waits for a quiet moment are bounded. GIL not
  // held. What goes wrong will be said when it matters.
  static void WaitForProcess();
  // Whether the devices stay idle for some milliseconds, in which other threads go on: the GIL is not held.
  static bool IsProcessIdle();
  // `cupti` and `driver` are borrowed for good.
  static absl::StatusOr<std::shared_ptr<KernelProfile>> Start(const CuptiApi& cupti, const device::DriverApi& driver);

  // What the calling thread asks of a device until Leave() belongs to a step of a plan with that site, to a call of a
  // module, or to a launch of a plan's graph whose sites begin at `first_site`. False or kNoCall: nothing to leave.
  bool EnterStep(uint64_t site) noexcept;
  uint64_t EnterCall();
  bool EnterLaunch(uint64_t first_site, uint64_t call);
  void Leave() noexcept { session_->Pop(); }
  void LeaveCall(uint64_t call, uint64_t site) noexcept;

  static constexpr uint64_t kNoCall = KernelAttribution::kNoRoom;

  // What to launch on the calling thread's stream in the place of the plan's own executable, whose kernels can be told
  // apart. Each stream has one of its own, because one executable on several streams is not something that CUPTI has
  // been seen to survive. Null: there is none, and the plan's graph should not be launched. The first one is made at a
  // quiet moment: to see it made takes CUPTI's subscriber.
  std::shared_ptr<const device::ExecutableGraph> ExecutableOf(const std::shared_ptr<const GraphPlan>& plan);
  // The plan's sites: one for each step of its body, and then one for each kernel that copies outputs.
  static uint32_t NumSites(const GraphPlan& plan);
  static constexpr size_t kOutputsPerSite = device::CopyKernel::kMaxCopies;

  void AfterForkInChild() { session_->AfterForkInChild(); }

  // The profile's end: what is asked of a device from now on is not part of it.
  void Close();
  // Behind Close: gives what was recorded, and takes CUPTI out of the process if only one thread used the devices;
  // where several did, that has been seen to lose the device, so CUPTI stays attached and a note says so. After
  // Unavailable it may be tried again.
  absl::StatusOr<DeviceProfile> Finish();
  // Behind Close, instead: leaves CUPTI as it is, and gives what has come so far.
  DeviceProfile GiveUp();

 private:
  struct Twin {
    std::weak_ptr<const GraphPlan> plan;
    std::shared_ptr<const device::ExecutableGraph> executable;
    int num_attempts = 0;
  };
  static constexpr int kMaxAttempts = 3;
  static constexpr size_t kMaxTwins = 64;

  KernelProfile(const CuptiApi& cupti, const device::DriverApi& driver) : cupti_(cupti), driver_(driver) {}
  std::shared_ptr<const device::ExecutableGraph> MakeTwin(const GraphPlan& plan);
  SynchronizeFunction Synchronize() const;
  absl::Status Stop();
  DeviceProfile Result() const;
  // Notes that the calling thread is in a recorded call, and says whether it is the only one so far.
  bool IsOnlyThread();

  const CuptiApi& cupti_;
  const device::DriverApi& driver_;
  std::unique_ptr<CuptiSession> session_;
  KernelAttribution attribution_;
  // Of the thread that ends it.
  uint64_t end_ns_ = 0;
  std::optional<absl::Status> stopped_;
  CuptiActivities activities_;
  CuptiBufferCounts counts_;

  std::mutex mutex_;  // of all below; held while an executable is made
  std::map<std::pair<const GraphPlan*, device::StreamHandle>, Twin> twins_;
  bool finished_ = false;
  std::set<std::thread::id> threads_;  // that were in recorded calls
};

}  // namespace cuvil::scheduler
