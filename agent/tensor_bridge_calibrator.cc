#include "agent/tensor_bridge_calibrator.h"

#include <dlfcn.h>

#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "agent/assumptions.h"

namespace cuvil::agent {
namespace {

// The probes are made outside of inference mode and on the CPU, whatever surrounds the call.
constexpr char kProbeProgram[] = R"(
import torch
with torch.inference_mode(False), torch.no_grad():
    plain = torch.zeros((3, 5, 7), dtype=torch.float32, device='cpu')
    row = plain[1, 2:4, 1:]
    deep = torch.zeros((2, 3, 2, 5, 2, 7, 2), dtype=torch.int16, device='cpu').permute(6, 5, 4, 3, 2, 1, 0)
    scalar = torch.zeros((), dtype=torch.bool, device='cpu')
    vector = torch.zeros((11,), dtype=torch.float64, device='cpu')
    complex_ = torch.zeros((4,), dtype=torch.complex64, device='cpu')
    conjugate = complex_.conj()
    negative = conjugate.imag
    detached = plain.detach()
    bumped = torch.zeros((2,), device='cpu')
    for _ in range(5):
        bumped.add_(1)
    bumped_view = bumped[1:]
with torch.inference_mode(True):
    inference = torch.zeros((3, 5, 7), dtype=torch.float32, device='cpu')
with torch.inference_mode(False), torch.enable_grad():
    leaf = torch.zeros((2, 2), dtype=torch.float32, device='cpu').requires_grad_(True)
    derived = leaf * 2
    former_leaf = torch.zeros((2,), device='cpu').requires_grad_(True).requires_grad_(False)
    parameter = torch.nn.Parameter(torch.zeros((2, 2), device='cpu'))
checked = ['plain', 'row', 'deep', 'scalar', 'vector', 'complex_', 'conjugate', 'negative', 'detached', 'bumped',
           'bumped_view', 'inference', 'leaf', 'derived', 'former_leaf', 'parameter']
def describe(t):
    return (list(t.size()), list(t.stride()), t.storage_offset(), str(t.dtype)[6:], t.requires_grad, t.is_inference(),
            torch._C._dispatch_keys(t).raw_repr(), t.untyped_storage().data_ptr(), t.untyped_storage().nbytes(),
            -1 if t.is_inference() else t._version)
facts = {name: describe(globals()[name]) for name in checked}
plain_keys = torch._C._dispatch_keys(plain).raw_repr()
conjugate_keys = torch._C._dispatch_keys(conjugate).raw_repr()
inference_keys = torch._C._dispatch_keys(inference).raw_repr()
capsules = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors([plain, row])
tensor_type = torch.Tensor
parameter_type = torch.nn.Parameter
)";

// A whole TensorImpl of torch 2.11; 2.15's has 176 bytes. Searches go upwards and end at the first match, inside both.
constexpr ptrdiff_t kSearchedBytes = 184;

template <typename T>
T Load(const char* base, ptrdiff_t offset) {
  T value;
  std::memcpy(&value, base + offset, sizeof(value));
  return value;
}

std::string TakeError() {
  PyObject* type = nullptr;
  PyObject* value = nullptr;
  PyObject* traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  const OwnedRef own_type = OwnedRef::Steal(type);
  const OwnedRef own_value = OwnedRef::Steal(value);
  const OwnedRef own_traceback = OwnedRef::Steal(traceback);
  const OwnedRef text = OwnedRef::Steal(value != nullptr ? PyObject_Str(value) : nullptr);
  const char* utf8 = text ? PyUnicode_AsUTF8(text.get()) : nullptr;
  std::string message = utf8 != nullptr ? utf8 : "no message";
  PyErr_Clear();
  return message.substr(0, message.find('\n'));
}

// Compares one element of a description made by the probe program.
bool SameInts(PyObject* list, const std::vector<int64_t>& values) {
  if (!PyList_Check(list) || PyList_GET_SIZE(list) != static_cast<Py_ssize_t>(values.size())) return false;
  for (size_t i = 0; i < values.size(); ++i) {
    if (PyLong_AsLongLong(PyList_GET_ITEM(list, static_cast<Py_ssize_t>(i))) != values[i]) return false;
  }
  return true;
}

}  // namespace

absl::Status TensorBridgeCalibrator::Run(TensorBridge* bridge) {
  bridge_ = bridge;
  const ErrorScope keep_pending_exception;
  using Step = absl::Status (TensorBridgeCalibrator::*)();
  for (const Step step :
       {&TensorBridgeCalibrator::MakeProbes, &TensorBridgeCalibrator::FindWrap, &TensorBridgeCalibrator::FindCell,
        &TensorBridgeCalibrator::FindGeometry, &TensorBridgeCalibrator::FindKeys, &TensorBridgeCalibrator::CheckStorage,
        &TensorBridgeCalibrator::CheckAutograd, &TensorBridgeCalibrator::CheckVersions,
        &TensorBridgeCalibrator::CrossCheck, &TensorBridgeCalibrator::CheckRoundTrip}) {
    if (absl::Status status = (this->*step)(); !status.ok()) return status;
  }
  return absl::OkStatus();
}

PyObject* TensorBridgeCalibrator::Probe(const char* name) const { return PyDict_GetItemString(probes_.get(), name); }

const char* TensorBridgeCalibrator::Impl(const char* name) const {
  return static_cast<const char*>(bridge_->FromPyObject(Probe(name)).impl());
}

int64_t TensorBridgeCalibrator::Number(const char* name) const {
  return static_cast<int64_t>(PyLong_AsUnsignedLongLongMask(Probe(name)));
}

absl::Status TensorBridgeCalibrator::MakeProbes() {
  probes_ = OwnedRef::Steal(PyDict_New());
  if (!probes_ || PyDict_SetItemString(probes_.get(), "__builtins__", PyEval_GetBuiltins()) < 0) {
    return absl::ResourceExhaustedError(TakeError());
  }
  const OwnedRef done = OwnedRef::Steal(PyRun_String(kProbeProgram, Py_file_input, probes_.get(), probes_.get()));
  if (!done)
    return absl::UnavailableError(absl::StrCat("probe tensors could not be made: ", TakeError(), "; ", kTorchAdvice));
  bridge_->tensor_type_ = reinterpret_cast<PyTypeObject*>(Probe("tensor_type"));
  bridge_->parameter_type_ = reinterpret_cast<PyTypeObject*>(Probe("parameter_type"));
  return absl::OkStatus();
}

absl::Status TensorBridgeCalibrator::FindWrap() {
  void* library = dlopen("libtorch_python.so", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr)
    return absl::UnavailableError(absl::StrCat("libtorch_python.so is not loaded; ", kTorchAdvice));
  bridge_->wrap_ =
      reinterpret_cast<PyObject* (*)(const void*)>(dlsym(library, "_Z16THPVariable_WrapRKN2at10TensorBaseE"));
  if (bridge_->wrap_ == nullptr)
    return absl::UnavailableError(absl::StrCat("this torch does not export THPVariable_Wrap; ", kTorchAdvice));
  return absl::OkStatus();
}

absl::Status TensorBridgeCalibrator::FindCell() {
  void* torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  const auto delete_tensor =
      torch == nullptr ? nullptr
                       : reinterpret_cast<int32_t (*)(void*)>(dlsym(torch, "aoti_torch_delete_tensor_object"));
  if (delete_tensor == nullptr) {
    return absl::UnavailableError(
        absl::StrCat("libtorch_cpu.so has no aoti_torch_delete_tensor_object; ", kTorchAdvice));
  }
  PyObject* capsules = Probe("capsules");
  const char* names[] = {"plain", "row"};
  for (int i = 0; i < 2; ++i) {
    void* handle = PyCapsule_GetPointer(PyList_GetItem(capsules, i), nullptr);
    if (handle == nullptr)
      return absl::UnavailableError(absl::StrCat("no tensor handle: ", TakeError(), "; ", kTorchAdvice));
    // A corrupted assumption looks for something that is not there.
    const void* impl = Corrupted(Assumption::kTensorCell) ? handle : *static_cast<void**>(handle);
    delete_tensor(handle);
    const auto* object = reinterpret_cast<const char*>(Probe(names[i]));
    const auto size = static_cast<ptrdiff_t>(Py_TYPE(Probe(names[i]))->tp_basicsize);
    ptrdiff_t offset = static_cast<ptrdiff_t>(sizeof(PyObject));
    while (offset + static_cast<ptrdiff_t>(sizeof(void*)) <= size && Load<const void*>(object, offset) != impl) {
      offset += static_cast<ptrdiff_t>(sizeof(void*));
    }
    if (offset + static_cast<ptrdiff_t>(sizeof(void*)) > size) return Violated(Assumption::kTensorCell);
    if (i > 0 && offset != bridge_->cell_offset_) return Violated(Assumption::kTensorCell);
    bridge_->cell_offset_ = offset;
  }
  return absl::OkStatus();
}

absl::Status TensorBridgeCalibrator::FindGeometry() {
  // SizesAndStrides: the dimension, then room for five sizes and five strides (or a pointer to more). The storage
  // offset, the element count, the dtype, the device and the bit fields follow.
  const int64_t pattern[] = {3, 3, 5, Corrupted(Assumption::kTensorSizes) ? 8 : 7};
  const int64_t strides[] = {35, 7, 1};
  const char* impl = Impl("plain");
  ptrdiff_t at = 48;
  for (; at + 120 <= kSearchedBytes; at += 8) {
    if (std::memcmp(impl + at, pattern, sizeof(pattern)) == 0 &&
        std::memcmp(impl + at + 48, strides, sizeof(strides)) == 0) {
      break;
    }
  }
  if (at + 120 > kSearchedBytes) return Violated(Assumption::kTensorSizes);
  bridge_->sizes_and_strides_ = at;
  bridge_->storage_offset_ = at + 88;
  bridge_->dtype_ = at + 104;
  if (!Holds(Assumption::kTensorCount, Load<int64_t>(impl, at + 96) == 105)) {
    return Violated(Assumption::kTensorCount);
  }
  const char* row = Impl("row");
  if (!Holds(Assumption::kTensorOffset, Load<int64_t>(row, bridge_->storage_offset_) == 50) ||
      Load<int64_t>(row, at + 96) != 12) {
    return Violated(Assumption::kTensorOffset);
  }
  const uint8_t device[] = {0, 0xff, 1};
  if (!Holds(Assumption::kTensorDevice, std::memcmp(impl + bridge_->dtype_ + 2, device, sizeof(device)) == 0)) {
    return Violated(Assumption::kTensorDevice);
  }
  return absl::OkStatus();
}

absl::Status TensorBridgeCalibrator::FindKeys() {
  const auto keys = static_cast<uint64_t>(Number("plain_keys")) + (Corrupted(Assumption::kTensorKeys) ? 1 : 0);
  const auto conjugate = static_cast<uint64_t>(Number("conjugate_keys"));
  const auto inference = static_cast<uint64_t>(Number("inference_keys"));
  if (keys == conjugate || keys == inference) return Violated(Assumption::kTensorKeys);
  ptrdiff_t at = bridge_->dtype_;
  while (at + 8 <= kSearchedBytes &&
         (Load<uint64_t>(Impl("plain"), at) != keys || Load<uint64_t>(Impl("conjugate"), at) != conjugate ||
          Load<uint64_t>(Impl("inference"), at) != inference)) {
    at += 8;
  }
  if (at + 8 > kSearchedBytes) return Violated(Assumption::kTensorKeys);
  bridge_->key_set_ = at;
  bridge_->differentiable_keys_ = keys & ~inference;
  return absl::OkStatus();
}

absl::Status TensorBridgeCalibrator::CheckStorage() {
  const auto storage = [&](const char* name) { return Load<const char*>(Impl(name), TensorBridge::kStorage); };
  if (storage("plain") == nullptr || !Holds(Assumption::kTensorStorage, storage("plain") == storage("row")) ||
      storage("plain") == storage("deep")) {
    return Violated(Assumption::kTensorStorage);
  }
  // StorageImpl: data pointer at 16; the size in bytes is found by its value in two storages.
  const int64_t bytes_of_plain = 3 * 5 * 7 * (Corrupted(Assumption::kStorageSize) ? 8 : 4);
  ptrdiff_t at = 24;
  while (at < 96 && (Load<int64_t>(storage("plain"), at) != bytes_of_plain ||
                     Load<int64_t>(storage("deep"), at) != 2 * 3 * 2 * 5 * 2 * 7 * 2 * 2)) {
    at += 8;
  }
  if (at >= 96) return Violated(Assumption::kStorageSize);
  bridge_->bytes_in_storage_ = at;
  return absl::OkStatus();
}

absl::Status TensorBridgeCalibrator::CheckAutograd() {
  const auto meta = [&](const char* name) { return Load<const void*>(Impl(name), TensorBridge::kAutogradMeta); };
  if (!Holds(Assumption::kTensorAutograd, meta("plain") == nullptr) || meta("leaf") == nullptr ||
      meta("derived") == nullptr) {
    return Violated(Assumption::kTensorAutograd);
  }
  // AutogradMeta::requires_grad_, behind its eight first members. Where it cannot be told apart, it is not looked at.
  constexpr ptrdiff_t kSearched = 152;  // inside of the whole: 2.11's has 200 bytes, 2.15's has 184
  const auto flag = [&](const char* name, ptrdiff_t at) {
    return Load<uint8_t>(static_cast<const char*>(meta(name)), at);
  };
  ptrdiff_t found = 0;
  int num_found = 0;
  for (ptrdiff_t at = sizeof(void*); at < kSearched; ++at) {
    const bool is_it =
        flag("leaf", at) == 1 && flag("parameter", at) == 1 && flag("derived", at) == 0 && flag("former_leaf", at) == 0;
    if (!is_it) continue;
    found = at;
    ++num_found;
  }
  const auto set = [&](PyObject* value) {
    const OwnedRef done = OwnedRef::Steal(PyObject_CallMethod(Probe("former_leaf"), "requires_grad_", "O", value));
    PyErr_Clear();
    return static_cast<bool>(done);
  };
  if (num_found == 1 && set(Py_True)) {
    const bool follows = flag("former_leaf", found) == 1;
    if (set(Py_False) && follows && flag("former_leaf", found) == 0) bridge_->leaf_flag_ = found;
  }
  return absl::OkStatus();
}

absl::Status TensorBridgeCalibrator::CheckVersions() {
  const auto counter = [&](const char* name) { return Load<const void*>(Impl(name), TensorBridge::kVersionCounter); };
  if (!Holds(Assumption::kTensorVersion, counter("inference") == nullptr) || counter("bumped") == nullptr ||
      counter("bumped") != counter("bumped_view")) {
    return Violated(Assumption::kTensorVersion);
  }
  return absl::OkStatus();
}

absl::Status TensorBridgeCalibrator::CrossCheck() {
  PyObject* facts = Probe("facts");
  PyObject* name = nullptr;
  PyObject* fact = nullptr;
  for (Py_ssize_t position = 0; PyDict_Next(facts, &position, &name, &fact) != 0;) {
    const char* text = PyUnicode_AsUTF8(name);
    const torch_abi::TensorRef tensor = bridge_->FromPyObject(Probe(text));
    const TensorMeta meta = bridge_->Read(tensor);
    const auto item = [&](Py_ssize_t i) { return PyTuple_GET_ITEM(fact, i); };
    const char* dtype = PyUnicode_AsUTF8(item(3));
    uint32_t version = 0;
    const bool has_version = bridge_->Version(tensor, &version);
    const bool same =
        SameInts(item(0), meta.sizes) && SameInts(item(1), meta.strides) &&
        PyLong_AsLongLong(item(2)) == meta.storage_offset && dtype != nullptr && cir::DTypeName(meta.dtype) == dtype &&
        (item(4) == Py_True) == meta.requires_grad && (item(5) == Py_True) == meta.is_inference &&
        PyLong_AsUnsignedLongLongMask(item(6)) == meta.key_set &&
        PyLong_AsVoidPtr(item(7)) == bridge_->StorageData(tensor) &&
        PyLong_AsSize_t(item(8)) == bridge_->StorageBytes(tensor) &&
        PyLong_AsLongLong(item(9)) == (has_version ? static_cast<long long>(version) : -1) &&  // NOLINT: Python's type
        meta.flags == 0 && bridge_->SameMeta(tensor, meta);
    if (PyErr_Occurred() != nullptr || !Holds(Assumption::kTensorMetadata, same)) {
      PyErr_Clear();
      return Violated(Assumption::kTensorMetadata);
    }
  }
  if (Corrupted(Assumption::kTensorDifference) ||
      bridge_->SameMeta(bridge_->FromPyObject(Probe("plain")), bridge_->Read(bridge_->FromPyObject(Probe("row")))) ||
      bridge_->SameMeta(bridge_->FromPyObject(Probe("plain")),
                        bridge_->Read(bridge_->FromPyObject(Probe("inference")))) ||
      bridge_->SameMeta(bridge_->FromPyObject(Probe("complex_")),
                        bridge_->Read(bridge_->FromPyObject(Probe("conjugate"))))) {
    return Violated(Assumption::kTensorDifference);
  }
  return absl::OkStatus();
}

absl::Status TensorBridgeCalibrator::CheckRoundTrip() {
  PyObject* plain = Probe("plain");
  const OwnedRef same = OwnedRef::Steal(bridge_->wrap_(bridge_->FromPyObject(plain).handle()));
  if (!Holds(Assumption::kTensorWrap, same.get() == plain)) {
    PyErr_Clear();
    return Violated(Assumption::kTensorWrap);
  }
  return absl::OkStatus();
}

}  // namespace cuvil::agent
