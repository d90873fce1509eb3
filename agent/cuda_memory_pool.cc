#include "agent/cuda_memory_pool.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "agent/gil.h"

namespace cuvil::agent {
namespace {

OwnedRef Attribute(const OwnedRef& object, const char* name) {
  return object ? OwnedRef::Steal(PyObject_GetAttrString(object.get(), name)) : OwnedRef();
}

}  // namespace

absl::StatusOr<std::unique_ptr<scheduler::AllocationPool>> TorchCudaAllocator::MakePool() {
  const GilAcquire with_gil;
  absl::StatusOr<std::unique_ptr<CudaMemoryPool>> pool = CudaMemoryPool::Create(device_index_);
  if (!pool.ok()) return pool.status();
  return std::unique_ptr<scheduler::AllocationPool>(*std::move(pool));
}

absl::Status TorchCudaAllocator::MakeWorkspaces() {
  const GilAcquire with_gil;
  const ErrorScope errors;
  const OwnedRef torch = OwnedRef::Steal(PyImport_ImportModule("torch"));
  // mm goes to cuBLAS, addmm with a vector to cuBLASLt.
  for (const char* dtype : {"float32", "float16"}) {
    const OwnedRef type = Attribute(torch, dtype);
    const OwnedRef keywords = type ? OwnedRef::Steal(Py_BuildValue("{s:O,s:N}", "dtype", type.get(), "device",
                                                                   PyUnicode_FromFormat("cuda:%d", device_index_)))
                                   : OwnedRef();
    const OwnedRef zeros = Attribute(torch, "zeros");
    const auto make = [&](OwnedRef sizes) {
      return keywords && zeros && sizes ? OwnedRef::Steal(PyObject_Call(zeros.get(), sizes.get(), keywords.get()))
                                        : OwnedRef();
    };
    const OwnedRef matrix = make(OwnedRef::Steal(Py_BuildValue("(ii)", 16, 16)));
    const OwnedRef row = matrix ? make(OwnedRef::Steal(Py_BuildValue("(i)", 16))) : OwnedRef();
    const OwnedRef product =
        row ? OwnedRef::Steal(PyObject_CallMethod(torch.get(), "mm", "OO", matrix.get(), matrix.get())) : OwnedRef();
    const OwnedRef sum =
        product
            ? OwnedRef::Steal(PyObject_CallMethod(torch.get(), "addmm", "OOO", row.get(), matrix.get(), matrix.get()))
            : OwnedRef();
    if (!sum) {
      PyErr_Clear();
      return absl::InternalError("torch does not multiply matrices on this device");
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<scheduler::DeviceRoom> TorchCudaAllocator::Room() {
  const GilAcquire with_gil;
  const ErrorScope errors;
  const OwnedRef c = OwnedRef::Steal(PyImport_ImportModule("torch._C"));
  const OwnedRef runtime = Attribute(c, "_cudart");
  const OwnedRef info =
      runtime ? OwnedRef::Steal(PyObject_CallMethod(runtime.get(), "cudaMemGetInfo", "i", device_index_)) : OwnedRef();
  unsigned long long free_bytes = 0, total_bytes = 0;
  if (!info || !PyArg_ParseTuple(info.get(), "KK", &free_bytes, &total_bytes)) {
    PyErr_Clear();
    return absl::InternalError("torch does not tell how much memory the device has");
  }
  // A torch that cannot be asked for its limit has none that it could tell of.
  const OwnedRef share = OwnedRef::Steal(PyObject_CallMethod(c.get(), "_cuda_getMemoryFraction", "i", device_index_));
  if (share && PyFloat_Check(share.get()) && PyFloat_AS_DOUBLE(share.get()) < 1) {
    const auto allowed = static_cast<uint64_t>(PyFloat_AS_DOUBLE(share.get()) * static_cast<double>(total_bytes));
    OwnedRef taken = OwnedRef::Steal(PyObject_CallMethod(c.get(), "_cuda_memoryStats", "i", device_index_));
    for (const char* key : {"reserved_bytes", "all", "current"}) {
      if (taken) taken = OwnedRef::Steal(PyMapping_GetItemString(taken.get(), key));
    }
    const uint64_t reserved = taken ? PyLong_AsUnsignedLongLong(taken.get()) : 0;
    if (PyErr_Occurred() == nullptr) {
      free_bytes = std::min<uint64_t>(free_bytes, allowed > reserved ? allowed - reserved : 0);
    }
  }
  if (PyErr_Occurred() != nullptr) PyErr_Clear();
  return scheduler::DeviceRoom{free_bytes, total_bytes};
}

absl::StatusOr<std::unique_ptr<CudaMemoryPool>> CudaMemoryPool::Create(int device_index) {
  const ErrorScope errors;
  const OwnedRef module = OwnedRef::Steal(PyImport_ImportModule("torch.cuda.memory"));
  const OwnedRef c = OwnedRef::Steal(PyImport_ImportModule("torch._C"));
  const OwnedRef backend =
      module ? OwnedRef::Steal(PyObject_CallMethod(module.get(), "get_allocator_backend", nullptr)) : OwnedRef();
  const char* name = backend ? PyUnicode_AsUTF8(backend.get()) : nullptr;
  if (name == nullptr) {
    PyErr_Clear();
    return absl::UnavailableError("torch does not tell which CUDA allocator it uses");
  }
  if (std::string(name) != "native") {
    return absl::UnimplementedError(
        absl::StrCat("torch's CUDA allocator is ", name, ", which puts allocations into graphs"));
  }
  std::unique_ptr<CudaMemoryPool> pool(new CudaMemoryPool());
  pool->begin_ = Attribute(c, "_cuda_beginAllocateCurrentThreadToPool");
  pool->end_ = Attribute(c, "_cuda_endAllocateToPool");
  pool->release_ = Attribute(c, "_cuda_releasePool");
  if (c) pool->id_ = OwnedRef::Steal(PyObject_CallMethod(c.get(), "_graph_pool_handle", nullptr));
  if (pool->id_) pool->arguments_ = OwnedRef::Steal(Py_BuildValue("iO", device_index, pool->id_.get()));
  if (!pool->begin_ || !pool->end_ || !pool->release_ || !pool->arguments_) {
    PyErr_Clear();
    return absl::UnavailableError("this torch has no private memory pools; install torch >= 2.10");
  }
  // Torch makes the pool at its first use, and keeps it, with graphs' memory that looks free, while it has users: we
  // are one of them from here on.
  const OwnedRef begun = OwnedRef::Steal(PyObject_CallObject(pool->begin_.get(), pool->arguments_.get()));
  const OwnedRef ended =
      begun ? OwnedRef::Steal(PyObject_CallObject(pool->end_.get(), pool->arguments_.get())) : OwnedRef();
  pool->is_held_ = static_cast<bool>(begun);
  if (!ended) {
    PyErr_Clear();
    return absl::UnavailableError("torch does not make a private memory pool");
  }
  return pool;
}

CudaMemoryPool::~CudaMemoryPool() {
  if (!Py_IsInitialized()) {
    // The process is ending: the driver takes everything back.
    for (OwnedRef* object : {&id_, &arguments_, &begin_, &end_, &release_}) (void)object->release();
    return;
  }
  const GilAcquire with_gil;
  const ErrorScope errors;
  if (is_held_) {
    const OwnedRef released = OwnedRef::Steal(PyObject_CallObject(release_.get(), arguments_.get()));
    // Then torch keeps the memory, and there is nobody to tell.
    if (!released) PyErr_Clear();
  }
  for (OwnedRef* object : {&id_, &arguments_, &begin_, &end_, &release_}) object->reset();
}

absl::Status CudaMemoryPool::Enter() {
  const GilAcquire with_gil;
  const ErrorScope errors;
  const OwnedRef done = OwnedRef::Steal(PyObject_CallObject(begin_.get(), arguments_.get()));
  if (done) return absl::OkStatus();
  PyErr_Clear();
  return absl::InternalError("torch does not let a thread use a private memory pool");
}

void CudaMemoryPool::Leave() {
  const GilAcquire with_gil;
  const ErrorScope errors;
  // Both take back what Enter did; torch has no reason to refuse, and there is nobody to tell.
  const OwnedRef ended = OwnedRef::Steal(PyObject_CallObject(end_.get(), arguments_.get()));
  const OwnedRef released = OwnedRef::Steal(PyObject_CallObject(release_.get(), arguments_.get()));
  if (PyErr_Occurred() != nullptr) PyErr_Clear();
}

absl::StatusOr<uint64_t> CudaMemoryPool::ReservedBytes() {
  const GilAcquire with_gil;
  const ErrorScope errors;
  const OwnedRef c = OwnedRef::Steal(PyImport_ImportModule("torch._C"));
  // (pool, without the history of allocations); older versions know the pool only.
  OwnedRef asked = PyTuple_Check(id_.get()) && PyTuple_GET_SIZE(id_.get()) == 2
                       ? OwnedRef::Steal(Py_BuildValue("(OOO)", PyTuple_GET_ITEM(id_.get(), 0),
                                                       PyTuple_GET_ITEM(id_.get(), 1), Py_False))
                       : OwnedRef();
  OwnedRef snapshot = c && asked
                          ? OwnedRef::Steal(PyObject_CallMethod(c.get(), "_cuda_memorySnapshot", "(O)", asked.get()))
                          : OwnedRef();
  if (!snapshot && c) {
    PyErr_Clear();
    snapshot = OwnedRef::Steal(PyObject_CallMethod(c.get(), "_cuda_memorySnapshot", "(O)", id_.get()));
  }
  const OwnedRef segments =
      snapshot ? OwnedRef::Steal(PyMapping_GetItemString(snapshot.get(), "segments")) : OwnedRef();
  uint64_t bytes = 0;
  const OwnedRef iterator = segments ? OwnedRef::Steal(PyObject_GetIter(segments.get())) : OwnedRef();
  while (iterator) {
    const OwnedRef segment = OwnedRef::Steal(PyIter_Next(iterator.get()));
    if (!segment) break;
    const OwnedRef size = OwnedRef::Steal(PyMapping_GetItemString(segment.get(), "total_size"));
    if (!size) break;
    bytes += PyLong_AsUnsignedLongLong(size.get());
  }
  if (!iterator || PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    return absl::InternalError("torch does not tell what a private memory pool has");
  }
  return bytes;
}

}  // namespace cuvil::agent
