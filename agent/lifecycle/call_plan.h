#pragma once

#include <Python.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "agent/capture.h"
#include "agent/lifecycle/record.h"
#include "agent/py_ref.h"
#include "agent/trace/trace.h"

namespace cuvil::agent {

// One way to answer calls of a module without running its Python code. The lifecycle decides when; this is what.
//
// Threads: GIL held for all but Build(), destructor included.
class CallPlan {
 public:
  virtual ~CallPlan() = default;

  // True iff the call has the signature that the plan is for. Runs no Python code.
  virtual bool MatchesInputs(const CallArgs& call) const = 0;
  // True iff nothing that the plan depends on has changed. Runs no Python code.
  virtual bool GuardsHold() = 0;
  virtual std::string LastGuardFailure() const = 0;

  // Draws from torch's default generator.
  virtual bool is_random() const = 0;
  // The first line that makes memory which need not be written before it is shown, as torch.empty does: two eager
  // calls may differ then.
  virtual std::optional<trace::SourceLocation> UninitializedMemory() const = 0;

  // Makes the plan ready to run. Called without the GIL, by one thread at a time; again after a fork that cut the first
  // call off and after a failure that need not be the plan's, also where this call itself had succeeded.
  //
  // Errors: Unimplemented  no plan can be made of this capture
  virtual absl::Status Build() = 0;

  // Answers the call. Called right after the two checks, under the same hold of the GIL; releases it meanwhile. What
  // the program can see is the same after an error as before, but for the generator's state.
  //
  // Errors: FailedPrecondition  a tensor is not what it was
  //         Aborted             an operator failed
  //         Internal            the result could not be rebuilt
  //         Unavailable         another internal failure
  //         Cancelled           a signal handler raised meanwhile, as KeyboardInterrupt does: that exception is
  //         pending,
  //                             and the call raises it
  virtual absl::StatusOr<OwnedRef> Run(const CallArgs& call) = 0;

  // For measurements: a built plan with the same signature, guards, tensors and form of result, whose Run() does
  // everything but the operators: each tensor of the result is made by that many `detach`. What it answers is not the
  // program's result.
  //
  // Errors: Unimplemented  there is none
  virtual absl::StatusOr<std::unique_ptr<CallPlan>> WithoutOperators(int num_detaches) const {
    static_cast<void>(num_detaches);
    return absl::UnimplementedError("this plan cannot do without its operators");
  }

  // What explain() shows. Before Build() has succeeded only what the capture knows.
  virtual void Describe(bool built, Record* record) const = 0;
  virtual std::string Summary() const = 0;  // for the log: "94 operators, 310 guards"
  virtual uint32_t num_python_steps() const = 0;
};

struct TracedCall {
  PyObject* result = nullptr;      // new reference; null: the call raised, exception set
  std::unique_ptr<CallPlan> plan;  // null: refused
  Refusal refusal;
  std::vector<trace::BranchCount> branches;  // which way they went, refused or not
  uint64_t trace_ns = 0;
};

// What turns calls into plans.
//
// Threads: GIL held.
struct PlanSource {
  // Resolves what tracing needs, once; torch has been imported. The message is one sentence.
  absl::Status (*initialize)();
  // Runs the call for real, as `original` would, and watches it. No trace is active on any thread. Never fails: at
  // worst there is a result and a refusal.
  TracedCall (*trace)(PyObject* callable, const CallArgs& call, vectorcallfunc original);
  // Constant-time hash of a call's signature; equal signatures hash equal. Runs no Python code.
  uint64_t (*hash)(const CallArgs& call);
};

}  // namespace cuvil::agent
