// Torch's current stream as a variable. One for each test program: torch's functions are plain pointers.
#pragma once

#include <cstdint>

#include "scheduler/torch/cuda_streams.h"
#include "tests/testing/fake_driver.h"

namespace cuvil::testing {

struct FakeStreams {
  static inline void* current = nullptr;

  static torch_abi::CudaStreams Api() {
    return torch_abi::CudaStreams(
        [](int32_t, void** stream) {
          *stream = current;
          return 0;
        },
        [](void* stream, int32_t) {
          current = stream;
          return 0;
        },
        FakeDriver::ExchangeDevice);
  }
};

}  // namespace cuvil::testing
