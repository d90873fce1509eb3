#include "agent/native_torch_state.h"

#include <dlfcn.h>

#include <string>
#include <string_view>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "agent/py_ref.h"

namespace cuvil::agent {
namespace {

struct KeyWords {
  uint64_t included;
  uint64_t excluded;
};

// libstdc++'s vector begins with these.
struct VectorHead {
  const void* begin;
  const void* end;
};

struct Functions {
  bool (*grad_enabled)() = nullptr;
  bool (*inference_mode)() = nullptr;
  int64_t (*function_modes)() = nullptr;
  int64_t (*dispatch_modes)() = nullptr;
  int32_t (*function_state)() = nullptr;
  int8_t (*default_dtype)() = nullptr;
  bool (*profiler)() = nullptr;
  const VectorHead& (*functorch_layers)() = nullptr;
  const void* const& (*tracing_state)() = nullptr;  // a shared_ptr, which begins with the pointer
  void* c10 = nullptr;
  bool tested = false;
};

Functions& F() {
  static Functions functions;
  return functions;
}

constexpr char kKeyWordsSymbol[] = "_ZN3c104impl26raw_local_dispatch_key_setE";

// The thread-local's address on this thread: dlsym of such a symbol gives it, and takes too long to do it every time.
const KeyWords* KeysOfThisThread() {
  thread_local const KeyWords* const keys = static_cast<const KeyWords*>(dlsym(F().c10, kKeyWordsSymbol));
  return keys;
}

absl::Status FindFunctions(Functions* f) {
  f->c10 = dlopen("libc10.so", RTLD_LAZY | RTLD_NOLOAD);
  void* cpu = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  if (f->c10 == nullptr || cpu == nullptr) return absl::UnavailableError("libtorch is not loaded");
  // Looks in what libtorch_cpu depends on, too.
  const auto find = [cpu](const char* name, auto* function) {
    *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(cpu, name));
    return *function != nullptr;
  };
  const bool found = find("_ZN3c108GradMode10is_enabledEv", &f->grad_enabled) &&
                     find("_ZN3c1013InferenceMode10is_enabledEv", &f->inference_mode) &&
                     find("_ZN2at4impl22PythonTorchFunctionTLS9stack_lenEv", &f->function_modes) &&
                     find("_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv", &f->dispatch_modes) &&
                     find("_ZN2at4impl22PythonTorchFunctionTLS18get_disabled_stateEv", &f->function_state) &&
                     find("_ZN3c1031get_default_dtype_as_scalartypeEv", &f->default_dtype) &&
                     find("_ZN5torch8profiler4impl15profilerEnabledEv", &f->profiler) &&
                     find("_ZN5torch3jit6tracer15getTracingStateEv", &f->tracing_state) &&
                     find("_ZN2at9functorch20getDynamicLayerStackEv", &f->functorch_layers);
  if (!found || KeysOfThisThread() == nullptr) {
    return absl::UnavailableError("this torch does not export the functions for its ambient state");
  }
  return absl::OkStatus();
}

NativeTorchState ReadState(const Functions& f) {
  const KeyWords keys = *KeysOfThisThread();
  const VectorHead& layers = f.functorch_layers();
  NativeTorchState state;
  state.included_keys = keys.included;
  state.excluded_keys = keys.excluded;
  state.function_modes = f.function_modes();
  state.dispatch_modes = f.dispatch_modes();
  state.function_state = f.function_state();
  state.default_dtype = f.default_dtype();
  state.grad_enabled = f.grad_enabled();
  state.inference_mode = f.inference_mode();
  state.functorch = layers.begin != layers.end;
  state.tracing = f.tracing_state() != nullptr;
  state.profiler = f.profiler();
  return state;
}

// One way of changing the state from Python and back, and what must be seen of it.
class Trial {
 public:
  explicit Trial(const Functions& functions) : functions_(functions) {
    c_ = OwnedRef::Steal(PyImport_ImportModule("torch._C"));
    PyErr_Clear();
  }

  bool ready() const { return static_cast<bool>(c_); }

  OwnedRef Get(const char* path_in_c) const {
    OwnedRef at = OwnedRef::New(c_.get());
    for (std::string_view rest = path_in_c; at && !rest.empty();) {
      const size_t dot = rest.find('.');
      at = OwnedRef::Steal(PyObject_GetAttrString(at.get(), std::string(rest.substr(0, dot)).c_str()));
      rest = dot == std::string_view::npos ? "" : rest.substr(dot + 1);
    }
    return at;
  }

  template <typename... Args>
  bool Call(const char* path_in_c, const char* format, Args... args) const {
    const OwnedRef function = Get(path_in_c);
    const OwnedRef result =
        function ? OwnedRef::Steal(PyObject_CallFunction(function.get(), format, args...)) : OwnedRef();
    if (!result) PyErr_Clear();
    return static_cast<bool>(result);
  }

  // `differs(before, within)` says whether the change shows as it should.
  template <typename Enter, typename Leave, typename Differs>
  absl::Status Run(const char* what, const Enter& enter, const Leave& leave, const Differs& differs) const {
    const NativeTorchState before = ReadState(functions_);
    const bool entered = enter();
    const NativeTorchState within = ReadState(functions_);
    const bool left = entered && leave();
    const NativeTorchState after = ReadState(functions_);
    if (entered && left && differs(before, within) && after == before && within != before) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat("torch's ambient state does not show ", what));
  }

  // The same with an object that is a context manager.
  template <typename Differs>
  absl::Status RunContext(const char* what, const char* type, const char* format, const Differs& differs) const {
    OwnedRef context;
    const auto enter = [&] {
      const OwnedRef made = Get(type);
      context = made ? OwnedRef::Steal(format[0] == '\0' ? PyObject_CallNoArgs(made.get())
                                                         : PyObject_CallFunction(made.get(), format, Py_True))
                     : OwnedRef();
      const OwnedRef entered =
          context ? OwnedRef::Steal(PyObject_CallMethod(context.get(), "__enter__", nullptr)) : OwnedRef();
      if (!entered) PyErr_Clear();
      return static_cast<bool>(entered);
    };
    const auto leave = [&] {
      const OwnedRef left =
          OwnedRef::Steal(PyObject_CallMethod(context.get(), "__exit__", "OOO", Py_None, Py_None, Py_None));
      if (!left) PyErr_Clear();
      context.reset();
      return static_cast<bool>(left);
    };
    return Run(what, enter, leave, differs);
  }

 private:
  const Functions& functions_;
  OwnedRef c_;
};

// What the state is within a traced call: the function that torch traces notes it.
PyObject* NoteState(PyObject* noted, PyObject* tensor) {
  *static_cast<NativeTorchState*>(PyCapsule_GetPointer(noted, nullptr)) = ReadState(F());
  return Py_NewRef(tensor);
}

absl::Status TestTracing(const Functions& f, const Trial& trial) {
  static PyMethodDef note = {"note_state", NoteState, METH_O, nullptr};
  const NativeTorchState before = ReadState(f);
  NativeTorchState within = before;
  const OwnedRef noted = OwnedRef::Steal(PyCapsule_New(&within, nullptr, nullptr));
  const OwnedRef function = noted ? OwnedRef::Steal(PyCFunction_New(&note, noted.get())) : OwnedRef();
  const OwnedRef name_of =
      OwnedRef::Steal(PyObject_GetAttrString(reinterpret_cast<PyObject*>(&PyUnicode_Type), "strip"));
  const OwnedRef torch = OwnedRef::Steal(PyImport_ImportModule("torch"));
  const OwnedRef tensor = torch ? OwnedRef::Steal(PyObject_CallMethod(torch.get(), "empty", "i", 0)) : OwnedRef();
  const bool ran =
      function && name_of && tensor &&
      trial.Call("_create_graph_by_tracing", "O(O)OOO", function.get(), tensor.get(), name_of.get(), Py_True, Py_False);
  PyErr_Clear();
  if (ran && !before.tracing && within.tracing && ReadState(f) == before) return absl::OkStatus();
  return absl::FailedPreconditionError("torch's ambient state does not show tracing");
}

absl::Status Test(const Functions& f) {
  using State = NativeTorchState;
  const Trial trial(f);
  if (!trial.ready()) return absl::UnavailableError("torch._C cannot be imported");
  const State now = ReadState(f);

  const auto set_grad = [&](bool on) { return trial.Call("_set_grad_enabled", "O", on ? Py_True : Py_False); };
  absl::Status status = trial.Run(
      "grad mode", [&] { return set_grad(!now.grad_enabled); }, [&] { return set_grad(now.grad_enabled); },
      [](const State& a, const State& b) { return a.grad_enabled != b.grad_enabled; });
  if (!status.ok()) return status;
  // Inside of inference mode entering it again changes nothing; enable() may be called there.
  if (!now.inference_mode) {
    status = trial.RunContext("inference mode", "_InferenceMode", "O", [](const State& a, const State& b) {
      return !a.inference_mode && b.inference_mode && a.excluded_keys != b.excluded_keys;
    });
    if (!status.ok()) return status;
  }
  for (const char* device : {"cpu", "cuda"}) {
    const OwnedRef is_enabled = trial.Get("is_autocast_enabled");
    const OwnedRef enabled =
        is_enabled ? OwnedRef::Steal(PyObject_CallFunction(is_enabled.get(), "s", device)) : OwnedRef();
    if (!enabled) {
      PyErr_Clear();
      return absl::UnavailableError("this torch has no is_autocast_enabled");
    }
    PyObject* const was = enabled.get();
    PyObject* const other = was == Py_True ? Py_False : Py_True;
    status = trial.Run(
        "autocast", [&] { return trial.Call("set_autocast_enabled", "sO", device, other); },
        [&] { return trial.Call("set_autocast_enabled", "sO", device, was); },
        [](const State& a, const State& b) { return a.excluded_keys != b.excluded_keys; });
    if (!status.ok()) return status;
  }
  status = trial.RunContext("disabled torch functions", "DisableTorchFunction", "",
                            [](const State& a, const State& b) { return a.function_state != b.function_state; });
  if (!status.ok()) return status;
  status = trial.Run(
      "function modes", [&] { return trial.Call("_push_on_torch_function_stack", "O", Py_Ellipsis); },
      [&] { return trial.Call("_pop_torch_function_stack", nullptr); },
      [](const State& a, const State& b) { return b.function_modes == a.function_modes + 1; });
  if (!status.ok()) return status;
  status = trial.Run(
      "dispatch modes", [&] { return trial.Call("_push_on_torch_dispatch_stack", "O", Py_Ellipsis); },
      [&] { return trial.Call("_pop_torch_dispatch_stack", "O", Py_None); },
      [](const State& a, const State& b) { return b.dispatch_modes == a.dispatch_modes + 1; });
  if (!status.ok()) return status;
  status = trial.Run(
      "functorch transforms", [&] { return trial.Call("_functorch._vmap_increment_nesting", "is", 2, "error"); },
      [&] { return trial.Call("_functorch._vmap_decrement_nesting", nullptr); },
      [](const State& a, const State& b) { return !a.functorch && b.functorch; });
  if (!status.ok()) return status;
  // Within torch.jit.trace a further trace would end that one.
  return now.tracing ? absl::OkStatus() : TestTracing(f, trial);
}

}  // namespace

absl::Status NativeTorchStateReader::Initialize() {
  Functions& f = F();
  if (f.tested) return absl::OkStatus();
  if (absl::Status status = FindFunctions(&f); !status.ok()) return status;
  const ErrorScope errors;
  absl::Status status = Test(f);
  f.tested = status.ok();
  return status;
}

bool NativeTorchStateReader::available() { return F().tested; }

NativeTorchState NativeTorchStateReader::Read() { return ReadState(F()); }

}  // namespace cuvil::agent
