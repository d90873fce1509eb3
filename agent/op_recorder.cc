#include "agent/op_recorder.h"

#include <string_view>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "agent/attr_conversion.h"
#include "agent/call_table.h"
#include "agent/dispatch_keys.h"
#include "agent/frame_hook.h"
#include "agent/process_lifetime.h"
#include "agent/py_ref.h"
#include "agent/torch_state.h"
#include "jit/cir/op_traits.h"
#include "jit/cir/reproducible.h"
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
constexpr char kAdviceOperator[] = "use another operator, or give it a module of its own: those beside it are planned";
constexpr char kAdviceOrigin[] = "make tensors with torch functions, outside of the model if they never change";

struct TorchObjects {
  OwnedRef mode;  // the instance that is pushed
  OwnedRef push;
  OwnedRef pop;
  OwnedRef clone;  // torch.ops.aten.clone.default
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

bool IsTensorListKind(cir::ArgKind kind) {
  return kind == cir::ArgKind::kTensorList || kind == cir::ArgKind::kOptionalTensorElementList ||
         kind == cir::ArgKind::kOptionalTensorList;
}

}  // namespace

const TensorBridge& Bridge() { return *T().bridge; }

bool IsPlainTensor(const TensorMeta& meta) { return DispatchKeys::IsPlainTensor(meta.key_set); }

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
  OwnedRef ops = get(torch, "ops");
  OwnedRef aten = get(ops, "aten");
  OwnedRef clone = get(aten, "clone");
  t.clone = get(clone, "default");
  if (PyErr_Occurred() || !mode_type) {
    PyErr_Clear();
    return absl::UnavailableError("this torch lacks a function that tracing needs; install torch >= 2.10");
  }
  if (absl::Status status = DispatchKeys::Initialize(*bridge); !status.ok()) return status;
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
  if (absl::Status status = AttrConversion::Initialize(torch.get()); !status.ok()) return status;
  t.bridge = new TensorBridge(*std::move(bridge));  // NOLINT: lives as long as the process
  return absl::OkStatus();
}

OpRecorder::OpRecorder(Tracer* tracer) : tracer_(tracer) { tracer->set_constants(this); }

OpRecorder::~OpRecorder() {
  if (started_) Stop();
  for (auto& [impl, tensor] : tensors_) Py_XDECREF(tensor.reference);
}

bool OpRecorder::Start() {
  TorchObjects& t = T();
  mode_bits_ = TorchStateReader::ModeBits();
  OwnedRef pushed = OwnedRef::Steal(PyObject_CallOneArg(t.push.get(), t.mode.get()));
  if (!pushed) return false;
  started_ = true;
  g_recorder = this;
  if (!skipped_keys_.Skip()) {
    ErrorScope errors;
    Stop();
    return false;
  }
  if (NativeTorchStateReader::available()) recording_state_ = NativeTorchStateReader::Read();
  return true;
}

void OpRecorder::HideMode() const {
  if (!started_ || hidden_ || withdrawn_) return;
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

void OpRecorder::WithdrawMode() const {
  if (!started_ || withdrawn_ || !NativeTorchStateReader::available()) return;
  ShowMode();
  // What the model has entered since then (another mode, inference mode) restores on its way out what it found, which
  // is what the recorder had set. Grad mode and autocast leave everything else alone.
  NativeTorchState now = NativeTorchStateReader::Read();
  NativeTorchState then = recording_state_;
  now.grad_enabled = then.grad_enabled;
  for (NativeTorchState* state : {&now, &then}) state->excluded_keys |= DispatchKeys::autocast_keys();
  if (now != then) return;
  ErrorScope errors;
  OwnedRef popped = OwnedRef::Steal(PyObject_CallOneArg(T().pop.get(), Py_None));
  PyErr_Clear();
  if (!popped) return;
  withdrawn_ = true;
  skipped_keys_.Restore();
}

void OpRecorder::Stop() {
  if (!started_) return;
  ShowMode();
  started_ = false;
  ErrorScope errors;
  skipped_keys_.Restore();
  g_recorder = nullptr;
  if (withdrawn_) return;
  OwnedRef popped = OwnedRef::Steal(PyObject_CallOneArg(T().pop.get(), Py_None));
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

void OpRecorder::ReadMetadata(PyObject* tensor) {
  if (!tracer_->heap().HasSeen(tensor) || HasOrigin(tensor, cir::Origin::kResult)) return;
  auto known = metadata_.find(tensor);
  if (known == metadata_.end()) {
    metadata_.emplace(tensor, Bridge().Read(Bridge().FromPyObject(tensor)));
  } else if (!Bridge().SameMeta(Bridge().FromPyObject(tensor), known->second)) {
    tracer_->Refuse("concurrent-change", "the shape or type of a tensor changed during the trace",
                    "another thread changed it; the next call is traced anew", true);
  }
}

const TensorMeta* OpRecorder::MetadataOf(PyObject* tensor) const {
  const auto found = metadata_.find(tensor);
  return found == metadata_.end() ? nullptr : &found->second;
}

bool OpRecorder::ToValue(PyObject* tensor, cir::ValueId* value) {
  last_tensors_.push_back(tensor);
  if (std::optional<cir::ValueId> known = Find(tensor)) {
    *value = *known;
    ReadMetadata(tensor);
    return true;
  }
  if (!Bridge().IsExactTensor(tensor) && !Bridge().IsExactParameter(tensor)) {
    tracer_->Refuse("tensor-subclass", absl::StrCat("uses a tensor subclass, ", Py_TYPE(tensor)->tp_name),
                    "use plain tensors inside of the model; modules that see nothing else are planned on their own");
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
                    "make it plain before the call: resolve_conj(), resolve_neg(), to_dense(), dequantize()");
    return false;
  }
  *value = graph_.AddCaptured(meta.ToType(), StorageOf(tensor));
  captured_.push_back(tensor);
  ReadMetadata(tensor);
  tracer_->heap().Hold(tensor);
  Register(tensor, *value);
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
      if (!AttrConversion::FromPython(items[i], &attrs[i])) return false;
    }
    cir::Attr list;
    if (!AttrConversion::FromItems(std::move(attrs), kind, &list)) return false;
    *operand = std::move(list);
    return true;
  }
  if (PyObject_TypeCheck(object, Types().generator)) {
    tracer_->Refuse("generator", "draws from a torch.Generator object of its own",
                    "use the default generator (torch.manual_seed) inside of models");
    return false;
  }
  cir::Attr attr;
  if (!AttrConversion::FromPython(object, &attr)) return false;
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
  uint32_t mode_bits = DispatchKeys::ModeBitsOfCaller();
  if (!tracer_->refused()) {
    ErrorScope errors;
    if (mode_bits != mode_bits_) {
      tracer_->Refuse("mode-change", "operators run under another grad mode or autocast state than the call started in",
                      "set the mode around the whole call");
    } else {
      Record(*overload, args, kwargs, &operands);
    }
  }
  // What the dispatcher did before it came here (autocast) does nothing the second time. Torch's own Python functions
  // make new tensors without tracking their versions.
  PyObject* result =
      DispatchKeys::CallAsEager(overload->callable.get(), args, kwargs, mode_bits, IsUntrackedFactory(*overload));
  if (tracer_->refused()) return result;
  if (std::exchange(skip_, false) && result != nullptr) return result;
  if (result == nullptr) {
    ErrorScope errors;
    tracer_->Refuse("operator-error", absl::StrCat(overload->schema.name, " raised an exception"),
                    "call it only where it does not raise; modules that do not call it are planned on their own");
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
                    data ? kAdviceData : kAdviceOperator);
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
                        "please report this line");
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
  for (const cir::ValueId id : cir::WrittenValues(op)) check(id);
}

void OpRecorder::RecordResult(const Overload& overload, std::vector<cir::Operand> operands, PyObject* result) {
  const Overload* described = &overload;
  bool lifted = overload.is_lift;
  if (lifted) {
    // A constant of the program. It may be written to later in the call, so every run starts from a fresh copy.
    described = Describe(T().clone.get());
    if (!Bridge().IsExactTensor(result)) {
      tracer_->Refuse("operator", "a constant is no plain tensor", "please report this line");
      return;
    }
    OwnedRef copy = OwnedRef::Steal(PyObject_CallMethod(result, "clone", nullptr));
    if (!copy) {
      PyErr_Clear();
      tracer_->Refuse("operator", "a constant cannot be copied", "please report this line");
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
                    kAdviceOperator);
    return;
  }
  if (op.effects.is_random) has_random_ops_ = true;
  bool random = op.effects.is_random;
  // Python may read such a tensor while it is traced: it must be the same in every call.
  bool constant = lifted || (!random && !cir::IsUninitialized(op) && AllConstant(op.operands) &&
                             cir::IsReproducible(graph_.graph(), op));
  if (!constant && cir::HasDynamicShape(graph_.graph(), op)) {
    tracer_->Refuse("data-read", absl::StrCat(schema.name, " makes a tensor whose size depends on data"),
                    "use masks instead of selecting elements");
    return;
  }
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
