#include "scheduler/torch/torch_api.h"

#include <dlfcn.h>

#include <bit>
#include <cstring>
#include <new>
#include <thread>

#include "absl/strings/str_cat.h"
#include "scheduler/torch/handle_deleter.h"
#include "scheduler/torch/self_test.h"

namespace cuvil::torch_abi {
namespace {

// The bytes of a number as the tensor that torch makes of it holds them.
struct NumberBytes {
  cir::DType dtype;
  uint64_t words[2] = {0, 0};
  size_t size_bytes;
};

absl::StatusOr<NumberBytes> EncodeNumber(const cir::Attr& number) {
  if (const auto* v = number.get_if<bool>()) return NumberBytes{cir::DType::kBool, {*v ? 1u : 0u, 0}, 1};
  if (const auto* v = number.get_if<int64_t>()) {
    return NumberBytes{cir::DType::kInt64, {static_cast<uint64_t>(*v), 0}, 8};
  }
  if (const auto* v = number.get_if<double>()) {
    return NumberBytes{cir::DType::kFloat64, {std::bit_cast<uint64_t>(*v), 0}, 8};
  }
  if (const auto* v = number.get_if<std::complex<double>>()) {
    return NumberBytes{
        cir::DType::kComplex128, {std::bit_cast<uint64_t>(v->real()), std::bit_cast<uint64_t>(v->imag())}, 16};
  }
  return absl::FailedPreconditionError("the constant is no number");
}

}  // namespace

absl::StatusOr<std::shared_ptr<const TorchApi>> TorchApi::Load(const std::string& library_path) {
  auto api = std::shared_ptr<TorchApi>(new TorchApi());
  // The library is never closed: torch's own threads and thread-local destructors live in it.
  api->library_ = library_path.empty() ? dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD)
                                       : dlopen(library_path.c_str(), RTLD_LAZY | RTLD_GLOBAL);
  if (api->library_ == nullptr) {
    return absl::UnavailableError(library_path.empty()
                                      ? std::string("libtorch_cpu.so is not loaded: import torch first")
                                      : absl::StrCat("dlopen: ", dlerror()));
  }
#define CUVIL_SHIM(member, symbol, result, parameters)                                                      \
  api->member = reinterpret_cast<result(*) parameters>(api->FindSymbol(#symbol));                           \
  if (api->member == nullptr) {                                                                             \
    return absl::UnavailableError("this torch has no function " #symbol ": torch 2.10 or newer is needed"); \
  }
#include "scheduler/torch/shim_functions.def"
#undef CUVIL_SHIM
  SetHandleDeleter(api->delete_tensor);
  api->is_key_excluded = reinterpret_cast<bool (*)(uint16_t)>(
      api->FindSymbol("_ZN3c104impl28tls_is_dispatch_key_excludedENS_11DispatchKeyE"));
  api->set_key_excluded = reinterpret_cast<void (*)(uint16_t, bool)>(
      api->FindSymbol("_ZN3c104impl29tls_set_dispatch_key_excludedENS_11DispatchKeyEb"));
  api->get_warning_handler =
      reinterpret_cast<void* (*)()>(api->FindSymbol("_ZN3c1012WarningUtils19get_warning_handlerEv"));
  api->set_warning_handler = reinterpret_cast<void (*)(void*)>(
      api->FindSymbol("_ZN3c1012WarningUtils19set_warning_handlerEPNS_14WarningHandlerE"));
  if (api->get_warning_handler == nullptr || api->set_warning_handler == nullptr) {
    return absl::UnavailableError("this torch has no c10::WarningUtils: torch 2.10 or newer is needed");
  }
  api->reinterpret_tensor =
      reinterpret_cast<decltype(api->reinterpret_tensor)>(api->FindSymbol("aoti_torch__reinterpret_tensor"));

  void* undefined = nullptr;
  if (api->new_uninitialized_tensor(&undefined) != 0) {
    return absl::FailedPreconditionError("aoti_torch_new_uninitialized_tensor failed");
  }
  api->undefined_ = OwnedTensor::Steal(undefined);
  // On a thread of its own: autocast, inference mode and dispatch modes of the caller must not change what is seen.
  absl::Status tested;
  std::thread([&api, &tested] {
    // The setting is the thread's own. A team of OpenMP threads for these tiny operators would cost more than they do.
    using SetNumThreads = void (*)(int);
    if (const auto set = reinterpret_cast<SetNumThreads>(api->FindSymbol("omp_set_num_threads"))) set(1);
    tested = SelfTest::Run(*api);
  }).join();
  if (!tested.ok()) return tested;
  return std::shared_ptr<const TorchApi>(std::move(api));
}

void* TorchApi::FindSymbol(const char* name) const { return dlsym(library_, name); }

OwnedTensor TorchApi::TakeCell(void** cell) const {
  // A handle is a heap cell that torch frees with `delete`; the reference moves from one cell to the other.
  auto* handle = static_cast<void**>(::operator new(sizeof(void*)));
  *handle = *cell;
  *cell = nullptr;
  return OwnedTensor::Steal(handle);
}

OwnedTensor TorchApi::NewReference(TensorRef tensor) const {
  void* handle = nullptr;
  if (new_tensor_handle(tensor.handle(), &handle) != 0) return {};
  return OwnedTensor::Steal(handle);
}

absl::StatusOr<OwnedTensor> TorchApi::MakeEmpty(cir::DType dtype, const std::vector<int64_t>& sizes) const {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * std::max<int64_t>(sizes[i], 1);
  void* handle = nullptr;
  const int32_t error = empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                                      static_cast<int32_t>(dtype), static_cast<int32_t>(cir::DeviceType::kCpu),
                                      /*device_index=*/-1, &handle);
  if (error != 0) return absl::ResourceExhaustedError("aoti_torch_empty_strided failed");
  return OwnedTensor::Steal(handle);
}

absl::StatusOr<OwnedTensor> TorchApi::MakeNumber(const cir::Attr& number) const {
  absl::StatusOr<NumberBytes> bytes = EncodeNumber(number);
  if (!bytes.ok()) return bytes.status();
  absl::StatusOr<OwnedTensor> tensor = MakeEmpty(bytes->dtype, {});
  if (!tensor.ok()) return tensor.status();
  void* data = nullptr;
  if (get_data_ptr(tensor->ref().handle(), &data) != 0 || data == nullptr) {
    return absl::FailedPreconditionError("aoti_torch_get_data_ptr failed");
  }
  std::memcpy(data, bytes->words, bytes->size_bytes);
  return tensor;
}

absl::StatusOr<OwnedTensor> TorchApi::MakeWrappedNumber(const cir::Attr& number) const {
  if (!abi_.wrapped_numbers) return absl::FailedPreconditionError("wrapped numbers are not in use");
  absl::StatusOr<OwnedTensor> tensor = MakeNumber(number);
  if (!tensor.ok()) return tensor.status();
  static_cast<uint8_t*>(tensor->ref().impl())[wrapped_flag_byte_] |= wrapped_flag_bit_;
  return tensor;
}

cir::DType TorchApi::DTypeOf(TensorRef tensor) const {
  int32_t code = -1;
  get_dtype(tensor.handle(), &code);
  return static_cast<cir::DType>(code);
}

}  // namespace cuvil::torch_abi
