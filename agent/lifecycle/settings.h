#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace cuvil::agent {

enum class PrepareMode { kBackground, kSync };
enum class AdoptMode { kMeasure, kAlways };
enum class LogLevel { kWarning, kInfo, kDebug };

// How much of a GPU's memory CUDA graphs may hold: so many bytes, or a share of what the device has.
struct GraphMemorySetting {
  // A graph needs about what eager's activations need, which models that fit the device with a batch worth having
  // rarely take more of than this; and eager's own caches have to fit beside it.
  double share = 0.125;
  uint64_t bytes = 0;
  bool is_bytes = false;

  uint64_t LimitBytes(uint64_t total_bytes) const {
    return is_bytes ? bytes : static_cast<uint64_t>(share * static_cast<double>(total_bytes));
  }
};

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
  GraphMemorySetting graph_memory;                 // CUVIL_GRAPH_MEMORY=<bytes>[K|M|G]|<share of the device>, per GPU
  uint32_t max_streams = 4;                        // CUVIL_STREAMS, of one CUDA graph; 1: no parallel branches
  std::string faults;                              // CUVIL_FAULT=point[:count],…
  std::vector<std::string> problems;

  // `lookup` is getenv's signature; null means unset.
  static Settings From(const char* (*lookup)(const char* name));
  static Settings FromEnvironment();
};

}  // namespace cuvil::agent
