// The libtorch that tests below the agent load without Python, found by CMake; see
// tests/scheduler/torch/CMakeLists.txt.
#pragma once

#include <cstdlib>
#include <memory>

#include "scheduler/torch/torch_api.h"

namespace cuvil::testing {

// Loaded once for each test binary. NotFound: no torch beside the Python of this build.
inline absl::StatusOr<std::shared_ptr<const torch_abi::TorchApi>> LoadTorch() {
  static const auto api = []() -> absl::StatusOr<std::shared_ptr<const torch_abi::TorchApi>> {
    const char* path = std::getenv("CUVIL_TEST_TORCH_LIBRARY");
    if (path == nullptr || *path == '\0') return absl::NotFoundError("CUVIL_TEST_TORCH_LIBRARY is not set");
    return torch_abi::TorchApi::Load(path);
  }();
  return api;
}

}  // namespace cuvil::testing
