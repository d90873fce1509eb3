#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "jit/host_cpu.h"
#include "jit/object_image.h"

namespace cuvil::jit {

// y[i] = fma(x[i], scale, shift) for i in [0, n). `x` and `y` do not overlap.
using ProbeKernel = void(const float* x, float* y, float scale, float shift, int64_t n);

inline constexpr char kProbeKernelName[] = "cuvil_probe_kernel";

// Compiles ProbeKernel for `host` with explicit vectors of the host's full width and a masked tail.
//
// Threads:   any; each call has an LLVM context of its own.
// Errors:    Unavailable  LLVM cannot generate code for `host`
//            Internal     the module that was built is invalid
absl::StatusOr<ObjectImage> CompileProbeKernel(const HostCpu& host);

// What the probe found out about code generation on this machine.
struct ProbeResult {
  HostCpu host;
  std::string llvm_version;
  double compile_ms = 0;  // emit, compile and link, the first time in this process
};

// Compiles the kernel, runs it over a length that is no multiple of any vector width and compares every element.
//
// Errors:    those of OrcEngine and CompileProbeKernel; DataLoss if an element differs
absl::StatusOr<ProbeResult> RunProbeKernel();

}  // namespace cuvil::jit
