// The static type of a tensor: element type, place, geometry; no data and no pointer.
//
// Threads:   plain values.
// Source:    the numbers of DType, DeviceType, Layout and MemoryFormat are torch's own (c10::ScalarType,
//            c10::DeviceType, c10::Layout, c10::MemoryFormat), which its stable C interface fixes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cuvil::cir {

enum class DType : int8_t {
#define CUVIL_DTYPE(enumerator, code, text, size_bytes) enumerator = code,
#include "jit/cir/dtypes.def"
#undef CUVIL_DTYPE
};

enum class DeviceType : int8_t { kCpu = 0, kCuda = 1, kMeta = 14 };

enum class Layout : int8_t { kStrided = 0, kSparse = 1, kSparseCsr = 2, kMkldnn = 3 };

enum class MemoryFormat : int8_t { kContiguous = 0, kPreserve = 1, kChannelsLast = 2, kChannelsLast3d = 3 };

// A device as torch writes it; index -1 means "the current one".
struct Device {
  DeviceType type = DeviceType::kCpu;
  int8_t index = -1;
  bool operator==(const Device&) const = default;
};

struct TensorType {
  DType dtype = DType{6};
  DeviceType device = DeviceType::kCpu;
  int8_t device_index = -1;
  std::vector<int64_t> sizes;    // in elements
  std::vector<int64_t> strides;  // in elements, as many as sizes
  bool requires_grad = false;
  bool is_inference = false;

  bool operator==(const TensorType&) const = default;

  int64_t num_elements() const;
  // Bytes between the first and the last element, both included; what a storage of its own would need.
  int64_t span_bytes() const;
};

// Zero for a code that is not in dtypes.def.
int64_t ElementSizeBytes(DType dtype);
bool IsKnownDType(int64_t code);

// "float32", "int64", ...; the names are torch's. Parsing gives nullopt for an unknown name.
std::string_view DTypeName(DType dtype);
std::optional<DType> ParseDType(std::string_view name);

// "cpu", "cuda:0", "meta". Parsing gives nullopt for an unknown name.
std::string DeviceName(Device device);
std::optional<Device> ParseDevice(std::string_view name);

// "contiguous", "preserve", "channels_last", "channels_last_3d"
std::string_view MemoryFormatName(MemoryFormat format);
std::optional<MemoryFormat> ParseMemoryFormat(std::string_view name);

// "strided", "sparse", "sparse_csr", "mkldnn"
std::string_view LayoutName(Layout layout);
std::optional<Layout> ParseLayout(std::string_view name);

}  // namespace cuvil::cir
