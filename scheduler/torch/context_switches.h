// Switches of torch's global context, asked through its own C++ functions: a load and a return each.
//
// Python's getters say the same for twenty times the price, which counts when they are asked before every launch of a
// graph.
//
// Threads:   immutable; any thread. Torch's switches are plain variables: somebody who sets one meanwhile is seen now
// or
//            next time, as by an operator.
// GIL:       not needed.
// Errors:    Load: Unavailable  no libtorch in this process, or it has no global context
//            Answer, Precisions: Aborted  torch refused to answer (TF32 asked for by two ways that contradict)
// Source:    aten/src/ATen/Context.h
#pragma once

#include <array>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace cuvil::torch_abi {

class ContextSwitches {
 public:
  enum class AnswerKind : uint8_t { kByte, kInt32, kOptionalInt32 };
  struct Row {
    AnswerKind kind;
    const char* getter;    // of torch._C; "" if there is none
    const char* function;  // of at::Context; "" if there is none that can be called
  };
  static constexpr Row kRows[] = {
#define CUVIL_SWITCH(answer, getter, function) {AnswerKind::answer, getter, function},
#include "scheduler/torch/context_switches.def"
  };
  static constexpr size_t kNumRows = sizeof(kRows) / sizeof(kRows[0]);
  // Of convolutions, recurrent layers and matrix products on CUDA.
  static constexpr size_t kNumPrecisions = 3;

  static absl::StatusOr<ContextSwitches> Load();

  bool Has(size_t row) const { return functions_[row] != nullptr; }
  bool HasPrecisions() const { return precision_ != nullptr; }

  // Precondition: Has(row). Equal for equal settings.
  absl::Status Answer(size_t row, uint64_t* answer) const;
  // float32 precision for each kind of operator. Precondition: HasPrecisions().
  absl::Status Precisions(std::array<uint64_t, kNumPrecisions>* answers) const;

 private:
  ContextSwitches() = default;
  void* context_ = nullptr;
  std::array<uint64_t (*)(void*), kNumRows> functions_{};
  int32_t (*precision_)(void*, int32_t, int32_t) = nullptr;
};

}  // namespace cuvil::torch_abi
