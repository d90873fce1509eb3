#include "agent/cuda_state.h"

#include <cstddef>
#include <iterator>
#include <utility>
#include <vector>

#include "agent/process_lifetime.h"
#include "agent/py_ref.h"

namespace cuvil::agent {
namespace {

// torch._C's getters without arguments; a torch that lacks one has no such switch.
constexpr const char* kGetters[] = {
    "_get_cublas_allow_tf32",
    "_get_cublas_allow_fp16_reduced_precision_reduction",
    "_get_cublas_allow_bf16_reduced_precision_reduction",
    "_get_cublas_allow_fp16_accumulation",
    "_get_float32_matmul_precision",
    "_get_blas_preferred_backend",
    "_get_linalg_preferred_backend",
    "_get_cudnn_allow_tf32",
    "_get_cudnn_benchmark",
    "_get_cudnn_deterministic",
    "_get_cudnn_enabled",
    "_get_deterministic_algorithms",
    "_get_deterministic_algorithms_warn_only",
    "_get_deterministic_fill_uninitialized_memory",
    "_get_flash_sdp_enabled",
    "_get_mem_efficient_sdp_enabled",
    "_get_math_sdp_enabled",
    "_get_cudnn_sdp_enabled",
    "_get_overrideable_sdp_enabled",
    "_get_math_sdp_allow_fp16_bf16_reduction",
    "_get_sm_carveout_experimental",
};

static_assert(std::size(kGetters) <= CudaState::kMaxAnswers);

std::vector<OwnedRef> FindGetters() {
  std::vector<OwnedRef> getters;
  const OwnedRef module = OwnedRef::Steal(PyImport_ImportModule("torch._C"));
  for (const char* name : kGetters) {
    OwnedRef getter = module ? OwnedRef::Steal(PyObject_GetAttrString(module.get(), name)) : OwnedRef();
    if (getter) getters.push_back(std::move(getter));
    PyErr_Clear();
  }
  return getters;
}

// Equal for equal answers: small numbers, bools, None, strings and members of enumerations.
uint64_t NumberOf(PyObject* answer) {
  if (PyLong_Check(answer)) {
    const int64_t value = PyLong_AsLongLong(answer);
    if (value == -1 && PyErr_Occurred() != nullptr) PyErr_Clear();
    return static_cast<uint64_t>(value);
  }
  if (PyUnicode_CheckExact(answer)) return static_cast<uint64_t>(PyObject_Hash(answer));
  if (answer == Py_None) return ~uint64_t{0};
  // torch's enumerations hash as their number.
  const Py_hash_t hash = PyObject_Hash(answer);
  if (hash == -1) PyErr_Clear();
  return static_cast<uint64_t>(hash);
}

// torch._C's function of this name, or null.
OwnedRef Function(const char* name) {
  const ErrorScope errors;
  const OwnedRef module = OwnedRef::Steal(PyImport_ImportModule("torch._C"));
  OwnedRef function = module ? OwnedRef::Steal(PyObject_GetAttrString(module.get(), name)) : OwnedRef();
  if (!function) PyErr_Clear();
  return function;
}

}  // namespace

int CudaState::CurrentDevice() {
  static ProcessLifetime<OwnedRef> getter(Function("_cuda_getDevice"));
  if (!*getter) return -1;
  const OwnedRef answer = OwnedRef::Steal(PyObject_CallNoArgs(getter->get()));
  if (!answer || !PyLong_Check(answer.get())) {
    PyErr_Clear();
    return -1;
  }
  return static_cast<int>(PyLong_AsLong(answer.get()));
}

bool CudaState::StreamIsCapturing() {
  static ProcessLifetime<OwnedRef> getter(Function("_cuda_isCurrentStreamCapturing"));
  static ProcessLifetime<OwnedRef> cuda(OwnedRef::Steal(PyImport_ImportModule("torch.cuda")));
  if (!*getter || !*cuda) {
    PyErr_Clear();
    return false;
  }
  if (PyDict_GetItemString(PyModule_GetDict(cuda->get()), "_initialized") != Py_True) return false;
  const OwnedRef answer = OwnedRef::Steal(PyObject_CallNoArgs(getter->get()));
  if (!answer) PyErr_Clear();
  return !answer || answer.get() == Py_True;
}

CudaState CudaState::Read() {
  static ProcessLifetime<std::vector<OwnedRef>> getters(FindGetters());
  static uint64_t num_unanswered = 0;
  CudaState state;
  for (size_t i = 0; i < getters->size(); ++i) {
    const OwnedRef answer = OwnedRef::Steal(PyObject_CallNoArgs((*getters)[i].get()));
    if (!answer) PyErr_Clear();
    state.answers_[i] = answer ? NumberOf(answer.get()) : ~++num_unanswered;
  }
  return state;
}

}  // namespace cuvil::agent
