// The libtorch that tests below the agent load without Python, found by CMake; see
// tests/scheduler/torch/CMakeLists.txt.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

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

// A test that calls the torch of this build; skipped where there is none.
class TorchTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto api = LoadTorch();
    if (api.status().code() == absl::StatusCode::kNotFound) GTEST_SKIP() << api.status();
    ASSERT_TRUE(api.ok()) << api.status();
    api_ = *api;
  }

  void* Data(torch_abi::TensorRef tensor) const {
    void* data = nullptr;
    api_->get_data_ptr(tensor.handle(), &data);
    return data;
  }
  // One dimension of float32, and what such a tensor holds.
  torch_abi::OwnedTensor Floats(const std::vector<float>& values) const {
    torch_abi::OwnedTensor tensor = *api_->MakeEmpty(cir::DType::kFloat32, {static_cast<int64_t>(values.size())});
    std::memcpy(Data(tensor.ref()), values.data(), values.size() * sizeof(float));
    return tensor;
  }
  std::vector<float> Read(const torch_abi::OwnedTensor& tensor, size_t count = 2) const {
    std::vector<float> values(count);
    std::memcpy(values.data(), Data(tensor.ref()), count * sizeof(float));
    return values;
  }

  std::shared_ptr<const torch_abi::TorchApi> api_;
};

}  // namespace cuvil::testing
