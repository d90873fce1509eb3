#pragma once

namespace cuvil::device {

// cuda.h: CUDA_KERNEL_NODE_PARAMS_v2, which the driver's functions for kernel nodes read.
struct KernelNodeParams {
  void* function = nullptr;
  unsigned grid_x = 1, grid_y = 1, grid_z = 1;
  unsigned block_x = 1, block_y = 1, block_z = 1;
  unsigned shared_bytes = 0;
  void** arguments = nullptr;
  void** extra = nullptr;
  void* kernel = nullptr;
  void* context = nullptr;
};

}  // namespace cuvil::device
