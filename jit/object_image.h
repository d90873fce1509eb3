#pragma once

#include <string>
#include <vector>

namespace cuvil::jit {

// Relocatable machine code for the host, ready for OrcEngine::Load().
struct ObjectImage {
  std::string name;                       // shown in errors and to debuggers
  std::string bytes;                      // an ELF object file
  std::vector<std::string> entry_points;  // unmangled names of the functions in it that may be called
};

}  // namespace cuvil::jit
