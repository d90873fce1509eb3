#include "agent/capture.h"

#include <algorithm>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "agent/call_table.h"
#include "agent/captured_tensors.h"
#include "agent/collector_pause.h"
#include "agent/dispatch_keys.h"
#include "agent/fault_injection.h"
#include "agent/forward_place.h"
#include "agent/frame_hook.h"
#include "agent/guards.h"
#include "agent/input_signature.h"
#include "agent/module_path.h"
#include "agent/op_recorder.h"
#include "agent/output_recipe.h"
#include "agent/torch_state.h"
#include "agent/tracer.h"
#include "scheduler/monotonic_clock.h"

namespace cuvil::agent {
namespace {

constexpr char kAdviceInternal[] = "this is a limit or a defect of Cuvil; please report it";

Refusal MakeRefusal(const char* code, std::string message, const char* advice, bool retry = false) {
  Refusal refusal;
  refusal.code = code;
  refusal.message = std::move(message);
  refusal.advice = advice;
  refusal.retry = retry;
  return refusal;
}

}  // namespace

Capture::Capture() = default;

Capture::~Capture() {
  // The last owner may be a worker thread; and at interpreter exit references are leaked rather than dropped.
  if (!Py_IsInitialized()) {
    for (OwnedRef& object : constant_objects_) (void)object.release();
    (void)guards_.release();
    (void)inputs_.release();
    (void)output_.release();
    (void)captured_.release();
    (void)seen_.release();
    return;
  }
  PyGILState_STATE state = PyGILState_Ensure();
  constant_objects_.clear();
  guards_.reset();
  inputs_.reset();
  output_.reset();
  captured_.reset();
  seen_.reset();
  PyGILState_Release(state);
}

bool Capture::MatchesInputs(const CallArgs& call) const { return inputs_->Matches(call); }

bool Capture::GuardsHold() {
  if (!TorchStateReader::Is(torch_state_)) {
    last_failure_ =
        "torch's ambient state (grad mode, inference mode, autocast, default dtype, modes, floating-point mode, "
        "registered kernels)";
    return false;
  }
  if (!guards_->Hold()) {
    last_failure_ = guards_->LastFailure();
    return false;
  }
  int64_t changed = captured_->FirstChanged();
  if (changed >= 0) {
    last_failure_ = absl::StrCat("the metadata of captured tensor ", changed);
    return false;
  }
  if (seen_->FirstChanged() >= 0) {
    last_failure_ = "the metadata of a tensor that the call came across";
    return false;
  }
  return true;
}

std::string Capture::LastFailure() const { return last_failure_; }

bool Capture::CollectTensors(const CallArgs& call, PinnedTensors* pins, std::vector<torch_abi::TensorRef>* inputs,
                             absl::Span<const torch_abi::TensorRef>* captured) {
  absl::InlinedVector<PyObject*, 8> objects;
  if (!inputs_->CollectTensors(call, &objects)) return false;
  const TensorBridge& bridge = Bridge();
  for (PyObject* object : objects) {
    for (PyObject* other : not_arguments_) {
      if (object == other) return false;
    }
    pins->Pin(object);
    inputs->push_back(bridge.FromPyObject(object));
  }
  pins->PinAll(captured_->objects());
  *captured = captured_->refs();
  return true;
}

PyObject* Capture::BuildOutput(const CallArgs& call, std::vector<torch_abi::OwnedTensor> results) {
  return output_->Build(call, *inputs_, std::move(results));
}

size_t Capture::num_guards() const { return guards_->size() + captured_->size() + seen_->size(); }

std::string Capture::DescribeGuards() const {
  std::string text = guards_->Describe();
  if (captured_->size() > 0) absl::StrAppend(&text, text.empty() ? "" : ", ", captured_->size(), " captured tensors");
  if (seen_->size() > 0) absl::StrAppend(&text, text.empty() ? "" : ", ", seen_->size(), " tensors seen");
  return text;
}

// Puts a Capture together from what the trace's parts have collected.
class CaptureBuilder {
 public:
  static std::shared_ptr<Capture> Build(Tracer* tracer, OpRecorder* recorder, InputSignature signature,
                                        const TorchState& state, PyObject* result, uint64_t hash, Refusal* refusal) {
    HeapLog& heap = tracer->heap();
    const auto at = [](Refusal made, const CodePlace& place) {
      made.file = place.file;
      made.line = place.line;
      return made;
    };
    std::vector<bool> old = heap.FindOld(result);
    const std::vector<HeapEntry>& entries = heap.entries();
    if (old.size() != entries.size()) {
      *refusal = at(
          MakeRefusal("output", "the result reaches too many objects", "return tensors and small containers of them"),
          tracer->ReturnPlace());
      return nullptr;
    }
    for (size_t i = 0; i < entries.size(); ++i) {
      if (!old[i]) continue;
      // What the call has written may differ between its own reads.
      const bool torn = entries[i].changed_meanwhile && !entries[i].written;
      if (!torn && heap.Unchanged(entries[i])) continue;
      // A seam: to replay writes (caches that grow, counters), take the entry into the capture here instead, as an
      // effect that a run applies when all of it has succeeded.
      *refusal = NetWrite(*tracer, entries[i]);
      return nullptr;
    }
    const std::vector<bool> guarding = WithoutFleetingInputs(entries, old, signature);
    std::unordered_set<PyObject*> guarded = GuardedValues(entries, guarding);
    for (PyObject* tensor : recorder->captured()) {
      if (heap.IsNew(tensor) || guarded.count(tensor) == 0) {
        *refusal = at(MakeRefusal("unknown-tensor", "an operator uses a tensor that the call made by unknown means",
                                  "make tensors with torch functions"),
                      FirstUse(*tracer, *recorder, tensor));
        return nullptr;
      }
    }
    for (const auto& [container, unused] : heap.structural()) {
      if (guarded.count(container) == 0 || PyTuple_Check(container)) continue;
      *refusal = MakeRefusal("aliased-argument", "an argument is a container that the call also finds elsewhere",
                             "pass a copy, or read it from one place");
      return nullptr;
    }
    for (size_t i = 0; i < tracer->compared_with_arguments().size(); ++i) {
      if (guarded.count(tracer->compared_with_arguments()[i]) != 0) continue;
      *refusal = at(MakeRefusal("identity", "an argument is compared by identity with a tensor that no guard covers",
                                "compare values, or pass a flag"),
                    PlaceOf(tracer->source(tracer->compared_at()[i])));
      return nullptr;
    }
    OutputRecipe::WhyNot why_not;
    std::unique_ptr<OutputRecipe> output = OutputRecipe::Describe(result, heap, guarded, signature, recorder, &why_not);
    if (output == nullptr) {
      *refusal = at(MakeRefusal("output", why_not.message, why_not.advice), tracer->ReturnPlace());
      return nullptr;
    }
    // An argument tensor that the call also found somewhere else must be found there again.
    for (PyObject* value : guarded) {
      if (IsTensor(value)) signature.PinIdentity(value);
    }
    signature.PinAtoms(heap.pinned());
    auto capture = std::shared_ptr<Capture>(new Capture());
    // Guards need an object that is there in later calls. An argument that became pinned above is.
    const std::vector<bool> kept = WithoutFleetingInputs(entries, old, signature);
    capture->guards_ = std::make_unique<GuardSet>(heap, kept);
    if (const std::string& why = capture->guards_->why_not(); !why.empty()) {
      *refusal = MakeRefusal("unknown-object", why,
                             "let its class have weak references (\"__weakref__\" among its __slots__), or keep it out "
                             "of what forward reads");
      return nullptr;
    }
    capture->captured_ = std::make_unique<CapturedTensors>();
    capture->seen_ = std::make_unique<CapturedTensors>();
    std::unordered_set<PyObject*> used;
    for (PyObject* tensor : recorder->captured()) {
      used.insert(tensor);
      capture->captured_->Add(tensor, *recorder->MetadataOf(tensor));
    }
    for (PyObject* value : GuardedValues(entries, kept)) {
      if (value == nullptr || !IsTensor(value) || !used.insert(value).second) continue;
      const TensorMeta* metadata = recorder->MetadataOf(value);
      capture->seen_->Add(value, metadata != nullptr ? *metadata : Bridge().Read(Bridge().FromPyObject(value)));
    }
    if (capture->captured_->FirstChanged() >= 0 || capture->seen_->FirstChanged() >= 0) {
      *refusal = MakeRefusal("concurrent-change", "the shape or type of a tensor changed during the trace",
                             "another thread changed it; the next call is traced anew", true);
      return nullptr;
    }
    capture->constant_objects_ = recorder->TakeConstants();
    for (const OwnedRef& constant : capture->constant_objects_) {
      capture->constants_.push_back(Bridge().FromPyObject(constant.get()));
    }
    capture->has_random_ops_ = recorder->has_random_ops();
    capture->not_arguments_ = tracer->compared_with_arguments();
    capture->output_ = std::move(output);
    signature.ForgetObjects();
    capture->inputs_ = std::make_unique<InputSignature>(std::move(signature));
    capture->torch_state_ = state;
    capture->signature_hash_ = hash;
    absl::StatusOr<cir::Graph> graph = std::move(recorder->graph()).Build();
    if (FaultInjected(FaultPoint::kVerify)) graph = absl::InternalError("injected fault: verify");
    if (!graph.ok()) {
      *refusal = MakeRefusal("internal", std::string(graph.status().message()), kAdviceInternal, true);
      return nullptr;
    }
    const auto is_foreign = [](const cir::Value& value) { return value.type.device != cir::DeviceType::kCpu; };
    if (state.kernels.own_cuda && std::ranges::any_of(graph->values, is_foreign)) {
      *refusal = MakeRefusal("torch-mode", TorchStateReader::WhyKernelsCount(true),
                             "the call runs as it is while that lasts", true);
      return nullptr;
    }
    NameSources(tracer->TakeSources(), &*graph, &capture->trace_);
    capture->trace_.graph = *std::move(graph);
    capture->trace_.frames = tracer->FrameCounts();
    return capture;
  }

 private:
  static CodePlace PlaceOf(const trace::SourceLocation& source) { return {source.user_file, source.user_line}; }

  // Of the first operator that reads the tensor.
  static CodePlace FirstUse(const Tracer& tracer, OpRecorder& recorder, PyObject* tensor) {
    const cir::Graph& graph = recorder.graph().graph();
    const std::optional<cir::ValueId> value = recorder.Find(tensor);
    const auto reads = [&](const cir::Operand& operand) {
      if (const auto* id = std::get_if<cir::ValueId>(&operand)) return *id == *value;
      const auto* list = std::get_if<cir::ValueList>(&operand);
      return list != nullptr && std::find(list->begin(), list->end(), value) != list->end();
    };
    size_t index = 0;
    for (const cir::Op& op : graph.ops) {
      if (!value || std::none_of(op.operands.begin(), op.operands.end(), reads)) continue;
      if (absl::SimpleAtoi(graph.sources[op.source], &index)) return PlaceOf(tracer.source(index));
    }
    return {};
  }

  // The graph's sources are numbers of the tracer's until here. Gives them their words, and the trace the same table.
  static void NameSources(std::vector<trace::SourceLocation> all, cir::Graph* graph, trace::Trace* trace) {
    for (std::string& text : graph->sources) {
      size_t index = 0;
      trace::SourceLocation source;  // of the first entry, which belongs to no operator
      if (absl::SimpleAtoi(text, &index) && index < all.size()) source = all[index];
      text = source.user_file.empty()
                 ? std::string()
                 : absl::StrCat(source.user_file, ":", source.user_line, " in ", source.user_function);
      trace->sources.push_back(std::move(source));
    }
  }

  // `old` without the state of argument tensors that may be others in the next call: the signature demands that they
  // carry no attributes, which is what the trace saw.
  static std::vector<bool> WithoutFleetingInputs(const std::vector<HeapEntry>& entries, std::vector<bool> old,
                                                 const InputSignature& signature) {
    std::unordered_set<PyObject*> dicts;
    for (size_t i = 0; i < entries.size(); ++i) {
      if (entries[i].kind != StateKind::kInstance || !signature.IsFleetingTensor(entries[i].object)) continue;
      old[i] = false;
      dicts.insert(entries[i].pointers[1]);
    }
    for (size_t i = 0; i < entries.size(); ++i) {
      if (entries[i].kind == StateKind::kDict && dicts.count(entries[i].object) != 0) old[i] = false;
    }
    return old;
  }

  // What the guards compare by identity: objects that are there again when the guards hold.
  static std::unordered_set<PyObject*> GuardedValues(const std::vector<HeapEntry>& entries,
                                                     const std::vector<bool>& old) {
    std::unordered_set<PyObject*> values;
    std::vector<PyObject*> pending;
    for (size_t i = 0; i < entries.size(); ++i) {
      if (!old[i] || entries[i].structural) continue;
      for (const DictItem& item : entries[i].items) pending.push_back(item.value);
      pending.insert(pending.end(), entries[i].pointers.begin(), entries[i].pointers.end());
    }
    while (!pending.empty()) {
      PyObject* value = pending.back();
      pending.pop_back();
      if (value == nullptr || !values.insert(value).second || !PyTuple_Check(value)) continue;
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i) pending.push_back(PyTuple_GET_ITEM(value, i));
    }
    return values;
  }

  static Refusal NetWrite(const Tracer& tracer, const HeapEntry& entry) {
    Refusal refusal;
    std::string type = Py_TYPE(entry.object)->tp_name;
    if (entry.kind == StateKind::kOpaque) {
      refusal = MakeRefusal("opaque-state", absl::StrCat("uses the state of a ", type, " that existed before the call"),
                            "make the object inside of the call");
    } else if (entry.kind == StateKind::kCall) {
      refusal = MakeRefusal("ambient-write", "leaves ambient state changed", "set it around the call", true);
    } else if (!entry.written) {
      return MakeRefusal("concurrent-change", absl::StrCat("a ", type, " changed during the trace"),
                         "another thread or a callback changed it; the next call is traced anew", true);
    } else {
      refusal = MakeRefusal("net-write", absl::StrCat("changes a ", type, " that existed before the call"),
                            "keep state outside of forward, or return it", true);
    }
    if (entry.written_at != 0 || entry.written) {
      const trace::SourceLocation& source = tracer.source(entry.written_at);
      refusal.file = source.user_file;
      refusal.line = source.user_line;
    }
    return refusal;
  }
};

namespace {
PyObject* g_module_call = nullptr;  // torch.nn.Module's for as long as the process lives
}  // namespace

PyObject* ModuleCallFunction() { return g_module_call; }

absl::StatusOr<OwnedRef> FindModuleCall() {
  const OwnedRef nn = OwnedRef::Steal(PyImport_ImportModule("torch.nn"));
  const OwnedRef module = nn ? OwnedRef::Steal(PyObject_GetAttrString(nn.get(), "Module")) : OwnedRef();
  OwnedRef function = module ? OwnedRef::Steal(PyObject_GetAttrString(module.get(), "__call__")) : OwnedRef();
  if (!function) PyErr_Clear();
  if (function && PyFunction_Check(function.get())) return function;
  return absl::FailedPreconditionError(absl::StrCat("torch.nn.Module.__call__ is ", function ? "a " : "missing",
                                                    function ? Py_TYPE(function.get())->tp_name : "",
                                                    ", no plain function; remove what replaced it before enable()"));
}

absl::Status InitializeCapture() {
  if (absl::Status status = CollectorPause::Initialize(); !status.ok()) return status;
  if (absl::Status status = BuildCallTable(); !status.ok()) return status;
  if (absl::Status status = TorchStateReader::Initialize(); !status.ok()) return status;
  if (absl::Status status = OpRecorder::Initialize(); !status.ok()) return status;
  absl::StatusOr<OwnedRef> function = FindModuleCall();
  if (!function.ok()) return function.status();
  Py_XDECREF(g_module_call);
  g_module_call = function->release();
  return absl::OkStatus();
}

namespace {

// CaptureCall() without the time and without the place of refusals that concern the whole call.
CaptureOutcome RunWatched(const CallArgs& call, vectorcallfunc original) {
  CaptureOutcome outcome;
  auto run = [&] {
    // The function itself: callers that go through the slot would come back to us.
    return original(ModuleCallFunction(), call.args, call.nargsf, call.kwnames);
  };
  TorchState state = TorchStateReader::Read();
  std::string untouched = TorchStateReader::WhyUntouched(state);
  if (untouched.empty() && !DispatchKeys::StateIsUsual()) untouched = "torch's dispatch keys are set in an unusual way";
  if (!untouched.empty()) {
    outcome.refusal = MakeRefusal("torch-mode", untouched,
                                  "call the model where that is not so; until then its calls run as they are", true);
    outcome.result = run();
    return outcome;
  }
  // Not even tried: what torch.jit.trace made fails inside of a dispatch mode, which a trace is, and where the model
  // enters inference mode around it the trace cannot step aside.
  if (PyObject* const script = FindInstance(call.args[0], Types().script_module); script != nullptr) {
    const std::string path = ModulePathBelow(call.args[0], script);
    outcome.refusal = MakeRefusal(
        "script", absl::StrCat(path.empty() ? "the module" : path, " is TorchScript, which runs without Python"),
        "keep the module that torch.jit was given; what stands beside it is planned");
    outcome.result = run();
    return outcome;
  }
  uint64_t hash = SignatureHash(call);
  {
    CollectorPause pause;
    Tracer tracer;
    tracer.set_collector_pause(&pause);
    const ModuleCallScope root(call.args[0]);
    tracer.set_root(&root);
    OpRecorder recorder(&tracer);
    InputSignature signature;
    tracer.set_forward(ForwardCode(call.args[0]));
    InputSignature::WhyNot why_not;
    if (!InputSignature::Describe(call, &recorder, &tracer.heap(), &signature, &why_not)) {
      outcome.refusal = MakeRefusal("argument", why_not.message, why_not.advice);
      outcome.result = run();
      return outcome;
    }
    absl::StatusOr<std::unique_ptr<TraceExtent>> extent = TraceExtent::Begin(&tracer);
    if (!extent.ok()) {
      outcome.refusal = MakeRefusal("extent", std::string(extent.status().message()),
                                    "end what else watches the program, or call the model without it", true);
      outcome.result = run();
      return outcome;
    }
    if (FaultInjected(FaultPoint::kRecord)) {
      tracer.Refuse("internal", "injected fault: record", kAdviceInternal, true);
    } else if (!recorder.Start()) {
      PyErr_Clear();
      tracer.Refuse("torch-mode", "torch refused the recording mode", "please report this");
    }
    outcome.result = run();
    recorder.Stop();
    absl::Status watched = (*extent)->status();
    extent->reset();

    const PyObject* raised = PyErr_Occurred();
    const std::string exception = raised == nullptr || !PyType_Check(raised)
                                      ? "exception"
                                      : reinterpret_cast<const PyTypeObject*>(raised)->tp_name;
    ErrorScope errors;
    const auto at = [&](const CodePlace& place) {
      outcome.refusal.file = place.file;
      outcome.refusal.line = place.line;
    };
    outcome.branches = tracer.BranchCounts();
    if (absl::IsInternal(watched) && outcome.result != nullptr) {
      // Whatever the tracer says follows from that.
      outcome.refusal = MakeRefusal("internal", std::string(watched.message()), kAdviceInternal, true);
    } else if (tracer.refused()) {
      outcome.refusal = tracer.refusal();
    } else if (outcome.result == nullptr) {
      outcome.refusal = MakeRefusal("exception", absl::StrCat("the call raised ", exception),
                                    "mend what it says, if that is a mistake; a later call is tried again", true);
      at(tracer.RaisePlace());
    } else if (!watched.ok()) {
      outcome.refusal = MakeRefusal("extent", std::string(watched.message()), "the next call is traced anew", true);
    } else if (tracer.locks_held() != 0) {
      outcome.refusal = MakeRefusal("lock", "takes a lock and keeps it", "release locks inside of the call");
      at(tracer.LockPlace());
    } else if (TorchStateReader::Read() != state) {
      outcome.refusal = MakeRefusal("ambient-write", "leaves torch's ambient state changed", "set it around the call");
    } else {
      outcome.capture = CaptureBuilder::Build(&tracer, &recorder, std::move(signature), state, outcome.result, hash,
                                              &outcome.refusal);
    }
  }
  return outcome;
}

}  // namespace

void PlaceAtForward(PyObject* module, Refusal* refusal) {
  if (!refusal->file.empty() && refusal->line > 0) return;
  CodePlace place = ForwardPlace(module);
  refusal->file = std::move(place.file);
  refusal->line = place.line;
}

CaptureOutcome CaptureCall(const CallArgs& call, vectorcallfunc original) {
  const uint64_t start = scheduler::MonotonicNs();
  CaptureOutcome outcome = RunWatched(call, original);
  if (!outcome.refusal.empty()) PlaceAtForward(call.args[0], &outcome.refusal);
  outcome.trace_ns = scheduler::MonotonicNs() - start;
  return outcome;
}

}  // namespace cuvil::agent
