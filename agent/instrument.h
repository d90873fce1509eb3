// Makes copies of code objects that announce every instruction before it runs, and otherwise behave as the original.
//
// A probe is LOAD_CONST P; COPY n; DELETE_SUBSCR: it calls the C slot of P, leaves the stack as it was and needs no
// inline cache. docs/design/0004-injection.md says where no probe may stand and why.
//
// Threads:   GIL held.
// Ownership: a copy belongs to its original and dies with it, or with the last frame or generator that runs it.
#pragma once

#include <Python.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "agent/cpython_compat.h"

namespace cuvil::agent {

// Called by every probe that the probed thread passes: `stack_top[-1]` is the top of the operand stack.
using ProbeHandler = void (*)(PyThreadState* thread, const FrameView& frame, const Site& site, PyObject** stack_top);

// What is known about one original code object; freed with it.
class CodeRecord {
 public:
  PyCodeObject* original() const { return original_; }
  PyCodeObject* copy() const { return copy_; }      // null: refused
  const char* refusal() const { return refusal_; }  // null: not refused; static storage
  // Sites in the order of the original code, one for each probe.
  const std::vector<Site>& sites() const { return sites_; }
  // Tells code objects apart for as long as the process lives, where an address may be used again.
  uint64_t number() const { return number_; }
  // Stack entries that a frame allocated for the original before it was instrumented lacks.
  int stack_growth() const { return stack_growth_; }

  // For the hook: whether code run with these globals belongs to cuvil itself.
  PyObject* checked_globals = nullptr;  // identity only, never dereferenced
  bool globals_are_ours = false;

 private:
  friend class Instrumenter;
  friend struct ProbeAccess;
  PyCodeObject* original_ = nullptr;  // borrowed: the original owns this record
  PyCodeObject* copy_ = nullptr;      // owned
  PyObject* probe_ = nullptr;         // borrowed: the copy's constants own it
  const char* refusal_ = nullptr;
  int stack_growth_ = 0;
  uint64_t number_ = 0;
  std::vector<Site> sites_;
  std::vector<int32_t> site_at_unit_;  // by code unit of the copy; -1 where no probe calls
};

class Instrumenter {
 public:
  // Claims the slot in every code object that holds its record, and the probe type. Once per process.
  // Errors: Unavailable  the interpreter has no slot left
  static absl::Status Prepare(ProbeHandler handler);

  // Probes on this thread call the handler; null: on none. All others cost a few nanoseconds and do nothing.
  static void SetProbedThread(PyThreadState* thread) noexcept { probed_thread_ = thread; }

  // The record of `code` (or, for a copy, of its original), made at the first call. From then on frames and generators
  // of the original are allocated with room for the copy. Null only when memory is short.
  static CodeRecord* RecordFor(PyCodeObject* code) noexcept;

  // The record if there is one; for a copy whose original is gone: null.
  static CodeRecord* FindRecord(PyCodeObject* code) noexcept;
  static bool IsCopy(PyCodeObject* code) noexcept;

  // Since the start of the process, for tests and explain().
  static uint64_t num_copies() noexcept;
  static uint64_t num_refused() noexcept;
  // Probes whose stack or position was not what the analysis had said. Not zero: a bug; the sink was not called.
  static uint64_t num_mismatches() noexcept;

 private:
  friend struct ProbeAccess;
  static std::unique_ptr<CodeRecord> Make(PyCodeObject* code);
  static inline PyThreadState* probed_thread_ = nullptr;
};

}  // namespace cuvil::agent
