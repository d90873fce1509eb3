// What the agent asks of torch's CUDA allocator, for tests that put their own functions in torch's place.
#include <Python.h>

#include <memory>
#include <string>

#include "agent/boundary.h"
#include "agent/cuda_memory_pool.h"
#include "agent/py_ref.h"

namespace cuvil::agent {
namespace {

// (problem, reserved bytes): makes a pool on the device, uses it once and lets it die.
PyObject* UsePool(PyObject*, PyObject* device) noexcept {
  return Boundary([&]() -> OwnedRef {
    TorchCudaAllocator allocator(static_cast<int>(PyLong_AsLong(device)));
    absl::StatusOr<std::unique_ptr<scheduler::AllocationPool>> pool = allocator.MakePool();
    absl::Status status = pool.status();
    uint64_t bytes = 0;
    if (status.ok()) {
      const scheduler::PoolScope scope(**pool);
      status = scope.status();
      if (status.ok()) {
        const absl::StatusOr<uint64_t> reserved = (*pool)->ReservedBytes();
        status = reserved.status();
        if (reserved.ok()) bytes = *reserved;
      }
    }
    return OwnedRef::Steal(
        Py_BuildValue("sK", std::string(status.message()).c_str(), static_cast<unsigned long long>(bytes)));
  });
}

// (problem, free bytes, total bytes)
PyObject* Room(PyObject*, PyObject* device) noexcept {
  return Boundary([&]() -> OwnedRef {
    TorchCudaAllocator allocator(static_cast<int>(PyLong_AsLong(device)));
    const absl::StatusOr<scheduler::DeviceRoom> room = allocator.Room();
    if (!room.ok())
      return OwnedRef::Steal(Py_BuildValue("sKK", std::string(room.status().message()).c_str(), 0ull, 0ull));
    return OwnedRef::Steal(Py_BuildValue("sKK", "", static_cast<unsigned long long>(room->free_bytes),
                                         static_cast<unsigned long long>(room->total_bytes)));
  });
}

PyMethodDef kMethods[] = {
    {"use_pool", UsePool, METH_O, nullptr},
    {"device_room", Room, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

int AddMemoryProbe(PyObject* module) { return PyModule_AddFunctions(module, kMethods); }

}  // namespace cuvil::agent
