#pragma once

#include <Python.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "agent/capture.h"
#include "agent/lifecycle/graph_runner.h"
#include "agent/lifecycle/record.h"
#include "scheduler/execution_plan.h"
#include "scheduler/part_sequence.h"

namespace cuvil::agent {

// A capture's program on a GPU: one CUDA graph where that can be, otherwise graphs with operators between them.
//
// What cannot be captured is told by the program (scheduler/program_cut.h), or by the capture, which fails at an
// operator; the program is then cut anew around it. Where cutting gives no graph that is long enough, there is none,
// and whoever calls runs the operators one by one.
//
// Threads: Create with the GIL held, Build without, all else with it.
class ProgramRunner {
 public:
  // Null for a program without a GPU.
  static std::unique_ptr<ProgramRunner> Create(std::shared_ptr<const Capture> capture);

  // Decides what is a graph; the graphs are captured when they are first run. Never fails: at worst there is none.
  void Build(const std::shared_ptr<const torch_abi::TorchApi>& api);

  // True iff it has answered; `outputs` are the program's results. False with OK: run the operators one by one.
  //
  // Errors: as GraphRunner::Run, and as PlanExecutor::Run of the operators between graphs
  absl::StatusOr<bool> Run(PyObject* module, absl::Span<const torch_abi::TensorRef> inputs,
                           absl::Span<const torch_abi::TensorRef> captured,
                           std::vector<torch_abi::OwnedTensor>* outputs);

  // For runs of the whole program operator by operator in its place, as GraphRunner's.
  uint64_t BeginOperators() const;
  void EndOperators(uint64_t begin_ns);

  void Describe(Record* record) const;

 private:
  // Cutting anew means capturing anew.
  static constexpr uint32_t kMaxCuts = 8;

  struct Part {
    std::unique_ptr<GraphRunner> graph;                    // null: operators only
    std::shared_ptr<const scheduler::ExecutionPlan> plan;  // one by one; null for the whole program
    uint64_t number;                                       // for the profile
  };
  struct Sequence {
    explicit Sequence(scheduler::PartSequence of_program) : flow(std::move(of_program)) {}
    const scheduler::PartSequence flow;
    std::vector<Part> parts;
    std::atomic<bool> is_final{false};  // cutting it anew gives nothing better
  };

  ProgramRunner(std::shared_ptr<const Capture> capture, cir::Device device)
      : capture_(std::move(capture)), device_(device) {}
  std::shared_ptr<Sequence> sequence() const {
    const absl::MutexLock lock(&mutex_);
    return sequence_;
  }
  std::shared_ptr<Sequence> MakeWhole() const;
  // The program in several parts; null if that gives no graph. No GIL.
  std::shared_ptr<Sequence> MakeParts(const std::vector<std::string>& host_reasons) const;
  // After a run in which graphs were missing: the program with what captures failed at kept out of the graphs. Null if
  // none failed, or nothing better is to be had.
  std::shared_ptr<Sequence> CutAnew(const std::shared_ptr<Sequence>& sequence);
  absl::Status RunPart(const Sequence& sequence, size_t index, PyObject* module,
                       absl::Span<const torch_abi::TensorRef> inputs, absl::Span<const torch_abi::TensorRef> captured,
                       std::vector<torch_abi::OwnedTensor>* outputs, bool* graph_is_missing) const;
  absl::StatusOr<bool> RunGraph(const Part& part, uint32_t first_op, PyObject* module,
                                absl::Span<const torch_abi::TensorRef> inputs,
                                absl::Span<const torch_abi::TensorRef> captured,
                                std::vector<torch_abi::OwnedTensor>* outputs) const;

  const std::shared_ptr<const Capture> capture_;
  const cir::Device device_;
  std::shared_ptr<const torch_abi::TorchApi> api_;
  mutable absl::Mutex mutex_;  // nothing is called or destroyed under it
  std::shared_ptr<Sequence> sequence_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> host_reasons_ ABSL_GUARDED_BY(mutex_);  // by operator: captures that failed
  uint32_t num_cuts_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace cuvil::agent
