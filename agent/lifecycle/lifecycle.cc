#include "agent/lifecycle/lifecycle.h"

#include <dlfcn.h>

#include <memory>
#include <vector>

#include "agent/lifecycle/log.h"
#include "agent/process_lifetime.h"

namespace cuvil::agent {
namespace {

// Runs in the main thread, under the GIL, some time after the worker finished a job that nobody called for since.
int CollectLater(void*) {
  Lifecycle& lifecycle = TheLifecycle();
  if (!lifecycle.exiting.load(std::memory_order_relaxed)) lifecycle.CollectFinishedJobs();
  return 0;
}

void OnJobFinished() {
  // Full queue: the next module call collects instead.
  static_cast<void>(Py_AddPendingCall(CollectLater, nullptr));
}

}  // namespace

Lifecycle::Lifecycle() : worker(OnJobFinished) {}

void Lifecycle::CollectFinishedJobs() {
  if (!worker.HasFinished()) return;
  const std::vector<std::shared_ptr<BackgroundWorker::Job>> finished = worker.TakeFinished();
}

void Lifecycle::Reset() {
  // Collected first, dropped last: what dies may call modules, and finds everything in order.
  std::vector<std::shared_ptr<const PlanCache<PlanEntry>::List>> dropped;
  for (ModuleState* state : modules.States()) dropped.push_back(state->Forget(BookOptions(settings)));
  refusals_by_code.clear();
  statistics.Reset();
  ResetLog();
  CollectFinishedJobs();
}

Lifecycle& TheLifecycle() {
  static ProcessLifetime<Lifecycle> lifecycle;
  return *lifecycle;
}

SignatureBook::Options BookOptions(const Settings& settings) {
  return settings.prepare == PrepareMode::kSync ? SignatureBook::Options::Sync() : SignatureBook::Options::Background();
}

SignatureBook::Mode CurrentMode() {
  // c10::GradMode::is_enabled(). torch loads its libraries privately, so the library is asked, not the process.
  // Without the symbol both modes share one back-off, which costs coverage and nothing else.
  static bool (*const is_enabled)() = [] {
    void* c10 = dlopen("libc10.so", RTLD_LAZY | RTLD_NOLOAD);
    return reinterpret_cast<bool (*)()>(c10 == nullptr ? nullptr : dlsym(c10, "_ZN3c108GradMode10is_enabledEv"));
  }();
  return is_enabled != nullptr && is_enabled() ? SignatureBook::Mode::kGrad : SignatureBook::Mode::kInference;
}

}  // namespace cuvil::agent
