#include "agent/plan_debug.h"

#include <chrono>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "agent/boundary.h"
#include "agent/cuda_state.h"
#include "agent/gil.h"
#include "agent/hidden_views.h"
#include "agent/lifecycle/record.h"
#include "agent/py_ref.h"
#include "agent/python_steps.h"
#include "agent/tensor_bridge.h"
#include "jit/cir/op_traits.h"
#include "jit/cir/schema.h"
#include "jit/cir/text.h"
#include "jit/cir/verifier.h"
#include "scheduler/execution_plan.h"
#include "scheduler/graph_split.h"
#include "scheduler/part_sequence.h"
#include "scheduler/plan_executor.h"
#include "scheduler/program_cut.h"
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

constexpr char kPlanCapsule[] = "cuvil.plan";
using PlanPointer = std::shared_ptr<const scheduler::ExecutionPlan>;

void DestroyPlan(PyObject* capsule) {
  const auto plan =
      std::unique_ptr<PlanPointer>(static_cast<PlanPointer*>(PyCapsule_GetPointer(capsule, kPlanCapsule)));
}

absl::StatusOr<PlanPointer> PlanArgument(PyObject* argument) {
  if (PyCapsule_IsValid(argument, kPlanCapsule) == 0) return absl::InvalidArgumentError("a plan is expected");
  return *static_cast<PlanPointer*>(PyCapsule_GetPointer(argument, kPlanCapsule));
}

// Borrows from a list or tuple of tensors.
absl::StatusOr<std::vector<torch_abi::TensorRef>> TensorArguments(const TensorBridge& bridge, PyObject* sequence) {
  if (PyList_Check(sequence) == 0 && PyTuple_Check(sequence) == 0) {
    return absl::InvalidArgumentError("a list or tuple of tensors is expected");
  }
  std::vector<torch_abi::TensorRef> tensors;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(sequence); ++i) {
    PyObject* item = PySequence_Fast_GET_ITEM(sequence, i);
    if (!bridge.IsTensor(item)) return absl::InvalidArgumentError("a list or tuple of tensors is expected");
    tensors.push_back(bridge.FromPyObject(item));
  }
  return tensors;
}

// _plan_build(cir_text, constants, unboxed, fold) -> plan
PyObject* PlanBuild(PyObject*, PyObject* arguments) noexcept {
  return Boundary([&]() -> absl::StatusOr<OwnedRef> {
    const char* text = nullptr;
    PyObject* constants = nullptr;
    int unboxed = 1;
    int fold = 1;
    if (PyArg_ParseTuple(arguments, "sO|pp", &text, &constants, &unboxed, &fold) == 0) return OwnedRef();
    const auto api = LoadedApi();
    if (!api.ok()) return api.status();
    const auto bridge = CalibratedBridge();
    if (!bridge.ok()) return bridge.status();
    auto graph = cir::Parse(text);
    if (!graph.ok()) return graph.status();
    const auto tensors = TensorArguments(**bridge, constants);
    if (!tensors.ok()) return tensors.status();
    PythonSteps steps(*bridge, *api);
    scheduler::BuildOptions options;
    for (const torch_abi::TensorRef tensor : *tensors) options.constants.push_back((*api)->NewReference(tensor));
    options.materializer = &steps;
    options.allow_unboxed = unboxed != 0;
    options.fold_constants = fold != 0;
    auto plan = scheduler::ExecutionPlan::Build(*std::move(graph), *api, std::move(options));
    if (!plan.ok()) return plan.status();
    auto holder = std::make_unique<PlanPointer>(*std::move(plan));
    OwnedRef capsule = OwnedRef::Steal(PyCapsule_New(holder.get(), kPlanCapsule, DestroyPlan));
    if (capsule) holder.release();  // NOLINT(bugprone-unused-return-value): the capsule owns it
    return capsule;
  });
}

// _plan_run(plan, inputs, captured, count=1) -> (outputs of the last run, ns per run)
PyObject* PlanRun(PyObject*, PyObject* arguments) noexcept {
  return Boundary([&]() -> absl::StatusOr<OwnedRef> {
    PyObject* capsule = nullptr;
    PyObject* input_list = nullptr;
    PyObject* captured_list = nullptr;
    long long count = 1;  // NOLINT: PyArg_ParseTuple's type
    if (PyArg_ParseTuple(arguments, "OOO|L", &capsule, &input_list, &captured_list, &count) == 0) return OwnedRef();
    const auto api = LoadedApi();
    if (!api.ok()) return api.status();
    const auto bridge = CalibratedBridge();
    if (!bridge.ok()) return bridge.status();
    const auto plan = PlanArgument(capsule);
    if (!plan.ok()) return plan.status();
    const auto inputs = TensorArguments(**bridge, input_list);
    if (!inputs.ok()) return inputs.status();
    const auto captured = TensorArguments(**bridge, captured_list);
    if (!captured.ok()) return captured.status();

    PythonSteps steps(*bridge, *api);
    std::vector<torch_abi::OwnedTensor> outputs;
    absl::Status status;
    double ns = 0;
    {
      AssertGilHeld();
      const GilRelease released;
      const auto start = std::chrono::steady_clock::now();
      for (long long i = 0; i < count && status.ok(); ++i) {  // NOLINT
        status = scheduler::PlanExecutor::Run(**plan, *inputs, *captured, &outputs, &steps);
      }
      const std::chrono::duration<double, std::nano> elapsed = std::chrono::steady_clock::now() - start;
      ns = elapsed.count() / static_cast<double>(count);
    }
    if (!status.ok()) return status;
    const OwnedRef list = OwnedRef::Steal(PyList_New(0));
    for (torch_abi::OwnedTensor& output : outputs) {
      const OwnedRef tensor = OwnedRef::Steal((*bridge)->ToPyObject(std::move(output)));
      if (!list || !tensor || PyList_Append(list.get(), tensor.get()) < 0) return OwnedRef();
    }
    return OwnedRef::Steal(Py_BuildValue("(Od)", list.get(), ns));
  });
}

// _plan_describe(plan) -> {"dump": str, "steps": int, "unboxed": int, ..., "arena": int, "separate": int}
PyObject* PlanDescribe(PyObject*, PyObject* argument) noexcept {
  return Boundary([&]() -> absl::StatusOr<OwnedRef> {
    const auto plan = PlanArgument(argument);
    if (!plan.ok()) return plan.status();
    const scheduler::PlanCounts& counts = (*plan)->counts();
    const memory::MemoryPlan& memory = (*plan)->memory_plan();
    return OwnedRef::Steal(Py_BuildValue(
        "{s:s,s:n,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:n,s:n,s:n,s:n}", "dump", (*plan)->Dump().c_str(), "steps",
        static_cast<Py_ssize_t>((*plan)->steps().size()), "unboxed", counts.unboxed, "dispatcher", counts.dispatcher,
        "clones", counts.clones, "python", counts.python, "elided", counts.elided, "folded", counts.folded, "in_place",
        counts.in_place, "linear", counts.linear, "arena", static_cast<Py_ssize_t>(memory.high_water_bytes), "separate",
        static_cast<Py_ssize_t>(memory.sum_bytes), "subgraphs",
        static_cast<Py_ssize_t>((*plan)->partition().subgraphs.size()), "width",
        static_cast<Py_ssize_t>((*plan)->partition().max_width)));
  });
}

// What a GraphPlan does with a part, with the executor in the graph's place: the body, copies of what it keeps, the
// tail. `hidden_views` become what the runs of the body show.
//
// Errors: Unimplemented  a graph would have given up
absl::Status RunAsGraph(const TensorBridge& bridge, const scheduler::ProgramPart& part,
                        const std::shared_ptr<const torch_abi::TorchApi>& api, scheduler::BuildOptions options,
                        absl::Span<const torch_abi::TensorRef> inputs, absl::Span<const torch_abi::TensorRef> captured,
                        scheduler::PythonStepCallback* steps, std::set<cir::ValueId>* hidden_views,
                        std::vector<torch_abi::OwnedTensor>* outputs) {
  auto split = scheduler::SplitForGraph(part.graph, {*hidden_views, &part.versioned});
  if (!split.ok()) return split.status();
  options.left_out_ops = split->left_out_ops;
  const auto body = scheduler::ExecutionPlan::Build(std::move(split->body), api, std::move(options));
  if (!body.ok()) return body.status();
  const auto tail = scheduler::ExecutionPlan::Build(std::move(split->tail), api, {});
  if (!tail.ok()) return tail.status();
  std::vector<torch_abi::OwnedTensor> kept, fresh;
  if (absl::Status s = scheduler::PlanExecutor::Run(**body, inputs, captured, &kept, steps); !s.ok()) return s;
  if (hidden_views->empty()) {
    const GilAcquire acquired;
    *hidden_views = HiddenViews(bridge, *api, (*body)->graph(), kept, part.versioned);
    if (!hidden_views->empty()) return absl::OkStatus();
  }
  std::vector<torch_abi::TensorRef> tail_captured;
  for (const uint32_t i : split->tail_captured) tail_captured.push_back(captured[i]);
  for (uint32_t i = 0; i < split->num_copies; ++i) {
    const cir::Graph& program = (*body)->graph();
    const cir::TensorType& type = program.value(program.outputs[i]).type;
    void* handle = nullptr;
    if (api->empty_strided(static_cast<int64_t>(type.sizes.size()), type.sizes.data(), type.strides.data(),
                           static_cast<int32_t>(type.dtype), 0, -1, &handle) != 0) {
      return absl::InternalError("no memory for a copy");
    }
    fresh.push_back(torch_abi::OwnedTensor::Steal(handle));
    void* from = nullptr;
    void* to = nullptr;
    api->get_data_ptr(kept[i].ref().handle(), &from);
    api->get_data_ptr(handle, &to);
    if (type.num_elements() != 0) std::memcpy(to, from, static_cast<size_t>(type.span_bytes()));
    tail_captured.push_back(fresh.back().ref());
  }
  for (size_t i = split->num_copies; i < kept.size(); ++i) tail_captured.push_back(kept[i].ref());
  return scheduler::PlanExecutor::Run(**tail, inputs, tail_captured, outputs, nullptr);
}

// _plan_run_parts(cir_text, constants, host_ops, inputs, captured, as_graphs) -> (outputs, [(first operator, number of
// them, on a graph?, why not)]). The program cut around these operators and run part by part. `as_graphs`: parts are
// cut further until each is fit for a graph, and run as one would be, in memory of their own.
PyObject* PlanRunParts(PyObject*, PyObject* arguments) noexcept {
  return Boundary([&]() -> absl::StatusOr<OwnedRef> {
    const char* text = nullptr;
    PyObject *constant_list = nullptr, *host_ops = nullptr, *input_list = nullptr, *captured_list = nullptr;
    int as_graphs = 0;
    if (PyArg_ParseTuple(arguments, "sOO!OOp", &text, &constant_list, &PyList_Type, &host_ops, &input_list,
                         &captured_list, &as_graphs) == 0) {
      return OwnedRef();
    }
    const auto api = LoadedApi();
    if (!api.ok()) return api.status();
    const auto bridge = CalibratedBridge();
    if (!bridge.ok()) return bridge.status();
    const auto graph = cir::Parse(text);
    if (!graph.ok()) return graph.status();
    const auto constants = TensorArguments(**bridge, constant_list);
    const auto inputs = TensorArguments(**bridge, input_list);
    const auto captured = TensorArguments(**bridge, captured_list);
    if (!constants.ok() || !inputs.ok() || !captured.ok())
      return absl::InvalidArgumentError("lists of tensors expected");
    std::vector<std::string> reasons(graph->ops.size());
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(host_ops); ++i) {
      const size_t op = PyLong_AsSize_t(PyList_GET_ITEM(host_ops, i));
      if (op >= reasons.size()) return absl::InvalidArgumentError("no such operator");
      reasons[op] = "asked for";
    }
    const auto options_of = [&](const scheduler::ProgramPart& part) {
      scheduler::BuildOptions options;
      for (const uint32_t i : part.constants) options.constants.push_back((*api)->NewReference((*constants)[i]));
      return options;
    };
    const auto plan_body = [&](const scheduler::ProgramPart& part, scheduler::GraphSplit split) {
      scheduler::BuildOptions options = options_of(part);
      options.left_out_ops = std::move(split.left_out_ops);
      return scheduler::ExecutionPlan::Build(std::move(split.body), *api, std::move(options));
    };
    std::vector<bool> on_host;
    for (const std::string& reason : reasons) on_host.push_back(!reason.empty());
    auto parts = as_graphs != 0
                     ? scheduler::CutForGraphs(*graph, {cir::DeviceType::kCpu, -1}, reasons, plan_body, {1, 1000})
                     : scheduler::CutProgram(*graph, on_host);
    if (!parts.ok()) return parts.status();
    RecordList descriptions;
    for (const scheduler::ProgramPart& part : *parts) {
      descriptions.Add(
          OwnedRef::Steal(Py_BuildValue("(InOs)", part.first_op, static_cast<Py_ssize_t>(part.graph.ops.size()),
                                        part.on_graph ? Py_True : Py_False, part.reason.c_str())));
    }
    const scheduler::PartSequence sequence(*graph, *std::move(parts));
    PythonSteps steps(*bridge, *api);
    std::vector<torch_abi::OwnedTensor> outputs;
    absl::Status status;
    {
      AssertGilHeld();
      const GilRelease released;
      status = sequence.Run(
          **api, *inputs, *captured, &outputs,
          [&](size_t index, absl::Span<const torch_abi::TensorRef> part_inputs,
              absl::Span<const torch_abi::TensorRef> part_captured, std::vector<torch_abi::OwnedTensor>* made) {
            const scheduler::ProgramPart& part = sequence.part(index);
            if (as_graphs != 0 && part.on_graph) {
              std::set<cir::ValueId> hidden_views;
              absl::Status ran = RunAsGraph(**bridge, part, *api, options_of(part), part_inputs, part_captured, &steps,
                                            &hidden_views, made);
              if (ran.ok() && !hidden_views.empty()) {
                ran = RunAsGraph(**bridge, part, *api, options_of(part), part_inputs, part_captured, &steps,
                                 &hidden_views, made);
              }
              if (!absl::IsUnimplemented(ran)) return ran;
            }
            const auto plan = scheduler::ExecutionPlan::Build(part.graph, *api, options_of(part));
            if (!plan.ok()) return plan.status();
            return scheduler::PlanExecutor::Run(**plan, part_inputs, part_captured, made, &steps);
          });
    }
    if (!status.ok()) return status;
    RecordList results;
    for (torch_abi::OwnedTensor& output : outputs) {
      results.Add(OwnedRef::Steal((*bridge)->ToPyObject(std::move(output))));
    }
    const OwnedRef result_list = results.Take(), description_list = descriptions.Take();
    if (!result_list || !description_list) return OwnedRef();
    return OwnedRef::Steal(PyTuple_Pack(2, result_list.get(), description_list.get()));
  });
}

// _cuda_switches() -> (answers: list of int, number of them that took a call of Python's getter)
PyObject* CudaSwitches(PyObject*, PyObject*) noexcept {
  return Boundary([&]() -> absl::StatusOr<OwnedRef> {
    const OwnedRef list = OwnedRef::Steal(PyList_New(0));
    for (const uint64_t answer : CudaState::Read().answers()) {
      const OwnedRef number = OwnedRef::Steal(PyLong_FromUnsignedLongLong(answer));
      if (!list || !number || PyList_Append(list.get(), number.get()) < 0) return OwnedRef();
    }
    return OwnedRef::Steal(Py_BuildValue("(On)", list.get(), static_cast<Py_ssize_t>(CudaState::NumGetters())));
  });
}

PyMethodDef kMethods[] = {
    {"_cir_roundtrip", CirRoundtrip, METH_O, nullptr},        {"_cir_schema", CirSchema, METH_O, nullptr},
    {"_plan_build", PlanBuild, METH_VARARGS, nullptr},        {"_plan_run", PlanRun, METH_VARARGS, nullptr},
    {"_plan_run_parts", PlanRunParts, METH_VARARGS, nullptr}, {"_plan_describe", PlanDescribe, METH_O, nullptr},
    {"_torch_boundary", TorchBoundary, METH_NOARGS, nullptr}, {"_tensor_meta", ReadTensorMeta, METH_O, nullptr},
    {"_cuda_switches", CudaSwitches, METH_NOARGS, nullptr},   {nullptr, nullptr, 0, nullptr},
};

}  // namespace

int RegisterPlanDebug(PyObject* module) noexcept { return PyModule_AddFunctions(module, kMethods); }

}  // namespace cuvil::agent
