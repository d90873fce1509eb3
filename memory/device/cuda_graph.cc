#include "memory/device/cuda_graph.h"

#include <vector>

namespace cuvil::device {
namespace {

// cuda.h: CU_STREAM_NON_BLOCKING, CU_EVENT_DISABLE_TIMING, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
// CU_STREAM_CAPTURE_STATUS_NONE, and the first values of CUgraphNodeType.
constexpr unsigned kNonBlocking = 1;
constexpr unsigned kDisableTiming = 2;
constexpr int kThreadLocal = 1;
constexpr int kNotCapturing = 0;
constexpr int kKernelNode = 0;
constexpr int kMemcpyNode = 1;
constexpr int kMemsetNode = 2;

absl::StatusOr<GraphNodeCounts> CountNodes(const DriverApi& api, void* graph) {
  size_t count = 0;
  if (auto s = api.ToStatus("cuGraphGetNodes", api.cuGraphGetNodes(graph, nullptr, &count)); !s.ok()) return s;
  std::vector<void*> nodes(count);
  if (count != 0) {
    if (auto s = api.ToStatus("cuGraphGetNodes", api.cuGraphGetNodes(graph, nodes.data(), &count)); !s.ok()) return s;
  }
  GraphNodeCounts counts;
  for (void* node : nodes) {
    int type = -1;
    if (auto s = api.ToStatus("cuGraphNodeGetType", api.cuGraphNodeGetType(node, &type)); !s.ok()) return s;
    ++(type == kKernelNode   ? counts.kernels
       : type == kMemcpyNode ? counts.copies
       : type == kMemsetNode ? counts.memsets
                             : counts.others);
  }
  return counts;
}

}  // namespace

absl::StatusOr<Stream> Stream::Create(const DriverApi& api) {
  StreamHandle handle = nullptr;
  if (auto s = api.ToStatus("cuStreamCreate", api.cuStreamCreate(&handle, kNonBlocking)); !s.ok()) return s;
  return Stream(&api, handle);
}

Stream::~Stream() {
  if (handle_ != nullptr) api_->cuStreamDestroy_v2(handle_);
}

absl::StatusOr<Event> Event::Create(const DriverApi& api) {
  void* handle = nullptr;
  if (auto s = api.ToStatus("cuEventCreate", api.cuEventCreate(&handle, kDisableTiming)); !s.ok()) return s;
  return Event(&api, handle);
}

Event::~Event() {
  if (handle_ != nullptr) api_->cuEventDestroy_v2(handle_);
}

absl::Status Event::Record(StreamHandle stream) const {
  return api_->ToStatus("cuEventRecord", api_->cuEventRecord(handle_, stream));
}

absl::Status Event::MakeWait(StreamHandle stream) const {
  return api_->ToStatus("cuStreamWaitEvent", api_->cuStreamWaitEvent(stream, handle_, 0));
}

absl::Status Event::Synchronize() const {
  return api_->ToStatus("cuEventSynchronize", api_->cuEventSynchronize(handle_));
}

ExecutableGraph::~ExecutableGraph() {
  if (handle_ != nullptr) api_->cuGraphExecDestroy(handle_);
}

absl::Status ExecutableGraph::Launch(StreamHandle stream) const {
  return api_->ToStatus("cuGraphLaunch", api_->cuGraphLaunch(handle_, stream));
}

absl::StatusOr<StreamCapture> StreamCapture::Begin(const DriverApi& api, const Stream& stream) {
  const int result = api.cuStreamBeginCapture_v2(stream.handle(), kThreadLocal);
  if (auto s = api.ToStatus("cuStreamBeginCapture", result); !s.ok()) return s;
  return StreamCapture(&api, stream.handle());
}

StreamCapture::~StreamCapture() {
  if (stream_ == nullptr) return;
  // Ending is the only way out. It reports what went wrong inside, which whoever gives up knows already.
  void* graph = nullptr;
  if (api_->cuStreamEndCapture(stream_, &graph) == 0 && graph != nullptr) api_->cuGraphDestroy(graph);
}

absl::StatusOr<ExecutableGraph> StreamCapture::Finish(const FillKernel* fill_kernel) {
  void* graph = nullptr;
  const int ended = api_->cuStreamEndCapture(std::exchange(stream_, nullptr), &graph);
  if (auto s = api_->ToStatus("cuStreamEndCapture", ended); !s.ok()) return s;
  if (graph == nullptr) return absl::UnavailableError("cuStreamEndCapture gave no graph");
  struct Destroy {
    const DriverApi* api;
    void* graph;
    ~Destroy() { api->cuGraphDestroy(graph); }
  };
  const Destroy destroy{api_, graph};  // the executable graph is a copy
  if (fill_kernel != nullptr) {
    if (auto replaced = fill_kernel->ReplaceMemsets(graph); !replaced.ok()) return replaced.status();
  }
  auto counts = CountNodes(*api_, graph);
  if (!counts.ok()) return counts.status();
  void* executable = nullptr;
  const int made = api_->cuGraphInstantiateWithFlags(&executable, graph, 0);
  if (auto s = api_->ToStatus("cuGraphInstantiate", made); !s.ok()) return s;
  return ExecutableGraph(api_, executable, *counts);
}

bool IsCapturing(const DriverApi& api, StreamHandle stream) {
  int status = kNotCapturing;
  return api.cuStreamIsCapturing(stream, &status) != 0 || status != kNotCapturing;
}

}  // namespace cuvil::device
