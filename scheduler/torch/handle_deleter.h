// How handles go back to torch; set by TorchApi::Load, used by OwnedTensor.
//
// Threads:   set once before the first handle exists, read from any thread.
#pragma once

#include <cstdint>

namespace cuvil::torch_abi {

using HandleDeleter = int32_t (*)(void* handle);
void SetHandleDeleter(HandleDeleter function);

}  // namespace cuvil::torch_abi
