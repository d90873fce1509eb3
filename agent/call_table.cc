#include "agent/call_table.h"

#include <cstring>
#include <string>
#include <string_view>
#include <unordered_map>

#include "absl/strings/str_cat.h"
#include "agent/cpython_compat.h"
#include "agent/object_layouts.h"
#include "agent/process_lifetime.h"
#include "agent/py_ref.h"

namespace cuvil::agent {
namespace {

struct Row {
  const char* module;
  const char* path;
  CallModel model;
  const char* reason = nullptr;
};

constexpr char kReadsData[] = "moves tensor data into Python";
constexpr char kOutside[] = "reads the outside world";

// The C functions that model code is seen to call, besides tensor functions and methods of builtin types. Names that
// the running versions lack are skipped.
constexpr Row kRows[] = {
    {"builtins", "getattr", CallModel::kGetAttr},
    {"builtins", "setattr", CallModel::kSetAttr},
    {"builtins", "delattr", CallModel::kDelAttr},
    {"builtins", "hasattr", CallModel::kHasAttr},
    {"builtins", "isinstance", CallModel::kIsInstance},
    {"builtins", "issubclass", CallModel::kIsSubclass},
    {"builtins", "iter", CallModel::kIter},
    {"builtins", "next", CallModel::kNext},
    {"builtins", "len", CallModel::kLen},
    {"builtins", "any", CallModel::kTruthAll},
    {"builtins", "all", CallModel::kTruthAll},
    {"builtins", "sum", CallModel::kReduce},
    {"builtins", "min", CallModel::kSorted},
    {"builtins", "max", CallModel::kSorted},
    {"builtins", "sorted", CallModel::kSorted},
    {"builtins", "id", CallModel::kId},
    {"builtins", "callable", CallModel::kCallable},
    {"builtins", "vars", CallModel::kVars},
    {"builtins", "repr", CallModel::kRepr},
    {"builtins", "ascii", CallModel::kRepr},
    {"builtins", "format", CallModel::kRepr},
    {"builtins", "abs", CallModel::kReduce},
    {"builtins", "round", CallModel::kReduce},
    {"builtins", "divmod", CallModel::kReduce},
    {"builtins", "pow", CallModel::kReduce},
    {"builtins", "chr", CallModel::kPure},
    {"builtins", "ord", CallModel::kPure},
    {"builtins", "hex", CallModel::kPure},
    {"builtins", "bin", CallModel::kPure},
    {"builtins", "oct", CallModel::kPure},
    {"builtins", "hash", CallModel::kReduce},
    {"builtins", "__import__", CallModel::kImport},
    {"builtins", "print", CallModel::kDenied, "prints"},
    {"builtins", "input", CallModel::kDenied, kOutside},
    {"builtins", "open", CallModel::kDenied, "opens a file"},
    {"builtins", "exec", CallModel::kDenied, "executes source text"},
    {"builtins", "eval", CallModel::kDenied, "evaluates source text"},
    {"builtins", "globals", CallModel::kDenied, "hands out a namespace"},
    {"builtins", "locals", CallModel::kDenied, "hands out a namespace"},
    {"_operator", "index", CallModel::kReduce},
    {"_operator", "add", CallModel::kReduce},
    {"_operator", "mul", CallModel::kReduce},
    {"_operator", "sub", CallModel::kReduce},
    {"_operator", "truediv", CallModel::kReduce},
    {"_operator", "floordiv", CallModel::kReduce},
    {"_operator", "mod", CallModel::kReduce},
    {"_operator", "neg", CallModel::kReduce},
    {"_operator", "lt", CallModel::kReduce},
    {"_operator", "le", CallModel::kReduce},
    {"_operator", "gt", CallModel::kReduce},
    {"_operator", "ge", CallModel::kReduce},
    {"_operator", "eq", CallModel::kReduce},
    {"_operator", "ne", CallModel::kReduce},
    {"_operator", "and_", CallModel::kReduce},
    {"_operator", "or_", CallModel::kReduce},
    {"_operator", "not_", CallModel::kReduce},
    {"_operator", "length_hint", CallModel::kReduce},
    {"_functools", "reduce", CallModel::kDenied, "calls a function that may be written in C"},
    {"_contextvars", "ContextVar.get", CallModel::kContextGet},
    {"_contextvars", "ContextVar.set", CallModel::kContextSet},
    {"_contextvars", "ContextVar.reset", CallModel::kContextReset},
    {"_abc", "_abc_instancecheck", CallModel::kAbcCheck},
    {"_abc", "_abc_subclasscheck", CallModel::kAbcCheck},
    {"sys", "getrecursionlimit", CallModel::kAmbient},
    {"sys", "intern", CallModel::kPure},
    {"sys", "is_finalizing", CallModel::kAmbient},
    {"sys", "exc_info", CallModel::kDenied, "looks at the exception being handled, maybe the caller's"},
    {"sys", "exception", CallModel::kDenied, "looks at the exception being handled, maybe the caller's"},
    {"sys", "_getframe", CallModel::kDenied, "looks at frames"},
    {"_thread", "get_ident", CallModel::kAmbient},
    {"_warnings", "warn", CallModel::kDenied, "issues a warning"},
    {"time", "time", CallModel::kDenied, kOutside},
    {"time", "perf_counter", CallModel::kDenied, kOutside},
    {"time", "monotonic", CallModel::kDenied, kOutside},
    {"time", "sleep", CallModel::kDenied, "sleeps"},
    {"posix", "getpid", CallModel::kDenied, kOutside},

    {"torch._C", "_is_tracing", CallModel::kAmbientShown},
    {"torch._C", "_get_tracing_state", CallModel::kAmbientShown},
    {"torch._C", "_has_torch_function", CallModel::kPure},
    {"torch._C", "_has_torch_function_unary", CallModel::kPure},
    {"torch._C", "_has_torch_function_variadic", CallModel::kPure},
    {"torch._C", "_log_api_usage_once", CallModel::kPure},
    {"torch._C", "_log_api_usage_metadata", CallModel::kPure},
    {"torch._C", "_get_cudnn_enabled", CallModel::kAmbient},
    {"torch._C", "_get_cudnn_benchmark", CallModel::kAmbient},
    {"torch._C", "_get_cudnn_deterministic", CallModel::kAmbient},
    {"torch._C", "_get_cudnn_allow_tf32", CallModel::kAmbient},
    {"torch._C", "_get_mkldnn_enabled", CallModel::kAmbient},
    {"torch._C", "_get_deterministic_algorithms", CallModel::kAmbient},
    {"torch._C", "_get_deterministic_algorithms_warn_only", CallModel::kAmbient},
    {"torch._C", "_get_flash_sdp_enabled", CallModel::kAmbient},
    {"torch._C", "_get_math_sdp_enabled", CallModel::kAmbient},
    {"torch._C", "_get_mem_efficient_sdp_enabled", CallModel::kAmbient},
    {"torch._C", "_get_cudnn_sdp_enabled", CallModel::kAmbient},
    {"torch._C", "_get_nested_int", CallModel::kDenied, "uses nested tensors"},
    {"torch._C", "_get_default_device", CallModel::kAmbient},
    {"torch._C", "get_default_dtype", CallModel::kAmbientShown},
    {"torch", "get_default_dtype", CallModel::kAmbientShown},
    {"torch", "is_grad_enabled", CallModel::kAmbientShown},
    {"torch", "is_inference_mode_enabled", CallModel::kAmbientShown},
    {"torch", "is_autocast_enabled", CallModel::kAmbient},
    {"torch", "is_autocast_cache_enabled", CallModel::kAmbient},
    {"torch", "get_autocast_dtype", CallModel::kAmbient},
    {"torch", "get_num_threads", CallModel::kAmbient},
    {"torch._C", "is_grad_enabled", CallModel::kAmbientShown},
    {"torch._C", "is_inference_mode_enabled", CallModel::kAmbientShown},
    {"torch._C", "is_autocast_enabled", CallModel::kAmbient},
    {"torch._C", "is_autocast_cache_enabled", CallModel::kAmbient},
    {"torch._C", "get_autocast_dtype", CallModel::kAmbient},
    {"torch._C", "_is_autocast_available", CallModel::kAmbient},
    {"torch._C", "_get_privateuse1_backend_name", CallModel::kAmbient},
    {"torch._C", "_is_torch_function_enabled", CallModel::kAmbient},
    {"torch._C", "_is_torch_function_mode_enabled", CallModel::kAmbient},
    {"torch._C", "_is_torch_function_all_disabled", CallModel::kAmbient},
    // Zero outside of dispatch modes, and a call inside of one is not traced; the recorder's own is no part of it.
    {"torch._C", "_len_torch_dispatch_stack", CallModel::kDispatchModes},
    {"torch._C", "_len_torch_function_stack", CallModel::kAmbientShown},
    {"torch._C", "_cuda_isCurrentStreamCapturing", CallModel::kAmbient},
    {"torch._C", "_cuda_getDeviceCount", CallModel::kAmbient},
    {"torch._C", "_are_functorch_transforms_active", CallModel::kAmbientShown},
    {"torch._C._functorch", "unwrap_if_dead", CallModel::kPure},
    {"torch._C", "_FunctionBase.apply", CallModel::kTensorOp},
    {"_thread", "RLock.acquire", CallModel::kLock},
    {"_thread", "RLock.release", CallModel::kUnlock},
    {"_thread", "RLock.__enter__", CallModel::kLock},
    {"_thread", "RLock.__exit__", CallModel::kUnlock},
    {"_thread", "lock.acquire", CallModel::kLock},
    {"_thread", "lock.release", CallModel::kUnlock},
    {"_thread", "lock.__enter__", CallModel::kLock},
    {"_thread", "lock.__exit__", CallModel::kUnlock},
    {"torch._C", "_is_alias_of", CallModel::kDenied, "compares storages"},
    {"torch._C", "_set_grad_enabled", CallModel::kAmbientSet},
    {"torch._C", "set_autocast_enabled", CallModel::kAmbientSet},
    {"torch._C", "set_autocast_dtype", CallModel::kAmbientSet},
    {"torch._C", "set_autocast_cache_enabled", CallModel::kAmbientSet},
    {"torch._C", "autocast_increment_nesting", CallModel::kAmbientSet},
    {"torch._C", "autocast_decrement_nesting", CallModel::kAmbientSet},
    {"torch._C", "clear_autocast_cache", CallModel::kAmbientSet},
    {"torch", "set_autocast_enabled", CallModel::kAmbientSet},
    {"torch", "set_autocast_dtype", CallModel::kAmbientSet},
    {"torch", "set_autocast_cache_enabled", CallModel::kAmbientSet},
    {"torch", "autocast_increment_nesting", CallModel::kAmbientSet},
    {"torch", "autocast_decrement_nesting", CallModel::kAmbientSet},
    {"torch", "clear_autocast_cache", CallModel::kAmbientSet},
    {"torch", "tensor", CallModel::kTensorMake},
    {"torch", "as_tensor", CallModel::kTensorMake},
    {"torch", "asarray", CallModel::kTensorMake},
    {"torch", "_from_blob", CallModel::kDenied, "wraps foreign memory"},
    {"torch", "scalar_tensor", CallModel::kTensorOp},
    {"torch", "from_numpy", CallModel::kDenied, "wraps memory that Python can write"},
    {"torch", "frombuffer", CallModel::kDenied, "wraps memory that Python can write"},
    {"torch", "get_device", CallModel::kPure},
    {"torch", "promote_types", CallModel::kPure},
    {"torch", "result_type", CallModel::kPure},
    {"torch", "can_cast", CallModel::kPure},
    {"torch", "is_tensor", CallModel::kPure},
};

// Methods of torch.Tensor that are no operators, or show less as operators than they do.
constexpr Row kTensorMethods[] = {
    {"", "numpy", CallModel::kDenied, kReadsData},
    {"", "tolist", CallModel::kDenied, kReadsData},
    {"", "item", CallModel::kDenied, kReadsData},
    {"", "__bool__", CallModel::kDenied, kReadsData},
    {"", "__int__", CallModel::kDenied, kReadsData},
    {"", "__float__", CallModel::kDenied, kReadsData},
    {"", "__complex__", CallModel::kDenied, kReadsData},
    {"", "__index__", CallModel::kDenied, kReadsData},
    {"", "nonzero", CallModel::kDenied, "makes a tensor whose size depends on data"},
    {"", "equal", CallModel::kDenied, kReadsData},
    {"", "allclose", CallModel::kDenied, kReadsData},
    {"", "is_nonzero", CallModel::kDenied, kReadsData},
    {"", "data_ptr", CallModel::kDenied, "reads the address of a tensor's data"},
    {"", "const_data_ptr", CallModel::kDenied, "reads the address of a tensor's data"},
    {"", "mutable_data_ptr", CallModel::kDenied, "reads the address of a tensor's data"},
    {"", "storage_offset", CallModel::kDenied, "reads where a view starts in its storage"},
    {"", "untyped_storage", CallModel::kDenied, "hands out a tensor's storage"},
    {"", "_typed_storage", CallModel::kDenied, "hands out a tensor's storage"},
    {"", "storage_type", CallModel::kDenied, "hands out a tensor's storage"},
    {"", "new_tensor", CallModel::kTensorMake},
    {"", "requires_grad_", CallModel::kDenied, "changes whether a tensor requires grad"},
    {"", "retain_grad", CallModel::kDenied, "uses autograd"},
    {"", "record_stream", CallModel::kDenied, "changes a tensor's stream bookkeeping"},
    {"", "apply_", CallModel::kDenied, "calls Python for each element"},
    {"", "map_", CallModel::kDenied, "calls Python for each element"},
    {"", "map2_", CallModel::kDenied, "calls Python for each element"},
    {"", "set_", CallModel::kDenied, "replaces a tensor's storage"},
    {"", "resize_", CallModel::kDenied, "changes a tensor's size in place"},
    {"", "resize_as_", CallModel::kDenied, "changes a tensor's size in place"},
    {"", "is_inference", CallModel::kPure},
    {"", "share_memory_", CallModel::kDenied, "moves a tensor's storage"},
    {"", "pin_memory", CallModel::kDenied, "moves a tensor to pinned memory"},
    {"", "is_pinned", CallModel::kDenied, "looks at a tensor's storage"},
    {"", "is_shared", CallModel::kDenied, "looks at a tensor's storage"},
    {"", "_make_subclass", CallModel::kDenied, "makes an alias of a tensor"},
    {"", "as_subclass", CallModel::kDenied, "makes an alias of a tensor"},
    {"", "_make_wrapper_subclass", CallModel::kDenied, "makes a tensor subclass"},
    {"", "as_strided", CallModel::kTensorOp},
    {"", "is_set_to", CallModel::kDenied, "compares storages"},
    {"", "_is_view", CallModel::kDenied, "looks at how a tensor was made"},
    {"", "type", CallModel::kTensorOp},
    {"", "new", CallModel::kTensorMake},
    {"", "_fix_weakref", CallModel::kDenied, "changes reference bookkeeping"},
    {"", "_use_count", CallModel::kDenied, "counts references"},
    {"", "_view_func", CallModel::kDenied, "replays a view"},
    {"", "_view_func_unsafe", CallModel::kDenied, "replays a view"},
    {"", "_rev_view_func_unsafe", CallModel::kDenied, "replays a view"},
};

struct KeyHash {
  size_t operator()(const void* key) const { return reinterpret_cast<uintptr_t>(key) >> 4; }
};
using Table = std::unordered_map<const void*, CallEntry, KeyHash>;

Table& MutableTable() {
  static ProcessLifetime<Table> table;
  return *table;
}
TorchTypes& MutableTypes() {
  static ProcessLifetime<TorchTypes> types;
  return *types;
}

OwnedRef Resolve(const char* module_name, const char* path) {
  OwnedRef object = OwnedRef::Steal(PyImport_ImportModule(module_name));
  std::string_view rest = path;
  while (object && !rest.empty()) {
    size_t dot = rest.find('.');
    std::string name(rest.substr(0, dot));
    rest = dot == std::string_view::npos ? std::string_view() : rest.substr(dot + 1);
    object = OwnedRef::Steal(PyObject_GetAttrString(object.get(), name.c_str()));
  }
  if (!object) PyErr_Clear();  // a name that this version lacks has no entry
  return object;
}

void Add(PyObject* callable, CallEntry entry) {
  const void* key = CImplementation(callable);
  if (key != nullptr) MutableTable()[key] = entry;
}

void AddMissing(PyObject* callable, CallEntry entry) {
  const void* key = CImplementation(callable);
  if (key != nullptr) MutableTable().try_emplace(key, entry);
}

const char* Intern(PyObject* name) {
  // Attribute names are interned for the life of the type; keep them for ever like the table itself.
  Py_INCREF(name);
  const char* text = PyUnicode_AsUTF8(name);
  if (text == nullptr) PyErr_Clear();
  return text == nullptr ? "" : text;
}

// Every C function in a namespace gets `model` unless it has one.
void AddNamespace(PyObject* dict, CallModel model, PyTypeObject* owner) {
  PyObject* key;
  PyObject* value;
  Py_ssize_t position = 0;
  while (PyDict_Next(dict, &position, &key, &value)) {
    if (!PyUnicode_Check(key)) continue;
    CallEntry entry{model, nullptr, owner, Intern(key)};
    if (Py_TYPE(value) == &PyStaticMethod_Type) {
      OwnedRef function = OwnedRef::Steal(PyObject_GetAttrString(value, "__func__"));
      if (function) AddMissing(function.get(), entry);
      PyErr_Clear();
      continue;
    }
    AddMissing(value, entry);
  }
}

}  // namespace

const void* CImplementation(PyObject* callable) {
  PyTypeObject* type = Py_TYPE(callable);
  if (PyCFunction_Check(callable)) return reinterpret_cast<PyCFunctionObject*>(callable)->m_ml;
  if (type == &PyMethodDescr_Type || type == &PyClassMethodDescr_Type) {
    return reinterpret_cast<PyMethodDescrObject*>(callable)->d_method;
  }
  if (type == &PyWrapperDescr_Type) return reinterpret_cast<PyWrapperDescrObject*>(callable)->d_wrapped;
  if (type == Types().method_wrapper) {
    return reinterpret_cast<BoundSlotWrapper*>(callable)->descriptor->d_wrapped;
  }
  return nullptr;
}

CallEntry FindCallModel(const void* implementation) {
  const Table& table = MutableTable();
  auto found = table.find(implementation);
  return found == table.end() ? CallEntry() : found->second;
}

const TorchTypes& Types() { return MutableTypes(); }

PyTypeObject* SolidBase(PyTypeObject* type) {
  // Classes made by Python share one deallocator; torch.nn.Module is such a class.
  const destructor python_class = Types().module->tp_dealloc;
  while (type->tp_base != nullptr && type->tp_dealloc == python_class) type = type->tp_base;
  return type;
}

absl::Status BuildCallTable() {
  if (!MutableTable().empty()) return absl::OkStatus();
  TorchTypes types;
  struct TypeRow {
    const char* module;
    const char* path;
    PyTypeObject** slot;
  };
  const TypeRow type_rows[] = {
      {"torch", "Tensor", &types.tensor},
      {"torch.nn", "Parameter", &types.parameter},
      {"torch.nn", "Module", &types.module},
      {"torch.jit", "ScriptModule", &types.script_module},
      {"torch", "dtype", &types.dtype},
      {"torch", "device", &types.device},
      {"torch", "layout", &types.layout},
      {"torch", "memory_format", &types.memory_format},
      {"torch", "Size", &types.size},
      {"torch", "Generator", &types.generator},
      {"functools", "_lru_cache_wrapper", &types.lru_cache},
      {"functools", "partial", &types.partial},
      {"collections", "deque", &types.deque},
      {"collections", "defaultdict", &types.defaultdict},
      {"torch", "finfo", &types.finfo},
      {"torch", "iinfo", &types.iinfo},
  };
  for (const TypeRow& row : type_rows) {
    OwnedRef type = Resolve(row.module, row.path);
    if (!type || !PyType_Check(type.get())) {
      return absl::UnavailableError(absl::StrCat(row.module, ".", row.path, " is missing; install torch >= 2.10"));
    }
    *row.slot = reinterpret_cast<PyTypeObject*>(type.release());  // immortal with the table
  }
  OwnedRef bound = OwnedRef::Steal(PyObject_GetAttrString(Py_None, "__str__"));
  if (!bound) return absl::InternalError("None has no __str__");
  types.method_wrapper = Py_TYPE(bound.get());
  MutableTypes() = types;

  // Slot wrappers of `object`: the generic attribute protocol spelled out, as in super().__setattr__(…).
  const Row object_rows[] = {
      {"builtins", "object.__getattribute__", CallModel::kObjectGetAttribute},
      {"builtins", "object.__setattr__", CallModel::kObjectSetAttr},
      {"builtins", "object.__delattr__", CallModel::kObjectDelAttr},
      {"builtins", "object.__new__", CallModel::kObjectNew},
      {"builtins", "object.__init__", CallModel::kObjectInit},
      {"builtins", "object.__eq__", CallModel::kPure},
      {"builtins", "object.__ne__", CallModel::kPure},
      {"builtins", "object.__hash__", CallModel::kPure},
      {"builtins", "object.__init_subclass__", CallModel::kPure},
      {"builtins", "type.__call__", CallModel::kTypeCall},
      {"builtins", "type.__instancecheck__", CallModel::kIsInstance},
      {"builtins", "type.__subclasscheck__", CallModel::kIsSubclass},
  };
  for (const Row& row : object_rows) {
    OwnedRef object = Resolve(row.module, row.path);
    const char* dot = std::strchr(row.path, '.');
    if (object) Add(object.get(), {row.model, row.reason, nullptr, dot == nullptr ? row.path : dot + 1});
  }
  for (const Row& row : kRows) {
    OwnedRef object = Resolve(row.module, row.path);
    if (object) AddMissing(object.get(), {row.model, row.reason, nullptr, row.path});
  }
  OwnedRef tensor_base = Resolve("torch._C", "TensorBase");
  if (!tensor_base) return absl::UnavailableError("torch._C.TensorBase is missing; install torch >= 2.10");
  for (const Row& row : kTensorMethods) {
    OwnedRef object = OwnedRef::Steal(PyObject_GetAttrString(tensor_base.get(), row.path));
    if (object) AddMissing(object.get(), {row.model, row.reason, Types().tensor, row.path});
    PyErr_Clear();
  }
  for (const char* path : {"nonzero", "equal", "allclose", "is_nonzero"}) {
    OwnedRef object = Resolve("torch._C._VariableFunctions", path);
    if (!object) object = Resolve("torch", path);
    if (object) AddMissing(object.get(), {CallModel::kTensorOp, nullptr, nullptr, path});
  }
  AddNamespace(TypeNamespace(reinterpret_cast<PyTypeObject*>(tensor_base.get())), CallModel::kTensorOp, Types().tensor);
  OwnedRef functions = Resolve("torch._C", "_VariableFunctionsClass");
  if (functions) {
    AddNamespace(TypeNamespace(reinterpret_cast<PyTypeObject*>(functions.get())), CallModel::kTensorOp, nullptr);
  }
  for (const char* name : {"_nn", "_linalg", "_fft", "_special", "_sparse", "_nested"}) {
    OwnedRef module = Resolve("torch._C", name);
    if (module && PyModule_Check(module.get())) {
      AddNamespace(PyModule_GetDict(module.get()), CallModel::kTensorOp, nullptr);
    }
  }
  OwnedRef math = OwnedRef::Steal(PyImport_ImportModule("math"));
  if (math) AddNamespace(PyModule_GetDict(math.get()), CallModel::kReduce, nullptr);

  OwnedRef odict = Resolve("collections", "OrderedDict");
  PyTypeObject* containers[] = {
      &PyList_Type,       &PyDict_Type,        &PySet_Type,
      &PyFrozenSet_Type,  &PyTuple_Type,       &PyUnicode_Type,
      &PyLong_Type,       &PyFloat_Type,       &PyBool_Type,
      &PyComplex_Type,    &PyBytes_Type,       &PyRange_Type,
      &PySlice_Type,      &PyODict_Type,       &PyDictItems_Type,
      &PyDictKeys_Type,   &PyDictValues_Type,  &PyODictItems_Type,
      &PyODictKeys_Type,  &PyODictValues_Type, &PyDictProxy_Type,
      &PyBaseObject_Type, Types().size,        Types().dtype,
      Types().device,     Types().deque,       Types().defaultdict,
      &PyGen_Type,        &PyCoro_Type,        reinterpret_cast<PyTypeObject*>(PyExc_BaseException)};
  for (PyTypeObject* type : containers) AddNamespace(TypeNamespace(type), CallModel::kContainerMethod, type);
  const char* pure_types[][2] = {{"re", "Pattern"}, {"re", "Match"}, {"functools", "partial"}};
  for (auto& row : pure_types) {
    OwnedRef type = Resolve(row[0], row[1]);
    if (type) AddNamespace(TypeNamespace(reinterpret_cast<PyTypeObject*>(type.get())), CallModel::kPure, nullptr);
  }
  PyErr_Clear();
  return absl::OkStatus();
}

}  // namespace cuvil::agent
