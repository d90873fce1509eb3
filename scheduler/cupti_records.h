// The beginnings of CUPTI's records, as far as they are read here.
//
// CUPTI gives each version of a record another struct, by appending to the one before. What is declared here is where
// CUDA 12.0 (CUpti_ActivityKernel9, Memcpy5, MemcpyPtoP4, Memset4) to 13.2 (Kernel11, Memcpy6) have it; a test compares
// it with cupti.h where there is one. A record is never copied whole, because its end is not known here.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cuvil::scheduler {

// CUpti_ActivityKind.
enum class CuptiActivityKind : int {
  kMemcpy = 1,
  kMemset = 2,
  kKernel = 3,
  kDriver = 4,
  kRuntime = 5,
  kConcurrentKernel = 10,
  kMemcpyPeer = 22,  // CUPTI_ACTIVITY_KIND_MEMCPY2
  kExternalCorrelation = 39,
};

constexpr int kCuptiDriverDomain = 1;           // CUPTI_CB_DOMAIN_DRIVER_API
constexpr int kCuptiRuntimeDomain = 2;          // CUPTI_CB_DOMAIN_RUNTIME_API
constexpr int kCuptiResourceDomain = 3;         // CUPTI_CB_DOMAIN_RESOURCE
constexpr int kCuptiApiEnter = 0;               // CUPTI_API_ENTER
constexpr uint32_t kCuptiGraphNodeCloned = 20;  // CUPTI_CBID_RESOURCE_GRAPHNODE_CLONED
constexpr uint32_t kCuptiFlushForced = 1;       // CUPTI_ACTIVITY_FLAG_FLUSH_FORCED
constexpr int kCuptiOwnCorrelation = 5;         // CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM2; torch uses the others
constexpr int kCuptiMultipleSubscribers = 39;   // CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED

struct CuptiRecord {
  CuptiActivityKind kind;
};

struct CuptiKernelRecord {
  CuptiActivityKind kind;
  uint8_t cache_config, shared_memory_config;
  uint16_t registers_per_thread;
  int32_t partitioned_cache[2];
  uint64_t start, end, completed;
  uint32_t device, context, stream;
  int32_t grid[3], block[3];
  int32_t static_shared_bytes, dynamic_shared_bytes;
  uint32_t local_bytes_per_thread, local_bytes_total;
  uint32_t correlation;
  int64_t grid_id;
  const char* name;
  void* reserved;
  uint64_t queued, submitted;
  uint8_t launch_type, carveout[2], padding;
  uint32_t shared_memory_executed;
  uint64_t graph_node;
  int32_t shared_memory_limit;
  uint32_t graph;
};
static_assert(offsetof(CuptiKernelRecord, start) == 16 && offsetof(CuptiKernelRecord, device) == 40 &&
              offsetof(CuptiKernelRecord, grid) == 52 && offsetof(CuptiKernelRecord, correlation) == 92 &&
              offsetof(CuptiKernelRecord, name) == 104 && offsetof(CuptiKernelRecord, graph_node) == 144 &&
              offsetof(CuptiKernelRecord, graph) == 156);

struct CuptiCopyRecord {
  CuptiActivityKind kind;
  uint8_t copy_kind, from_kind, to_kind, flags;
  uint64_t bytes, start, end;
  uint32_t device, context, stream;
  uint32_t correlation, runtime_correlation, padding;
  void* reserved;
  uint64_t graph_node;
  uint32_t graph;
};
static_assert(offsetof(CuptiCopyRecord, bytes) == 8 && offsetof(CuptiCopyRecord, correlation) == 44 &&
              offsetof(CuptiCopyRecord, graph_node) == 64 && offsetof(CuptiCopyRecord, graph) == 72);

struct CuptiPeerCopyRecord {
  CuptiActivityKind kind;
  uint8_t copy_kind, from_kind, to_kind, flags;
  uint64_t bytes, start, end;
  uint32_t device, context, stream;
  uint32_t from_device, from_context, to_device, to_context;
  uint32_t correlation;
  void* reserved;
  uint64_t graph_node;
  uint32_t graph;
};
static_assert(offsetof(CuptiPeerCopyRecord, correlation) == 60 && offsetof(CuptiPeerCopyRecord, graph_node) == 72 &&
              offsetof(CuptiPeerCopyRecord, graph) == 80);

struct CuptiMemsetRecord {
  CuptiActivityKind kind;
  uint32_t value;
  uint64_t bytes, start, end;
  uint32_t device, context, stream;
  uint32_t correlation;
  uint16_t flags, memory_kind;
  uint32_t padding;
  void* reserved;
  uint64_t graph_node;
  uint32_t graph;
};
static_assert(offsetof(CuptiMemsetRecord, correlation) == 44 && offsetof(CuptiMemsetRecord, graph_node) == 64 &&
              offsetof(CuptiMemsetRecord, graph) == 72);

struct CuptiExternalCorrelationRecord {
  CuptiActivityKind kind;
  int external_kind;
  uint64_t external_id;
  uint32_t correlation;
};
static_assert(offsetof(CuptiExternalCorrelationRecord, correlation) == 16);

// Of kDriver and kRuntime.
struct CuptiCallRecord {
  CuptiActivityKind kind;
  uint32_t callback_id;
  uint64_t start, end;
  uint32_t process, thread;
  uint32_t correlation;
};
static_assert(offsetof(CuptiCallRecord, thread) == 28 && offsetof(CuptiCallRecord, correlation) == 32);

// What callbacks of the domains of calls are given begins with whether it is the entry or the exit
// (CUpti_CallbackData::callbackSite, an int).

// What callbacks of the resource domain are given (CUpti_ResourceData), and the part of CUpti_GraphData that it points
// to for graph nodes.
struct CuptiGraphData {
  void *graph, *original_graph, *node, *original_node;
};
struct CuptiResourceData {
  void *context, *resource;
  const CuptiGraphData* graph_data;
};
static_assert(offsetof(CuptiResourceData, graph_data) == 16 && offsetof(CuptiGraphData, original_node) == 24);

}  // namespace cuvil::scheduler
