#include "agent/lifecycle/graph_memory.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "agent/boundary.h"
#include "agent/cuda_memory_pool.h"
#include "agent/cuda_state.h"
#include "agent/gil.h"
#include "agent/lifecycle/lifecycle.h"
#include "agent/lifecycle/log.h"
#include "agent/process_lifetime.h"
#include "agent/py_ref.h"

namespace cuvil::agent {
namespace {

using scheduler::GraphArena;
using scheduler::GraphBudget;

thread_local bool t_out_of_memory = false;

// Arenas by module and device. A module may have plans on several devices. GIL held.
using ArenaTable = std::map<std::pair<PyObject*, int>, std::weak_ptr<GraphArena>>;
ArenaTable& Arenas() {
  static ProcessLifetime<ArenaTable> arenas;
  return *arenas;
}

// What torch calls as (device, wanted bytes, bytes allowed, free bytes) before it raises; without the allocator's lock.
PyObject* OnOutOfMemory(PyObject*, PyObject* const* args, Py_ssize_t nargs) noexcept {
  t_out_of_memory = true;
  const bool can_wait = !GraphArena::IsInUseByThisThread() && !TheLifecycle().exiting.load(std::memory_order_relaxed);
  if (nargs >= 1 && PyLong_Check(args[0]) && can_wait) {
    const absl::Status status = ContainStatus([&] {
      GiveUpGraphs(static_cast<int>(PyLong_AsLong(args[0])));
      return absl::OkStatus();
    });
    if (!status.ok())
      Log(LogLevel::kWarning, "out-of-memory",
          absl::StrCat("graphs were not given back: ", std::string(status.message())));
  }
  Py_RETURN_NONE;
}

void AttachObserver() {
  static bool attached = false;
  if (std::exchange(attached, true)) return;
  static PyMethodDef definition = {"_cuvil_out_of_memory",
                                   reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(OnOutOfMemory)),
                                   METH_FASTCALL, nullptr};
  const ErrorScope errors;
  const OwnedRef observer = OwnedRef::Steal(PyCFunction_New(&definition, nullptr));
  const OwnedRef c = OwnedRef::Steal(PyImport_ImportModule("torch._C"));
  const OwnedRef done =
      observer && c
          ? OwnedRef::Steal(PyObject_CallMethod(c.get(), "_cuda_attach_out_of_memory_observer", "O", observer.get()))
          : OwnedRef();
  if (done) return;
  PyErr_Clear();
  Log(LogLevel::kInfo, "observer", "this torch does not tell when it runs out of memory; graphs are given back later");
}

// Torch's caches go back to the device, on all devices. Other threads' captures do not notice.
void EmptyCaches() {
  {
    const ErrorScope errors;
    const scheduler::FreeingScope freeing;
    const OwnedRef c = OwnedRef::Steal(PyImport_ImportModule("torch._C"));
    const OwnedRef done = c ? OwnedRef::Steal(PyObject_CallMethod(c.get(), "_cuda_emptyCache", nullptr)) : OwnedRef();
    if (!done) {
      PyErr_Clear();
      Log(LogLevel::kInfo, "empty-caches", "torch did not give its caches back to the device");
    }
  }
  for (int device = 0; device < GraphArena::kMaxDevices; ++device) {
    if (GraphBudget* budget = GraphArena::BudgetOf(device)) budget->CachesAreEmpty();
  }
}

void Drop(GraphBudget::GivenUp given_up) {
  AssertGilHeld();
  const GilRelease no_gil;
  given_up.clear();
}

void Drop(std::shared_ptr<GraphArena> arena) {
  AssertGilHeld();
  const GilRelease no_gil;
  arena.reset();
}

absl::StatusOr<std::shared_ptr<GraphArena>> ArenaOf(PyObject* module, cir::Device device) {
  ArenaTable& arenas = Arenas();
  const std::pair<PyObject*, int> key(module, device.index);
  if (const auto found = arenas.find(key); found != arenas.end()) {
    if (std::shared_ptr<GraphArena> arena = found->second.lock(); arena != nullptr) return arena;
  }
  std::erase_if(arenas, [](const auto& entry) { return entry.second.expired(); });
  absl::StatusOr<std::shared_ptr<GraphArena>> arena =
      GraphArena::CreateForProcess(device, std::make_unique<TorchCudaAllocator>(device.index));
  if (!arena.ok()) return arena;
  AttachObserver();
  arenas[key] = *arena;
  return arena;
}

}  // namespace

absl::StatusOr<GraphRoom> MakeGraphRoom(PyObject* module, cir::Device device, uint64_t need_bytes) {
  LetGraphDie(nullptr);
  GraphRoom room;
  absl::StatusOr<std::shared_ptr<GraphArena>> arena = ArenaOf(module, device);
  if (!arena.ok()) return arena.status();
  absl::StatusOr<scheduler::DeviceRoom> device_room = (*arena)->allocator().Room();
  if (!device_room.ok()) return device_room.status();
  GraphBudget& budget = (*arena)->budget();
  budget.SetLimit(TheLifecycle().settings.graph_memory.LimitBytes(device_room->total_bytes));
  if (budget.WantsEmptyCaches(need_bytes, *device_room)) {
    EmptyCaches();
    device_room = (*arena)->allocator().Room();
    if (!device_room.ok()) return device_room.status();
  }
  GraphBudget::Admission admission = budget.Admit(&(*arena)->account(), need_bytes, *device_room);
  Drop(std::move(admission.given_up));
  if (admission.verdict == GraphBudget::Verdict::kTooBig) return absl::UnimplementedError(admission.reason);
  if (admission.verdict == GraphBudget::Verdict::kLater) return absl::ResourceExhaustedError(admission.reason);
  if (admission.arena_is_empty) {
    Arenas().erase({module, device.index});
    Drop(*std::move(arena));
    arena = ArenaOf(module, device);
    if (!arena.ok()) return arena.status();
  }
  // What was given up has to leave the device before the capture: during one torch empties no caches.
  const uint64_t growth = std::min(admission.reservation.bytes(), device_room->free_bytes);
  if (budget.WantsEmptyCaches(0, {device_room->free_bytes - growth, device_room->total_bytes})) EmptyCaches();
  room.arena = *std::move(arena);
  room.reservation = std::move(admission.reservation);
  room.is_first = room.arena->account().pool_bytes() == 0;
  return room;
}

absl::Status SettleGraphRoom(PyObject* module, uint64_t own_bytes, GraphRoom* room) {
  const absl::Status measured = room->arena->Measure();
  room->reservation = {};
  if (!measured.ok()) {
    // A pool that cannot be asked is not counted; the device's own limits hold all the same.
    Log(LogLevel::kInfo, "graph-memory",
        absl::StrCat("memory of graphs is not counted: ", std::string(measured.message())));
    return absl::OkStatus();
  }
  room->need_bytes = room->is_first ? room->arena->account().pool_bytes()
                                    : room->arena->budget().NeedAtMost(room->arena->account(), own_bytes);
  GraphBudget::Admission settled = room->arena->budget().Settle(room->arena->account());
  Drop(std::move(settled.given_up));
  if (!settled.arena_is_empty) {
    KeepGraphLimit(room->arena->device().index);
    return absl::OkStatus();
  }
  Arenas().erase({module, room->arena->device().index});
  return absl::ResourceExhaustedError(settled.reason);
}

void KeepGraphLimit(int device_index) {
  const GraphBudget* budget = GraphArena::BudgetOf(device_index);
  constexpr scheduler::DeviceRoom kAnyRoom = {~uint64_t{0}, 0};
  if (budget != nullptr && budget->WantsEmptyCaches(0, kAnyRoom)) EmptyCaches();
}

void LetGraphDie(std::shared_ptr<void> graph) {
  static ProcessLifetime<GraphBudget::GivenUp> waiting;
  if (graph != nullptr) waiting->push_back(std::move(graph));
  if (waiting->empty() || CudaState::StreamIsCapturing()) return;
  // They wait for whoever uses their arena, who may be waiting for the GIL.
  Drop(std::exchange(*waiting, {}));
}

void EmptyCachesOfGraphs() {
  LetGraphDie(nullptr);
  for (int device = 0; device < GraphArena::kMaxDevices; ++device) {
    const GraphBudget* budget = GraphArena::BudgetOf(device);
    if (budget == nullptr || budget->usage().cached_bytes == 0) continue;
    EmptyCaches();
    return;
  }
}

void GiveUpGraphs(int device_index) {
  GraphBudget* budget = GraphArena::BudgetOf(device_index);
  if (budget == nullptr) return;
  AssertGilHeld();
  const GilRelease no_gil;
  GraphBudget::GivenUp given_up = budget->GiveUpAll();
  given_up.clear();
}

bool TakeOutOfMemory() { return std::exchange(t_out_of_memory, false); }

}  // namespace cuvil::agent
