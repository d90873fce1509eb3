#include "jit/cir/tensor_type.h"

#include <array>
#include <charconv>

namespace cuvil::cir {
namespace {

struct DTypeRow {
  DType dtype;
  std::string_view name;
  int64_t size_bytes;
};

constexpr DTypeRow kDTypes[] = {
#define CUVIL_DTYPE(enumerator, code, text, size_bytes) {DType::enumerator, text, size_bytes},
#include "jit/cir/dtypes.def"
#undef CUVIL_DTYPE
};

constexpr std::array<std::string_view, 4> kMemoryFormats = {"contiguous", "preserve", "channels_last",
                                                            "channels_last_3d"};
constexpr std::array<std::string_view, 4> kLayouts = {"strided", "sparse", "sparse_csr", "mkldnn"};

template <typename Enum, size_t n>
std::optional<Enum> FindName(const std::array<std::string_view, n>& names, std::string_view name) {
  for (size_t i = 0; i < n; ++i) {
    if (names[i] == name) return static_cast<Enum>(i);
  }
  return std::nullopt;
}

struct DeviceRow {
  DeviceType type;
  std::string_view name;
};
constexpr DeviceRow kDevices[] = {{DeviceType::kCpu, "cpu"}, {DeviceType::kCuda, "cuda"}, {DeviceType::kMeta, "meta"}};

}  // namespace

int64_t TensorType::num_elements() const {
  int64_t n = 1;
  for (int64_t size : sizes) n *= size;
  return n;
}

int64_t TensorType::span_bytes() const {
  int64_t last = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return 0;
    last += (sizes[i] - 1) * strides[i];
  }
  return (last + 1) * ElementSizeBytes(dtype);
}

int64_t ElementSizeBytes(DType dtype) {
  for (const DTypeRow& row : kDTypes) {
    if (row.dtype == dtype) return row.size_bytes;
  }
  return 0;
}

bool IsKnownDType(int64_t code) {
  for (const DTypeRow& row : kDTypes) {
    if (static_cast<int64_t>(row.dtype) == code) return true;
  }
  return false;
}

std::string_view DTypeName(DType dtype) {
  for (const DTypeRow& row : kDTypes) {
    if (row.dtype == dtype) return row.name;
  }
  return "unknown";
}

std::optional<DType> ParseDType(std::string_view name) {
  for (const DTypeRow& row : kDTypes) {
    if (row.name == name) return row.dtype;
  }
  return std::nullopt;
}

std::string DeviceName(Device device) {
  std::string name = "device";
  name += std::to_string(static_cast<int>(device.type));
  for (const DeviceRow& row : kDevices) {
    if (row.type == device.type) name = row.name;
  }
  if (device.index >= 0) {
    name.push_back(':');
    name += std::to_string(device.index);
  }
  return name;
}

std::optional<Device> ParseDevice(std::string_view name) {
  Device device;
  if (const size_t colon = name.find(':'); colon != std::string_view::npos) {
    const std::string_view digits = name.substr(colon + 1);
    int index = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), index);
    if (error != std::errc() || end != digits.data() + digits.size() || index < 0 || index > 127) return std::nullopt;
    device.index = static_cast<int8_t>(index);
    name = name.substr(0, colon);
  }
  for (const DeviceRow& row : kDevices) {
    if (row.name != name) continue;
    device.type = row.type;
    return device;
  }
  constexpr std::string_view kNumbered = "device";
  if (!name.starts_with(kNumbered)) return std::nullopt;
  name.remove_prefix(kNumbered.size());
  int type = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), type);
  if (error != std::errc() || end != name.data() + name.size() || type < 0 || type > 127) return std::nullopt;
  device.type = static_cast<DeviceType>(type);
  return device;
}

std::string_view MemoryFormatName(MemoryFormat format) {
  const auto i = static_cast<size_t>(format);
  return i < kMemoryFormats.size() ? kMemoryFormats[i] : "unknown";
}

std::optional<MemoryFormat> ParseMemoryFormat(std::string_view name) {
  return FindName<MemoryFormat>(kMemoryFormats, name);
}

std::string_view LayoutName(Layout layout) {
  const auto i = static_cast<size_t>(layout);
  return i < kLayouts.size() ? kLayouts[i] : "unknown";
}

std::optional<Layout> ParseLayout(std::string_view name) { return FindName<Layout>(kLayouts, name); }

}  // namespace cuvil::cir
