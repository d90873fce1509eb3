#include "agent/cuda_state.h"

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "agent/process_lifetime.h"
#include "agent/py_ref.h"
#include "scheduler/torch/cuda_streams.h"

namespace cuvil::agent {
namespace {

using torch_abi::ContextSwitches;

// torch._C's function of this name, or null.
OwnedRef Function(const char* name) {
  const ErrorScope errors;
  const OwnedRef module = OwnedRef::Steal(PyImport_ImportModule("torch._C"));
  OwnedRef function = module ? OwnedRef::Steal(PyObject_GetAttrString(module.get(), name)) : OwnedRef();
  if (!function) PyErr_Clear();
  return function;
}

// Equal for equal answers: small numbers, bools, None, strings, members of enumerations, and lists and tuples of them.
uint64_t NumberOf(PyObject* answer) {
  if (PyLong_Check(answer)) {
    const int64_t value = PyLong_AsLongLong(answer);
    if (value == -1 && PyErr_Occurred() != nullptr) PyErr_Clear();
    return static_cast<uint64_t>(value);
  }
  if (PyUnicode_CheckExact(answer)) return static_cast<uint64_t>(PyObject_Hash(answer));
  if (answer == Py_None) return ~uint64_t{0};
  if (PyList_CheckExact(answer) || PyTuple_CheckExact(answer)) {
    uint64_t number = 1;
    for (Py_ssize_t i = 0; i < Py_SIZE(answer); ++i) {
      PyObject* item = PyList_CheckExact(answer) ? PyList_GET_ITEM(answer, i) : PyTuple_GET_ITEM(answer, i);
      number = number * 1'000'003 + NumberOf(item);
    }
    return number;
  }
  // torch's enumerations hash as their number.
  const Py_hash_t hash = PyObject_Hash(answer);
  if (hash == -1) PyErr_Clear();
  return static_cast<uint64_t>(hash);
}

// How each switch is asked: by libtorch's function, or by Python's getter.
class Switches {
 public:
  static const Switches& Get() {
    static ProcessLifetime<Switches> switches;
    return *switches;
  }
  Switches() : native_(ContextSwitches::Load()) {
    for (size_t i = 0; i < ContextSwitches::kNumRows; ++i) {
      if (native_.ok() && native_->Has(i)) {
        functions_.push_back(i);
      } else if (*ContextSwitches::kRows[i].getter != '\0') {
        OwnedRef getter = Function(ContextSwitches::kRows[i].getter);
        if (getter) getters_.emplace_back(i, std::move(getter));
      }
    }
    if (native_.ok() && native_->HasPrecisions()) return;
    // The getter of older torch for convolutions; it refuses to answer where torch is of two minds.
    OwnedRef getter = Function("_get_cudnn_allow_tf32");
    if (getter) getters_.emplace_back(ContextSwitches::kNumRows, std::move(getter));
  }

  size_t num_getters() const { return getters_.size(); }

  // `answers` has room for the rows and the precisions.
  void Read(uint64_t* answers) const {
    static uint64_t num_unanswered = 0;  // GIL held
    for (const size_t row : functions_) {
      if (!native_->Answer(row, &answers[row]).ok()) answers[row] = ~++num_unanswered;
    }
    if (native_.ok() && native_->HasPrecisions()) {
      std::array<uint64_t, ContextSwitches::kNumPrecisions> precisions{};
      if (!native_->Precisions(&precisions).ok()) precisions[0] = ~++num_unanswered;
      std::copy(precisions.begin(), precisions.end(), answers + ContextSwitches::kNumRows);
    }
    for (const auto& [row, getter] : getters_) {
      const OwnedRef answer = OwnedRef::Steal(PyObject_CallNoArgs(getter.get()));
      if (!answer) PyErr_Clear();
      answers[row] = answer ? NumberOf(answer.get()) : ~++num_unanswered;
    }
  }

 private:
  const absl::StatusOr<ContextSwitches> native_;
  std::vector<size_t> functions_;
  std::vector<std::pair<size_t, OwnedRef>> getters_;
};

}  // namespace

int CudaState::CurrentDevice() {
  static int (*const native)() = torch_abi::FindCurrentCudaDevice();
  if (native != nullptr) return native();
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
  CudaState state;
  Switches::Get().Read(state.answers_.data());
  return state;
}

size_t CudaState::NumGetters() { return Switches::Get().num_getters(); }

}  // namespace cuvil::agent
