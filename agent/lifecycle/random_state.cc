#include "agent/lifecycle/random_state.h"

#include <utility>

#include "agent/fault_injection.h"

namespace cuvil::agent {
namespace {

absl::Status Failed(const char* what) {
  PyErr_Clear();
  return absl::InternalError(what);
}

}  // namespace

absl::StatusOr<RandomState> RandomState::Save() {
  if (FaultInjected(FaultPoint::kRandomSave)) return absl::InternalError("injected fault: random-save");
  const OwnedRef torch = OwnedRef::Steal(PyImport_ImportModule("torch"));
  if (!torch) return Failed("torch cannot be imported");
  OwnedRef generator = OwnedRef::Steal(PyObject_GetAttrString(torch.get(), "default_generator"));
  if (!generator) return Failed("torch.default_generator is missing");
  OwnedRef state = OwnedRef::Steal(PyObject_CallMethod(generator.get(), "get_state", nullptr));
  if (!state) return Failed("default_generator.get_state() failed");
  return RandomState(std::move(generator), std::move(state));
}

absl::Status RandomState::Restore() const {
  const OwnedRef done = OwnedRef::Steal(PyObject_CallMethod(generator_.get(), "set_state", "O", state_.get()));
  if (!done) return Failed("default_generator.set_state() failed");
  return absl::OkStatus();
}

absl::StatusOr<bool> RandomState::IsCurrent() const {
  const OwnedRef state = OwnedRef::Steal(PyObject_CallMethod(generator_.get(), "get_state", nullptr));
  if (!state) return Failed("default_generator.get_state() failed");
  const OwnedRef equal = OwnedRef::Steal(PyObject_CallMethod(state.get(), "equal", "O", state_.get()));
  if (!equal) return Failed("comparing two generator states failed");
  return equal.get() == Py_True;
}

}  // namespace cuvil::agent
