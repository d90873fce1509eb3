#pragma once

#include <Python.h>

#include <array>
#include <cstdint>
#include <vector>

#include "scheduler/torch/context_switches.h"

namespace cuvil::agent {

// What torch's CUDA operators look at besides their operands when they choose a kernel: TF32 and reduced precision,
// cuDNN's and attention's switches, determinism. Operators that run look for themselves; a captured graph has the
// choice built in, so it is good for one state only.
//
// Threads: GIL held; the state is the process's.
class CudaState {
 public:
  // Everything that this torch can be asked about; runs no Python code. An answer that cannot be had differs from every
  // other.
  static CudaState Read();
  // How many of the answers take a call of Python's getter.
  static size_t NumGetters();

  // The calling thread's device; -1 if torch does not tell.
  static int CurrentDevice();
  // Whether the calling thread's current stream is being captured into a graph of the program's own. Does not
  // initialise CUDA.
  static bool StreamIsCapturing();

  bool operator==(const CudaState&) const = default;

  std::vector<uint64_t> answers() const { return {answers_.begin(), answers_.end()}; }

 private:
  static constexpr size_t kNumAnswers =
      torch_abi::ContextSwitches::kNumRows + torch_abi::ContextSwitches::kNumPrecisions;
  std::array<uint64_t, kNumAnswers> answers_{};
};

}  // namespace cuvil::agent
