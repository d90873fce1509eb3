#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace cuvil::agent {

enum class PrepareMode { kBackground, kSync };
enum class AdoptMode { kMeasure, kAlways };
enum class LogLevel { kWarning, kInfo, kDebug };

// What the environment asks for, read once per enable().
//
// A value that makes no sense is ignored, with a sentence in `problems`: a typo in a variable may not break a program.
//
// Threads: plain data.
struct Settings {
  PrepareMode prepare = PrepareMode::kBackground;  // CUVIL_PREPARE=background|sync
  AdoptMode adopt = AdoptMode::kMeasure;           // CUVIL_ADOPT=measure|always
  LogLevel log_level = LogLevel::kWarning;         // CUVIL_LOG=info|debug
  bool disabled = false;                           // CUVIL_DISABLE=1
  size_t max_plans = 16;                           // CUVIL_PLANS, per module
  std::string faults;                              // CUVIL_FAULT=point[:count],…
  std::vector<std::string> problems;

  // `lookup` is getenv's signature; null means unset.
  static Settings From(const char* (*lookup)(const char* name));
  static Settings FromEnvironment();
};

}  // namespace cuvil::agent
