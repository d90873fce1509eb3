#include "agent/tensor_bridge.h"

#include <algorithm>
#include <cstring>

#include "absl/status/status.h"
#include "agent/boundary.h"
#include "agent/tensor_bridge_calibrator.h"
#include "scheduler/torch/boundary.h"

namespace cuvil::agent {
namespace {

// SizesAndStrides keeps up to five dimensions inline and more behind a pointer.
constexpr size_t kInlineDimensions = 5;
// The bits of TensorImpl's first byte of flags that say something which sizes, strides and keys do not:
// storage_access_should_throw and is_wrapped_number.
constexpr uint8_t kTellingFlags = 0x82;
constexpr ptrdiff_t kDataInStorage = 16;
constexpr ptrdiff_t kVersionInCounter = 16;

template <typename T>
T Load(const char* base, ptrdiff_t offset) {
  T value;
  std::memcpy(&value, base + offset, sizeof(value));
  return value;
}

struct Geometry {
  size_t dimension;
  const int64_t* sizes;
  const int64_t* strides;
};

Geometry ReadGeometry(const char* sizes_and_strides) {
  const auto dimension = Load<size_t>(sizes_and_strides, 0);
  if (dimension <= kInlineDimensions) {
    const auto* words = reinterpret_cast<const int64_t*>(sizes_and_strides + sizeof(size_t));
    return {dimension, words, words + kInlineDimensions};
  }
  const auto* words = Load<const int64_t*>(sizes_and_strides, sizeof(size_t));
  return {dimension, words, words + dimension};
}

}  // namespace

cir::TensorType TensorMeta::ToType() const {
  return cir::TensorType{dtype, device, device_index, sizes, strides, requires_grad, is_inference};
}

absl::StatusOr<TensorBridge> TensorBridge::Calibrate() {
  TensorBridge bridge;
  if (absl::Status status = TensorBridgeCalibrator().Run(&bridge); !status.ok()) return status;
  return bridge;
}

bool TensorBridge::IsTensor(PyObject* object) const { return PyObject_TypeCheck(object, tensor_type_) != 0; }

PyObject* TensorBridge::ToPyObject(torch_abi::OwnedTensor tensor) const {
  PyObject* object = nullptr;
  const absl::Status status = torch_abi::CallForeign([&] { object = wrap_(tensor.ref().handle()); });
  if (!status.ok()) RaiseStatus(status);
  return status.ok() ? object : nullptr;
}

bool TensorBridge::RequiresGrad(const char* impl) const {
  const auto* meta = Load<const char*>(impl, kAutogradMeta);
  if (meta == nullptr) return false;
  // Of the two or three things that each suffice, the one that holds for parameters.
  if (leaf_flag_ != 0 && Load<uint8_t>(meta, leaf_flag_) == 1) return true;
  // AutogradMetaInterface's second virtual function; set_requires_grad is the first.
  using Function = bool (*)(const void*);
  const auto* table = Load<const char*>(meta, 0);
  return Load<Function>(table, sizeof(void*))(meta);
}

TensorMeta TensorBridge::Read(torch_abi::TensorRef tensor) const {
  const char* impl = Impl(tensor);
  TensorMeta meta;
  meta.dtype = static_cast<cir::DType>(Load<uint16_t>(impl, dtype_));
  meta.device = static_cast<cir::DeviceType>(Load<int8_t>(impl, dtype_ + 2));
  meta.device_index = Load<int8_t>(impl, dtype_ + 3);
  meta.flags = Load<uint8_t>(impl, dtype_ + 5) & kTellingFlags;
  meta.key_set = Load<uint64_t>(impl, key_set_);
  meta.storage_offset = Load<int64_t>(impl, storage_offset_);
  meta.requires_grad = RequiresGrad(impl);
  meta.is_inference = (meta.key_set & differentiable_keys_) == 0;
  const Geometry geometry = ReadGeometry(impl + sizes_and_strides_);
  meta.sizes.assign(geometry.sizes, geometry.sizes + geometry.dimension);
  meta.strides.assign(geometry.strides, geometry.strides + geometry.dimension);
  return meta;
}

bool TensorBridge::SameMeta(torch_abi::TensorRef tensor, const TensorMeta& meta) const {
  const char* impl = Impl(tensor);
  if (Load<uint64_t>(impl, key_set_) != meta.key_set) return false;
  if (Load<uint16_t>(impl, dtype_) != static_cast<uint16_t>(meta.dtype)) return false;
  if (Load<int8_t>(impl, dtype_ + 2) != static_cast<int8_t>(meta.device)) return false;
  if (Load<int8_t>(impl, dtype_ + 3) != meta.device_index) return false;
  if ((Load<uint8_t>(impl, dtype_ + 5) & kTellingFlags) != meta.flags) return false;
  if (Load<int64_t>(impl, storage_offset_) != meta.storage_offset) return false;
  const Geometry geometry = ReadGeometry(impl + sizes_and_strides_);
  if (geometry.dimension != meta.sizes.size()) return false;
  for (size_t i = 0; i < geometry.dimension; ++i) {
    if (geometry.sizes[i] != meta.sizes[i] || geometry.strides[i] != meta.strides[i]) return false;
  }
  return RequiresGrad(impl) == meta.requires_grad;
}

bool TensorBridge::Flatten(const TensorMeta& meta, FlatTensorMeta* flat) {
  if (meta.sizes.size() > kInlineDimensions) return false;
  flat->key_set = meta.key_set;
  flat->storage_offset = meta.storage_offset;
  const auto dtype = static_cast<uint16_t>(meta.dtype);
  const auto device = static_cast<int8_t>(meta.device);
  char bytes[sizeof(flat->dtype_and_device)];
  std::memcpy(bytes, &dtype, 2);
  std::memcpy(bytes + 2, &device, 1);
  std::memcpy(bytes + 3, &meta.device_index, 1);
  std::memcpy(&flat->dtype_and_device, bytes, sizeof bytes);
  flat->flags = static_cast<uint8_t>(meta.flags);
  flat->requires_grad = meta.requires_grad;
  flat->dimension = static_cast<uint8_t>(meta.sizes.size());
  std::copy(meta.sizes.begin(), meta.sizes.end(), flat->sizes);
  std::copy(meta.strides.begin(), meta.strides.end(), flat->strides);
  return true;
}

bool TensorBridge::SameFlat(torch_abi::TensorRef tensor, const FlatTensorMeta& meta) const {
  const char* impl = Impl(tensor);
  const char* geometry = impl + sizes_and_strides_;
  if (Load<uint64_t>(impl, key_set_) != meta.key_set || Load<uint32_t>(impl, dtype_) != meta.dtype_and_device ||
      (Load<uint8_t>(impl, dtype_ + 5) & kTellingFlags) != meta.flags ||
      Load<int64_t>(impl, storage_offset_) != meta.storage_offset || Load<size_t>(geometry, 0) != meta.dimension) {
    return false;
  }
  const auto* words = reinterpret_cast<const int64_t*>(geometry + sizeof(size_t));
  for (size_t i = 0; i < meta.dimension; ++i) {
    if (words[i] != meta.sizes[i] || words[kInlineDimensions + i] != meta.strides[i]) return false;
  }
  return RequiresGrad(impl) == meta.requires_grad;
}

void* TensorBridge::Storage(torch_abi::TensorRef tensor) const { return Load<void*>(Impl(tensor), kStorage); }

void* TensorBridge::StorageData(torch_abi::TensorRef tensor) const {
  const auto* storage = static_cast<const char*>(Storage(tensor));
  return storage == nullptr ? nullptr : Load<void*>(storage, kDataInStorage);
}

void* TensorBridge::Data(torch_abi::TensorRef tensor) const {
  auto* data = static_cast<char*>(StorageData(tensor));
  if (data == nullptr) return nullptr;
  const char* impl = Impl(tensor);
  const auto dtype = static_cast<cir::DType>(Load<uint16_t>(impl, dtype_));
  return data + Load<int64_t>(impl, storage_offset_) * cir::ElementSizeBytes(dtype);
}

bool TensorBridge::AreAt(absl::Span<const torch_abi::TensorRef> tensors, absl::Span<const void* const> data) const {
  if (tensors.size() != data.size()) return false;
  // Nobody else looks at storages, so each is a miss; the tensors themselves have just been looked at.
  constexpr size_t kAhead = 8;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (i + kAhead < tensors.size()) __builtin_prefetch(Storage(tensors[i + kAhead]));
    if (Data(tensors[i]) != data[i]) return false;
  }
  return true;
}

size_t TensorBridge::StorageBytes(torch_abi::TensorRef tensor) const {
  const auto* storage = static_cast<const char*>(Storage(tensor));
  return storage == nullptr ? 0 : Load<size_t>(storage, bytes_in_storage_);
}

const void* TensorBridge::AutogradMeta(torch_abi::TensorRef tensor) const {
  return Load<const void*>(Impl(tensor), kAutogradMeta);
}

bool TensorBridge::Version(torch_abi::TensorRef tensor, uint32_t* version) const {
  const auto* counter = Load<const char*>(Impl(tensor), kVersionCounter);
  if (counter == nullptr) return false;
  *version = Load<uint32_t>(counter, kVersionInCounter);
  return true;
}

}  // namespace cuvil::agent
