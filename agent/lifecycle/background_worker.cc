#include "agent/lifecycle/background_worker.h"

#include <pthread.h>
#include <signal.h>

#include <utility>

#include "absl/strings/str_cat.h"

namespace cuvil::agent {
namespace {

// Building a plan takes milliseconds. Longer than this means that something is stuck, and a fork may not hang on it.
constexpr std::chrono::seconds kForkWait{2};

}  // namespace

BackgroundWorker::BackgroundWorker(void (*on_finished)())
    : on_finished_(on_finished), sync_(std::make_unique<Sync>()) {}

BackgroundWorker::~BackgroundWorker() { Stop(); }

absl::Status BackgroundWorker::Submit(std::shared_ptr<Job> job) {
  const std::lock_guard<std::mutex> lock(sync_->mutex);
  if (stopping_) return absl::FailedPreconditionError("the background thread is being stopped");
  if (absl::Status status = StartThreadLocked(); !status.ok()) return status;
  queue_.push_back(std::move(job));
  sync_->work.notify_one();
  return absl::OkStatus();
}

absl::Status BackgroundWorker::EnsureRunning() {
  const std::lock_guard<std::mutex> lock(sync_->mutex);
  if (stopping_ || running_ || queue_.empty()) return absl::OkStatus();
  return StartThreadLocked();
}

absl::Status BackgroundWorker::StartThreadLocked() {
  if (running_) return absl::OkStatus();
  // A raw pthread, since std::thread throws where there is no thread to be had. Detached: its end is waited for
  // through running_, and a fork leaves no handle of a vanished thread behind.
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  // Signals are for the program's own threads; Python's handlers expect them there.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  pthread_t thread;
  const int error = pthread_create(
      &thread, &attributes,
      [](void* self) -> void* {
        static_cast<BackgroundWorker*>(self)->Loop();
        return nullptr;
      },
      this);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_attr_destroy(&attributes);
  if (error != 0) return absl::UnavailableError(absl::StrCat("pthread_create: error ", error));
  running_ = true;
  return absl::OkStatus();
}

std::vector<std::shared_ptr<BackgroundWorker::Job>> BackgroundWorker::TakeFinished() {
  const std::lock_guard<std::mutex> lock(sync_->mutex);
  has_finished_.store(false, std::memory_order_relaxed);
  return std::exchange(finished_, {});
}

void BackgroundWorker::WaitFor(const std::function<bool()>& done, std::chrono::nanoseconds timeout) {
  std::unique_lock<std::mutex> lock(sync_->mutex);
  sync_->idle.wait_for(lock, timeout, done);
}

void BackgroundWorker::Drain() {
  std::unique_lock<std::mutex> lock(sync_->mutex);
  sync_->idle.wait(lock, [this] { return !running_ || !Busy(); });
}

void BackgroundWorker::Stop() {
  std::unique_lock<std::mutex> lock(sync_->mutex);
  stopping_ = true;
  for (std::shared_ptr<Job>& job : queue_) finished_.push_back(std::move(job));
  queue_.clear();
  if (!finished_.empty()) has_finished_.store(true, std::memory_order_relaxed);
  sync_->work.notify_one();
  sync_->idle.wait(lock, [this] { return !running_; });
  stopping_ = false;
}

void BackgroundWorker::BeforeFork() {
  std::unique_lock<std::mutex> lock(sync_->mutex);
  forking_ = true;
  sync_->idle.wait_for(lock, kForkWait, [this] { return current_ == nullptr; });
  lock.release();  // Held across the fork, so that the child finds consistent members.
}

void BackgroundWorker::AfterForkInParent() {
  forking_ = false;
  sync_->work.notify_one();
  sync_->mutex.unlock();
}

void BackgroundWorker::AfterForkInChild() {
  // Leaked on purpose: destroying a condition variable that has waiters, if only in another process, may block.
  static_cast<void>(sync_.release());
  sync_ = std::make_unique<Sync>();
  forking_ = false;
  running_ = false;
  if (current_ != nullptr) queue_.push_front(std::exchange(current_, nullptr));
  // The thread is not started here: a child that calls exec() next needs none.
}

void BackgroundWorker::Loop() {
  std::unique_lock<std::mutex> lock(sync_->mutex);
  for (;;) {
    sync_->work.wait(lock, [this] { return stopping_ || (!queue_.empty() && !forking_); });
    if (stopping_ && queue_.empty()) break;
    current_ = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    current_->Run();
    lock.lock();
    finished_.push_back(std::move(current_));
    current_ = nullptr;
    has_finished_.store(true, std::memory_order_relaxed);
    sync_->idle.notify_all();
    if (on_finished_ != nullptr) {
      lock.unlock();
      on_finished_();
      lock.lock();
    }
  }
  running_ = false;
  sync_->idle.notify_all();
}

}  // namespace cuvil::agent
