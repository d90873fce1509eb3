#include "scheduler/nvml_api.h"

#include "absl/strings/str_cat.h"
#include "memory/device/shared_library.h"

namespace cuvil::scheduler {
namespace {

enum class Presence { kRequired, kOptional };

}  // namespace

absl::StatusOr<NvmlApi> NvmlApi::Load() {
  auto library = device::SharedLibrary::Open({"libnvidia-ml.so.1"});
  if (!library.ok()) return library.status();
  NvmlApi api;
  api.nvmlErrorString = reinterpret_cast<const char* (*)(int)>(library->Find("nvmlErrorString"));
  const char* missing = api.nvmlErrorString == nullptr ? "nvmlErrorString" : nullptr;
#define CUVIL_NVML_FUNCTION(presence, name, ...)                           \
  api.name = reinterpret_cast<int (*)(__VA_ARGS__)>(library->Find(#name)); \
  if (api.name == nullptr && Presence::presence == Presence::kRequired && missing == nullptr) missing = #name;
#include "scheduler/nvml_api.def"
  if (missing != nullptr) return absl::UnavailableError(absl::StrCat(library->path(), " has no ", missing));
  return api;
}

absl::Status NvmlApi::ToStatus(const char* call, int result) const {
  if (result == 0) return absl::OkStatus();
  const char* text = nvmlErrorString(result);
  return absl::UnavailableError(absl::StrCat(call, ": ", text != nullptr ? text : "nvmlReturn", " (", result, ")"));
}

bool NvmlApi::HasGpm() const {
  return nvmlGpmQueryDeviceSupport != nullptr && nvmlGpmSampleAlloc != nullptr && nvmlGpmSampleFree != nullptr &&
         nvmlGpmSampleGet != nullptr && nvmlGpmMetricsGet != nullptr;
}

}  // namespace cuvil::scheduler
