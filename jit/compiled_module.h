#pragma once

#include <memory>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace cuvil::jit {

// Host entry points whose code stays mapped for as long as any copy of the module lives.
//
// Threads:   immutable; copies may be used and dropped on any thread. A copy must outlive every call into its code.
// Ownership: shares the code, and with it the engine that mapped it; the last copy unmaps.
class CompiledModule {
 public:
  using EntryPoints = absl::flat_hash_map<std::string, void*>;

  // `code` unmaps the machine code when its last reference goes.
  CompiledModule(std::shared_ptr<const void> code, EntryPoints entry_points)
      : code_(std::move(code)), entry_points_(std::move(entry_points)) {}

  // The entry point `name` as a function of type `Function`; the caller answers for the type.
  //
  // Errors:    NotFound  the module has no such entry point
  template <typename Function>
  absl::StatusOr<Function*> Get(absl::string_view name) const {
    auto found = Find(name);
    if (!found.ok()) return found.status();
    return reinterpret_cast<Function*>(*found);
  }

 private:
  absl::StatusOr<void*> Find(absl::string_view name) const;

  std::shared_ptr<const void> code_;
  EntryPoints entry_points_;
};

}  // namespace cuvil::jit
