#include "agent/torch_state.h"

#include "absl/strings/str_cat.h"
#include "agent/py_ref.h"
#include "scheduler/floating_point_mode.h"

namespace cuvil::agent {
namespace {

struct Getters {
  PyObject* is_grad_enabled = nullptr;
  PyObject* is_inference_mode_enabled = nullptr;
  PyObject* is_autocast_enabled = nullptr;
  PyObject* get_default_dtype = nullptr;
  PyObject* len_function_stack = nullptr;
  PyObject* len_dispatch_stack = nullptr;
  PyObject* is_function_enabled = nullptr;
  PyObject* functorch_active = nullptr;
  PyObject* profiler_enabled = nullptr;  // optional
  PyObject* function_stack_at = nullptr;
  PyTypeObject* device_context = nullptr;  // torch.utils._device.DeviceContext
  PyObject* forward_ad = nullptr;          // the module's dict; its _current_level is -1 outside of dual levels
  PyObject* current_level = nullptr;       // the name of that level
  PyObject* cpu = nullptr;
  PyObject* cuda = nullptr;
  absl::Status native_status;
};
Getters& G() {
  static Getters getters;
  return getters;
}

bool CallBool(PyObject* function, PyObject* argument = nullptr) {
  PyObject* result = argument == nullptr ? PyObject_CallNoArgs(function) : PyObject_CallOneArg(function, argument);
  if (result == nullptr) {
    PyErr_Clear();
    return true;  // an unreadable state counts as unusual: the call runs untouched
  }
  bool value = result == Py_True;
  Py_DECREF(result);
  return value;
}

int64_t CallInt(PyObject* function) {
  PyObject* result = PyObject_CallNoArgs(function);
  int64_t value = result == nullptr ? 1 : PyLong_AsLongLong(result);
  if (result == nullptr || PyErr_Occurred()) PyErr_Clear();
  Py_XDECREF(result);
  return value;
}

bool ForwardAdActive() {
  const Getters& g = G();
  if (g.forward_ad == nullptr) return false;
  PyObject* level = PyDict_GetItemWithError(g.forward_ad, g.current_level);
  if (level == nullptr) PyErr_Clear();
  return level == nullptr || !PyLong_Check(level) || PyLong_AsLong(level) >= 0;
}

}  // namespace

absl::Status TorchStateReader::Initialize() {
  Getters& g = G();
  if (g.cuda != nullptr) return absl::OkStatus();
  OwnedRef torch = OwnedRef::Steal(PyImport_ImportModule("torch"));
  OwnedRef c = OwnedRef::Steal(PyImport_ImportModule("torch._C"));
  if (!torch || !c) {
    PyErr_Clear();
    return absl::UnavailableError("torch is not installed; install torch >= 2.10");
  }
  struct Row {
    PyObject* module;
    const char* name;
    PyObject** slot;
    bool optional;
  };
  const Row rows[] = {
      {torch.get(), "is_grad_enabled", &g.is_grad_enabled, false},
      {torch.get(), "is_inference_mode_enabled", &g.is_inference_mode_enabled, false},
      {torch.get(), "is_autocast_enabled", &g.is_autocast_enabled, false},
      {torch.get(), "get_default_dtype", &g.get_default_dtype, false},
      {c.get(), "_len_torch_function_stack", &g.len_function_stack, false},
      {c.get(), "_len_torch_dispatch_stack", &g.len_dispatch_stack, false},
      {c.get(), "_is_torch_function_enabled", &g.is_function_enabled, false},
      {c.get(), "_are_functorch_transforms_active", &g.functorch_active, false},
  };
  for (const Row& row : rows) {
    *row.slot = PyObject_GetAttrString(row.module, row.name);
    if (*row.slot == nullptr) {
      PyErr_Clear();
      return absl::UnavailableError(absl::StrCat("torch has no ", row.name, "; install torch >= 2.10"));
    }
  }
  OwnedRef autograd = OwnedRef::Steal(PyObject_GetAttrString(c.get(), "_autograd"));
  if (autograd) g.profiler_enabled = PyObject_GetAttrString(autograd.get(), "_profiler_enabled");
  PyErr_Clear();
  g.function_stack_at = PyObject_GetAttrString(c.get(), "_get_function_stack_at");
  OwnedRef device_module = OwnedRef::Steal(PyImport_ImportModule("torch.utils._device"));
  OwnedRef context =
      device_module ? OwnedRef::Steal(PyObject_GetAttrString(device_module.get(), "DeviceContext")) : OwnedRef();
  if (context && PyType_Check(context.get())) g.device_context = reinterpret_cast<PyTypeObject*>(context.release());
  PyErr_Clear();
  OwnedRef forward_ad = OwnedRef::Steal(PyImport_ImportModule("torch.autograd.forward_ad"));
  if (forward_ad) g.forward_ad = Py_NewRef(PyModule_GetDict(forward_ad.get()));
  PyErr_Clear();
  g.current_level = PyUnicode_InternFromString("_current_level");
  g.cpu = PyUnicode_InternFromString("cpu");
  g.cuda = PyUnicode_InternFromString("cuda");
  if (absl::Status status = KernelRegistrationsReader::Initialize(); !status.ok()) return status;
  // Without it, every check asks torch's Python functions, which is slower and says the same.
  g.native_status = NativeTorchStateReader::Initialize();
  return absl::OkStatus();
}

TorchState TorchStateReader::Read() {
  const Getters& g = G();
  TorchState state;
  state.grad_enabled = CallBool(g.is_grad_enabled);
  state.inference_mode = CallBool(g.is_inference_mode_enabled);
  state.autocast_cpu = CallBool(g.is_autocast_enabled, g.cpu);
  state.autocast_cuda = CallBool(g.is_autocast_enabled, g.cuda);
  state.torch_function_enabled = CallBool(g.is_function_enabled);
  state.function_modes = CallInt(g.len_function_stack);
  state.dispatch_modes = CallInt(g.len_dispatch_stack);
  state.functorch = CallBool(g.functorch_active);
  if (state.function_modes == 1 && g.function_stack_at != nullptr && g.device_context != nullptr) {
    OwnedRef index = OwnedRef::Steal(PyLong_FromLong(0));
    OwnedRef mode = OwnedRef::Steal(PyObject_CallOneArg(g.function_stack_at, index.get()));
    if (!mode) PyErr_Clear();
    if (mode && Py_TYPE(mode.get()) == g.device_context) state.default_device_mode = mode.get();
  }
  state.forward_ad = ForwardAdActive();
  if (g.profiler_enabled != nullptr) state.profiler = CallBool(g.profiler_enabled);
  state.default_dtype = PyObject_CallNoArgs(g.get_default_dtype);
  if (state.default_dtype == nullptr) PyErr_Clear();
  Py_XDECREF(state.default_dtype);
  state.kernels = KernelRegistrationsReader::Read();
  state.floating_point_mode = scheduler::FloatingPointMode();
  if (NativeTorchStateReader::available()) state.native = NativeTorchStateReader::Read();
  return state;
}

bool TorchStateReader::Is(const TorchState& state) {
  // A function mode has an identity that only Python shows.
  if (!NativeTorchStateReader::available() || state.native.function_modes != 0) return Read() == state;
  return scheduler::FloatingPointMode() == state.floating_point_mode &&
         KernelRegistrationsReader::Read() == state.kernels && NativeTorchStateReader::Read() == state.native &&
         ForwardAdActive() == state.forward_ad;
}

absl::Status TorchStateReader::NativeStatus() { return G().native_status; }

uint32_t TorchStateReader::ModeBits() {
  const Getters& g = G();
  return (CallBool(g.is_grad_enabled) ? 1u : 0u) | (CallBool(g.is_inference_mode_enabled) ? 2u : 0u) |
         (CallBool(g.is_autocast_enabled, g.cpu) ? 4u : 0u) | (CallBool(g.is_autocast_enabled, g.cuda) ? 8u : 0u);
}

std::string TorchStateReader::WhyUntouched(const TorchState& state) {
  if (state.dispatch_modes != 0) return "a torch dispatch mode is active";
  // torch.set_default_device is a function mode too; its Python code is traced like the model's.
  if (state.function_modes != 0 && state.default_device_mode == nullptr) return "a torch function mode is active";
  if (!state.torch_function_enabled) return "torch functions are disabled on this thread";
  if (state.functorch) return "a torch.func transform is active";
  if (state.forward_ad) return "a forward-mode AD level is active";
  if (state.profiler) return "the torch profiler is active";
  if (state.autocast_cpu || state.autocast_cuda) return "autocast is active around the call";
  if (state.kernels.own_cpu) return WhyKernelsCount(false);
  return "";
}

std::string TorchStateReader::WhyKernelsCount(bool for_cuda) {
  return absl::StrCat("the program has registered a kernel of its own for ",
                      KernelRegistrationsReader::OwnKernel(for_cuda));
}

}  // namespace cuvil::agent
