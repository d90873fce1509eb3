#pragma once

#include <Python.h>

#include "absl/status/status.h"
#include "agent/py_ref.h"

namespace cuvil::agent {

// Keeps the cyclic collector from starting by itself while it lives: its callbacks and the finalizers that it runs are
// not the model. Collections that a program asks for happen.
//
// The thresholds are raised, since turning the collector off is seen: by gc.isenabled() of any thread, which may then
// turn it off for good (timeit does), and gc.disable() would be undone at the end.
//
// Threads: GIL held. One at a time in the process.
class CollectorPause {
 public:
  // Once, before the first.
  static absl::Status Initialize();
  // In the child of a fork that another thread made: the paused thread is gone.
  static void AfterForkInChild();

  CollectorPause();
  ~CollectorPause() { End(); }
  CollectorPause(const CollectorPause&) = delete;
  CollectorPause& operator=(const CollectorPause&) = delete;

  // Ends it early, before code runs that could see it.
  void End();

 private:
  OwnedRef thresholds_;  // to be restored; null: ended
};

}  // namespace cuvil::agent
