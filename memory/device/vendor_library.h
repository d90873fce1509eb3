#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"

namespace cuvil::device {

// What is known about one optional library of vendor_library.def.
struct VendorLibrary {
  std::string id;       // "cudnn"
  std::string name;     // "cuDNN"
  std::string use;      // what its absence costs, as a noun phrase
  absl::Status status;  // Unavailable with the loader's reason, or OK
  std::string soname;
  std::string path;
  std::string version;  // as the library reports it; empty if it reports none
  bool was_loaded = false;
};

// Looks for every library of vendor_library.def, in its order. Those found stay loaded.
//
// Threads:   any.
std::vector<VendorLibrary> ProbeVendorLibraries();

}  // namespace cuvil::device
