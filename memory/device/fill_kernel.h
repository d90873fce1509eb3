#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "memory/device/driver_api.h"

namespace cuvil::device {

// Kernels that set memory, to stand for a graph's memset nodes.
//
// A graph that has memset nodes among its kernels takes three to five times as long to launch: 15.7 µs of host time
// with twelve of them among 117 kernels, 23 µs with 17 among 338, where kernels alone take 4 to 6.
//
// Threads:   immutable; any thread.
// Ownership: the loaded module, for one context; it must outlive the graphs that use it.
// Errors:    Load: Unavailable  the driver refused, or lacks a function
//            Replace: Unavailable  the driver refused; the graph is then not to be used
class FillKernel {
 public:
  static absl::StatusOr<FillKernel> Load(const DriverApi& api);
  FillKernel(FillKernel&& other) noexcept
      : api_(other.api_),
        module_(std::exchange(other.module_, nullptr)),
        fill_words_(other.fill_words_),
        fill_bytes_(other.fill_bytes_) {}
  FillKernel& operator=(FillKernel&&) = delete;
  ~FillKernel();

  // A node that is no more, and the one in its place.
  struct Replacement {
    void *memset, *kernel;
  };
  // Puts a kernel in the place of every memset node whose memory has no gaps.
  absl::StatusOr<std::vector<Replacement>> ReplaceMemsets(void* graph) const;

 private:
  FillKernel(const DriverApi* api, void* module) : api_(api), module_(module) {}
  // Null if the node stays.
  absl::StatusOr<void*> Replace(void* graph, void* node) const;

  const DriverApi* api_;
  void* module_;
  void* fill_words_ = nullptr;
  void* fill_bytes_ = nullptr;
};

}  // namespace cuvil::device
