#pragma once

#include <Python.h>

#include <cstdint>

namespace cuvil::agent {

// One cuvil.prepare(): on its thread calls are traced when first seen, plans are built at once, and a plan that is
// right serves without being timed first. It reports how far the model got, so that prepare() knows when to stop.
//
// Threads: belongs to the thread that runs it.
struct PrepareSession {
  explicit PrepareSession(PyObject* model);
  ~PrepareSession();
  PrepareSession(const PrepareSession&) = delete;
  PrepareSession& operator=(const PrepareSession&) = delete;

  PyObject* const model;
  const uint64_t id;         // never 0
  uint32_t num_steps = 0;    // traces and comparisons so far, of the model and of modules inside it
  bool model_ready = false;  // a plan of the model answered, or is right for, the last call
  PrepareSession* const outer;
};

inline thread_local constinit PrepareSession* prepare_session = nullptr;

}  // namespace cuvil::agent
