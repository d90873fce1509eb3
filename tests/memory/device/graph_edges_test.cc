#include "memory/device/graph_edges.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "memory/device/cuda_graph.h"
#include "tests/testing/fake_driver.h"

namespace cuvil::device {
namespace {

using testing::FakeDriver;
using ::testing::UnorderedElementsAre;

class GraphEdgesTest : public ::testing::Test {
 protected:
  GraphEdgesTest() { fake_.node_types.clear(); }

  // Two nodes on the capture's stream, one on a stream that was forked after the first, joined by a third.
  absl::StatusOr<CapturedGraph> CaptureDiamond() {
    void* const side = reinterpret_cast<void*>(77);
    auto stream = Stream::Create(api_);
    auto event = Event::Create(api_);
    auto capture = StreamCapture::Begin(api_, *stream);
    if (!capture.ok()) return capture.status();
    void* on = stream->handle();
    fake_.working_stream = [&] { return on; };
    const auto work = [&](void* where) {
      on = where;
      return capture->NewNodes();
    };
    (void)work(stream->handle());
    (void)event->Record(stream->handle());
    (void)event->MakeWait(side);
    (void)work(stream->handle());
    (void)work(side);
    (void)event->Record(side);
    (void)event->MakeWait(stream->handle());
    (void)work(stream->handle());
    fake_.working_stream = nullptr;
    return capture->Finish();
  }

  FakeDriver fake_;
  DriverApi api_ = FakeDriver::Api();
};

TEST_F(GraphEdgesTest, ReadsNodesAndTheirOrder) {
  const auto graph = CaptureDiamond();
  ASSERT_TRUE(graph.ok()) << graph.status();
  const auto edges = ReadGraphEdges(api_, graph->handle());
  ASSERT_TRUE(edges.ok()) << edges.status();
  EXPECT_EQ(edges->nodes.size(), 4u);
  EXPECT_THAT(edges->edges,
              UnorderedElementsAre(std::pair(0u, 1u), std::pair(0u, 2u), std::pair(1u, 3u), std::pair(2u, 3u)));
}

TEST_F(GraphEdgesTest, AsksWithEdgeDataWhereTheDriverHasIt) {
  const auto graph = CaptureDiamond();
  ASSERT_TRUE(graph.ok()) << graph.status();
  api_.cuGraphGetEdges_v2 = [](void* graph, void** from, void** to, void* data, size_t* count) {
    EXPECT_EQ(from != nullptr, data != nullptr);
    return FakeDriver::Api().cuGraphGetEdges(graph, from, to, count);
  };
  api_.cuGraphGetEdges = [](void*, void**, void**, size_t*) { return 918; };  // edges with data are not told here
  const auto edges = ReadGraphEdges(api_, graph->handle());
  ASSERT_TRUE(edges.ok()) << edges.status();
  EXPECT_EQ(edges->edges.size(), 4u);
}

TEST_F(GraphEdgesTest, FailuresAreNamed) {
  const auto graph = CaptureDiamond();
  ASSERT_TRUE(graph.ok()) << graph.status();
  for (const char* name : {"cuGraphGetNodes", "cuGraphGetEdges"}) {
    fake_.failing = name;
    const absl::Status status = ReadGraphEdges(api_, graph->handle()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(name));
  }
  fake_.failing = "";
  fake_.node_types.pop_back();  // an edge to a node that is not listed
  EXPECT_EQ(ReadGraphEdges(api_, graph->handle()).status().code(), absl::StatusCode::kInternal);
  api_.cuGraphGetEdges = nullptr;
  EXPECT_EQ(ReadGraphEdges(api_, graph->handle()).status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace cuvil::device
