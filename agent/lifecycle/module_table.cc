#include "agent/lifecycle/module_table.h"

#include <utility>

#include "agent/lifecycle/lifecycle.h"

namespace cuvil::agent {
namespace {

constexpr size_t kMaxRefusals = 32;

}  // namespace

void ModuleState::AddRefusal(const Refusal& refusal) {
  for (CountedRefusal& known : refusals) {
    if (known.refusal.code == refusal.code && known.refusal.line == refusal.line &&
        known.refusal.file == refusal.file && known.refusal.message == refusal.message) {
      ++known.count;
      return;
    }
  }
  // The first reasons say more than the last: a module that is refused for ever new reasons would forget them all.
  if (refusals.size() < kMaxRefusals) {
    refusals.push_back({refusal, 1});
  } else {
    ++num_refusals_dropped;
  }
}

std::shared_ptr<const PlanCache<PlanEntry>::List> ModuleState::Forget(SignatureBook::Options options) {
  book = SignatureBook(options);
  refusals.clear();
  num_refusals_dropped = 0;
  branches = trace::BranchBook();
  num_calls = num_planned = 0;
  refused_in_session = 0;
  idle_calls = 0;
  return plans.Clear();
}

ModuleState* ModuleTable::Add(PyObject* module, const Settings& settings) {
  static PyMethodDef callback_definition = {"_module_died", OnModuleDeath, METH_O, nullptr};
  // The callback is only given the dead reference, so the address travels as its self.
  const ErrorScope errors;
  const OwnedRef address = OwnedRef::Steal(PyLong_FromVoidPtr(module));
  if (!address) return nullptr;
  const OwnedRef callback = OwnedRef::Steal(PyCFunction_New(&callback_definition, address.get()));
  if (!callback) return nullptr;
  OwnedRef weak = OwnedRef::Steal(PyWeakref_NewRef(module, callback.get()));
  if (!weak) return nullptr;
  auto state = std::make_unique<ModuleState>(settings.max_plans, BookOptions(settings));
  state->weak = std::move(weak);
  return states_.Insert(module, std::move(state));
}

ModuleState* ModuleTable::Renew(PyObject* module) {
  // Out of the map first: what dies with the state may call modules.
  const std::unique_ptr<ModuleState> stale = states_.Take(module);
  return nullptr;
}

PyObject* ModuleTable::OnModuleDeath(PyObject* self, PyObject* weak) noexcept {
  Lifecycle& lifecycle = TheLifecycle();
  // The interpreter is going away, and what the plans refer to may be gone already: leak.
  if (lifecycle.exiting.load(std::memory_order_relaxed)) Py_RETURN_NONE;
  const ErrorScope errors;
  void* module = PyLong_AsVoidPtr(self);
  ModuleTable& table = lifecycle.modules;
  ModuleState* state = table.states_.Find(module);
  if (state != nullptr && state->weak.get() == weak) {
    const std::unique_ptr<ModuleState> dead = table.states_.Take(module);
    lifecycle.CollectFinishedJobs();
  }
  Py_RETURN_NONE;
}

}  // namespace cuvil::agent
