#include "agent/cuda_memory_pool.h"

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
  pool->pool_ = OwnedRef::Steal(PyObject_CallMethod(module.get(), "MemPool", nullptr));
  const OwnedRef id = Attribute(pool->pool_, "id");
  if (id) pool->arguments_ = OwnedRef::Steal(Py_BuildValue("iO", device_index, id.get()));
  if (!pool->begin_ || !pool->end_ || !pool->release_ || !pool->arguments_) {
    PyErr_Clear();
    return absl::UnavailableError("this torch has no private memory pools; install torch >= 2.10");
  }
  return pool;
}

CudaMemoryPool::~CudaMemoryPool() {
  if (!Py_IsInitialized()) {
    // The process is ending: the driver takes everything back.
    for (OwnedRef* object : {&pool_, &arguments_, &begin_, &end_, &release_}) (void)object->release();
    return;
  }
  const GilAcquire with_gil;
  const ErrorScope errors;
  for (OwnedRef* object : {&pool_, &arguments_, &begin_, &end_, &release_}) object->reset();
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

}  // namespace cuvil::agent
