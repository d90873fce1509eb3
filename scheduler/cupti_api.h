#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace cuvil::scheduler {

using CuptiCallback = void (*)(void* user_data, int domain, uint32_t callback_id, const void* data);
using CuptiBufferRequested = void (*)(uint8_t** buffer, size_t* size_bytes, size_t* max_records);
using CuptiBufferCompleted = void (*)(void* context, uint32_t stream_id, uint8_t* buffer, size_t size_bytes,
                                      size_t valid_bytes);

// CUPTI's functions, resolved once: of the library that torch brought if one is loaded, or else the loader's.
//
// Looking CUPTI up does not attach it; the first call of most of its functions does.
//
// Threads:   immutable; any thread.
struct CuptiApi {
  // Errors:    Unavailable  no CUPTI on this machine, or one without a function of cupti_api.def
  static absl::StatusOr<CuptiApi> Load();

  // `call` with CUPTI's words for `result`; OK for CUPTI_SUCCESS.
  absl::Status ToStatus(const char* call, int result) const;

#define CUVIL_CUPTI_FUNCTION(name, ...) int (*name)(__VA_ARGS__) = nullptr;
#include "scheduler/cupti_api.def"
};

}  // namespace cuvil::scheduler
