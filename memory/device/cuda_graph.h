#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "memory/device/driver_api.h"

namespace cuvil::device {

// A CUstream that somebody else owns; null is the legacy default stream.
using StreamHandle = void*;

// A stream of our own that does not wait for the legacy default stream.
//
// Threads:   immutable; any thread.
// Ownership: destroyed with the object; the driver finishes what is queued.
// Errors:    Create: Unavailable as the driver says, e.g. without a current context
class Stream {
 public:
  static absl::StatusOr<Stream> Create(const DriverApi& api);
  Stream(Stream&& other) noexcept : api_(other.api_), handle_(std::exchange(other.handle_, nullptr)) {}
  Stream& operator=(Stream&& other) noexcept {
    std::swap(api_, other.api_);
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Stream();

  StreamHandle handle() const { return handle_; }

 private:
  Stream(const DriverApi* api, StreamHandle handle) : api_(api), handle_(handle) {}
  const DriverApi* api_;
  StreamHandle handle_;
};

// An event for order between streams; it takes no time.
//
// Threads:   thread-compatible.
// Errors:    Unavailable as the driver says
class Event {
 public:
  static absl::StatusOr<Event> Create(const DriverApi& api);
  Event(Event&& other) noexcept : api_(other.api_), handle_(std::exchange(other.handle_, nullptr)) {}
  Event& operator=(Event&&) = delete;
  ~Event();

  absl::Status Record(StreamHandle stream) const;
  absl::Status MakeWait(StreamHandle stream) const;
  // Blocks until what was recorded has happened; at once if nothing was.
  absl::Status Synchronize() const;

 private:
  Event(const DriverApi* api, void* handle) : api_(api), handle_(handle) {}
  const DriverApi* api_;
  void* handle_;
};

struct GraphNodeCounts {
  uint32_t kernels = 0, copies = 0, memsets = 0, others = 0;
  uint32_t total() const { return kernels + copies + memsets + others; }
};

// A graph that can be launched any number of times; launches of one object run one after the other on the device.
//
// Threads:   thread-compatible.
// Ownership: destroyed with the object; a launch in flight is finished by the driver.
// Errors:    Unavailable as the driver says. A device error is sticky: every later call says it again.
class ExecutableGraph {
 public:
  ExecutableGraph(ExecutableGraph&& other) noexcept
      : api_(other.api_), handle_(std::exchange(other.handle_, nullptr)) {}
  ExecutableGraph& operator=(ExecutableGraph&&) = delete;
  ~ExecutableGraph();

  absl::Status Launch(StreamHandle stream) const;
  // A CUgraphExec.
  void* handle() const { return handle_; }

 private:
  friend class CapturedGraph;
  ExecutableGraph(const DriverApi* api, void* handle) : api_(api), handle_(handle) {}
  const DriverApi* api_;
  void* handle_;
};

// What a capture gave: nodes and their order. Its nodes name the nodes of every executable made of it.
//
// Threads:   thread-compatible.
// Ownership: destroyed with the object; executables are copies and may outlive it.
// Errors:    Unavailable as the driver says
class CapturedGraph {
 public:
  CapturedGraph(CapturedGraph&& other) noexcept : api_(other.api_), handle_(std::exchange(other.handle_, nullptr)) {}
  CapturedGraph& operator=(CapturedGraph&&) = delete;
  ~CapturedGraph();

  absl::StatusOr<ExecutableGraph> Instantiate() const;
  absl::StatusOr<GraphNodeCounts> CountNodes() const;
  // A CUgraph.
  void* handle() const { return handle_; }

 private:
  friend class StreamCapture;
  CapturedGraph(const DriverApi* api, void* handle) : api_(api), handle_(handle) {}
  const DriverApi* api_;
  void* handle_;
};

// Turns what the calling thread puts into one stream into a graph instead of running it. Thread-local mode: other
// threads may allocate, synchronise and capture meanwhile (CUDA Driver API, cuStreamBeginCapture).
//
// Threads:   Begin, the work and Finish on one thread.
// Errors:    Unavailable as the driver says; a capture that failed or is given up leaves the stream usable
class StreamCapture {
 public:
  static absl::StatusOr<StreamCapture> Begin(const DriverApi& api, const Stream& stream);
  StreamCapture(StreamCapture&& other) noexcept
      : api_(other.api_), stream_(std::exchange(other.stream_, nullptr)), known_(std::move(other.known_)) {}
  StreamCapture& operator=(StreamCapture&&) = delete;
  // Gives the capture up.
  ~StreamCapture();

  // The nodes (CUgraphNode) that have come since the last time, on this stream or one that was forked from it, in the
  // order of their making.
  absl::StatusOr<std::vector<void*>> NewNodes();

  absl::StatusOr<CapturedGraph> Finish();

 private:
  StreamCapture(const DriverApi* api, StreamHandle stream) : api_(api), stream_(stream) {}
  const DriverApi* api_;
  StreamHandle stream_;       // null: finished
  std::vector<void*> known_;  // nodes
};

// Whether somebody is capturing this stream. A stream that cannot be asked counts as captured.
bool IsCapturing(const DriverApi& api, StreamHandle stream);

}  // namespace cuvil::device
