#include "scheduler/torch/context_switches.h"

#include <dlfcn.h>

#include "scheduler/torch/boundary.h"

namespace cuvil::torch_abi {
namespace {

// at::Float32Backend::CUDA; at::Float32Op::CONV, RNN, MATMUL.
constexpr int32_t kCuda = 1;
// at::Float32Precision: operators do for NONE what they do for IEEE, and torch's older switches set the one for the
// other.
constexpr uint64_t kNone = 0, kIeee = 1;
constexpr int32_t kFloat32Ops[ContextSwitches::kNumPrecisions] = {1, 2, 3};

// What a function of this kind leaves in the result register: the rest of it is undefined (System V ABI, 3.2.3).
uint64_t Meaningful(ContextSwitches::AnswerKind kind, uint64_t result) {
  switch (kind) {
    case ContextSwitches::AnswerKind::kByte:
      return result & 0xff;
    case ContextSwitches::AnswerKind::kInt32:
      return result & 0xffffffff;
    case ContextSwitches::AnswerKind::kOptionalInt32:  // the value, then whether there is one
      return (result >> 32 & 0xff) == 0 ? ~uint64_t{0} : result & 0xffffffff;
  }
  return result;
}

}  // namespace

absl::StatusOr<ContextSwitches> ContextSwitches::Load() {
  void* library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD);
  if (library == nullptr) return absl::UnavailableError("libtorch_cpu.so is not loaded");
  const auto global = reinterpret_cast<void* (*)()>(dlsym(library, "_ZN2at13globalContextEv"));
  if (global == nullptr) return absl::UnavailableError("this torch does not export its global context");
  ContextSwitches switches;
  if (absl::Status s = CallForeign([&] { switches.context_ = global(); }); !s.ok()) return s;
  for (size_t i = 0; i < kNumRows; ++i) {
    if (*kRows[i].function == '\0') continue;
    switches.functions_[i] = reinterpret_cast<uint64_t (*)(void*)>(dlsym(library, kRows[i].function));
  }
  switches.precision_ = reinterpret_cast<int32_t (*)(void*, int32_t, int32_t)>(
      dlsym(library, "_ZNK2at7Context16float32PrecisionENS_14Float32BackendENS_9Float32OpE"));
  return switches;
}

absl::Status ContextSwitches::Answer(size_t row, uint64_t* answer) const {
  return CallForeign([&] { *answer = Meaningful(kRows[row].kind, functions_[row](context_)); });
}

absl::Status ContextSwitches::Precisions(std::array<uint64_t, kNumPrecisions>* answers) const {
  return CallForeign([&] {
    for (size_t i = 0; i < kNumPrecisions; ++i) {
      const uint64_t precision = static_cast<uint64_t>(precision_(context_, kCuda, kFloat32Ops[i])) & 0xff;
      (*answers)[i] = precision == kNone ? kIeee : precision;
    }
  });
}

}  // namespace cuvil::torch_abi
