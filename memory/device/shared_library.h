#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace cuvil::device {

// A vendor library that is loaded once and never unloaded: vendor libraries own threads, callbacks and exit handlers
// that outlive any handle of ours.
//
// Threads:   immutable; any thread.
class SharedLibrary {
 public:
  // The first of `sonames` that is loaded already, or else the first that the dynamic loader finds.
  //
  // Errors:    Unavailable  none can be loaded; the message is the loader's for the last one
  static absl::StatusOr<SharedLibrary> Open(absl::Span<const char* const> sonames);

  // The address of `symbol`, or null.
  void* Find(const char* symbol) const;

  const std::string& soname() const { return soname_; }
  const std::string& path() const { return path_; }  // as the loader resolved it
  bool was_loaded() const { return was_loaded_; }    // by somebody else, before Open()

 private:
  SharedLibrary(void* handle, absl::string_view soname, bool was_loaded);

  void* handle_;
  std::string soname_;
  std::string path_;
  bool was_loaded_;
};

}  // namespace cuvil::device
