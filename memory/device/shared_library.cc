#include "memory/device/shared_library.h"

#include <dlfcn.h>
#include <link.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace cuvil::device {

SharedLibrary::SharedLibrary(void* handle, absl::string_view soname, bool was_loaded)
    : handle_(handle), soname_(soname), was_loaded_(was_loaded) {
  link_map* map = nullptr;
  if (dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr && map->l_name != nullptr) path_ = map->l_name;
}

absl::StatusOr<SharedLibrary> SharedLibrary::Open(absl::Span<const char* const> sonames) {
  // A framework that brings its own copy has loaded it from a path that the loader does not search.
  for (const char* soname : sonames) {
    if (void* handle = dlopen(soname, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD)) {
      return SharedLibrary(handle, soname, /*was_loaded=*/true);
    }
  }
  std::string reason = "no name given";
  for (const char* soname : sonames) {
    if (void* handle = dlopen(soname, RTLD_NOW | RTLD_LOCAL)) {
      return SharedLibrary(handle, soname, /*was_loaded=*/false);
    }
    const char* error = dlerror();
    reason = error != nullptr ? error : absl::StrCat("dlopen(", soname, ") failed");
  }
  return absl::UnavailableError(reason);
}

void* SharedLibrary::Find(const char* symbol) const { return dlsym(handle_, symbol); }

}  // namespace cuvil::device
