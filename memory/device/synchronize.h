#pragma once

#include "absl/status/status.h"
#include "memory/device/driver_api.h"

namespace cuvil::device {

// Blocks until every device that this process has a primary context on has done all that was queued.
//
// For the end of a profile, never on the path that serves. A stream that is being captured cannot be waited for; the
// capture goes on.
//
// Threads:   any; the calling thread's current context is the same afterwards.
// Errors:    Unavailable  the driver lacks a function or refuses, as during a capture
absl::Status SynchronizeDevices(const DriverApi& api);

}  // namespace cuvil::device
