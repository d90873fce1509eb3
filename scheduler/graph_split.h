// Divides a tensor program into a body that one CUDA graph can hold and a tail that gives the caller tensors of its
// own.
//
// A graph writes to the same memory at every launch, so nothing that it makes may be handed out. The tail runs after
// each launch, operator by operator: it gets copies of the memory that outputs show and makes the same views of them.
// Views of inputs and weights are made of the caller's own tensors. Outputs are then fresh tensors with eager's
// strides, storage and identities. Where an operator gives a view of memory that no other operator shows (`linear` of
// three dimensions), a copy would be no view: the tail runs the operator itself.
//
// Threads:   pure.
// Errors:    Unimplemented  a program that cannot be one graph; the message is the reason, with the operator's line
//            Internal       the tail does not verify
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "jit/cir/graph.h"
#include "scheduler/execution_plan.h"

namespace cuvil::scheduler {

struct GraphSplit {
  // As the program; its outputs are what the tail reads: of the first num_copies a fresh copy, the others as they are.
  cir::Graph body;
  uint32_t num_copies = 0;
  // Inputs as the program; captured are first those of the program's that it needs, then the body's outputs.
  cir::Graph tail;
  std::vector<uint32_t> tail_captured;  // positions in the program's captured tensors
  std::vector<uint32_t> left_out_ops;   // of the program, that the body leaves to the tail
};

struct SplitOptions {
  std::set<cir::ValueId> hidden_views;  // that their operators make as views of memory of their own
  // Memory whose version counters somebody can see; null: of all outputs.
  const std::set<cir::StorageId>* versioned = nullptr;
};
absl::StatusOr<GraphSplit> SplitForGraph(const cir::Graph& graph, const SplitOptions& options);

// Why steps of a plan cannot be captured on this device: host memory, writes to what the caller owns, random numbers,
// what only Python can call. By operator of its graph; empty where nothing is against it.
std::vector<std::string> WhyNotCapturable(const ExecutionPlan& plan, cir::Device device);

// Whether every step of a body can be captured.
//
// Errors:    Unimplemented  with the first reason
absl::Status CheckCapturable(const ExecutionPlan& body, cir::Device device);

}  // namespace cuvil::scheduler
