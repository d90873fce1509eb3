#pragma once

#include <Python.h>

#include <memory>

#include "absl/status/status.h"
#include "agent/capture.h"
#include "agent/lifecycle/module_table.h"
#include "agent/lifecycle/plan_entry.h"
#include "agent/lifecycle/signature_book.h"

namespace cuvil::agent {

// The real calls that bring a signature from nothing to a plan that serves. Each runs the original exactly once and
// returns what it returned, null with its exception included; bookkeeping never changes either.
//
// Threads: GIL held on entry and exit. `callable` is the intercepted function.

// Traces the call and hands the capture on to be built. No trace may be active on any thread.
PyObject* TraceCall(ModuleState& state, PyObject* callable, const CallArgs& call, uint64_t hash,
                    SignatureBook::Mode mode) noexcept;

// Runs plan and original side by side and puts the plan into service if they agree. The entry fits the call and is
// kBuilt. Returns the original's result.
PyObject* CompareCall(ModuleState& state, PyObject* callable, const CallArgs& call,
                      const std::shared_ptr<PlanEntry>& entry) noexcept;

// Why a plan one of whose operators warned (the status of its run) is out of service: only eager warns as it should.
Refusal WarningRefusal(const absl::Status& status);

// Takes an entry whose plan could not be built, or was wrong, out of service for good. The module is alive.
void DropEntry(ModuleState& state, const std::shared_ptr<PlanEntry>& entry, Refusal refusal);

// One internal failure: counted, and logged by one line for each code object, whatever fails in its calls and however
// often; all of them with CUVIL_LOG=debug.
void NoteFault(const CallArgs& call, const char* stage, std::string_view message) noexcept;

// Drops a plan whose `stage` failed for internal reasons more often than TryAgain() puts up with.
void GiveUp(ModuleState& state, const std::shared_ptr<PlanEntry>& entry, const char* stage,
            const absl::Status& status) noexcept;

// The module's class, as the log names it.
std::string ModuleName(PyObject* module);

}  // namespace cuvil::agent
