// A CUDA driver that does its work at once in host memory and keeps a log of what it was asked.
//
// A capture really runs what is put into the stream, because the operators of these tests run on the CPU; launching
// calls `on_launch`, which does the work again. One fake at a time: the driver's functions are plain pointers.
#pragma once

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "memory/device/driver_api.h"

namespace cuvil::testing {

struct FakeDriver {
  FakeDriver() { current = this; }
  ~FakeDriver() { current = nullptr; }
  FakeDriver(const FakeDriver&) = delete;
  FakeDriver& operator=(const FakeDriver&) = delete;

  std::vector<std::string> log;
  std::string failing;  // the function that fails
  int error = 999;
  std::vector<int> node_types = {0, 0, 2};
  int capture_status = 0;
  std::function<void()> on_launch;
  int num_live = 0;  // streams, events, graphs, executables, modules

  // As cuda.h has them.
  struct MemsetParams {
    uint64_t to;
    size_t pitch_bytes;
    unsigned value, element_bytes;
    size_t width, height;
  };
  struct KernelParams {
    void* function;
    unsigned grid[3], block[3], shared_bytes;
    void** arguments;
  };
  MemsetParams memset{};
  // Of the last kernel node that was added.
  std::string kernel_name;
  unsigned kernel_blocks = 0;
  uint64_t kernel_to = 0, kernel_count = 0;
  uint32_t kernel_value = 0;

  int Note(const char* name, const std::string& detail = "") {
    log.push_back(detail.empty() ? name : std::string(name) + " " + detail);
    return failing == name ? error : 0;
  }
  size_t Count(const std::string& entry) const {
    size_t count = 0;
    for (const std::string& each : log) count += each == entry || each.starts_with(entry + " ");
    return count;
  }

  static std::string Text(const void* handle) { return std::to_string(reinterpret_cast<uintptr_t>(handle)); }
  static int Make(const char* name, void** handle) {
    const int result = current->Note(name);
    if (result != 0) return result;
    *handle = reinterpret_cast<void*>(++current->next_handle);
    ++current->num_live;
    return 0;
  }
  static int Destroy(const char* name) {
    --current->num_live;
    return current->Note(name);
  }

  static device::DriverApi Api() {
    device::DriverApi api;
    api.cuGetErrorName = [](int result, const char** name) {
      *name = result == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_UNKNOWN";
      return 0;
    };
    api.cuStreamCreate = [](void** stream, unsigned) { return Make("cuStreamCreate", stream); };
    api.cuStreamDestroy_v2 = [](void*) { return Destroy("cuStreamDestroy"); };
    api.cuStreamWaitEvent = [](void* stream, void*, unsigned) {
      return current->Note("cuStreamWaitEvent", Text(stream));
    };
    api.cuStreamIsCapturing = [](void*, int* status) {
      *status = current->capture_status;
      return current->failing == "cuStreamIsCapturing" ? current->error : 0;
    };
    api.cuStreamBeginCapture_v2 = [](void*, int mode) {
      return current->Note("cuStreamBeginCapture", std::to_string(mode));
    };
    api.cuStreamEndCapture = [](void*, void** graph) {
      *graph = nullptr;
      return Make("cuStreamEndCapture", graph);
    };
    api.cuEventCreate = [](void** event, unsigned) { return Make("cuEventCreate", event); };
    api.cuEventRecord = [](void*, void* stream) { return current->Note("cuEventRecord", Text(stream)); };
    api.cuEventSynchronize = [](void*) { return current->Note("cuEventSynchronize"); };
    api.cuEventDestroy_v2 = [](void*) { return Destroy("cuEventDestroy"); };
    api.cuMemcpyDtoDAsync_v2 = [](uint64_t to, uint64_t from, size_t size_bytes, void*) {
      const int result = current->Note("cuMemcpyDtoDAsync", std::to_string(size_bytes));
      if (result == 0) std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), size_bytes);
      return result;
    };
    api.cuGraphGetNodes = [](void*, void** nodes, size_t* count) {
      *count = current->node_types.size();
      for (size_t i = 0; nodes != nullptr && i < *count; ++i) nodes[i] = &current->node_types[i];
      return current->failing == "cuGraphGetNodes" ? current->error : 0;
    };
    api.cuGraphNodeGetType = [](void* node, int* type) {
      *type = *static_cast<int*>(node);
      return 0;
    };
    api.cuGraphInstantiateWithFlags = [](void** executable, void*, uint64_t) {
      return Make("cuGraphInstantiate", executable);
    };
    api.cuGraphLaunch = [](void*, void* stream) {
      const int result = current->Note("cuGraphLaunch", Text(stream));
      if (result == 0 && current->on_launch) current->on_launch();
      return result;
    };
    api.cuGraphExecDestroy = [](void*) { return Destroy("cuGraphExecDestroy"); };
    api.cuGraphDestroy = [](void*) { return Destroy("cuGraphDestroy"); };
    api.cuModuleLoadData = [](void** module, const void*) { return Make("cuModuleLoadData", module); };
    api.cuModuleUnload = [](void*) { return Destroy("cuModuleUnload"); };
    api.cuModuleGetFunction = [](void** function, void*, const char* name) {
      *function = const_cast<char*>(name);
      return current->Note("cuModuleGetFunction", name);
    };
    api.cuGraphMemsetNodeGetParams = [](void*, void* params) {
      *static_cast<MemsetParams*>(params) = current->memset;
      return current->failing == "cuGraphMemsetNodeGetParams" ? current->error : 0;
    };
    // The first node comes before every memset node, the second behind it.
    api.cuGraphNodeGetDependencies = [](void*, void** nodes, size_t* count) {
      *count = 1;
      if (nodes != nullptr) nodes[0] = &current->node_types[0];
      return 0;
    };
    api.cuGraphNodeGetDependentNodes = [](void*, void** nodes, size_t* count) {
      *count = 1;
      if (nodes != nullptr) nodes[0] = &current->node_types[1];
      return 0;
    };
    api.cuGraphAddKernelNode_v2 = [](void** node, void*, void* const* dependencies, size_t count, const void* params) {
      const auto& kernel = *static_cast<const KernelParams*>(params);
      current->kernel_name = static_cast<const char*>(kernel.function);
      current->kernel_blocks = kernel.grid[0];
      current->kernel_to = *static_cast<uint64_t*>(kernel.arguments[0]);
      current->kernel_count = *static_cast<uint64_t*>(kernel.arguments[1]);
      current->kernel_value = *static_cast<uint32_t*>(kernel.arguments[2]);
      *node = &current->added_node;
      return current->Note("cuGraphAddKernelNode",
                           count == 1 && dependencies[0] == &current->node_types[0] ? "behind the first" : "?");
    };
    api.cuGraphAddDependencies = [](void*, void* const* from, void* const* to, size_t count) {
      const bool right = count == 1 && from[0] == &current->added_node && to[0] == &current->node_types[1];
      return current->Note("cuGraphAddDependencies", right ? "before the second" : "?");
    };
    api.cuGraphDestroyNode = [](void* node) {
      *static_cast<int*>(node) = 0;
      return current->Note("cuGraphDestroyNode");
    };
    return api;
  }

 private:
  int added_node = 0;
  static inline FakeDriver* current = nullptr;
  uintptr_t next_handle = 1000;
};

}  // namespace cuvil::testing
