#pragma once

#include <string>

namespace cuvil::jit {

// The processor that generated code runs on, as LLVM names it.
struct HostCpu {
  std::string triple;
  std::string name;             // "znver4"
  std::string features;         // "+avx2,+fma,…", exactly what code generation is told
  int vector_width_bytes = 16;  // the widest vector worth emitting: 64, 32 or 16
};

}  // namespace cuvil::jit
