#include "agent/kernel_registrations.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <string_view>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "agent/cpython_private.h"
#include "agent/process_lifetime.h"
#include "agent/py_ref.h"
#include "agent/torch_files.h"

namespace cuvil::agent {
namespace {

// Whose operators plans compute once, rewrite, and take to be what they are inside of other operators. Operators of
// other namespaces are only ever called; torchvision registers its own autograd kernels in Python.
constexpr std::string_view kNamespace = "aten";
// What a call with strided tensors of a CPU or of CUDA can come to outside of modes and autocast. Library.impl without
// a key notes none.
constexpr std::string_view kCudaKeys[] = {"CUDA", "AutogradCUDA"};
constexpr std::string_view kKeys[] = {"",
                                      "CPU",
                                      "AutogradCPU",
                                      "Autograd",
                                      "AutogradFunctionality",
                                      "AutogradOther",
                                      "ADInplaceOrView",
                                      "BackendSelect",
                                      "CatchAll",
                                      "CompositeExplicitAutograd",
                                      "CompositeExplicitAutogradNonFunctional",
                                      "CompositeImplicitAutograd",
                                      "Dense",
                                      "Undefined"};

struct Registration {
  std::string_view name_space, op, key;  // "aten", "add.Tensor", "CPU"

  // From "aten/add.Tensor/CPU".
  static Registration Parse(std::string_view text) {
    const size_t first = text.find('/'), last = text.rfind('/');
    if (first == std::string_view::npos || first == last) return {};
    return {text.substr(0, first), text.substr(first + 1, last - first - 1), text.substr(last + 1)};
  }
  bool is_cuda() const { return std::ranges::find(kCudaKeys, key) != std::end(kCudaKeys); }
  bool matters() const {
    return name_space == kNamespace && (is_cuda() || std::ranges::find(kKeys, key) != std::end(kKeys));
  }
};

struct Known {
  OwnedRef dump;              // torch._C._dispatch_dump
  std::set<std::string> own;  // kernels of the program's, as the set names them
};

Known& K() {
  static ProcessLifetime<Known> known;
  return *known;
}

// Where the kernel that stands was registered, "" if there is none or torch does not tell.
std::string PlaceOf(const Registration& registration) {
  const std::string op = absl::StrCat(registration.name_space, "::", registration.op);
  const OwnedRef text = OwnedRef::Steal(PyObject_CallFunction(K().dump.get(), "s", op.c_str()));
  const char* chars = text ? PyUnicode_AsUTF8(text.get()) : nullptr;
  if (chars == nullptr) {
    PyErr_Clear();
    return "";
  }
  const std::string_view key = registration.key.empty() ? "CompositeImplicitAutograd" : registration.key;
  std::string_view rest = chars;
  while (!rest.empty()) {
    const size_t end = rest.find('\n');
    std::string_view line = rest.substr(0, end);
    rest = end == std::string_view::npos ? std::string_view() : rest.substr(end + 1);
    if (!line.starts_with(key)) continue;
    line.remove_prefix(key.size());
    for (const std::string_view before : {": registered at ", "[alias]: registered at "}) {
      if (line.starts_with(before)) return std::string(line.substr(before.size(), line.find(" :: ") - before.size()));
    }
  }
  return "";
}

// Torch's own libraries are made in its modules. What torch/library.py itself makes one for is somebody else's kernel.
bool IsOfTorch(std::string_view place) { return IsTorchFile(place) && !absl::StrContains(place, "/torch/library.py:"); }

// "/a/b.py:12", "<stdin>:1"; kernels in C++ name a C++ file.
bool IsOfPython(std::string_view place) { return place.starts_with('<') || absl::StrContains(place, ".py:"); }

}  // namespace

absl::Status KernelRegistrationsReader::Initialize() {
  if (set_ != nullptr) return absl::OkStatus();
  const ErrorScope errors;
  const OwnedRef library = OwnedRef::Steal(PyImport_ImportModule("torch.library"));
  const OwnedRef c = OwnedRef::Steal(PyImport_ImportModule("torch._C"));
  OwnedRef set = library ? OwnedRef::Steal(PyObject_GetAttrString(library.get(), "_impls")) : OwnedRef();
  OwnedRef dump = c ? OwnedRef::Steal(PyObject_GetAttrString(c.get(), "_dispatch_dump")) : OwnedRef();
  if (!dump || !set || !PySet_CheckExact(set.get())) {
    PyErr_Clear();
    return absl::UnavailableError("torch.library does not show which kernels are registered; use a released torch");
  }
  K().dump = std::move(dump);
  set_ = reinterpret_cast<PySetObject*>(set.release());
  return absl::OkStatus();
}

KernelRegistrations KernelRegistrationsReader::ReadAgain() {
  static ProcessLifetime<std::set<std::string>> known_of_torch;
  const ErrorScope errors;
  KernelRegistrations now;
  // Asking torch may start a collection, whose finalizers may register more and come by here: what is found is noted
  // at the end, all at once and with the mark of what was looked at.
  std::set<std::string> own = K().own, of_torch = *known_of_torch;
  std::set<std::string> texts;
  Py_ssize_t position = 0;
  PyObject* item = nullptr;
  Py_hash_t hash = 0;
  Mark mark = MarkOf(set_);
  while (_PySet_NextEntry(reinterpret_cast<PyObject*>(set_), &position, &item, &hash) != 0) {
    const char* chars = PyUnicode_CheckExact(item) ? PyUnicode_AsUTF8(item) : nullptr;
    if (chars == nullptr) {
      PyErr_Clear();
    } else if (Registration::Parse(chars).matters()) {
      now.keys += static_cast<uint64_t>(hash) * 0x9e3779b97f4a7c15u;
      texts.emplace(chars);
    }
  }
  // Torch takes a name away with the first of two libraries that have registered it; the other's kernel stays.
  std::erase_if(own, [&texts](const std::string& text) {
    if (texts.contains(text)) return false;
    const std::string place = PlaceOf(Registration::Parse(text));
    return !IsOfPython(place) || IsOfTorch(place);
  });
  std::erase_if(of_torch, [&texts](const std::string& text) { return !texts.contains(text); });
  for (const std::string& text : texts) {
    if (of_torch.contains(text) || own.contains(text)) continue;
    (IsOfTorch(PlaceOf(Registration::Parse(text))) ? of_torch : own).insert(text);
  }
  for (const std::string& text : own) {
    const bool is_cuda = Registration::Parse(text).is_cuda();
    now.own_cuda |= is_cuda;
    now.own_cpu |= !is_cuda;
    // The set will not show when this one goes.
    if (!texts.contains(text)) mark.table = nullptr;
  }
  K().own = std::move(own);
  *known_of_torch = std::move(of_torch);
  mark_ = mark;
  last_ = now;
  return now;
}

std::string KernelRegistrationsReader::OwnKernel(bool for_cuda) {
  Read();
  for (const std::string& text : K().own) {
    const Registration registration = Registration::Parse(text);
    if (registration.is_cuda() != for_cuda) continue;
    return absl::StrCat(registration.name_space, "::", registration.op, " (",
                        registration.key.empty() ? "CompositeImplicitAutograd" : registration.key, ")");
  }
  return "";
}

}  // namespace cuvil::agent
