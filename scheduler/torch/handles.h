// Borrowed and owned tensors of the torch in this process, without a torch header.
//
// A handle is torch's AtenTensorHandle: the address of a cell that holds one TensorImpl pointer (an `at::Tensor`).
//
// Ownership: TensorRef borrows the cell; OwnedTensor owns cell and reference and gives both back to torch.
// Threads:   values; the reference count behind them is atomic.
// GIL:       not needed, except that dropping the last reference of a tensor with a Python object may take it.
#pragma once

#include <cstdint>
#include <utility>

namespace cuvil::torch_abi {

class TensorRef {
 public:
  constexpr TensorRef() = default;
  constexpr explicit TensorRef(void* handle) : handle_(handle) {}

  void* handle() const { return handle_; }
  // The TensorImpl: equal for equal tensor objects.
  void* impl() const { return *static_cast<void**>(handle_); }
  explicit operator bool() const { return handle_ != nullptr; }
  bool operator==(const TensorRef&) const = default;

 private:
  void* handle_ = nullptr;
};

class OwnedTensor {
 public:
  OwnedTensor() = default;
  // Takes the handle over; it came from torch, or is a malloc'ed cell that holds one reference.
  static OwnedTensor Steal(void* handle) { return OwnedTensor(handle); }

  OwnedTensor(OwnedTensor&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  OwnedTensor& operator=(OwnedTensor&& other) noexcept {
    if (this != &other) {
      reset();
      handle_ = std::exchange(other.handle_, nullptr);
    }
    return *this;
  }
  OwnedTensor(const OwnedTensor&) = delete;
  OwnedTensor& operator=(const OwnedTensor&) = delete;
  ~OwnedTensor() { reset(); }

  TensorRef ref() const { return TensorRef(handle_); }
  explicit operator bool() const { return handle_ != nullptr; }
  void* release() { return std::exchange(handle_, nullptr); }
  void reset();

 private:
  explicit OwnedTensor(void* handle) : handle_(handle) {}
  void* handle_ = nullptr;
};

}  // namespace cuvil::torch_abi
