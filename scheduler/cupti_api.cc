#include "scheduler/cupti_api.h"

#include "absl/strings/str_cat.h"
#include "memory/device/shared_library.h"

namespace cuvil::scheduler {

absl::StatusOr<CuptiApi> CuptiApi::Load() {
  auto library = device::SharedLibrary::Open({"libcupti.so.13", "libcupti.so.12"});
  if (!library.ok()) return library.status();
  CuptiApi api;
  const char* missing = nullptr;
#define CUVIL_CUPTI_FUNCTION(name, ...)                                    \
  api.name = reinterpret_cast<int (*)(__VA_ARGS__)>(library->Find(#name)); \
  if (api.name == nullptr && missing == nullptr) missing = #name;
#include "scheduler/cupti_api.def"
  if (missing != nullptr) return absl::UnavailableError(absl::StrCat(library->path(), " has no ", missing));
  return api;
}

absl::Status CuptiApi::ToStatus(const char* call, int result) const {
  if (result == 0) return absl::OkStatus();
  const char* text = nullptr;
  cuptiGetResultString(result, &text);
  return absl::UnavailableError(absl::StrCat(call, ": ", text != nullptr ? text : "CUptiResult", " (", result, ")"));
}

}  // namespace cuvil::scheduler
