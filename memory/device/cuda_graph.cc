#include "memory/device/cuda_graph.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <vector>

namespace cuvil::device {
namespace {

// cuda.h: CU_STREAM_NON_BLOCKING, CU_EVENT_DISABLE_TIMING, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
// CU_STREAM_CAPTURE_STATUS_NONE and _ACTIVE, and the first values of CUgraphNodeType.
constexpr unsigned kNonBlocking = 1;
constexpr unsigned kDisableTiming = 2;
constexpr int kThreadLocal = 1;
constexpr int kNotCapturing = 0;
constexpr int kCapturing = 1;
constexpr int kKernelNode = 0;
constexpr int kMemcpyNode = 1;
constexpr int kMemsetNode = 2;

absl::StatusOr<std::vector<void*>> NodesOf(const DriverApi& api, void* graph) {
  size_t count = 0;
  if (auto s = api.ToStatus("cuGraphGetNodes", api.cuGraphGetNodes(graph, nullptr, &count)); !s.ok()) return s;
  std::vector<void*> nodes(count);
  if (count != 0) {
    if (auto s = api.ToStatus("cuGraphGetNodes", api.cuGraphGetNodes(graph, nodes.data(), &count)); !s.ok()) return s;
  }
  return nodes;
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

absl::StatusOr<std::vector<void*>> StreamCapture::NewNodes() {
  int status = kNotCapturing;
  void* graph = nullptr;
  const int asked = api_->cuStreamGetCaptureInfo_v2(stream_, &status, nullptr, &graph, nullptr, nullptr);
  if (auto s = api_->ToStatus("cuStreamGetCaptureInfo", asked); !s.ok()) return s;
  if (status != kCapturing || graph == nullptr) return absl::UnavailableError("the capture has been ended by an error");
  size_t count = 0;
  if (auto s = api_->ToStatus("cuGraphGetNodes", api_->cuGraphGetNodes(graph, nullptr, &count)); !s.ok()) return s;
  if (count == known_.size()) return std::vector<void*>();
  absl::StatusOr<std::vector<void*>> nodes = NodesOf(*api_, graph);
  if (!nodes.ok()) return nodes.status();
  // The driver lists nodes as they were made, which its manual does not promise.
  std::vector<void*> added;
  if (std::equal(known_.begin(), known_.end(), nodes->begin())) {
    added.assign(nodes->begin() + static_cast<ptrdiff_t>(known_.size()), nodes->end());
  } else {
    const std::set<void*> known(known_.begin(), known_.end());
    std::copy_if(nodes->begin(), nodes->end(), std::back_inserter(added),
                 [&](void* node) { return !known.contains(node); });
  }
  known_ = *std::move(nodes);
  return added;
}

absl::StatusOr<CapturedGraph> StreamCapture::Finish() {
  void* graph = nullptr;
  const int ended = api_->cuStreamEndCapture(std::exchange(stream_, nullptr), &graph);
  if (auto s = api_->ToStatus("cuStreamEndCapture", ended); !s.ok()) return s;
  if (graph == nullptr) return absl::UnavailableError("cuStreamEndCapture gave no graph");
  return CapturedGraph(api_, graph);
}

CapturedGraph::~CapturedGraph() {
  if (handle_ != nullptr) api_->cuGraphDestroy(handle_);
}

absl::StatusOr<ExecutableGraph> CapturedGraph::Instantiate() const {
  void* executable = nullptr;
  const int made = api_->cuGraphInstantiateWithFlags(&executable, handle_, 0);
  if (auto s = api_->ToStatus("cuGraphInstantiate", made); !s.ok()) return s;
  return ExecutableGraph(api_, executable);
}

absl::StatusOr<GraphNodeCounts> CapturedGraph::CountNodes() const {
  absl::StatusOr<std::vector<void*>> nodes = NodesOf(*api_, handle_);
  if (!nodes.ok()) return nodes.status();
  GraphNodeCounts counts;
  for (void* node : *nodes) {
    int type = -1;
    if (auto s = api_->ToStatus("cuGraphNodeGetType", api_->cuGraphNodeGetType(node, &type)); !s.ok()) return s;
    ++(type == kKernelNode   ? counts.kernels
       : type == kMemcpyNode ? counts.copies
       : type == kMemsetNode ? counts.memsets
                             : counts.others);
  }
  return counts;
}

bool IsCapturing(const DriverApi& api, StreamHandle stream) {
  int status = kNotCapturing;
  return api.cuStreamIsCapturing(stream, &status) != 0 || status != kNotCapturing;
}

}  // namespace cuvil::device
