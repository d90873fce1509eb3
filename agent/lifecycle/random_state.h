#pragma once

#include <Python.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "agent/py_ref.h"

namespace cuvil::agent {

// The state of torch's default CPU generator at one moment, to be put back.
//
// Other threads that draw from the same generator between Save() and Restore() draw those numbers again; only calls
// that draw random numbers themselves are saved and restored, and eager orders such threads no better.
//
// Threads: GIL held.
// Errors:  Internal  torch raised; the exception is cleared
class RandomState {
 public:
  static absl::StatusOr<RandomState> Save();
  absl::Status Restore() const;
  // True iff the generator is in exactly this state.
  absl::StatusOr<bool> IsCurrent() const;

 private:
  RandomState(OwnedRef generator, OwnedRef state) : generator_(std::move(generator)), state_(std::move(state)) {}

  OwnedRef generator_;
  OwnedRef state_;  // a byte tensor
};

}  // namespace cuvil::agent
