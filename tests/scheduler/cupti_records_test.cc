#include "scheduler/cupti_records.h"

#include <gtest/gtest.h>

#if __has_include(<cupti.h>)
#include <cupti.h>
#define CUVIL_HAS_CUPTI_HEADER 1
#endif

namespace cuvil::scheduler {
namespace {

#ifdef CUVIL_HAS_CUPTI_HEADER

#define EXPECT_SAME_FIELD(ours, field, theirs, their_field)                 \
  EXPECT_EQ(offsetof(ours, field), offsetof(theirs, their_field)) << #ours; \
  EXPECT_EQ(sizeof(ours::field), sizeof(theirs::their_field)) << #ours << " " << #field

// The newest structs of the header that this is built with.
#if CUPTI_API_VERSION >= 130100
using Kernel = CUpti_ActivityKernel11;
#elif CUPTI_API_VERSION >= 130000
using Kernel = CUpti_ActivityKernel10;
#else
using Kernel = CUpti_ActivityKernel9;
#endif
using Memcpy = CUpti_ActivityMemcpy5;
using Peer = CUpti_ActivityMemcpyPtoP4;
using Memset = CUpti_ActivityMemset4;
using External = CUpti_ActivityExternalCorrelation;

TEST(CuptiRecordsTest, FieldsAreWhereTheHeaderHasThem) {
  EXPECT_SAME_FIELD(CuptiKernelRecord, start, Kernel, start);
  EXPECT_SAME_FIELD(CuptiKernelRecord, end, Kernel, end);
  EXPECT_SAME_FIELD(CuptiKernelRecord, device, Kernel, deviceId);
  EXPECT_SAME_FIELD(CuptiKernelRecord, stream, Kernel, streamId);
  EXPECT_EQ(offsetof(CuptiKernelRecord, grid), offsetof(Kernel, gridX));
  EXPECT_EQ(offsetof(CuptiKernelRecord, block), offsetof(Kernel, blockX));
  EXPECT_SAME_FIELD(CuptiKernelRecord, correlation, Kernel, correlationId);
  EXPECT_SAME_FIELD(CuptiKernelRecord, name, Kernel, name);
  EXPECT_SAME_FIELD(CuptiKernelRecord, graph_node, Kernel, graphNodeId);
  EXPECT_SAME_FIELD(CuptiKernelRecord, graph, Kernel, graphId);

  EXPECT_SAME_FIELD(CuptiCopyRecord, copy_kind, Memcpy, copyKind);
  EXPECT_SAME_FIELD(CuptiCopyRecord, bytes, Memcpy, bytes);
  EXPECT_SAME_FIELD(CuptiCopyRecord, start, Memcpy, start);
  EXPECT_SAME_FIELD(CuptiCopyRecord, device, Memcpy, deviceId);
  EXPECT_SAME_FIELD(CuptiCopyRecord, stream, Memcpy, streamId);
  EXPECT_SAME_FIELD(CuptiCopyRecord, correlation, Memcpy, correlationId);
  EXPECT_SAME_FIELD(CuptiCopyRecord, graph_node, Memcpy, graphNodeId);

  EXPECT_SAME_FIELD(CuptiPeerCopyRecord, bytes, Peer, bytes);
  EXPECT_SAME_FIELD(CuptiPeerCopyRecord, stream, Peer, streamId);
  EXPECT_SAME_FIELD(CuptiPeerCopyRecord, correlation, Peer, correlationId);
  EXPECT_SAME_FIELD(CuptiPeerCopyRecord, graph_node, Peer, graphNodeId);

  EXPECT_SAME_FIELD(CuptiMemsetRecord, bytes, Memset, bytes);
  EXPECT_SAME_FIELD(CuptiMemsetRecord, stream, Memset, streamId);
  EXPECT_SAME_FIELD(CuptiMemsetRecord, correlation, Memset, correlationId);
  EXPECT_SAME_FIELD(CuptiMemsetRecord, graph_node, Memset, graphNodeId);

  EXPECT_SAME_FIELD(CuptiExternalCorrelationRecord, external_kind, External, externalKind);
  EXPECT_SAME_FIELD(CuptiExternalCorrelationRecord, external_id, External, externalId);
  EXPECT_SAME_FIELD(CuptiExternalCorrelationRecord, correlation, External, correlationId);

  EXPECT_SAME_FIELD(CuptiCallRecord, thread, CUpti_ActivityAPI, threadId);
  EXPECT_SAME_FIELD(CuptiCallRecord, correlation, CUpti_ActivityAPI, correlationId);

  EXPECT_SAME_FIELD(CuptiResourceData, graph_data, CUpti_ResourceData, resourceDescriptor);
  EXPECT_SAME_FIELD(CuptiGraphData, node, CUpti_GraphData, node);
  EXPECT_SAME_FIELD(CuptiGraphData, original_node, CUpti_GraphData, originalNode);
}

TEST(CuptiRecordsTest, NumbersAreTheHeaders) {
  EXPECT_EQ(static_cast<int>(CuptiActivityKind::kMemcpy), CUPTI_ACTIVITY_KIND_MEMCPY);
  EXPECT_EQ(static_cast<int>(CuptiActivityKind::kMemset), CUPTI_ACTIVITY_KIND_MEMSET);
  EXPECT_EQ(static_cast<int>(CuptiActivityKind::kKernel), CUPTI_ACTIVITY_KIND_KERNEL);
  EXPECT_EQ(static_cast<int>(CuptiActivityKind::kDriver), CUPTI_ACTIVITY_KIND_DRIVER);
  EXPECT_EQ(static_cast<int>(CuptiActivityKind::kRuntime), CUPTI_ACTIVITY_KIND_RUNTIME);
  EXPECT_EQ(static_cast<int>(CuptiActivityKind::kConcurrentKernel), CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
  EXPECT_EQ(static_cast<int>(CuptiActivityKind::kMemcpyPeer), CUPTI_ACTIVITY_KIND_MEMCPY2);
  EXPECT_EQ(static_cast<int>(CuptiActivityKind::kExternalCorrelation), CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION);
  EXPECT_EQ(kCuptiDriverDomain, CUPTI_CB_DOMAIN_DRIVER_API);
  EXPECT_EQ(kCuptiRuntimeDomain, CUPTI_CB_DOMAIN_RUNTIME_API);
  EXPECT_EQ(kCuptiResourceDomain, CUPTI_CB_DOMAIN_RESOURCE);
  EXPECT_EQ(kCuptiApiEnter, CUPTI_API_ENTER);
  EXPECT_EQ(offsetof(CUpti_CallbackData, callbackSite), 0u);
  EXPECT_EQ(sizeof(CUpti_CallbackData::callbackSite), sizeof(int));
  EXPECT_EQ(kCuptiGraphNodeCloned, static_cast<uint32_t>(CUPTI_CBID_RESOURCE_GRAPHNODE_CLONED));
  EXPECT_EQ(kCuptiFlushForced, static_cast<uint32_t>(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED));
  EXPECT_EQ(kCuptiOwnCorrelation, CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM2);
  EXPECT_EQ(kCuptiMultipleSubscribers, CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED);
}

#else

TEST(CuptiRecordsTest, FieldsAreWhereTheHeaderHasThem) { GTEST_SKIP() << "no cupti.h on this machine"; }

#endif

}  // namespace
}  // namespace cuvil::scheduler
