#include "agent/plan_debug.h"

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "agent/boundary.h"
#include "agent/py_ref.h"
#include "agent/tensor_bridge.h"
#include "jit/cir/op_traits.h"
#include "jit/cir/schema.h"
#include "jit/cir/text.h"
#include "jit/cir/verifier.h"
#include "scheduler/torch/torch_api.h"

namespace cuvil::agent {
namespace {

OwnedRef ToPython(const std::string& text) {
  return OwnedRef::Steal(PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size())));
}

absl::StatusOr<std::string> TextArgument(PyObject* argument) {
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(argument, &size);
  if (text == nullptr) return absl::InvalidArgumentError("a str is expected");
  return std::string(text, static_cast<size_t>(size));
}

// The boundary of this process, made at first use.
absl::StatusOr<std::shared_ptr<const torch_abi::TorchApi>> LoadedApi() {
  static const auto api = torch_abi::TorchApi::Load();
  return api;
}

absl::StatusOr<const TensorBridge*> CalibratedBridge() {
  static const auto bridge = TensorBridge::Calibrate();
  if (!bridge.ok()) return bridge.status();
  return &*bridge;
}

// _cir_roundtrip(text) -> text as CIR prints it; ValueError if it does not parse or verify.
PyObject* CirRoundtrip(PyObject*, PyObject* argument) noexcept {
  return Boundary([&]() -> absl::StatusOr<OwnedRef> {
    const auto text = TextArgument(argument);
    if (!text.ok()) return text.status();
    const auto graph = cir::Parse(*text);
    if (!graph.ok()) return graph.status();
    if (absl::Status status = cir::Verify(*graph); !status.ok()) return status;
    return ToPython(cir::Print(*graph));
  });
}

// _cir_schema(text) -> {"allowed": None or the reason why not, "writes": int, "random": bool, "dynamic": bool,
// "uninitialized": bool, "kinds": [str]}. The operands are the schema's defaults, with True and 0.5 for flags and
// floats that have none; NotImplementedError for a type without a kind.
PyObject* CirSchema(PyObject*, PyObject* argument) noexcept {
  return Boundary([&]() -> absl::StatusOr<OwnedRef> {
    const auto text = TextArgument(argument);
    if (!text.ok()) return text.status();
    const auto schema = cir::ParseSchema(*text);
    if (!schema.ok()) return schema.status();
    cir::Graph graph;
    cir::Op op;
    op.name = schema->name;
    op.overload = schema->overload;
    OwnedRef kinds = OwnedRef::Steal(PyList_New(0));
    for (const cir::SchemaArgument& a : schema->arguments) {
      op.kinds.push_back(a.kind);
      cir::Attr attr = a.default_value.value_or(cir::Attr());
      if (a.kind == cir::ArgKind::kFloat) attr = 0.5;
      if (a.kind == cir::ArgKind::kBool || a.kind == cir::ArgKind::kOptionalBool) attr = true;
      op.operands.emplace_back(std::move(attr));
      const OwnedRef name = ToPython(std::string(cir::ArgKindName(a.kind)));
      if (!kinds || !name || PyList_Append(kinds.get(), name.get()) < 0) return OwnedRef();
    }
    const absl::Status allowed = cir::CheckAllowed(*schema);
    const std::string reason(allowed.message());
    const cir::Effects effects = cir::DeriveEffects(*schema, op);
    return OwnedRef::Steal(Py_BuildValue(
        "{s:z,s:K,s:O,s:O,s:O,s:O}", "allowed", allowed.ok() ? nullptr : reason.c_str(), "writes",
        static_cast<unsigned long long>(schema->written_arguments() | effects.writes),  // NOLINT: Py_BuildValue's type
        "random", effects.is_random ? Py_True : Py_False, "dynamic",
        cir::HasDynamicShape(graph, op) ? Py_True : Py_False, "uninitialized",
        cir::IsUninitialized(op) ? Py_True : Py_False, "kinds", kinds.get()));
  });
}

// _torch_boundary() -> {"report": str, features...}; RuntimeError if the boundary cannot be used.
PyObject* TorchBoundary(PyObject*, PyObject*) noexcept {
  return Boundary([&]() -> absl::StatusOr<OwnedRef> {
    const auto api = LoadedApi();
    if (!api.ok()) return api.status();
    const auto bridge = CalibratedBridge();
    if (!bridge.ok()) return bridge.status();
    const torch_abi::AbiFeatures& abi = (*api)->abi();
    const auto flag = [](bool b) { return b ? Py_True : Py_False; };
    return OwnedRef::Steal(Py_BuildValue(
        "{s:s,s:O,s:O,s:O,s:O,s:O,s:O,s:O}", "report", (*api)->abi_report().c_str(), "unboxed", flag(abi.unboxed),
        "scalars", flag(abi.scalars), "symints", flag(abi.symints), "tensor_lists", flag(abi.tensor_lists), "strings",
        flag(abi.strings), "wrapped_numbers", flag(abi.wrapped_numbers), "exceptions", flag(abi.exceptions)));
  });
}

// _tensor_meta(tensor) -> (sizes, strides, offset, dtype, device, requires_grad, is_inference, keys, data, bytes,
// version or -1), all by direct loads.
PyObject* ReadTensorMeta(PyObject*, PyObject* argument) noexcept {
  return Boundary([&]() -> absl::StatusOr<OwnedRef> {
    const auto bridge = CalibratedBridge();
    if (!bridge.ok()) return bridge.status();
    if (!(*bridge)->IsTensor(argument)) return absl::InvalidArgumentError("a tensor is expected");
    const torch_abi::TensorRef tensor = (*bridge)->FromPyObject(argument);
    const TensorMeta meta = (*bridge)->Read(tensor);
    const auto to_list = [](const std::vector<int64_t>& values) {
      OwnedRef list = OwnedRef::Steal(PyList_New(0));
      for (const int64_t value : values) {
        const OwnedRef item = OwnedRef::Steal(PyLong_FromLongLong(value));
        if (!list || !item || PyList_Append(list.get(), item.get()) < 0) return OwnedRef();
      }
      return list;
    };
    const OwnedRef sizes = to_list(meta.sizes);
    const OwnedRef strides = to_list(meta.strides);
    if (!sizes || !strides) return OwnedRef();
    uint32_t version = 0;
    const bool has_version = (*bridge)->Version(tensor, &version);
    const std::string dtype(cir::DTypeName(meta.dtype));
    const std::string device = cir::DeviceName({meta.device, meta.device_index});
    return OwnedRef::Steal(Py_BuildValue(
        "(OOLssOOKKnL)", sizes.get(), strides.get(), static_cast<long long>(meta.storage_offset),  // NOLINT
        dtype.c_str(), device.c_str(), meta.requires_grad ? Py_True : Py_False, meta.is_inference ? Py_True : Py_False,
        static_cast<unsigned long long>(meta.key_set),                                          // NOLINT: Py_BuildValue
        static_cast<unsigned long long>(reinterpret_cast<uintptr_t>((*bridge)->Data(tensor))),  // NOLINT
        static_cast<Py_ssize_t>((*bridge)->StorageBytes(tensor)),
        has_version ? static_cast<long long>(version) : -1LL));  // NOLINT
  });
}

PyMethodDef kMethods[] = {
    {"_cir_roundtrip", CirRoundtrip, METH_O, nullptr},
    {"_cir_schema", CirSchema, METH_O, nullptr},
    {"_torch_boundary", TorchBoundary, METH_NOARGS, nullptr},
    {"_tensor_meta", ReadTensorMeta, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

int RegisterPlanDebug(PyObject* module) noexcept { return PyModule_AddFunctions(module, kMethods); }

}  // namespace cuvil::agent
