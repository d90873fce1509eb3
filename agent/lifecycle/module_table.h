#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "agent/capture.h"
#include "agent/lifecycle/plan_cache.h"
#include "agent/lifecycle/plan_entry.h"
#include "agent/lifecycle/pointer_map.h"
#include "agent/lifecycle/settings.h"
#include "agent/lifecycle/signature_book.h"
#include "agent/py_ref.h"
#include "agent/trace/branch_book.h"

namespace cuvil::agent {

// A refusal and how often it was given, for explain().
struct CountedRefusal {
  Refusal refusal;
  uint64_t count = 0;
};

// Everything that is known about one module object; dies with it.
//
// Threads:   GIL held, but for `plans`.
// Ownership: holds the module weakly.
struct ModuleState {
  ModuleState(size_t max_plans, SignatureBook::Options options) : plans(max_plans), book(options) {}

  void AddRefusal(const Refusal& refusal);
  // Forgets what was learned, keeps the opt-out; what it returns dies at the caller's.
  [[nodiscard]] std::shared_ptr<const PlanCache<PlanEntry>::List> Forget(SignatureBook::Options options);

  OwnedRef weak;
  bool opted_out = false;
  uint32_t idle_calls = 0;          // calls to come that run as they are: the only plan is retired
  uint64_t refused_in_session = 0;  // the cuvil.prepare() call that last saw it refused
  PlanCache<PlanEntry> plans;
  SignatureBook book;
  std::vector<CountedRefusal> refusals;  // bounded; one per place and reason
  uint64_t num_refusals_dropped = 0;     // given for places and reasons that found no room
  trace::BranchBook branches;            // of all traces of the module, refused ones included
  uint64_t num_calls = 0;
  uint64_t num_planned = 0;
};

// Finds the state of a module object by its address; the module's death removes it.
//
// A lookup verifies through the weak reference that the address still belongs to the same object, since a module that
// is revived by its finaliser loses its weak references without a callback.
//
// Threads:   GIL held.
// Ownership: owns the states; a ModuleState pointer is valid while the module is alive.
class ModuleTable {
 public:
  ModuleState* Find(PyObject* module) {
    ModuleState* state = states_.Find(module);
    if (state == nullptr) return nullptr;
    const auto* weak = reinterpret_cast<PyWeakReference*>(state->weak.get());
    return weak->wr_object == module ? state : Renew(module);
  }

  // Null, with no exception set, if the object cannot be referenced weakly.
  ModuleState* FindOrAdd(PyObject* module, const Settings& settings) {
    ModuleState* state = Find(module);
    return state != nullptr ? state : Add(module, settings);
  }

  std::vector<ModuleState*> States() const { return states_.Values(); }
  size_t size() const { return states_.size(); }

 private:
  ModuleState* Add(PyObject* module, const Settings& settings);
  ModuleState* Renew(PyObject* module);
  static PyObject* OnModuleDeath(PyObject* self, PyObject* weak) noexcept;

  PointerMap<ModuleState> states_;
};

}  // namespace cuvil::agent
