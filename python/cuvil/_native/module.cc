// The extension module: creates it and lets every subsystem add its functions.

#include <Python.h>

#include "agent/capture_debug.h"
#include "agent/doctor.h"
#include "agent/instrument_debug.h"
#include "agent/lifecycle/bindings.h"
#include "agent/plan_debug.h"

namespace {

// In the order in which the subsystems depend on each other. Each returns 0, or -1 with an exception set.
constexpr int (*kRegistrations[])(PyObject* module) = {
    cuvil::agent::RegisterDoctor,       cuvil::agent::RegisterInstrumentDebug, cuvil::agent::RegisterPlanDebug,
    cuvil::agent::RegisterCaptureDebug, cuvil::agent::RegisterLifecycle,
};

PyModuleDef kDefinition = {
    PyModuleDef_HEAD_INIT, "cuvil._native", "Cuvil's engine; use the package `cuvil`.", -1, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__native() {
  PyObject* module = PyModule_Create(&kDefinition);
  if (module == nullptr) return nullptr;
  for (auto* registration : kRegistrations) {
    if (registration(module) < 0) {
      Py_DECREF(module);
      return nullptr;
    }
  }
  return module;
}
