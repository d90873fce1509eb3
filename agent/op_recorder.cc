#include "agent/op_recorder.h"

#include <string_view>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "agent/call_table.h"
#include "agent/frame_hook.h"
#include "agent/process_lifetime.h"
#include "agent/py_ref.h"
#include "agent/torch_state.h"
#include "jit/cir/op_traits.h"
#include "jit/cir/schema.h"

namespace cuvil::agent {

struct OpRecorder::Overload {
  OwnedRef object;
  OwnedRef callable;  // the C function behind it: calling it enters no Python frame
  cir::Schema schema;
  absl::Status status;  // not OK: the operator cannot be part of a plan
  bool is_lift = false;
};

namespace {

constexpr char kAdviceData[] = "keep the computation in tensors (torch.where, masks) so that no value leaves them";
constexpr char kAdviceOrigin[] = "make tensors with torch functions, outside of the model if they never change";

// The dispatch keys that a thread includes and excludes, as torch's DispatchKeySet::raw_repr() gives them.
struct KeySets {
  uint64_t include = 0;
  uint64_t exclude = 0;
  bool operator==(const KeySets&) const = default;
};

struct TorchObjects {
  OwnedRef mode;  // the instance that is pushed
  OwnedRef push;
  OwnedRef pop;
  OwnedRef set_excluded;
  OwnedRef is_excluded;
  OwnedRef include_set;  // torch._C._dispatch_tls_local_include_set, …exclude_set
  OwnedRef exclude_set;
  OwnedRef force_guard;  // torch._C._ForceDispatchKeyGuard
  OwnedRef key_set_type;
  OwnedRef restore_snapshot;  // torch._C._RestorePythonTLSSnapshot: the state in which Python called the operator
  OwnedRef skipped_keys[4];   // what Python's calls skip during a trace: autograd, and view and version tracking
  KeySets normal;             // outside of autocast
  KeySets inference;
  uint64_t view_tracking = 0;
  int32_t view_tracking_key = -1;
  uint64_t autocast_cpu = 0;
  uint64_t autocast_cuda = 0;
  OwnedRef clone;                                      // torch.ops.aten.clone.default
  std::unordered_map<PyObject*, cir::Attr> constants;  // dtypes, layouts, memory formats
  uint64_t plain_key_sets[2] = {};                     // of an ordinary and of an inference tensor
  TensorBridge* bridge = nullptr;
};

TorchObjects& T() {
  static ProcessLifetime<TorchObjects> objects;
  return *objects;
}

OpRecorder* g_recorder = nullptr;  // of the one active trace; only its thread has the mode on its stack

PyObject* HandleDispatch(PyObject*, PyObject* const* args, Py_ssize_t count) {
  // mode, overload, types, args, kwargs
  if (count < 4 || !PyTuple_Check(args[3])) {
    PyErr_SetString(PyExc_TypeError, "unexpected call of cuvil's dispatch mode");
    return nullptr;
  }
  PyObject* kwargs = count > 4 && args[4] != Py_None ? args[4] : nullptr;
  if (g_recorder == nullptr) return PyObject_Call(args[1], args[3], kwargs);
  return g_recorder->Handle(args[1], args[3], kwargs);
}

PyMethodDef kHandler = {"__torch_dispatch__",
                        reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(HandleDispatch)), METH_FASTCALL,
                        nullptr};

bool ReadRaw(PyObject* getter, uint64_t* raw) {
  OwnedRef set = OwnedRef::Steal(PyObject_CallNoArgs(getter));
  OwnedRef number = set ? OwnedRef::Steal(PyObject_CallMethod(set.get(), "raw_repr", nullptr)) : OwnedRef();
  if (!number) return false;
  *raw = PyLong_AsUnsignedLongLong(number.get());
  return !PyErr_Occurred();
}

bool ReadKeySets(KeySets* sets) {
  return ReadRaw(T().include_set.get(), &sets->include) && ReadRaw(T().exclude_set.get(), &sets->exclude);
}

uint64_t RawOf(PyObject* keys, const char* name) {
  OwnedRef key = OwnedRef::Steal(PyObject_GetAttrString(keys, name));
  OwnedRef set = key ? OwnedRef::Steal(PyObject_CallOneArg(T().key_set_type.get(), key.get())) : OwnedRef();
  OwnedRef number = set ? OwnedRef::Steal(PyObject_CallMethod(set.get(), "raw_repr", nullptr)) : OwnedRef();
  return number ? PyLong_AsUnsignedLongLong(number.get()) : 0;
}

// Grad mode, inference mode and autocast as Python called the operator: inside of a handler autocast always looks off.
uint32_t ModeBitsOfCaller() {
  ErrorScope errors;
  OwnedRef guard = OwnedRef::Steal(PyObject_CallNoArgs(T().restore_snapshot.get()));
  OwnedRef entered = guard ? OwnedRef::Steal(PyObject_CallMethod(guard.get(), "__enter__", nullptr)) : OwnedRef();
  uint32_t bits = TorchStateReader::ModeBits();
  if (entered) {
    OwnedRef left = OwnedRef::Steal(PyObject_CallMethod(guard.get(), "__exit__", "OOO", Py_None, Py_None, Py_None));
  }
  PyErr_Clear();
  return bits;
}

// What a thread in this mode has when it runs eager code; autocast is told apart by its keys being excluded.
KeySets EagerKeySets(uint32_t mode_bits) {
  KeySets sets = (mode_bits & 2) != 0 ? T().inference : T().normal;
  if ((mode_bits & 4) != 0) sets.exclude &= ~T().autocast_cpu;
  if ((mode_bits & 8) != 0) sets.exclude &= ~T().autocast_cuda;
  return sets;
}

bool IsTensorListKind(cir::ArgKind kind) {
  return kind == cir::ArgKind::kTensorList || kind == cir::ArgKind::kOptionalTensorElementList ||
         kind == cir::ArgKind::kOptionalTensorList;
}

}  // namespace

const TensorBridge& Bridge() { return *T().bridge; }

int32_t ViewTrackingKey() { return T().view_tracking_key; }

bool IsPlainTensor(const TensorMeta& meta) {
  for (uint64_t known : T().plain_key_sets) {
    // The backend (CPU, CUDA) has the low bits; the rest is what kind of tensor it is.
    if (((known ^ meta.key_set) & ~uint64_t{0xffff}) == 0) return true;
  }
  return false;
}

absl::Status OpRecorder::Initialize() {
  TorchObjects& t = T();
  if (t.bridge != nullptr) return absl::OkStatus();
  absl::StatusOr<TensorBridge> bridge = TensorBridge::Calibrate();
  if (!bridge.ok()) return bridge.status();
  OwnedRef torch = OwnedRef::Steal(PyImport_ImportModule("torch"));
  OwnedRef c = OwnedRef::Steal(PyImport_ImportModule("torch._C"));
  OwnedRef dispatch = OwnedRef::Steal(PyImport_ImportModule("torch.utils._python_dispatch"));
  if (!torch || !c || !dispatch) {
    PyErr_Clear();
    return absl::UnavailableError("torch cannot be imported; install torch >= 2.10");
  }
  auto get = [](const OwnedRef& from, const char* name) {
    return from ? OwnedRef::Steal(PyObject_GetAttrString(from.get(), name)) : OwnedRef();
  };
  OwnedRef mode_type = get(dispatch, "TorchDispatchMode");
  t.push = get(c, "_push_on_torch_dispatch_stack");
  t.pop = get(c, "_pop_torch_dispatch_stack");
  t.set_excluded = get(c, "_dispatch_tls_set_dispatch_key_excluded");
  t.is_excluded = get(c, "_dispatch_tls_is_dispatch_key_excluded");
  t.include_set = get(c, "_dispatch_tls_local_include_set");
  t.exclude_set = get(c, "_dispatch_tls_local_exclude_set");
  t.force_guard = get(c, "_ForceDispatchKeyGuard");
  t.key_set_type = get(c, "DispatchKeySet");
  t.restore_snapshot = get(c, "_RestorePythonTLSSnapshot");
  OwnedRef keys = get(c, "DispatchKey");
  const char* names[] = {"AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"};
  for (size_t i = 0; i < 4; ++i) t.skipped_keys[i] = get(keys, names[i]);
  OwnedRef ops = get(torch, "ops");
  OwnedRef aten = get(ops, "aten");
  OwnedRef clone = get(aten, "clone");
  t.clone = get(clone, "default");
  if (PyErr_Occurred() || !mode_type) {
    PyErr_Clear();
    return absl::UnavailableError("this torch lacks a function that tracing needs; install torch >= 2.10");
  }
  OwnedRef key_number = t.skipped_keys[3] ? OwnedRef::Steal(PyNumber_Long(t.skipped_keys[3].get())) : OwnedRef();
  if (key_number) t.view_tracking_key = static_cast<int32_t>(PyLong_AsLong(key_number.get()));
  PyErr_Clear();
  t.view_tracking = RawOf(keys.get(), "ADInplaceOrView");
  t.autocast_cpu = RawOf(keys.get(), "AutocastCPU");
  t.autocast_cuda = RawOf(keys.get(), "AutocastCUDA");
  OwnedRef inference_mode = get(torch, "inference_mode");
  for (bool enabled : {false, true}) {
    OwnedRef scope = inference_mode
                         ? OwnedRef::Steal(PyObject_CallOneArg(inference_mode.get(), enabled ? Py_True : Py_False))
                         : OwnedRef();
    OwnedRef entered = scope ? OwnedRef::Steal(PyObject_CallMethod(scope.get(), "__enter__", nullptr)) : OwnedRef();
    if (!entered) break;
    ReadKeySets(enabled ? &t.inference : &t.normal);
    OwnedRef sample = OwnedRef::Steal(PyObject_CallMethod(torch.get(), "ones", "i", 1));
    if (sample) t.plain_key_sets[enabled ? 1 : 0] = bridge->Read(bridge->FromPyObject(sample.get())).key_set;
    OwnedRef left = OwnedRef::Steal(PyObject_CallMethod(scope.get(), "__exit__", "OOO", Py_None, Py_None, Py_None));
    for (KeySets* sets : {&t.inference, &t.normal}) sets->exclude |= t.autocast_cpu | t.autocast_cuda;
  }
  if (PyErr_Occurred() || t.autocast_cpu == 0 || t.normal == t.inference) {
    PyErr_Clear();
    return absl::UnavailableError("torch's dispatch keys are not what tracing expects; use a released torch >= 2.10");
  }
  OwnedRef handler = OwnedRef::Steal(PyCFunction_New(&kHandler, nullptr));
  OwnedRef method = handler ? OwnedRef::Steal(PyInstanceMethod_New(handler.get())) : OwnedRef();
  OwnedRef subclass = OwnedRef::Steal(
      PyObject_CallFunction(reinterpret_cast<PyObject*>(&PyType_Type), "s(O){}", "CuvilRecorder", mode_type.get()));
  // Set afterwards: __init_subclass__ of the base wraps a handler that it finds in the class body in Python.
  if (!subclass || !method || PyObject_SetAttrString(subclass.get(), "__torch_dispatch__", method.get()) < 0) {
    PyErr_Clear();
    return absl::UnavailableError("torch's dispatch mode cannot be subclassed as expected");
  }
  t.mode = OwnedRef::Steal(PyObject_CallNoArgs(subclass.get()));
  if (!t.mode) {
    PyErr_Clear();
    return absl::UnavailableError("torch's dispatch mode cannot be made as expected");
  }
  OwnedRef dtype_names = OwnedRef::Steal(PyObject_Dir(torch.get()));
  for (Py_ssize_t i = 0; dtype_names && i < PyList_GET_SIZE(dtype_names.get()); ++i) {
    OwnedRef value = OwnedRef::Steal(PyObject_GetAttr(torch.get(), PyList_GET_ITEM(dtype_names.get(), i)));
    if (!value) {
      PyErr_Clear();
      continue;
    }
    PyTypeObject* type = Py_TYPE(value.get());
    OwnedRef text = OwnedRef::Steal(PyObject_Str(value.get()));
    const char* name = text ? PyUnicode_AsUTF8(text.get()) : nullptr;
    if (name == nullptr || !absl::StartsWith(name, "torch.")) continue;
    std::string_view plain = std::string_view(name).substr(6);
    if (type == Types().dtype) {
      if (std::optional<cir::DType> dtype = cir::ParseDType(plain)) t.constants.emplace(value.release(), *dtype);
    } else if (type == Types().layout) {
      if (std::optional<cir::Layout> layout = cir::ParseLayout(plain)) t.constants.emplace(value.release(), *layout);
    } else if (type == Types().memory_format) {
      if (absl::EndsWith(plain, "_format")) plain.remove_suffix(7);
      if (std::optional<cir::MemoryFormat> format = cir::ParseMemoryFormat(plain)) {
        t.constants.emplace(value.release(), *format);
      }
    }
  }
  PyErr_Clear();
  t.bridge = new TensorBridge(*std::move(bridge));  // NOLINT: lives as long as the process
  return absl::OkStatus();
}

OpRecorder::OpRecorder(Tracer* tracer) : tracer_(tracer) { tracer->set_constants(this); }

OpRecorder::~OpRecorder() {
  if (started_) Stop();
  for (auto& [impl, tensor] : tensors_) Py_XDECREF(tensor.reference);
}

bool OpRecorder::StateIsUsual() {
  KeySets now;
  if (!ReadKeySets(&now)) {
    PyErr_Clear();
    return false;
  }
  return now == EagerKeySets(TorchStateReader::ModeBits());
}

bool OpRecorder::Start() {
  TorchObjects& t = T();
  mode_bits_ = TorchStateReader::ModeBits();
  OwnedRef pushed = OwnedRef::Steal(PyObject_CallOneArg(t.push.get(), t.mode.get()));
  if (!pushed) return false;
  started_ = true;
  g_recorder = this;
  for (size_t i = 0; i < 4; ++i) {
    PyObject* key = t.skipped_keys[i].get();
    OwnedRef excluded = OwnedRef::Steal(PyObject_CallOneArg(t.is_excluded.get(), key));
    if (excluded && excluded.get() == Py_True) continue;
    OwnedRef done = OwnedRef::Steal(PyObject_CallFunctionObjArgs(t.set_excluded.get(), key, Py_True, nullptr));
    if (!done) {
      ErrorScope errors;
      Stop();
      return false;
    }
    skipped_[i] = true;
  }
  return true;
}

void OpRecorder::HideMode() const {
  if (!started_ || hidden_) return;
  ErrorScope errors;
  // Only the innermost mode can be taken away; the model may have pushed one of its own.
  if (TorchStateReader::Read().dispatch_modes != 1) return;
  OwnedRef popped = OwnedRef::Steal(PyObject_CallOneArg(T().pop.get(), Py_None));
  hidden_ = static_cast<bool>(popped);
  PyErr_Clear();
}

void OpRecorder::ShowMode() const {
  if (!std::exchange(hidden_, false)) return;
  ErrorScope errors;
  OwnedRef pushed = OwnedRef::Steal(PyObject_CallOneArg(T().push.get(), T().mode.get()));
  if (!pushed) tracer_->Refuse("torch-mode", "torch refused the recording mode", "please report this");
  PyErr_Clear();
}

void OpRecorder::Stop() {
  if (!started_) return;
  ShowMode();
  started_ = false;
  ErrorScope errors;
  TorchObjects& t = T();
  for (size_t i = 0; i < 4; ++i) {
    if (!std::exchange(skipped_[i], false)) continue;
    OwnedRef done =
        OwnedRef::Steal(PyObject_CallFunctionObjArgs(t.set_excluded.get(), t.skipped_keys[i].get(), Py_False, nullptr));
  }
  g_recorder = nullptr;
  OwnedRef popped = OwnedRef::Steal(PyObject_CallOneArg(t.pop.get(), Py_None));
  PyErr_Clear();
}

bool OpRecorder::IsUntrackedFactory(const Overload& overload) {
  if (!overload.status.ok() || overload.schema.written_arguments() != 0) return false;
  if (absl::EndsWith(overload.schema.name, "_like")) return true;
  for (const cir::SchemaArgument& argument : overload.schema.arguments) {
    if (absl::StartsWith(cir::ArgKindName(argument.kind), "Tensor")) return false;
  }
  return true;
}

// The operator as eager would run it: with the dispatch keys of a thread in the present mode, from the top. What the
// dispatcher did before it came to the handler (autocast) does nothing the second time.
PyObject* OpRecorder::RunAsEager(const Overload& overload, PyObject* args, PyObject* kwargs, uint32_t mode_bits) {
  static ProcessLifetime<std::unordered_map<uint32_t, std::pair<OwnedRef, OwnedRef>>> key_sets;
  TorchObjects& t = T();
  // Torch's own Python functions make new tensors without tracking their versions.
  const bool untracked = IsUntrackedFactory(overload);
  auto& [include, exclude] = (*key_sets)[(mode_bits & ~1u) | (untracked ? 0x100u : 0u)];
  if (!include) {
    KeySets sets = EagerKeySets(mode_bits);
    if (untracked) sets.exclude |= T().view_tracking;
    include = OwnedRef::Steal(
        PyObject_CallMethod(t.key_set_type.get(), "from_raw_repr", "K", static_cast<unsigned long long>(sets.include)));
    exclude = OwnedRef::Steal(
        PyObject_CallMethod(t.key_set_type.get(), "from_raw_repr", "K", static_cast<unsigned long long>(sets.exclude)));
    if (!include || !exclude) return nullptr;
  }
  OwnedRef guard =
      OwnedRef::Steal(PyObject_CallFunctionObjArgs(t.force_guard.get(), include.get(), exclude.get(), nullptr));
  OwnedRef entered = guard ? OwnedRef::Steal(PyObject_CallMethod(guard.get(), "__enter__", nullptr)) : OwnedRef();
  if (!entered) return nullptr;
  PyObject* result = PyObject_Call(overload.callable.get(), args, kwargs);
  ErrorScope errors;
  OwnedRef left = OwnedRef::Steal(PyObject_CallMethod(guard.get(), "__exit__", "OOO", Py_None, Py_None, Py_None));
  PyErr_Clear();
  return result;
}

cir::StorageId OpRecorder::StorageOf(PyObject* tensor) {
  void* storage = Bridge().Storage(Bridge().FromPyObject(tensor));
  auto [found, inserted] = old_storages_.try_emplace(storage);
  if (inserted) {
    found->second = graph_.NewStorage();
    storage_is_old_.resize(found->second.index + 1, false);
    storage_is_old_[found->second.index] = true;
  }
  return found->second;
}

void OpRecorder::Register(PyObject* tensor, cir::ValueId value) {
  Tensor& entry = tensors_[Bridge().FromPyObject(tensor).impl()];
  Py_XDECREF(entry.reference);
  entry.value = value;
  entry.reference = PyWeakref_NewRef(tensor, nullptr);
  if (entry.reference == nullptr) PyErr_Clear();
}

std::optional<cir::ValueId> OpRecorder::Find(PyObject* tensor) const {
  auto found = tensors_.find(Bridge().FromPyObject(tensor).impl());
  if (found == tensors_.end() || found->second.reference == nullptr) return std::nullopt;
  if (PyWeakref_GET_OBJECT(found->second.reference) != tensor) return std::nullopt;
  return found->second.value;
}

cir::ValueId OpRecorder::AddInput(PyObject* tensor) {
  if (std::optional<cir::ValueId> known = Find(tensor)) return *known;
  TensorMeta meta = Bridge().Read(Bridge().FromPyObject(tensor));
  cir::ValueId value = graph_.AddInput(meta.ToType(), StorageOf(tensor));
  Register(tensor, value);
  return value;
}

bool OpRecorder::IsConstant(PyObject* tensor) const {
  std::optional<cir::ValueId> value = Find(tensor);
  return value && IsConstantStorage(graph_.graph().value(*value).storage);
}

bool OpRecorder::AllConstant(const std::vector<cir::Operand>& operands) const {
  auto constant = [&](cir::ValueId id) { return IsConstantStorage(graph_.graph().value(id).storage); };
  for (const cir::Operand& operand : operands) {
    if (const auto* id = std::get_if<cir::ValueId>(&operand)) {
      if (!constant(*id)) return false;
    } else if (const auto* list = std::get_if<cir::ValueList>(&operand)) {
      for (const std::optional<cir::ValueId>& item : *list) {
        if (item && !constant(*item)) return false;
      }
    }
  }
  return true;
}

bool OpRecorder::ToValue(PyObject* tensor, cir::ValueId* value) {
  last_tensors_.push_back(tensor);
  if (std::optional<cir::ValueId> known = Find(tensor)) {
    *value = *known;
    return true;
  }
  if (!Bridge().IsExactTensor(tensor) && !Bridge().IsExactParameter(tensor)) {
    tracer_->Refuse("tensor-subclass", absl::StrCat("uses a tensor subclass, ", Py_TYPE(tensor)->tp_name),
                    "tensor subclasses run as they are");
    return false;
  }
  if (!tracer_->heap().HasSeen(tensor)) {
    tracer_->Refuse("unknown-tensor", "an operator uses a tensor that no watched read or operator produced",
                    kAdviceOrigin);
    return false;
  }
  TensorMeta meta = Bridge().Read(Bridge().FromPyObject(tensor));
  if (!IsPlainTensor(meta)) {
    tracer_->Refuse("tensor-kind",
                    "uses a tensor that is not plain and strided (conj, neg, zero, sparse, quantized, …)",
                    "the call runs as it is");
    return false;
  }
  *value = graph_.AddCaptured(meta.ToType(), StorageOf(tensor));
  captured_.push_back(tensor);
  tracer_->heap().Hold(tensor);
  Register(tensor, *value);
  return true;
}

bool OpRecorder::ToAttr(PyObject* object, cir::Attr* attr) {
  if (object == Py_None) {
    *attr = cir::NoneAttr();
  } else if (PyBool_Check(object)) {
    *attr = object == Py_True;
  } else if (PyLong_Check(object)) {
    int overflow = 0;
    int64_t value = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (overflow != 0) return false;
    *attr = value;
  } else if (PyFloat_Check(object)) {
    *attr = PyFloat_AS_DOUBLE(object);
  } else if (PyComplex_CheckExact(object)) {
    Py_complex value = PyComplex_AsCComplex(object);
    *attr = std::complex<double>(value.real, value.imag);
  } else if (PyUnicode_Check(object)) {
    const char* text = PyUnicode_AsUTF8(object);
    if (text == nullptr) return false;
    *attr = std::string(text);
  } else if (Py_TYPE(object) == Types().device) {
    OwnedRef text = OwnedRef::Steal(PyObject_Str(object));
    const char* name = text ? PyUnicode_AsUTF8(text.get()) : nullptr;
    std::optional<cir::Device> device = name == nullptr ? std::nullopt : cir::ParseDevice(name);
    if (!device) return false;
    *attr = *device;
  } else {
    auto found = T().constants.find(object);
    if (found == T().constants.end()) return false;
    *attr = found->second;
  }
  return true;
}

bool OpRecorder::ToOperand(PyObject* object, cir::ArgKind kind, cir::Operand* operand) {
  if (IsTensor(object)) {
    cir::ValueId value;
    if (!ToValue(object, &value)) return false;
    *operand = value;
    return true;
  }
  if (PyList_Check(object) || PyTuple_Check(object)) {
    Py_ssize_t size = PySequence_Fast_GET_SIZE(object);
    PyObject** items = PySequence_Fast_ITEMS(object);
    if (IsTensorListKind(kind)) {
      cir::ValueList values;
      for (Py_ssize_t i = 0; i < size; ++i) {
        cir::ValueId value;
        if (items[i] == Py_None) {
          values.push_back(std::nullopt);
        } else if (IsTensor(items[i]) && ToValue(items[i], &value)) {
          values.push_back(value);
        } else {
          return false;
        }
      }
      *operand = std::move(values);
      return true;
    }
    std::vector<cir::Attr> attrs(size);
    for (Py_ssize_t i = 0; i < size; ++i) {
      if (!ToAttr(items[i], &attrs[i])) return false;
    }
    switch (kind) {
      case cir::ArgKind::kIntList:
      case cir::ArgKind::kOptionalIntList:
      case cir::ArgKind::kSymIntList:
      case cir::ArgKind::kOptionalSymIntList: {
        std::vector<int64_t> values;
        for (const cir::Attr& attr : attrs) {
          const int64_t* value = attr.get_if<int64_t>();
          if (value == nullptr) return false;
          values.push_back(*value);
        }
        *operand = cir::Attr(std::move(values));
        return true;
      }
      case cir::ArgKind::kFloatList:
      case cir::ArgKind::kOptionalFloatList: {
        std::vector<double> values;
        for (const cir::Attr& attr : attrs) {
          if (const double* real = attr.get_if<double>()) {
            values.push_back(*real);
          } else if (const int64_t* integer = attr.get_if<int64_t>()) {
            values.push_back(static_cast<double>(*integer));
          } else {
            return false;
          }
        }
        *operand = cir::Attr(std::move(values));
        return true;
      }
      case cir::ArgKind::kBoolList:
      case cir::ArgKind::kBoolArray2:
      case cir::ArgKind::kBoolArray3:
      case cir::ArgKind::kBoolArray4: {
        std::vector<bool> values;
        for (const cir::Attr& attr : attrs) {
          const bool* value = attr.get_if<bool>();
          if (value == nullptr) return false;
          values.push_back(*value);
        }
        *operand = cir::Attr(std::move(values));
        return true;
      }
      case cir::ArgKind::kScalarList:
        *operand = cir::Attr(std::move(attrs));
        return true;
      default:
        return false;
    }
  }
  if (PyObject_TypeCheck(object, Types().generator)) {
    tracer_->Refuse("generator", "draws from a torch.Generator object of its own",
                    "use the default generator (torch.manual_seed) inside of models");
    return false;
  }
  cir::Attr attr;
  if (!ToAttr(object, &attr)) return false;
  if ((kind == cir::ArgKind::kFloat || kind == cir::ArgKind::kOptionalFloat) && attr.get_if<int64_t>() != nullptr) {
    attr = static_cast<double>(*attr.get_if<int64_t>());
  }
  if ((kind == cir::ArgKind::kGenerator || kind == cir::ArgKind::kOptionalGenerator) && attr.is_none()) {
    attr = cir::NoneAttr();
  }
  *operand = std::move(attr);
  return true;
}

const OpRecorder::Overload* OpRecorder::Describe(PyObject* object) {
  static ProcessLifetime<std::unordered_map<PyObject*, std::unique_ptr<Overload>>> cache;
  auto found = cache->find(object);
  if (found != cache->end()) return found->second.get();
  auto overload = std::make_unique<Overload>();
  overload->object = OwnedRef::New(object);
  overload->callable = OwnedRef::Steal(PyObject_GetAttrString(object, "_op"));
  OwnedRef schema = OwnedRef::Steal(PyObject_GetAttrString(object, "_schema"));
  OwnedRef text = schema ? OwnedRef::Steal(PyObject_Str(schema.get())) : OwnedRef();
  const char* chars = text ? PyUnicode_AsUTF8(text.get()) : nullptr;
  if (!overload->callable || chars == nullptr) {
    PyErr_Clear();
    overload->callable = OwnedRef::New(object);
    overload->status = absl::UnimplementedError("a higher-order operator is no part of plans");
  } else {
    absl::StatusOr<cir::Schema> parsed = cir::ParseSchema(chars);
    if (!parsed.ok()) {
      overload->status = parsed.status();
    } else {
      overload->schema = *std::move(parsed);
      overload->status = cir::CheckAllowed(overload->schema);
      overload->is_lift = overload->schema.name == "aten::lift_fresh";
      if (overload->status.ok() && overload->schema.returns_non_tensor) {
        overload->status = absl::UnimplementedError(
            absl::StrCat(overload->schema.name, " moves tensor data or properties into Python"));
      }
    }
  }
  return cache->emplace(object, std::move(overload)).first->second.get();
}

PyObject* OpRecorder::Handle(PyObject* object, PyObject* args, PyObject* kwargs) {
  UnobservedScope unobserved;
  const Overload* overload = Describe(object);
  std::vector<cir::Operand> operands;
  uint32_t mode_bits = ModeBitsOfCaller();
  if (!tracer_->refused()) {
    ErrorScope errors;
    if (mode_bits != mode_bits_) {
      tracer_->Refuse("mode-change", "operators run under another grad mode or autocast state than the call started in",
                      "set the mode around the whole call");
    } else {
      Record(*overload, args, kwargs, &operands);
    }
  }
  PyObject* result = RunAsEager(*overload, args, kwargs, mode_bits);
  if (tracer_->refused()) return result;
  if (std::exchange(skip_, false) && result != nullptr) return result;
  if (result == nullptr) {
    ErrorScope errors;
    tracer_->Refuse("operator-error", absl::StrCat(overload->schema.name, " raised an exception"),
                    "whether it does may depend on data");
    return nullptr;
  }
  ErrorScope errors;
  RecordResult(*overload, std::move(operands), result);
  return result;
}

bool OpRecorder::ReadsConstant(const Overload& overload, PyObject* args, PyObject* kwargs) {
  if (cir::IsMetadataQuery(overload.schema)) return skip_ = true;
  if (!overload.schema.returns_non_tensor) return false;
  if (kwargs != nullptr && PyDict_GET_SIZE(kwargs) != 0) return false;
  bool any = false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i) {
    PyObject* argument = PyTuple_GET_ITEM(args, i);
    if (!IsTensor(argument)) continue;
    if (!IsConstant(argument)) return false;
    any = true;
  }
  skip_ = any;
  return any;
}

void OpRecorder::Record(const Overload& overload, PyObject* args, PyObject* kwargs,
                        std::vector<cir::Operand>* operands) {
  last_tensors_.clear();
  if (!overload.status.ok() && ReadsConstant(overload, args, kwargs)) return;
  if (!overload.status.ok()) {
    bool data = overload.schema.returns_non_tensor || absl::StrContains(overload.status.message(), "data");
    tracer_->Refuse(data ? "data-read" : "operator", std::string(overload.status.message()),
                    data ? kAdviceData : "the operator runs as it is");
    return;
  }
  if (overload.is_lift) return;  // its argument is a constant: RecordResult
  const cir::Schema& schema = overload.schema;
  Py_ssize_t num_args = PyTuple_GET_SIZE(args);
  for (size_t i = 0; i < schema.arguments.size(); ++i) {
    const cir::SchemaArgument& argument = schema.arguments[i];
    PyObject* value = nullptr;
    if (static_cast<Py_ssize_t>(i) < num_args) {
      value = PyTuple_GET_ITEM(args, i);
    } else if (kwargs != nullptr) {
      value = PyDict_GetItemString(kwargs, argument.name.c_str());
    }
    cir::Operand operand;
    if (value == nullptr) {
      if (!argument.default_value) {
        tracer_->Refuse("operator", absl::StrCat(schema.name, " is called without its argument ", argument.name),
                        "report this line");
        return;
      }
      operand = *argument.default_value;
    } else if (!ToOperand(value, argument.kind, &operand)) {
      tracer_->Refuse("operator-argument",
                      absl::StrCat(schema.name, ": argument ", argument.name, " of type ", Py_TYPE(value)->tp_name,
                                   " has no constant form"),
                      "pass numbers, tensors, dtypes and devices to operators");
      return;
    }
    operands->push_back(std::move(operand));
  }
  if ((mode_bits_ & 1) != 0 && (mode_bits_ & 2) == 0) {
    for (const cir::Operand& operand : *operands) {
      auto requires_grad = [&](cir::ValueId id) { return graph_.graph().value(id).type.requires_grad; };
      bool needs = false;
      if (const auto* id = std::get_if<cir::ValueId>(&operand)) needs = requires_grad(*id);
      if (const auto* list = std::get_if<cir::ValueList>(&operand)) {
        for (const std::optional<cir::ValueId>& id : *list) needs = needs || (id && requires_grad(*id));
      }
      if (needs) {
        tracer_->Refuse("autograd", "grad mode is enabled and a tensor requires grad",
                        "call the model under torch.no_grad() or torch.inference_mode()");
        return;
      }
    }
  }
}

void OpRecorder::RefuseOldWrites(const cir::Op& op) {
  auto check = [&](cir::ValueId id) {
    size_t storage = graph_.graph().value(id).storage.index;
    if (storage >= storage_is_old_.size() || !storage_is_old_[storage]) return;
    tracer_->Refuse("tensor-write", absl::StrCat(op.name, " writes to a tensor that existed before the call"),
                    "return the new value instead of updating in place");
  };
  for (size_t i = 0; i < op.operands.size(); ++i) {
    if ((op.effects.writes >> i & 1) == 0) continue;
    if (const auto* id = std::get_if<cir::ValueId>(&op.operands[i])) check(*id);
    if (const auto* list = std::get_if<cir::ValueList>(&op.operands[i])) {
      for (const std::optional<cir::ValueId>& id : *list) {
        if (id) check(*id);
      }
    }
  }
}

void OpRecorder::RecordResult(const Overload& overload, std::vector<cir::Operand> operands, PyObject* result) {
  const Overload* described = &overload;
  bool lifted = overload.is_lift;
  if (lifted) {
    // A constant of the program. It may be written to later in the call, so every run starts from a fresh copy.
    described = Describe(T().clone.get());
    if (!Bridge().IsExactTensor(result)) {
      tracer_->Refuse("operator", "a constant is no plain tensor", "report this line");
      return;
    }
    OwnedRef copy = OwnedRef::Steal(PyObject_CallMethod(result, "clone", nullptr));
    if (!copy) {
      PyErr_Clear();
      tracer_->Refuse("operator", "a constant cannot be copied", "report this line");
      return;
    }
    torch_abi::TensorRef ref = Bridge().FromPyObject(copy.get());
    cir::StorageId storage = graph_.NewStorage();
    cir::ValueId value = graph_.AddConstant(Bridge().Read(ref).ToType(), storage);
    constants_.push_back(std::move(copy));
    operands = {cir::Operand(value), cir::Operand(cir::Attr(cir::NoneAttr()))};
  }
  const cir::Schema& schema = described->schema;
  cir::Op op;
  op.name = schema.name;
  op.overload = schema.overload;
  for (const cir::SchemaArgument& argument : schema.arguments) op.kinds.push_back(argument.kind);
  op.operands = std::move(operands);
  op.effects = cir::DeriveEffects(schema, op);
  RefuseOldWrites(op);
  op.source = graph_.AddSource(absl::StrCat(tracer_->CurrentSource()));

  // Which storages the operands have, to tell views from new memory.
  std::vector<std::pair<void*, cir::StorageId>> operand_storages;
  auto note = [&](PyObject* tensor) {
    if (std::optional<cir::ValueId> id = Find(tensor)) {
      operand_storages.emplace_back(Bridge().Storage(Bridge().FromPyObject(tensor)), graph_.graph().value(*id).storage);
    }
  };
  for (const auto& object : last_tensors_) note(object);

  bool failed = false;
  auto add = [&](PyObject* tensor) -> std::optional<cir::ValueId> {
    if (!Bridge().IsExactTensor(tensor) && !Bridge().IsExactParameter(tensor)) {
      failed = true;
      return std::nullopt;
    }
    torch_abi::TensorRef ref = Bridge().FromPyObject(tensor);
    void* memory = Bridge().Storage(ref);
    std::optional<cir::StorageId> storage;
    for (const auto& [address, id] : operand_storages) {
      if (address == memory) storage = id;
    }
    if (storage) {
      op.effects.is_view = true;
    } else {
      storage = graph_.NewStorage();
    }
    TensorMeta meta = Bridge().Read(ref);
    // Without grad mode only views of weights say so, and the plan makes the same views.
    if (meta.requires_grad && (mode_bits_ & 3) == 1) {
      tracer_->Refuse("autograd", "a result requires grad",
                      "call the model under torch.no_grad() or torch.inference_mode()");
    }
    return graph_.AddResultValue(meta.ToType(), *storage);
  };
  std::vector<std::pair<PyObject*, cir::ValueId>> made;
  size_t num_returns = schema.returns.size();
  for (size_t i = 0; i < num_returns; ++i) {
    PyObject* item = num_returns == 1 ? result
                     : (PyTuple_Check(result) || PyList_Check(result)) &&
                             static_cast<size_t>(PySequence_Fast_GET_SIZE(result)) == num_returns
                         ? PySequence_Fast_GET_ITEM(result, i)
                         : nullptr;
    cir::Result described_result;
    described_result.returned = schema.returns[i];
    if (item == nullptr) {
      failed = true;
    } else if (item == Py_None) {
      described_result.form = cir::ResultForm::kUnused;
    } else if (IsTensor(item)) {
      std::optional<cir::ValueId> known = lifted ? std::nullopt : Find(item);
      if (known) {
        described_result.form = cir::ResultForm::kSame;
        described_result.values = {*known};
      } else if (std::optional<cir::ValueId> value = add(item)) {
        described_result.form = cir::ResultForm::kNew;
        described_result.values = {*value};
        made.emplace_back(item, *value);
      }
    } else if (PyList_Check(item) || PyTuple_Check(item)) {
      described_result.form = cir::ResultForm::kList;
      for (Py_ssize_t k = 0; k < PySequence_Fast_GET_SIZE(item); ++k) {
        PyObject* tensor = PySequence_Fast_GET_ITEM(item, k);
        std::optional<cir::ValueId> value = IsTensor(tensor) && !Find(tensor) ? add(tensor) : std::nullopt;
        if (!value) {
          failed = true;
          break;
        }
        described_result.values.push_back(*value);
        made.emplace_back(tensor, *value);
      }
    } else {
      failed = true;
    }
    op.results.push_back(std::move(described_result));
  }
  if (failed) {
    tracer_->Refuse("operator", absl::StrCat(schema.name, " returns something that is no plain tensor"),
                    "the operator runs as it is");
    return;
  }
  if (op.effects.is_random) has_random_ops_ = true;
  bool random = op.effects.is_random;
  bool constant = lifted || (!random && !cir::IsUninitialized(op) && AllConstant(op.operands));
  if (!constant && cir::HasDynamicShape(graph_.graph(), op)) {
    tracer_->Refuse("data-read", absl::StrCat(schema.name, " makes a tensor whose size depends on data"),
                    "use masks instead of selecting elements");
    return;
  }
  if (cir::IsUninitialized(op)) uninitialized_ = true;
  // What is made or written here is constant if everything that it is made from is.
  for (const auto& [tensor, value] : made) {
    size_t storage = graph_.graph().value(value).storage.index;
    if (storage >= storage_is_constant_.size()) storage_is_constant_.resize(storage + 1, false);
    bool view = false;
    for (const auto& [address, id] : operand_storages) view = view || id.index == storage;
    if (!view) storage_is_constant_[storage] = constant;
  }
  if (!constant) {
    for (size_t i = 0; i < op.operands.size(); ++i) {
      if ((op.effects.writes >> i & 1) == 0) continue;
      const auto* id = std::get_if<cir::ValueId>(&op.operands[i]);
      if (id == nullptr) continue;
      size_t storage = graph_.graph().value(*id).storage.index;
      if (storage < storage_is_constant_.size()) storage_is_constant_[storage] = false;
    }
  }
  graph_.AddOp(std::move(op));
  for (const auto& [tensor, value] : made) Register(tensor, value);
}

}  // namespace cuvil::agent
