#include "memory/device/copy_kernel.h"

#include <algorithm>
#include <array>

#include "absl/strings/str_cat.h"
#include "memory/device/kernel_node.h"

namespace cuvil::device {
namespace {

// A row of blocks does one copy of the table: in units of 16 or 4 bytes where both addresses allow it, then what is
// left byte by byte. %rd5 is the thread's number in the row, %rd6 the number of threads; every loop strides by it.
// PTX 6.0 runs on everything from Maxwell on and needs no particular driver.
//
// CUVIL_COPY_UNITS: %rd8 counts units of 2^shift bytes up to %rd7; %rd11 is where the bytes that are left begin.
#define CUVIL_COPY_UNITS(name, shift, load, store) \
  name ":\n"                                       \
       "  shr.u64 %rd7, %rd4, " shift              \
       ";\n"                                       \
       "  shl.b64 %rd11, %rd7, " shift             \
       ";\n"                                       \
       "  mov.u64 %rd8, %rd5;\n" name              \
       "_NEXT:\n"                                  \
       "  setp.ge.u64 %p0, %rd8, %rd7;\n"          \
       "  @%p0 bra BYTES;\n"                       \
       "  shl.b64 %rd9, %rd8, " shift              \
       ";\n"                                       \
       "  add.u64 %rd10, %rd3, %rd9;\n"            \
       "  ld.global." load                         \
       ", [%rd10];\n"                              \
       "  add.u64 %rd10, %rd2, %rd9;\n"            \
       "  st.global." store                        \
       ";\n"                                       \
       "  add.u64 %rd8, %rd8, %rd6;\n"             \
       "  bra " name "_NEXT;\n"
constexpr char kPtx[] =
    ".version 6.0\n"
    ".target sm_50\n"
    ".address_size 64\n"
    ".visible .entry cuvil_copy(.param .align 8 .b8 table[384])\n"
    "{\n"
    "  .reg .pred %p<2>;\n"
    "  .reg .b32 %r<8>;\n"
    "  .reg .b64 %rd<12>;\n"
    "  mov.b64 %rd0, table;\n"
    "  mov.u32 %r0, %ctaid.y;\n"
    "  mul.wide.u32 %rd1, %r0, 24;\n"
    "  add.u64 %rd0, %rd0, %rd1;\n"
    "  ld.param.u64 %rd2, [%rd0];\n"
    "  ld.param.u64 %rd3, [%rd0+8];\n"
    "  ld.param.u64 %rd4, [%rd0+16];\n"
    "  cvta.to.global.u64 %rd2, %rd2;\n"
    "  cvta.to.global.u64 %rd3, %rd3;\n"
    "  mov.u32 %r1, %ctaid.x;\n"
    "  mov.u32 %r2, %ntid.x;\n"
    "  mov.u32 %r3, %tid.x;\n"
    "  mov.u32 %r4, %nctaid.x;\n"
    "  mul.wide.u32 %rd5, %r1, %r2;\n"
    "  cvt.u64.u32 %rd7, %r3;\n"
    "  add.u64 %rd5, %rd5, %rd7;\n"
    "  mul.wide.u32 %rd6, %r4, %r2;\n"
    "  mov.u64 %rd11, 0;\n"
    "  or.b64 %rd7, %rd2, %rd3;\n"
    "  and.b64 %rd8, %rd7, 15;\n"
    "  setp.eq.u64 %p0, %rd8, 0;\n"
    "  @%p0 bra WIDE;\n"
    "  and.b64 %rd8, %rd7, 3;\n"
    "  setp.eq.u64 %p1, %rd8, 0;\n"
    "  @%p1 bra WORDS;\n"
    "  bra BYTES;\n" CUVIL_COPY_UNITS("WIDE", "4", "v4.u32 {%r4, %r5, %r6, %r7}", "v4.u32 [%rd10], {%r4, %r5, %r6, %r7}")
        CUVIL_COPY_UNITS("WORDS", "2", "u32 %r4", "u32 [%rd10], %r4")
    "BYTES:\n"
    "  add.u64 %rd8, %rd11, %rd5;\n"
    "BYTES_NEXT:\n"
    "  setp.ge.u64 %p0, %rd8, %rd4;\n"
    "  @%p0 bra DONE;\n"
    "  add.u64 %rd10, %rd3, %rd8;\n"
    "  ld.global.u8 %r4, [%rd10];\n"
    "  add.u64 %rd10, %rd2, %rd8;\n"
    "  st.global.u8 [%rd10], %r4;\n"
    "  add.u64 %rd8, %rd8, %rd6;\n"
    "  bra BYTES_NEXT;\n"
    "DONE:\n"
    "  ret;\n"
    "}\n";
#undef CUVIL_COPY_UNITS

constexpr unsigned kThreads = 256;
constexpr uint64_t kUnitBytes = 16;
constexpr uint64_t kMaxBlocks = 1024;

using Table = std::array<DeviceCopy, CopyKernel::kMaxCopies>;
static_assert(sizeof(Table) == 384, "the size of the kernel's parameter");

// What the kernel is started with; borrows the table and the arguments.
struct Call {
  Table table{};
  void* arguments[1] = {&table};
  KernelNodeParams params;
};

absl::Status Prepare(absl::Span<const DeviceCopy> copies, void* function, Call* call) {
  if (copies.size() > CopyKernel::kMaxCopies) {
    return absl::InvalidArgumentError(absl::StrCat(copies.size(), " copies, at most ", CopyKernel::kMaxCopies));
  }
  uint64_t largest = 0;
  for (size_t i = 0; i < copies.size(); ++i) {
    call->table[i] = copies[i];
    largest = std::max(largest, copies[i].size_bytes);
  }
  const uint64_t units = (largest + kUnitBytes - 1) / kUnitBytes;
  call->params.function = function;
  call->params.grid_x = static_cast<unsigned>(std::clamp<uint64_t>((units + kThreads - 1) / kThreads, 1, kMaxBlocks));
  call->params.grid_y = std::max<unsigned>(1, static_cast<unsigned>(copies.size()));
  call->params.block_x = kThreads;
  call->params.arguments = call->arguments;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<CopyKernel> CopyKernel::Load(const DriverApi& api) {
  if (api.cuModuleLoadData == nullptr || api.cuModuleUnload == nullptr || api.cuModuleGetFunction == nullptr ||
      api.cuLaunchKernel == nullptr || api.cuGraphExecKernelNodeSetParams_v2 == nullptr) {
    return absl::UnavailableError("the CUDA driver cannot change graphs; update it");
  }
  void* module = nullptr;
  if (auto s = api.ToStatus("cuModuleLoadData", api.cuModuleLoadData(&module, kPtx)); !s.ok()) return s;
  CopyKernel kernel(&api, module);
  const int found = api.cuModuleGetFunction(&kernel.function_, module, "cuvil_copy");
  if (auto s = api.ToStatus("cuModuleGetFunction", found); !s.ok()) return s;
  return kernel;
}

CopyKernel::~CopyKernel() {
  if (module_ != nullptr) api_->cuModuleUnload(module_);
}

absl::Status CopyKernel::Launch(absl::Span<const DeviceCopy> copies, void* stream) const {
  Call call;
  if (absl::Status s = Prepare(copies, function_, &call); !s.ok()) return s;
  const KernelNodeParams& p = call.params;
  return api_->ToStatus("cuLaunchKernel",
                        api_->cuLaunchKernel(function_, p.grid_x, p.grid_y, p.grid_z, p.block_x, p.block_y, p.block_z,
                                             p.shared_bytes, stream, p.arguments, nullptr));
}

absl::Status CopyKernel::Update(void* executable, void* node, absl::Span<const DeviceCopy> copies) const {
  Call call;
  if (absl::Status s = Prepare(copies, function_, &call); !s.ok()) return s;
  return api_->ToStatus("cuGraphExecKernelNodeSetParams",
                        api_->cuGraphExecKernelNodeSetParams_v2(executable, node, &call.params));
}

}  // namespace cuvil::device
