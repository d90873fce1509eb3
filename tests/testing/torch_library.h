// The libtorch that tests below the agent load without Python: the one named by CUVIL_TEST_TORCH_LIBRARY in the
// environment, or else the one that CMake found (tests/scheduler/torch/CMakeLists.txt). Where there is neither, these
// tests are skipped; with CUVIL_REQUIRE_TORCH_LIBRARY=1, which scripts/test.sh sets, they fail.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "scheduler/torch/torch_api.h"

namespace cuvil::testing {

inline std::string_view Environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string_view() : std::string_view(value);
}

// Loaded once for each test binary. NotFound: nobody has named a library; one that is named and cannot be loaded is
// another error.
inline absl::StatusOr<std::shared_ptr<const torch_abi::TorchApi>> LoadTorch() {
  static const auto api = []() -> absl::StatusOr<std::shared_ptr<const torch_abi::TorchApi>> {
    std::string path(Environment("CUVIL_TEST_TORCH_LIBRARY"));
    if (path.empty()) path = Environment("CUVIL_BUILD_TORCH_LIBRARY");
    if (path.empty()) return absl::NotFoundError("CUVIL_TEST_TORCH_LIBRARY is not set");
    auto api = torch_abi::TorchApi::Load(path.c_str());
    if (!api.ok()) return absl::FailedPreconditionError(api.status().ToString());
    return api;
  }();
  return api;
}

// A test that calls that torch.
class TorchTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto api = LoadTorch();
    if (api.status().code() == absl::StatusCode::kNotFound && Environment("CUVIL_REQUIRE_TORCH_LIBRARY") != "1") {
      GTEST_SKIP() << api.status();
    }
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
