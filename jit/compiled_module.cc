#include "jit/compiled_module.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace cuvil::jit {

absl::StatusOr<void*> CompiledModule::Find(absl::string_view name) const {
  auto it = entry_points_.find(name);
  if (it == entry_points_.end()) return absl::NotFoundError(absl::StrCat("no entry point named ", name));
  return it->second;
}

}  // namespace cuvil::jit
