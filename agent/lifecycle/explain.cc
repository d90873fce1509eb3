#include "agent/lifecycle/explain.h"

#include <utility>
#include <vector>

#include "agent/lifecycle/lifecycle.h"
#include "agent/lifecycle/record.h"
#include "scheduler/graph_arena.h"
#include "scheduler/graph_budget.h"

namespace cuvil::agent {
namespace {

using Stage = PlanEntry::Stage;

const char* EntryState(const PlanEntry& entry) {
  switch (entry.stage.load(std::memory_order_acquire)) {
    case Stage::kBuilding:
      return "preparing";
    case Stage::kBuilt:
      return "comparing";
    case Stage::kDropped:
      return "refused";
    case Stage::kServing:
      break;
  }
  switch (entry.adoption.state()) {
    case Adoption::State::kAdopted:
      return "planned";
    case Adoption::State::kRetired:
      return "retired";
    case Adoption::State::kMeasuring:
      break;
  }
  return "measuring";
}

// The best that any of its plans has reached.
const char* ModuleStateName(const ModuleState& state, const PlanCache<PlanEntry>::List& plans) {
  if (state.opted_out) return "opted_out";
  for (const char* wanted : {"planned", "measuring", "comparing", "preparing", "retired"}) {
    for (const auto& entry : plans) {
      if (std::string_view(EntryState(*entry)) == wanted) return wanted;
    }
  }
  if (!state.refusals.empty()) return "refused";
  return state.num_calls != 0 ? "waiting" : "eager";
}

OwnedRef DescribeEntry(const PlanEntry& entry) {
  Record record;
  const Stage stage = entry.stage.load(std::memory_order_acquire);
  record.Set("state", EntryState(entry));
  record.Set("planned_calls", entry.num_planned);
  if (entry.adoption.plan_ns() != 0) record.Set("planned_ns", entry.adoption.plan_ns());
  if (entry.adoption.eager_ns() != 0) record.Set("eager_ns", entry.adoption.eager_ns());
  Record stages;
  stages.Set("trace", entry.trace_ns);
  if (stage != Stage::kBuilding) stages.Set("build", entry.build_ns);
  if (entry.compare_ns != 0) stages.Set("compare", entry.compare_ns);
  record.Set("stages_ns", stages.Take());
  entry.plan->Describe(stage != Stage::kBuilding && entry.build_status.ok(), &record);
  return record.Take();
}

OwnedRef DescribeRefusal(const CountedRefusal& counted) {
  Record record;
  record.Set("code", counted.refusal.code);
  record.Set("file", counted.refusal.file);
  record.Set("line", static_cast<uint64_t>(counted.refusal.line > 0 ? counted.refusal.line : 0));
  record.Set("message", counted.refusal.message);
  record.Set("advice", counted.refusal.advice);
  record.Set("count", counted.count);
  return record.Take();
}

const char* KindName(trace::BranchKind kind) {
  switch (kind) {
    case trace::BranchKind::kTruth:
      return "truth";
    case trace::BranchKind::kNone:
      return "none";
    case trace::BranchKind::kLoop:
      return "loop";
  }
  return "";
}

OwnedRef DescribeBranch(const trace::BranchBook::Total& branch) {
  Record record;
  record.Set("file", *branch.file);
  record.Set("line", static_cast<uint64_t>(branch.line));
  record.Set("column", static_cast<uint64_t>(branch.column));
  record.Set("instruction", static_cast<uint64_t>(branch.instruction));
  record.Set("kind", KindName(branch.kind));
  record.Set("taken", branch.num_true);
  record.Set("not_taken", branch.num_false);
  record.SetReal("probability",
                 static_cast<double>(branch.num_true) / static_cast<double>(branch.num_true + branch.num_false));
  return record.Take();
}

OwnedRef TypeName(PyObject* object) { return Record::Text(Py_TYPE(object)->tp_name); }

}  // namespace

OwnedRef DescribeModule(PyObject* module, const std::string& path) {
  const ModuleState* state = TheLifecycle().modules.Find(module);
  if (state == nullptr || (state->num_calls == 0 && !state->opted_out)) return OwnedRef::New(Py_None);
  const auto plans = state->plans.Snapshot();
  Record record;
  record.Set("path", path);
  record.Set("type", TypeName(module));
  record.Set("state", ModuleStateName(*state, *plans));
  record.Set("calls", state->num_calls);
  record.Set("planned_calls", state->num_planned);
  record.Set("eager_calls", state->num_calls - state->num_planned);
  RecordList plan_list;
  for (const auto& entry : *plans) plan_list.Add(DescribeEntry(*entry));
  record.Set("plans", plan_list.Take());
  RecordList branches;
  for (const trace::BranchBook::Total& branch : state->branches.Totals()) branches.Add(DescribeBranch(branch));
  record.Set("branches", branches.Take());
  record.Set("branches_dropped", state->branches.num_dropped());
  RecordList refusals;
  for (const CountedRefusal& refusal : state->refusals) refusals.Add(DescribeRefusal(refusal));
  record.Set("refusals", refusals.Take());
  record.Set("refusals_dropped", state->num_refusals_dropped);
  return record.Take();
}

OwnedRef DescribeModel(PyObject* model) {
  Record record;
  record.Set("type", TypeName(model));
  RecordList modules;
  const OwnedRef named = OwnedRef::Steal(PyObject_CallMethod(model, "named_modules", nullptr));
  const OwnedRef iterator = named ? OwnedRef::Steal(PyObject_GetIter(named.get())) : OwnedRef();
  if (!iterator) return OwnedRef();
  while (const OwnedRef item = OwnedRef::Steal(PyIter_Next(iterator.get()))) {
    PyObject *name, *module;
    if (!PyArg_ParseTuple(item.get(), "OO", &name, &module)) return OwnedRef();
    const char* path = PyUnicode_AsUTF8(name);
    if (path == nullptr) return OwnedRef();
    OwnedRef described = DescribeModule(module, path);
    if (!described) return OwnedRef();
    if (described.get() != Py_None) modules.Add(std::move(described));
  }
  if (PyErr_Occurred() != nullptr) return OwnedRef();
  record.Set("modules", modules.Take());
  return record.Take();
}

OwnedRef DescribeStatistics() {
  Lifecycle& lifecycle = TheLifecycle();
  const Statistics& statistics = lifecycle.statistics;
  Record record;
#define CUVIL_COUNTER(member, description) record.Set(#member, statistics.member.load(std::memory_order_relaxed));
#include "agent/lifecycle/statistics.def"
#undef CUVIL_COUNTER
  const uint64_t samples = statistics.guard_samples.load(std::memory_order_relaxed);
  record.Set("guard_ns",
             samples == 0 ? uint64_t{0} : statistics.guard_ns_total.load(std::memory_order_relaxed) / samples);
  record.Set("prepare_ns", statistics.trace_ns.load(std::memory_order_relaxed) +
                               statistics.build_ns.load(std::memory_order_relaxed) +
                               statistics.compare_ns.load(std::memory_order_relaxed));
  Record refusals;
  for (const auto& [code, count] : lifecycle.refusals_by_code) refusals.Set(code.c_str(), count);
  record.Set("refusals", refusals.Take());
  uint64_t num_plans = 0;
  for (const ModuleState* state : lifecycle.modules.States()) num_plans += state->plans.size();
  record.Set("modules", static_cast<uint64_t>(lifecycle.modules.size()));
  record.Set("plans", num_plans);
  // Of all GPUs.
  scheduler::GraphBudget::Usage graphs;
  for (int device = 0; device < scheduler::GraphArena::kMaxDevices; ++device) {
    const scheduler::GraphBudget* budget = scheduler::GraphArena::BudgetOf(device);
    if (budget == nullptr) continue;
    const scheduler::GraphBudget::Usage usage = budget->usage();
    graphs.limit_bytes += usage.limit_bytes;
    graphs.pool_bytes += usage.pool_bytes;
    graphs.workspace_bytes += usage.workspace_bytes;
    graphs.cached_bytes += usage.cached_bytes;
    graphs.num_graphs += usage.num_graphs;
  }
  record.Set("graphs", graphs.num_graphs);
  record.Set("graph_bytes", graphs.pool_bytes);
  record.Set("graph_workspace_bytes", graphs.workspace_bytes);
  record.Set("graph_cached_bytes", graphs.cached_bytes);
  record.Set("graph_budget_bytes", graphs.limit_bytes);
  return record.Take();
}

}  // namespace cuvil::agent
