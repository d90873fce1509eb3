// Tells torch's own Python code from the program's.
//
// Threads:   GIL held. No Python code runs.
#pragma once

#include <string>
#include <string_view>

namespace cuvil::agent {

// Whether a file is one of the imported torch package's. By the package's folder, not by a folder's name: programs and
// whole environments live below folders called torch.
bool IsTorchFile(std::string_view path);

// Where an imported module's code comes from; empty if it is not there or does not say.
std::string ModuleFile(const char* name);

}  // namespace cuvil::agent
