#pragma once

#include <Python.h>

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "jit/cir/tensor_type.h"
#include "scheduler/graph_arena.h"
#include "scheduler/graph_budget.h"

namespace cuvil::agent {

// Room on a GPU for one capture: the arena of the module, and bytes that nobody else is promised meanwhile.
struct GraphRoom {
  std::shared_ptr<scheduler::GraphArena> arena;
  scheduler::GraphBudget::Reservation reservation;
  bool is_first = false;    // no graph is in the arena yet: what it has afterwards is what this one needs
  uint64_t need_bytes = 0;  // after the capture: what it has needed, or at most, if others are in the arena
};

// Finds or makes the arena of the module's plans on that device, and gives up other graphs if the budget or the device
// is short. The arena lives as long as one of its graphs.
//
// Threads: GIL held; released while graphs die.
// Errors:  Unimplemented      it cannot fit into the budget; a sentence
//          ResourceExhausted  not now; a sentence
//          Unavailable        as the driver or torch says
absl::StatusOr<GraphRoom> MakeGraphRoom(PyObject* module, cir::Device device, uint64_t need_bytes);

// After the capture of a graph with so many bytes of its own: asks what it took in place of what was reserved, and
// gives up others if that was more.
//
// Threads: GIL held; released while graphs die.
// Errors:  ResourceExhausted  it took too much: all graphs of the module have been given up, and the caller is to drop
//                             its own and then to call KeepGraphLimit()
absl::Status SettleGraphRoom(PyObject* module, uint64_t own_bytes, GraphRoom* room);

// Empties torch's caches if the limit holds only without what graphs that are gone have left there.
//
// Threads: GIL held.
void KeepGraphLimit(int device_index);

// Where graphs die that nobody wants any more. While the calling thread captures for the program they wait for the next
// that comes here: its capture may not see them die. Null lets die what waits.
//
// Threads: GIL held; released while graphs die.
void LetGraphDie(std::shared_ptr<void> graph);

// Empties torch's caches if memory of graphs that are gone is among them: after cuvil.reset().
//
// Threads: GIL held.
void EmptyCachesOfGraphs();

// Gives every graph of the device back, for an allocation that has failed or is about to.
//
// Threads: GIL held; released while graphs die. Not from within a GraphArena::Use.
void GiveUpGraphs(int device_index);

// Whether torch's allocator has failed on the calling thread since this was asked last.
//
// The allocator tells an observer of ours, which is attached with the first arena. It gives graphs back at once, unless
// the thread is inside of an arena, so that whoever tries again succeeds: torch itself does not.
bool TakeOutOfMemory();

}  // namespace cuvil::agent
