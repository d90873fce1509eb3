#include "agent/doctor.h"

namespace cuvil::agent {
namespace {

PyMethodDef kMethods[] = {
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

int RegisterDoctor(PyObject* module) noexcept { return PyModule_AddFunctions(module, kMethods); }

}  // namespace cuvil::agent
