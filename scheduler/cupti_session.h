// CUPTI's recording, on for the extent of one profile.
//
// A process has one session at a time, because CUPTI's buffer callbacks know of no user. CUPTI's one place for a
// subscriber is taken for moments only: torch.profiler, used for the first time while it is taken, would have no GPU
// for the rest of the process.
//
// Threads:   Push and Pop from any thread, also after the end; CollectClones by one thread at a time; all else by one
//            thread, the session's owner. Attach and Stop at a quiet moment (scheduler/quiet_moment.h).
// Ownership: buffers are the session's, or CUPTI's between its two callbacks; what CUPTI keeps is left to it.
// Errors:    Attach: FailedPrecondition  another tool holds CUPTI; nothing has been changed
//                    Unavailable         CUPTI refuses; what had been enabled is disabled again
//            Stop:   Unavailable         CUPTI refuses; the records that came are given all the same
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <shared_mutex>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "scheduler/cupti_api.h"

namespace cuvil::scheduler {

// CUPTI's clock against scheduler/monotonic_clock.h, by two readings of both.
//
// CUPTI's is the system's real-time clock unless a tool has given it another one, of which only its linearity is known.
struct CuptiClock {
  struct Reading {
    uint64_t cupti = 0, monotonic_ns = 0;
  };
  Reading first, last;

  uint64_t ToMonotonicNs(uint64_t cupti) const;
  // The closest of several readings; zeros if CUPTI does not tell.
  static Reading Read(const CuptiApi& api);
};

// What one of CUPTI's buffers holds.
using CuptiBufferView = absl::Span<uint8_t>;

struct CuptiBufferCounts {
  uint64_t dropped = 0;  // records that CUPTI had no room for
  uint64_t missing = 0;  // buffers that CUPTI kept
};

class CuptiSession {
 public:
  struct Limits {
    size_t buffer_bytes = size_t{2} << 20;
    size_t max_bytes = size_t{256} << 20;  // about a million kernels
  };
  // A node of an executable graph, by CUPTI's number, and the captured node that it was made of.
  struct Clone {
    uint64_t id = 0;
    void* original = nullptr;
    uint64_t original_id = 0;
  };

  // `api` is borrowed for the session's life.
  static absl::StatusOr<std::unique_ptr<CuptiSession>> Attach(const CuptiApi& api, Limits limits);
  static absl::StatusOr<std::unique_ptr<CuptiSession>> Attach(const CuptiApi& api) { return Attach(api, Limits()); }
  // A session that was not stopped is abandoned.
  ~CuptiSession();
  CuptiSession(const CuptiSession&) = delete;
  CuptiSession& operator=(const CuptiSession&) = delete;

  // From now on, whatever the calling thread asks of a device carries `id`; false if the session has ended. Each true
  // Push has its Pop on the same thread.
  bool Push(uint64_t id) noexcept;
  // False if the session has ended meanwhile.
  bool Pop() noexcept;

  // The nodes that `instantiate` makes on the calling thread, at most `max_clones`; none if another tool holds CUPTI by
  // now.
  std::vector<Clone> CollectClones(size_t max_clones, absl::FunctionRef<void()> instantiate);

  // No thread pushes any more; before one of the two below.
  void StopCorrelation();
  // Ends the recording; CUPTI stays attached. `read` is given what was recorded, while the names that
  // records point to exist.
  absl::Status Stop(absl::FunctionRef<void(absl::Span<const CuptiBufferView>, const CuptiBufferCounts&)> read);
  // Ends the session and leaves all that is enabled as it is: another tool uses CUPTI, or there is no quiet moment.
  // `read` is given what has come so far.
  void Abandon(absl::FunctionRef<void(absl::Span<const CuptiBufferView>, const CuptiBufferCounts&)> read);

  // The parent's session is none here: CUPTI is not called again.
  void AfterForkInChild();

  // Both readings after the end.
  const CuptiClock& clock() const { return clock_; }

 private:
  explicit CuptiSession(const CuptiApi& api) : api_(api) {}
  absl::Status Enable();
  absl::Status Disable();

  const CuptiApi& api_;
  std::vector<int> enabled_kinds_;
  CuptiClock clock_;
  bool ended_ = false;

  // Held shared by threads that call CUPTI, and by the end while it sets the flag: after it no thread calls CUPTI,
  // which would attach it again. Not absl's: see ProfileTrack.
  std::shared_mutex gate_;
  std::atomic<bool> correlating_{
      false};  // ordered by the gate; looked at without it after a fork, where it may be held
};

}  // namespace cuvil::scheduler
