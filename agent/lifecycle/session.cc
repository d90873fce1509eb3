#include "agent/lifecycle/session.h"

namespace cuvil::agent {
namespace {

uint64_t num_sessions = 0;  // guarded by the GIL

}  // namespace

PrepareSession::PrepareSession(PyObject* model) : model(model), id(++num_sessions), outer(prepare_session) {
  prepare_session = this;
}

PrepareSession::~PrepareSession() { prepare_session = outer; }

}  // namespace cuvil::agent
