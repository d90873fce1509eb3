// The GIL as a capability that Clang's thread-safety analysis understands, and scopes that take or release it.
//
// Functions that touch Python say ABSL_EXCLUSIVE_LOCKS_REQUIRED(gil); functions that block or launch say
// ABSL_LOCKS_EXCLUDED(gil). Functions that CPython calls begin with AssertGilHeld().
#pragma once

#include <Python.h>

#include <cassert>

#include "absl/base/thread_annotations.h"

namespace cuvil::agent {

class ABSL_LOCKABLE Gil {};
inline Gil gil;

// States, for the analysis and in debug builds for real, that this thread holds the GIL.
inline void AssertGilHeld() ABSL_ASSERT_EXCLUSIVE_LOCK(gil) { assert(PyGILState_Check()); }

// Holds the GIL for a scope, on any thread; nests.
class ABSL_SCOPED_LOCKABLE GilAcquire {
 public:
  GilAcquire() ABSL_EXCLUSIVE_LOCK_FUNCTION(gil) : state_(PyGILState_Ensure()) {}
  ~GilAcquire() ABSL_UNLOCK_FUNCTION() { PyGILState_Release(state_); }
  GilAcquire(const GilAcquire&) = delete;
  GilAcquire& operator=(const GilAcquire&) = delete;

 private:
  PyGILState_STATE state_;
};

// Releases the GIL for a scope; the thread must hold it.
// The constructor carries the raw attribute: Clang reports false errors for a scoped object that begins by unlocking
// through ABSL_UNLOCK_FUNCTION.
#if defined(__clang__)
#define CUVIL_RELEASES_GIL __attribute__((release_capability(gil)))
#else
#define CUVIL_RELEASES_GIL
#endif
class ABSL_SCOPED_LOCKABLE GilRelease {
 public:
  GilRelease() CUVIL_RELEASES_GIL : state_(PyEval_SaveThread()) {}
  ~GilRelease() ABSL_UNLOCK_FUNCTION() { PyEval_RestoreThread(state_); }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* state_;
};
#undef CUVIL_RELEASES_GIL

}  // namespace cuvil::agent
