#include "memory/device/fill_kernel.h"

#include <algorithm>
#include <vector>

#include "memory/device/kernel_node.h"

namespace cuvil::device {
namespace {

// Each thread strides over the memory; %rd1 is the next element, %rd2 how many there are. `address` makes %rd6 of %rd0
// and %rd1. PTX 6.0 runs on everything from Maxwell on and needs no particular driver.
#define CUVIL_FILL(name, address, type)                      \
  ".visible .entry " name                                    \
  "(.param .u64 to, .param .u64 count, .param .u32 value)\n" \
  "{\n"                                                      \
  "  .reg .pred %p;\n"                                       \
  "  .reg .b32 %r<6>;\n"                                     \
  "  .reg .b64 %rd<7>;\n"                                    \
  "  ld.param.u64 %rd0, [to];\n"                             \
  "  ld.param.u64 %rd2, [count];\n"                          \
  "  ld.param.u32 %r0, [value];\n"                           \
  "  cvta.to.global.u64 %rd0, %rd0;\n"                       \
  "  mov.u32 %r1, %ctaid.x;\n"                               \
  "  mov.u32 %r2, %ntid.x;\n"                                \
  "  mov.u32 %r3, %tid.x;\n"                                 \
  "  mov.u32 %r4, %nctaid.x;\n"                              \
  "  mul.wide.u32 %rd1, %r1, %r2;\n"                         \
  "  cvt.u64.u32 %rd3, %r3;\n"                               \
  "  add.u64 %rd1, %rd1, %rd3;\n"                            \
  "  mul.wide.u32 %rd4, %r4, %r2;\n"                         \
  "NEXT:\n"                                                  \
  "  setp.ge.u64 %p, %rd1, %rd2;\n"                          \
  "  @%p bra DONE;\n" address "  st.global." type            \
  " [%rd6], %r0;\n"                                          \
  "  add.u64 %rd1, %rd1, %rd4;\n"                            \
  "  bra NEXT;\n"                                            \
  "DONE:\n"                                                  \
  "  ret;\n"                                                 \
  "}\n"
constexpr char kPtx[] =
    ".version 6.0\n"
    ".target sm_50\n"
    ".address_size 64\n" CUVIL_FILL("cuvil_fill_words", "  shl.b64 %rd5, %rd1, 2;\n  add.u64 %rd6, %rd0, %rd5;\n",
                                    "u32") CUVIL_FILL("cuvil_fill_bytes", "  add.u64 %rd6, %rd0, %rd1;\n", "u8");
#undef CUVIL_FILL

constexpr int kMemsetNode = 2;
constexpr unsigned kThreads = 256;
constexpr uint64_t kMaxBlocks = 1024;

// cuda.h: CUDA_MEMSET_NODE_PARAMS.
struct MemsetParams {
  uint64_t to;
  size_t pitch_bytes;
  unsigned value;
  unsigned element_bytes;
  size_t width;  // in elements
  size_t height;
};

// The node's neighbours, by one of the driver's two functions for that.
absl::StatusOr<std::vector<void*>> Neighbours(const DriverApi& api, const char* name,
                                              int (*function)(void*, void**, size_t*), void* node) {
  size_t count = 0;
  if (auto s = api.ToStatus(name, function(node, nullptr, &count)); !s.ok()) return s;
  std::vector<void*> nodes(count);
  if (count != 0) {
    if (auto s = api.ToStatus(name, function(node, nodes.data(), &count)); !s.ok()) return s;
  }
  return nodes;
}

}  // namespace

absl::StatusOr<FillKernel> FillKernel::Load(const DriverApi& api) {
  if (api.cuModuleLoadData == nullptr || api.cuModuleUnload == nullptr || api.cuModuleGetFunction == nullptr ||
      api.cuGraphMemsetNodeGetParams == nullptr || api.cuGraphNodeGetDependencies == nullptr ||
      api.cuGraphNodeGetDependentNodes == nullptr || api.cuGraphAddKernelNode_v2 == nullptr ||
      api.cuGraphAddDependencies == nullptr || api.cuGraphDestroyNode == nullptr) {
    return absl::UnavailableError("the CUDA driver cannot change graphs");
  }
  void* module = nullptr;
  if (auto s = api.ToStatus("cuModuleLoadData", api.cuModuleLoadData(&module, kPtx)); !s.ok()) return s;
  FillKernel kernel(&api, module);
  int found = api.cuModuleGetFunction(&kernel.fill_words_, module, "cuvil_fill_words");
  if (found == 0) found = api.cuModuleGetFunction(&kernel.fill_bytes_, module, "cuvil_fill_bytes");
  if (auto s = api.ToStatus("cuModuleGetFunction", found); !s.ok()) return s;
  return kernel;
}

FillKernel::~FillKernel() {
  if (module_ != nullptr) api_->cuModuleUnload(module_);
}

absl::StatusOr<std::vector<FillKernel::Replacement>> FillKernel::ReplaceMemsets(void* graph) const {
  size_t count = 0;
  if (auto s = api_->ToStatus("cuGraphGetNodes", api_->cuGraphGetNodes(graph, nullptr, &count)); !s.ok()) return s;
  std::vector<void*> nodes(count);
  if (count == 0) return std::vector<Replacement>();
  if (auto s = api_->ToStatus("cuGraphGetNodes", api_->cuGraphGetNodes(graph, nodes.data(), &count)); !s.ok()) return s;
  std::vector<Replacement> replaced;
  for (void* node : nodes) {
    int type = -1;
    if (auto s = api_->ToStatus("cuGraphNodeGetType", api_->cuGraphNodeGetType(node, &type)); !s.ok()) return s;
    if (type != kMemsetNode) continue;
    absl::StatusOr<void*> kernel = Replace(graph, node);
    if (!kernel.ok()) return kernel.status();
    if (*kernel != nullptr) replaced.push_back({node, *kernel});
  }
  return replaced;
}

absl::StatusOr<void*> FillKernel::Replace(void* graph, void* node) const {
  MemsetParams memset{};
  const int read = api_->cuGraphMemsetNodeGetParams(node, &memset);
  if (auto s = api_->ToStatus("cuGraphMemsetNodeGetParams", read); !s.ok()) return s;
  const uint64_t row_bytes = uint64_t{memset.width} * memset.element_bytes;
  if (memset.height > 1 && memset.pitch_bytes != row_bytes) return nullptr;
  const uint64_t size_bytes = row_bytes * std::max<size_t>(memset.height, 1);
  // The pattern as one word; of four-byte elements it is the value, smaller ones repeat.
  uint32_t word = memset.value;
  if (memset.element_bytes == 1) word = (word & 0xff) * 0x01010101u;
  if (memset.element_bytes == 2) word = (word & 0xffff) * 0x00010001u;
  const bool by_words = memset.to % 4 == 0 && size_bytes % 4 == 0;
  // Bytes can stand for two- and four-byte elements only if all their bytes are equal.
  if (!by_words && word != (word & 0xff) * 0x01010101u) return nullptr;

  uint64_t to = memset.to;
  uint64_t count = by_words ? size_bytes / 4 : size_bytes;
  void* arguments[] = {&to, &count, &word};
  KernelNodeParams kernel;
  kernel.function = by_words ? fill_words_ : fill_bytes_;
  kernel.grid_x = static_cast<unsigned>(std::clamp<uint64_t>((count + kThreads - 1) / kThreads, 1, kMaxBlocks));
  kernel.block_x = kThreads;
  kernel.arguments = arguments;

  auto before = Neighbours(*api_, "cuGraphNodeGetDependencies", api_->cuGraphNodeGetDependencies, node);
  if (!before.ok()) return before.status();
  auto after = Neighbours(*api_, "cuGraphNodeGetDependentNodes", api_->cuGraphNodeGetDependentNodes, node);
  if (!after.ok()) return after.status();
  void* added = nullptr;
  const int add = api_->cuGraphAddKernelNode_v2(&added, graph, before->data(), before->size(), &kernel);
  if (auto s = api_->ToStatus("cuGraphAddKernelNode", add); !s.ok()) return s;
  if (!after->empty()) {
    const std::vector<void*> from(after->size(), added);
    const int ordered = api_->cuGraphAddDependencies(graph, from.data(), after->data(), after->size());
    if (auto s = api_->ToStatus("cuGraphAddDependencies", ordered); !s.ok()) return s;
  }
  if (auto s = api_->ToStatus("cuGraphDestroyNode", api_->cuGraphDestroyNode(node)); !s.ok()) return s;
  return added;
}

}  // namespace cuvil::device
