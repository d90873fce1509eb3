#pragma once

#include <Python.h>

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "agent/capture.h"

namespace cuvil::agent {

// Judges whether what a plan returned is what eager returned, as far as a program can tell.
//
// Types, structure, dtypes, shapes, strides, storage sizes and offsets, view relations, version counters and which
// tensors share memory with each other or with tensors that existed before must agree exactly. Values must agree bit
// by bit; where floating-point values do not, `rerun`, a second result of the same plan, shows how much the operators
// vary from run to run, and a difference within twice that, or within the rounding error of the dtype, is accepted.
//
// No user code runs: objects of user classes are compared by their __dict__.
//
// Threads:   GIL held.
// Ownership: borrows everything.
// Errors:    Internal  torch raised, so that nothing is known; the exception is cleared
class Comparison {
 public:
  enum class Verdict : uint8_t { kEqual, kValuesDiffer, kDiffer };
  // kBits: nothing is within rounding, for memory that nobody wrote holds numbers of any magnitude.
  enum class Values : uint8_t { kRounded, kBits };
  struct Result {
    Verdict verdict = Verdict::kEqual;
    std::string difference;  // where and what, e.g. "result[0]: stride (4, 1) instead of (1, 4)"
  };

  // kValuesDiffer: all agrees but floating-point values, which are worth a second look with a rerun; with kBits: all
  // but values of any type.
  static absl::StatusOr<Result> Compare(const CallArgs& call, PyObject* eager, PyObject* planned, PyObject* rerun,
                                        Values values);
};

}  // namespace cuvil::agent
