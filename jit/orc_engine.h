#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "jit/compiled_module.h"
#include "jit/host_cpu.h"
#include "jit/object_image.h"

namespace cuvil::jit {

// Maps object images into this process. Code sees no symbol of the process besides the few functions that code
// generation itself calls (memcpy, memset, memmove, fmaf, fma), so a user's library can never be bound by accident.
//
// Threads:   thread-safe; independent of other copies of LLVM in the process.
// Ownership: modules keep what they need of the engine alive and may outlive it.
class OrcEngine {
 public:
  // Errors:    Unavailable  no code generator for this processor, or memory cannot be mapped executable
  static absl::StatusOr<std::unique_ptr<OrcEngine>> Create();

  ~OrcEngine();
  OrcEngine(const OrcEngine&) = delete;
  OrcEngine& operator=(const OrcEngine&) = delete;

  const HostCpu& host() const;

  // Links `image` and resolves all of its entry points.
  //
  // Errors:    Internal  the object is malformed, or needs a symbol or lacks an entry point
  absl::StatusOr<CompiledModule> Load(const ObjectImage& image);

 private:
  class Session;
  explicit OrcEngine(std::shared_ptr<Session> session);

  std::shared_ptr<Session> session_;
};

// The host as code generation sees it.
//
// Errors:    Unavailable  LLVM has no code generator for this processor
absl::StatusOr<HostCpu> DetectHostCpu();

}  // namespace cuvil::jit
