#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "memory/device/driver_api.h"

namespace cuvil::device {

// Bytes of device memory to copy. The spans of one copy, and of copies that one kernel does, must not overlap.
struct DeviceCopy {
  uint64_t to = 0, from = 0, size_bytes = 0;
  bool operator==(const DeviceCopy&) const = default;
};

// A kernel that does several copies at once, and whose node in a graph can be told to do others from the next launch
// on.
//
// That is what brings a call's own tensors into a graph that has its addresses built in: on an H200 changing a node
// costs 0.4 to 1.2 µs of host time, a copy that is queued beside the graph about 6, and the launch of a graph with
// memcpy nodes more than one with kernels only.
//
// Threads:   immutable; any thread.
// Ownership: the loaded module, for one context; it must outlive the graphs that use it.
// Errors:    Load: Unavailable  the driver refused, or lacks a function
//            Launch, Update: InvalidArgument  more copies than kMaxCopies
//                            Unavailable      the driver refused
class CopyKernel {
 public:
  static constexpr size_t kMaxCopies = 16;

  static absl::StatusOr<CopyKernel> Load(const DriverApi& api);
  CopyKernel(CopyKernel&& other) noexcept
      : api_(other.api_), module_(std::exchange(other.module_, nullptr)), function_(other.function_) {}
  CopyKernel& operator=(CopyKernel&&) = delete;
  ~CopyKernel();

  // Queues the copies; a stream that is being captured gets one node.
  absl::Status Launch(absl::Span<const DeviceCopy> copies, void* stream) const;
  // Later launches of the executable graph do these copies at the node that Launch has made. A launch that is under way
  // is not affected (CUDA Driver API, cuGraphExecKernelNodeSetParams).
  absl::Status Update(void* executable, void* node, absl::Span<const DeviceCopy> copies) const;

 private:
  CopyKernel(const DriverApi* api, void* module) : api_(api), module_(module) {}

  const DriverApi* api_;
  void* module_;
  void* function_ = nullptr;
};

}  // namespace cuvil::device
