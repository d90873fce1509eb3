// A CUDA driver that does its work at once in host memory and keeps a log of what it was asked.
//
// A capture really runs what is put into the stream, because the operators of these tests run on the CPU; launching
// calls `on_launch`, which does the work again. One fake at a time: the driver's functions are plain pointers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "memory/device/driver_api.h"
#include "tests/testing/capture_model.h"

namespace cuvil::testing {

struct FakeDriver {
  FakeDriver() { current = this; }
  ~FakeDriver() { current = nullptr; }
  FakeDriver(const FakeDriver&) = delete;
  FakeDriver& operator=(const FakeDriver&) = delete;

  std::vector<std::string> log;
  std::vector<void*> contexts;  // the calling thread's stack of contexts
  bool needs_context = false;   // functions refuse without one, as most of the driver's do
  std::string failing;          // the function that fails
  int error = 999;
  std::deque<int> node_types = {0, 0, 2};  // of the captured graph; launched kernels are added
  int capture_status = 0;
  int capture_mode = 0;         // of the calling thread
  bool capture_breaks = false;  // a capture under way has been invalidated
  // What a launched graph does besides the copies that were captured: behind the first `copies_before` of them.
  std::function<void()> on_launch;
  size_t copies_before = 1;
  // Set: between two looks at a capture something made a kernel node on this stream, unless a node has come anyway.
  std::function<void*()> working_stream;
  // Set: how long a launch of the graph takes on the device that has so many side streams.
  std::function<double(size_t num_side_streams)> launch_ms;
  // Left out of every graph's edges, by position.
  size_t hidden_edge = SIZE_MAX;
  std::function<void()> on_instantiate;
  std::vector<int> primary_contexts = {0, 1};  // of each device, whether it is active
  int num_live = 0;                            // streams, events, graphs, executables, modules
  // What was made in which device's context. Using a handle while another device is current fails, as on a real one.
  int8_t current_device = 0;
  std::vector<int> modes_at_destruction;  // of the calling thread, for each handle
  std::function<void()> on_synchronize;   // at a wait for an event
  std::vector<std::pair<std::string, int>> made;
  std::map<const void*, int> device_of;

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
  // The kernel that copies: its parameter.
  struct CopyTable {
    struct {
      uint64_t to, from, size_bytes;
    } copies[16];
  };
  struct CopyNode {
    void* node;
    uintptr_t capture;  // which one made it
    CopyTable table;
    unsigned grid_x, grid_y;
    void Run() const {
      for (unsigned i = 0; i < grid_y; ++i) {
        const auto& copy = table.copies[i];
        std::memmove(reinterpret_cast<void*>(copy.to), reinterpret_cast<const void*>(copy.from), copy.size_bytes);
      }
    }
  };
  std::vector<CopyNode> copy_nodes;
  MemsetParams memset{};
  // Of the last kernel node that was added.
  std::string kernel_name;
  unsigned kernel_blocks = 0;
  uint64_t kernel_to = 0, kernel_count = 0;
  uint32_t kernel_value = 0;

  int Note(const char* name, const std::string& detail = "") {
    log.push_back(detail.empty() ? name : std::string(name) + " " + detail);
    if (needs_context && contexts.empty() && log.back().find("Ctx") == std::string::npos) return 201;
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
    current->made.emplace_back(name, current->current_device);
    current->device_of[*handle] = current->current_device;
    ++current->num_live;
    return 0;
  }
  static int8_t ExchangeDevice(int8_t device) { return std::exchange(current->current_device, device); }
  static constexpr int kInvalidContext = 201;
  static bool IsCurrent(const void* handle) {
    const auto found = current->device_of.find(handle);
    return found == current->device_of.end() || found->second == current->current_device;
  }
  static int Destroy(const char* name) {
    --current->num_live;
    current->modes_at_destruction.push_back(current->capture_mode);
    return current->Note(name);
  }

  static device::DriverApi Api() {
    device::DriverApi api;
    api.cuGetErrorName = [](int result, const char** name) {
      *name = result == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_UNKNOWN";
      return 0;
    };
    api.cuDevicePrimaryCtxRetain = [](void** context, int device) {
      *context = reinterpret_cast<void*>(500 + static_cast<uintptr_t>(device));
      return current->Note("cuDevicePrimaryCtxRetain", std::to_string(device));
    };
    api.cuCtxGetCurrent = [](void** context) {
      *context = current->contexts.empty() ? nullptr : current->contexts.back();
      return 0;
    };
    api.cuCtxPushCurrent_v2 = [](void* context) {
      const int result = current->Note("cuCtxPushCurrent");
      if (result == 0) current->contexts.push_back(context);
      return result;
    };
    api.cuCtxPopCurrent_v2 = [](void** context) {
      const int result = current->Note("cuCtxPopCurrent");
      if (result != 0) return result;
      *context = current->contexts.back();
      current->contexts.pop_back();
      return 0;
    };
    api.cuStreamCreate = [](void** stream, unsigned) { return Make("cuStreamCreate", stream); };
    api.cuStreamDestroy_v2 = [](void*) { return Destroy("cuStreamDestroy"); };
    api.cuStreamWaitEvent = [](void* stream, void* event, unsigned) {
      if (current->capturing) {
        current->Capture().model.Wait(reinterpret_cast<uintptr_t>(stream), reinterpret_cast<uintptr_t>(event));
      }
      return current->Note("cuStreamWaitEvent", Text(stream));
    };
    api.cuStreamIsCapturing = [](void*, int* status) {
      *status = current->capture_status;
      return current->failing == "cuStreamIsCapturing" ? current->error : 0;
    };
    api.cuStreamBeginCapture_v2 = [](void* stream, int mode) {
      if (!IsCurrent(stream)) return kInvalidContext;
      ++current->num_captures;
      current->capturing = true;
      current->Capture().stream = reinterpret_cast<uintptr_t>(stream);
      return current->Note("cuStreamBeginCapture", std::to_string(mode));
    };
    api.cuStreamEndCapture = [](void*, void** graph) {
      *graph = nullptr;
      current->capturing = false;
      const int result = Make("cuStreamEndCapture", graph);
      current->captures[*graph] = current->num_captures;
      return result;
    };
    api.cuStreamGetCaptureInfo_v2 = [](void*, int* status, uint64_t*, void** graph, void* const**, size_t*) {
      *status = current->capture_breaks ? 2 : 1;
      *graph = current;
      if (current->working_stream && !std::exchange(current->saw_node, false)) {
        current->AddNode(current->working_stream());
        current->saw_node = false;
      }
      return current->failing == "cuStreamGetCaptureInfo" ? current->error : 0;
    };
    api.cuLaunchKernel = [](void* function, unsigned grid_x, unsigned grid_y, unsigned, unsigned, unsigned, unsigned,
                            unsigned, void* stream, void** arguments, void**) {
      const int result = current->Note("cuLaunchKernel", static_cast<const char*>(function));
      if (result != 0) return result;
      current->AddNode(stream);
      current->copy_nodes.push_back({&current->node_types.back(), current->num_captures,
                                     *static_cast<const CopyTable*>(arguments[0]), grid_x, grid_y});
      current->copy_nodes.back().Run();
      return 0;
    };
    api.cuGraphExecKernelNodeSetParams_v2 = [](void*, void* node, const void* params) {
      const int result = current->Note("cuGraphExecKernelNodeSetParams");
      if (result != 0) return result;
      const auto& kernel = *static_cast<const KernelParams*>(params);
      for (CopyNode& copy : current->copy_nodes) {
        if (copy.node != node) continue;
        copy.table = *static_cast<const CopyTable*>(kernel.arguments[0]);
        copy.grid_x = kernel.grid[0];
        copy.grid_y = kernel.grid[1];
      }
      return 0;
    };
    api.cuEventCreate = [](void** event, unsigned) { return Make("cuEventCreate", event); };
    api.cuEventRecord = [](void* event, void* stream) {
      if (!IsCurrent(event) || !IsCurrent(stream)) return kInvalidContext;
      if (current->capturing) {
        current->Capture().model.Record(reinterpret_cast<uintptr_t>(event), reinterpret_cast<uintptr_t>(stream));
      }
      current->event_ms[event] = current->clock_ms;
      return current->Note("cuEventRecord", Text(stream));
    };
    api.cuEventElapsedTime = [](float* milliseconds, void* start, void* end) {
      *milliseconds = static_cast<float>(current->event_ms[end] - current->event_ms[start]);
      return current->Note("cuEventElapsedTime");
    };
    api.cuEventSynchronize = [](void*) {
      if (current->on_synchronize) current->on_synchronize();
      return current->Note("cuEventSynchronize");
    };
    api.cuEventDestroy_v2 = [](void*) { return Destroy("cuEventDestroy"); };
    // Nodes that no capture has made are in every graph.
    api.cuGraphGetNodes = [](void* graph, void** nodes, size_t* count) {
      const uintptr_t capture = current->CaptureOf(graph);
      size_t found = 0;
      for (int& type : current->node_types) {
        const auto made = current->made_by.find(&type);
        if (made != current->made_by.end() && made->second != capture) continue;
        if (nodes != nullptr) nodes[found] = &type;
        ++found;
      }
      *count = found;
      return current->failing == "cuGraphGetNodes" ? current->error : 0;
    };
    api.cuGraphGetEdges = [](void* graph, void** from, void** to, size_t* count) {
      const Captured& captured = current->captured[current->CaptureOf(graph)];
      size_t found = 0;
      for (size_t i = 0; i < captured.model.edges().size(); ++i) {
        if (i == current->hidden_edge) continue;
        if (from != nullptr) from[found] = captured.nodes[captured.model.edges()[i].first];
        if (to != nullptr) to[found] = captured.nodes[captured.model.edges()[i].second];
        ++found;
      }
      *count = found;
      return current->Note("cuGraphGetEdges");
    };
    api.cuGraphNodeGetType = [](void* node, int* type) {
      *type = *static_cast<int*>(node);
      return 0;
    };
    api.cuGraphInstantiateWithFlags = [](void** executable, void* graph, uint64_t) {
      const int result = Make("cuGraphInstantiate", executable);
      current->captures[*executable] = current->captures[graph];
      if (result == 0 && current->on_instantiate) current->on_instantiate();
      return result;
    };
    api.cuGraphLaunch = [](void* executable, void* stream) {
      if (!IsCurrent(executable)) return kInvalidContext;
      const int result = current->Note("cuGraphLaunch", Text(stream));
      if (result != 0) return result;
      if (current->launch_ms) {
        const Captured& captured = current->captured[current->CaptureOf(executable)];
        const auto& streams = captured.model.captured();
        current->clock_ms += current->launch_ms(streams.size() - streams.count(captured.stream));
      }
      std::vector<const CopyNode*> copies;
      for (const CopyNode& copy : current->copy_nodes) {
        if (copy.capture == current->captures[executable]) copies.push_back(&copy);
      }
      for (size_t i = 0; i <= copies.size(); ++i) {
        if (i == std::min(current->copies_before, copies.size()) && current->on_launch) current->on_launch();
        if (i < copies.size()) copies[i]->Run();
      }
      return 0;
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
    api.cuDeviceGetCount = [](int* count) {
      *count = static_cast<int>(current->primary_contexts.size());
      return 0;
    };
    api.cuDeviceGet = [](int* device, int ordinal) {
      *device = ordinal;
      return 0;
    };
    api.cuDevicePrimaryCtxGetState = [](int device, unsigned*, int* active) {
      *active = current->primary_contexts[device];
      return 0;
    };
    api.cuDevicePrimaryCtxRelease_v2 = [](int device) {
      return current->Note("cuDevicePrimaryCtxRelease", std::to_string(device));
    };
    api.cuCtxSynchronize = [] { return current->Note("cuCtxSynchronize"); };
    api.cuThreadExchangeStreamCaptureMode = [](int* mode) {
      std::swap(*mode, current->capture_mode);
      return 0;
    };
    api.cuGraphDestroyNode = [](void* node) {
      *static_cast<int*>(node) = 0;
      return current->Note("cuGraphDestroyNode");
    };
    return api;
  }

 private:
  // What the streams of one capture made.
  struct Captured {
    uintptr_t stream = 0;
    CaptureModel model;
    std::vector<void*> nodes;
  };
  Captured& Capture() { return captured[num_captures]; }
  uintptr_t CaptureOf(void* graph) { return graph == this ? num_captures : captures[graph]; }
  void AddNode(void* stream) {
    node_types.push_back(0);
    made_by[&node_types.back()] = num_captures;
    Capture().model.Launch(reinterpret_cast<uintptr_t>(stream));
    Capture().nodes.push_back(&node_types.back());
    saw_node = true;
  }

  int added_node = 0;
  bool capturing = false, saw_node = false;
  std::map<uintptr_t, Captured> captured;
  std::map<void*, uintptr_t> made_by;  // of nodes
  double clock_ms = 0;
  std::map<void*, double> event_ms;
  uintptr_t num_captures = 0;
  std::map<void*, uintptr_t> captures;  // of graphs and executables
  static inline FakeDriver* current = nullptr;
  uintptr_t next_handle = 1000;
};

}  // namespace cuvil::testing
