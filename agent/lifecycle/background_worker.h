#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/status.h"

namespace cuvil::agent {

// One background thread that runs jobs in the order they came; started by the first job, and again after a fork.
//
// A finished job is not destroyed here, because it may own Python references: it waits in TakeFinished() for a thread
// that holds the GIL. The worker itself never touches Python.
//
// A fork waits, for a bounded time, until the job at hand is done, so that a child does not inherit locks that the
// job held inside of other libraries. A job that is cut off all the same starts over in the child: Run() must be
// restartable, that is publish its result in one last step.
//
// Threads: thread-safe. The mutex is a leaf in the lock order; neither jobs nor callbacks run under it.
class BackgroundWorker {
 public:
  class Job {
   public:
    virtual ~Job() = default;
    virtual void Run() noexcept = 0;
  };

  // `on_finished` is called by the worker thread after each job; it may be null.
  explicit BackgroundWorker(void (*on_finished)());
  BackgroundWorker(const BackgroundWorker&) = delete;
  BackgroundWorker& operator=(const BackgroundWorker&) = delete;
  ~BackgroundWorker();

  // Errors: Unavailable          no thread could be started; the job stays with the caller
  //         FailedPrecondition   stopped
  absl::Status Submit(std::shared_ptr<Job> job);

  // Starts the thread again for jobs that a fork brought into this process.
  absl::Status EnsureRunning();

  // One relaxed load; true if TakeFinished() has something.
  bool HasFinished() const { return has_finished_.load(std::memory_order_relaxed); }
  std::vector<std::shared_ptr<Job>> TakeFinished();

  // Blocks until `done`, which a job made true, or for `timeout`. Call without the GIL. `done` runs under the mutex.
  void WaitFor(const std::function<bool()>& done, std::chrono::nanoseconds timeout);

  // Blocks until nothing is queued or running. Call without the GIL.
  void Drain();

  // Drops what is queued (into TakeFinished()), waits for the job at hand and ends the thread. Call without the GIL.
  void Stop();

  // pthread_atfork's three handlers.
  void BeforeFork();
  void AfterForkInParent();
  void AfterForkInChild();

 private:
  // Replaced after a fork: a condition variable that a vanished thread waits on cannot be used again.
  struct Sync {
    std::mutex mutex;
    std::condition_variable work;
    std::condition_variable idle;
  };

  void Loop();
  absl::Status StartThreadLocked();
  bool Busy() const { return current_ != nullptr || !queue_.empty(); }

  void (*const on_finished_)();
  std::unique_ptr<Sync> sync_;
  // Guarded by sync_->mutex.
  std::deque<std::shared_ptr<Job>> queue_;
  std::shared_ptr<Job> current_;  // the only reference the thread uses, so that a child inherits no lost one
  std::vector<std::shared_ptr<Job>> finished_;
  bool running_ = false;
  bool stopping_ = false;
  bool forking_ = false;

  std::atomic<bool> has_finished_{false};
};

}  // namespace cuvil::agent
