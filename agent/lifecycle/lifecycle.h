#pragma once

#include <Python.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <string>

#include "agent/capture.h"
#include "agent/lifecycle/background_worker.h"
#include "agent/lifecycle/call_plan.h"
#include "agent/lifecycle/module_table.h"
#include "agent/lifecycle/settings.h"
#include "agent/lifecycle/signature_book.h"
#include "agent/lifecycle/statistics.h"
#include "scheduler/monotonic_clock.h"

namespace cuvil::agent {

// What the process knows: settings, counters, modules with their plans, and the thread that builds plans.
//
// Never destroyed: modules are called, and die, until the last moment of the interpreter.
//
// Threads: GIL held, but for the atomics and the worker.
struct Lifecycle {
  Lifecycle();

  // Destroys what the worker has finished, here, where the GIL is held.
  void CollectFinishedJobs();
  // Forgets plans, modules' histories and counters.
  void Reset();

  // True while calls are looked at: between enable() and disable(), and not at exit.
  std::atomic<bool> active{false};
  // The interpreter is finalising: run everything as CPython would, and leak.
  std::atomic<bool> exiting{false};
  // A thread is tracing; all others run eager or planned meanwhile. Set and cleared under the GIL.
  bool tracing = false;

  // A fake in tests. Set when the extension is loaded.
  PlanSource tracer{};

  Settings settings;
  Statistics statistics;
  std::map<std::string, uint64_t> refusals_by_code;
  ModuleTable modules;
  BackgroundWorker worker;
};

Lifecycle& TheLifecycle();

SignatureBook::Options BookOptions(const Settings& settings);

// Whether operators record for autograd on this thread; read from torch's thread-local state without Python.
SignatureBook::Mode CurrentMode();

using scheduler::MonotonicNs;

}  // namespace cuvil::agent
