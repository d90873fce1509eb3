// A device's primary context, which is the one that torch works in, and threads that have none yet.
//
// The CUDA runtime makes it current for a thread at the thread's first call that needs it; functions of the driver
// expect it to be there already. A thread whose first work is the launch of a plan has none: the driver then fails, or
// crashes where it takes a function of the context for granted (cuGraphExecKernelNodeSetParams).
//
// Threads:   ContextScope concerns the calling thread, for as long as it lives.
// Ownership: a retained context stays retained: graphs may live as long as the process.
// Errors:    RetainPrimaryContext: Unavailable as the driver says, or without the functions
// Source:    CUDA Driver API, primary context management and context stack
#pragma once

#include "absl/status/statusor.h"
#include "memory/device/driver_api.h"

namespace cuvil::device {

// A CUcontext.
using ContextHandle = void*;

absl::StatusOr<ContextHandle> RetainPrimaryContext(const DriverApi& api, int device_index);

// Makes a context current. Null: leaves the thread as it is.
class ContextScope {
 public:
  ContextScope(const DriverApi& api, ContextHandle context) : api_(api) {
    if (context == nullptr) return;
    ContextHandle current = nullptr;
    if (api_.cuCtxGetCurrent(&current) == 0 && current == context) return;
    pushed_ = api_.cuCtxPushCurrent_v2(context) == 0;
  }
  ~ContextScope() {
    ContextHandle popped = nullptr;
    if (pushed_) api_.cuCtxPopCurrent_v2(&popped);
  }
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  const DriverApi& api_;
  bool pushed_ = false;
};

}  // namespace cuvil::device
