// The one place below agent/ where an exception is caught: around a call into libtorch's C++ code.
//
// agent/boundary.h keeps our own exceptions away from CPython. This header keeps torch's away from us: operators report
// errors by throwing c10::Error, and a plan that calls them unboxed is their caller. No other file of this folder or of
// scheduler/ may contain a catch.
//
// Threads:   any; no state.
// Errors:    Aborted  the callee threw; the message is what() without torch's C++ backtrace, or says that there is none
// Source:    Itanium C++ ABI: handlers compare type names, so `std::exception` matches although this library carries
//            its own copy of libstdc++. What derives from nothing we know is caught without a text.
#pragma once

#include <exception>
#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace cuvil::torch_abi {

// "message\nException raised from ... (most recent call first): ..." -> "message"
inline std::string WithoutBacktrace(std::string_view what) {
  for (const std::string_view marker : {"\nException raised from", "\nC++ CapturedTraceback"}) {
    if (const size_t at = what.find(marker); at != std::string_view::npos) what = what.substr(0, at);
  }
  return std::string(what);
}

// OutOfMemory and operator errors are alike here: eager would have raised.
template <typename Call>
absl::Status CallForeign(const Call& call) {
  try {
    call();
    return absl::OkStatus();
  } catch (const std::exception& error) {
    return absl::AbortedError(WithoutBacktrace(error.what()));
  } catch (...) {
    return absl::AbortedError("torch threw something that is no std::exception");
  }
}

}  // namespace cuvil::torch_abi
