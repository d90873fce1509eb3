#include "memory/device/vendor_library.h"

#include <cstddef>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "memory/device/shared_library.h"

namespace cuvil::device {
namespace {

enum class VersionScheme { kReturned, kStored, kStoredByGpu, kText, kPresent };

absl::StatusOr<std::string> ReadText(const SharedLibrary& library, void* function) {
  auto* init = reinterpret_cast<int (*)()>(library.Find("nvmlInit_v2"));
  auto* shutdown = reinterpret_cast<int (*)()>(library.Find("nvmlShutdown"));
  if (init == nullptr || shutdown == nullptr) return absl::UnavailableError("nvmlInit_v2 is missing");
  if (int result = init(); result != 0) return absl::UnavailableError(absl::StrCat("nvmlInit_v2: nvmlReturn ", result));
  char text[96] = {};
  const int result = reinterpret_cast<int (*)(char*, unsigned)>(function)(text, sizeof(text) - 1);
  shutdown();
  if (result != 0) return absl::UnavailableError(absl::StrCat("nvmlSystemGetDriverVersion: nvmlReturn ", result));
  return std::string(text);
}

absl::StatusOr<std::string> ReadVersion(const SharedLibrary& library, VersionScheme scheme, const char* name) {
  void* function = library.Find(name);
  if (function == nullptr) return absl::UnavailableError(absl::StrCat(library.path(), " has no ", name));
  switch (scheme) {
    case VersionScheme::kReturned:
      return absl::StrCat(reinterpret_cast<size_t (*)()>(function)());
    case VersionScheme::kStoredByGpu:
      if (const auto driver = SharedLibrary::Open({"libcuda.so.1"}); !driver.ok()) {
        return absl::UnavailableError("it is there, but no CUDA driver (libcuda.so.1)");
      }
      [[fallthrough]];
    case VersionScheme::kStored: {
      unsigned version = 0;
      if (int result = reinterpret_cast<int (*)(unsigned*)>(function)(&version); result != 0) {
        return absl::UnavailableError(absl::StrCat(name, ": error ", result));
      }
      return absl::StrCat(version);
    }
    case VersionScheme::kText:
      return ReadText(library, function);
    case VersionScheme::kPresent:
      return std::string();
  }
  return absl::InternalError("unknown version scheme");
}

VendorLibrary Probe(VendorLibrary row, VersionScheme scheme, const char* function,
                    absl::Span<const char* const> sonames) {
  auto library = SharedLibrary::Open(sonames);
  if (!library.ok()) {
    row.status = library.status();
    return row;
  }
  row.soname = library->soname();
  row.path = library->path();
  row.was_loaded = library->was_loaded();
  auto version = ReadVersion(*library, scheme, function);
  if (version.ok()) {
    row.version = *std::move(version);
  } else {
    row.status = version.status();
  }
  return row;
}

}  // namespace

std::vector<VendorLibrary> ProbeVendorLibraries() {
  std::vector<VendorLibrary> rows;
#define CUVIL_VENDOR_LIBRARY(id, name, use, scheme, function, ...) \
  rows.push_back(                                                  \
      Probe({#id, name, use, absl::OkStatus(), "", "", "", false}, VersionScheme::scheme, function, {__VA_ARGS__}));
#include "memory/device/vendor_library.def"
  return rows;
}

}  // namespace cuvil::device
