#include "memory/device/driver_api.h"

#include "absl/strings/str_cat.h"

namespace cuvil::device {
namespace {

enum class Presence { kRequired, kOptional };

// CUdevice_attribute values of cuda.h.
constexpr int kMultiprocessorCount = 16;
constexpr int kComputeCapabilityMajor = 75;
constexpr int kComputeCapabilityMinor = 76;

// CUresult values of cuda.h.
constexpr int kOutOfMemory = 2;

// The errors of which the driver's reference says that the process must be ended to use CUDA again.
bool LosesContext(int result) {
  switch (result) {
    case 4:    // DEINITIALIZED
    case 214:  // ECC_UNCORRECTABLE
    case 220:  // NVLINK_UNCORRECTABLE
    case 226:  // CONTAINED
    case 700:  // ILLEGAL_ADDRESS
    case 702:  // LAUNCH_TIMEOUT
    case 709:  // CONTEXT_IS_DESTROYED
    case 710:  // ASSERT
    case 714:  // HARDWARE_STACK_ERROR
    case 715:  // ILLEGAL_INSTRUCTION
    case 716:  // MISALIGNED_ADDRESS
    case 717:  // INVALID_ADDRESS_SPACE
    case 718:  // INVALID_PC
    case 719:  // LAUNCH_FAILED
      return true;
    default:
      return false;
  }
}

absl::StatusOr<Gpu> DescribeGpu(const DriverApi& api, int ordinal) {
  Gpu gpu;
  int device = 0;
  char name[256] = {};
  size_t memory_bytes = 0;
  struct Call {
    const char* text;
    int result;
  };
  if (auto s = api.ToStatus("cuDeviceGet", api.cuDeviceGet(&device, ordinal)); !s.ok()) return s;
  for (const Call& call : {
           Call{"cuDeviceGetName", api.cuDeviceGetName(name, sizeof(name) - 1, device)},
           Call{"cuDeviceTotalMem", api.cuDeviceTotalMem_v2(&memory_bytes, device)},
           Call{"cuDeviceGetAttribute(MULTIPROCESSOR_COUNT)",
                api.cuDeviceGetAttribute(&gpu.num_multiprocessors, kMultiprocessorCount, device)},
           Call{"cuDeviceGetAttribute(COMPUTE_CAPABILITY_MAJOR)",
                api.cuDeviceGetAttribute(&gpu.compute_capability_major, kComputeCapabilityMajor, device)},
           Call{"cuDeviceGetAttribute(COMPUTE_CAPABILITY_MINOR)",
                api.cuDeviceGetAttribute(&gpu.compute_capability_minor, kComputeCapabilityMinor, device)},
       }) {
    if (auto s = api.ToStatus(call.text, call.result); !s.ok()) return s;
  }
  gpu.name = name;
  gpu.memory_bytes = memory_bytes;
  return gpu;
}

}  // namespace

absl::StatusOr<DriverApi> DriverApi::Load() {
  auto library = SharedLibrary::Open({"libcuda.so.1"});
  if (!library.ok()) return library.status();
  DriverApi api;
  const char* missing = nullptr;
#define CUVIL_DRIVER_FUNCTION(presence, name, ...)                         \
  api.name = reinterpret_cast<int (*)(__VA_ARGS__)>(library->Find(#name)); \
  if (api.name == nullptr && Presence::presence == Presence::kRequired && missing == nullptr) missing = #name;
#include "memory/device/driver_api.def"
  if (missing != nullptr) return absl::UnavailableError(absl::StrCat(library->path(), " has no ", missing));
  return api;
}

bool DriverApi::HasGraphs() const {
  return cuStreamCreate != nullptr && cuStreamDestroy_v2 != nullptr && cuEventSynchronize != nullptr &&
         cuStreamWaitEvent != nullptr && cuStreamIsCapturing != nullptr && cuStreamBeginCapture_v2 != nullptr &&
         cuStreamEndCapture != nullptr && cuEventCreate != nullptr && cuEventRecord != nullptr &&
         cuEventDestroy_v2 != nullptr && cuStreamGetCaptureInfo_v2 != nullptr && cuGraphGetNodes != nullptr &&
         cuGraphGetEdges != nullptr && cuGraphNodeGetType != nullptr && cuGraphInstantiateWithFlags != nullptr &&
         cuGraphLaunch != nullptr && cuGraphExecDestroy != nullptr && cuGraphDestroy != nullptr;
}

absl::Status DriverApi::ToStatus(const char* call, int result) const {
  if (result == 0) return absl::OkStatus();
  const char* name = nullptr;
  cuGetErrorName(result, &name);
  const std::string text = absl::StrCat(call, ": ", name != nullptr ? name : "CUresult", " (", result, ")");
  if (result == kOutOfMemory) return absl::ResourceExhaustedError(text);
  return LosesContext(result) ? absl::DataLossError(text) : absl::UnavailableError(text);
}

absl::StatusOr<DriverReport> ProbeDriver() {
  auto api = DriverApi::Load();
  if (!api.ok()) return api.status();
  if (auto s = api->ToStatus("cuInit", api->cuInit(0)); !s.ok()) return s;
  DriverReport report;
  if (auto s = api->ToStatus("cuDriverGetVersion", api->cuDriverGetVersion(&report.cuda_version)); !s.ok()) return s;
  int count = 0;
  if (auto s = api->ToStatus("cuDeviceGetCount", api->cuDeviceGetCount(&count)); !s.ok()) return s;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    auto gpu = DescribeGpu(*api, ordinal);
    if (!gpu.ok()) return gpu.status();
    report.gpus.push_back(*std::move(gpu));
  }
  return report;
}

absl::StatusOr<std::vector<ActiveGpu>> ActiveGpus(const DriverApi& api) {
  if (api.cuDevicePrimaryCtxGetState == nullptr || api.cuDeviceGetPCIBusId == nullptr) {
    return absl::UnavailableError("the CUDA driver does not tell which devices are in use");
  }
  if (auto s = api.ToStatus("cuInit", api.cuInit(0)); !s.ok()) return s;
  int count = 0;
  if (auto s = api.ToStatus("cuDeviceGetCount", api.cuDeviceGetCount(&count)); !s.ok()) return s;
  std::vector<ActiveGpu> gpus;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    int device = 0;
    if (auto s = api.ToStatus("cuDeviceGet", api.cuDeviceGet(&device, ordinal)); !s.ok()) return s;
    unsigned flags = 0;
    int active = 0;
    const int asked = api.cuDevicePrimaryCtxGetState(device, &flags, &active);
    if (auto s = api.ToStatus("cuDevicePrimaryCtxGetState", asked); !s.ok()) return s;
    if (active == 0) continue;
    char bus_id[32] = {};
    const int named = api.cuDeviceGetPCIBusId(bus_id, sizeof(bus_id) - 1, device);
    if (auto s = api.ToStatus("cuDeviceGetPCIBusId", named); !s.ok()) return s;
    gpus.push_back({ordinal, bus_id});
  }
  return gpus;
}

}  // namespace cuvil::device
