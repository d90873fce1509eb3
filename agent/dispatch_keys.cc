#include "agent/dispatch_keys.h"

#include <unordered_map>
#include <utility>

#include "agent/assumptions.h"
#include "agent/process_lifetime.h"
#include "agent/py_ref.h"
#include "agent/torch_state.h"

namespace cuvil::agent {
namespace {

// As torch's DispatchKeySet::raw_repr() gives them.
struct KeySets {
  uint64_t include = 0;
  uint64_t exclude = 0;
  bool operator==(const KeySets&) const = default;
};

struct KeyObjects {
  OwnedRef set_excluded;
  OwnedRef is_excluded;
  OwnedRef include_set;  // torch._C._dispatch_tls_local_include_set, …exclude_set
  OwnedRef exclude_set;
  OwnedRef force_guard;  // torch._C._ForceDispatchKeyGuard
  OwnedRef key_set_type;
  OwnedRef restore_snapshot;  // torch._C._RestorePythonTLSSnapshot: the state in which Python called the operator
  OwnedRef skipped_keys[4];
  KeySets normal;  // outside of autocast
  KeySets inference;
  uint64_t view_tracking = 0;
  int32_t view_tracking_key = -1;
  uint64_t autocast_cpu = 0;
  uint64_t autocast_cuda = 0;
  uint64_t plain_key_sets[2] = {};  // of an ordinary and of an inference tensor
};

KeyObjects& K() {
  static ProcessLifetime<KeyObjects> objects;
  return *objects;
}

bool ReadRaw(PyObject* getter, uint64_t* raw) {
  OwnedRef set = OwnedRef::Steal(PyObject_CallNoArgs(getter));
  OwnedRef number = set ? OwnedRef::Steal(PyObject_CallMethod(set.get(), "raw_repr", nullptr)) : OwnedRef();
  if (!number) return false;
  *raw = PyLong_AsUnsignedLongLong(number.get());
  return !PyErr_Occurred();
}

bool ReadKeySets(KeySets* sets) {
  return ReadRaw(K().include_set.get(), &sets->include) && ReadRaw(K().exclude_set.get(), &sets->exclude);
}

uint64_t RawOf(PyObject* keys, const char* name) {
  OwnedRef key = OwnedRef::Steal(PyObject_GetAttrString(keys, name));
  OwnedRef set = key ? OwnedRef::Steal(PyObject_CallOneArg(K().key_set_type.get(), key.get())) : OwnedRef();
  OwnedRef number = set ? OwnedRef::Steal(PyObject_CallMethod(set.get(), "raw_repr", nullptr)) : OwnedRef();
  return number ? PyLong_AsUnsignedLongLong(number.get()) : 0;
}

// What a thread in this mode has when it runs eager code; autocast is told apart by its keys being excluded.
KeySets EagerKeySets(uint32_t mode_bits) {
  KeySets sets = (mode_bits & 2) != 0 ? K().inference : K().normal;
  if ((mode_bits & 4) != 0) sets.exclude &= ~K().autocast_cpu;
  if ((mode_bits & 8) != 0) sets.exclude &= ~K().autocast_cuda;
  return sets;
}

}  // namespace

absl::Status DispatchKeys::Initialize(const TensorBridge& bridge) {
  KeyObjects& k = K();
  OwnedRef torch = OwnedRef::Steal(PyImport_ImportModule("torch"));
  OwnedRef c = OwnedRef::Steal(PyImport_ImportModule("torch._C"));
  if (!torch || !c) {
    PyErr_Clear();
    return absl::UnavailableError("torch cannot be imported; install torch >= 2.10");
  }
  auto get = [](const OwnedRef& from, const char* name) {
    return from ? OwnedRef::Steal(PyObject_GetAttrString(from.get(), name)) : OwnedRef();
  };
  k.set_excluded = get(c, "_dispatch_tls_set_dispatch_key_excluded");
  k.is_excluded = get(c, "_dispatch_tls_is_dispatch_key_excluded");
  k.include_set = get(c, "_dispatch_tls_local_include_set");
  k.exclude_set = get(c, "_dispatch_tls_local_exclude_set");
  k.force_guard = get(c, "_ForceDispatchKeyGuard");
  k.key_set_type = get(c, "DispatchKeySet");
  k.restore_snapshot = get(c, "_RestorePythonTLSSnapshot");
  OwnedRef keys = get(c, "DispatchKey");
  const char* names[] = {"AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"};
  for (size_t i = 0; i < 4; ++i) k.skipped_keys[i] = get(keys, names[i]);
  if (PyErr_Occurred()) {
    PyErr_Clear();
    return absl::UnavailableError("this torch lacks a function that tracing needs; install torch >= 2.10");
  }
  OwnedRef key_number = k.skipped_keys[3] ? OwnedRef::Steal(PyNumber_Long(k.skipped_keys[3].get())) : OwnedRef();
  if (key_number) k.view_tracking_key = static_cast<int32_t>(PyLong_AsLong(key_number.get()));
  PyErr_Clear();
  k.view_tracking = RawOf(keys.get(), "ADInplaceOrView");
  k.autocast_cpu = RawOf(keys.get(), "AutocastCPU");
  k.autocast_cuda = RawOf(keys.get(), "AutocastCUDA");
  OwnedRef inference_mode = get(torch, "inference_mode");
  for (bool enabled : {false, true}) {
    OwnedRef scope = inference_mode
                         ? OwnedRef::Steal(PyObject_CallOneArg(inference_mode.get(), enabled ? Py_True : Py_False))
                         : OwnedRef();
    OwnedRef entered = scope ? OwnedRef::Steal(PyObject_CallMethod(scope.get(), "__enter__", nullptr)) : OwnedRef();
    if (!entered) break;
    ReadKeySets(enabled ? &k.inference : &k.normal);
    OwnedRef sample = OwnedRef::Steal(PyObject_CallMethod(torch.get(), "ones", "i", 1));
    if (sample) k.plain_key_sets[enabled ? 1 : 0] = bridge.Read(bridge.FromPyObject(sample.get())).key_set;
    OwnedRef left = OwnedRef::Steal(PyObject_CallMethod(scope.get(), "__exit__", "OOO", Py_None, Py_None, Py_None));
    for (KeySets* sets : {&k.inference, &k.normal}) sets->exclude |= k.autocast_cpu | k.autocast_cuda;
  }
  if (PyErr_Occurred() || k.autocast_cpu == 0 || !Holds(Assumption::kDispatchKeys, k.normal != k.inference)) {
    PyErr_Clear();
    return Violated(Assumption::kDispatchKeys);
  }
  return absl::OkStatus();
}

bool DispatchKeys::StateIsUsual() {
  KeySets now;
  if (!ReadKeySets(&now)) {
    PyErr_Clear();
    return false;
  }
  return now == EagerKeySets(TorchStateReader::ModeBits());
}

uint32_t DispatchKeys::ModeBitsOfCaller() {
  ErrorScope errors;
  OwnedRef guard = OwnedRef::Steal(PyObject_CallNoArgs(K().restore_snapshot.get()));
  OwnedRef entered = guard ? OwnedRef::Steal(PyObject_CallMethod(guard.get(), "__enter__", nullptr)) : OwnedRef();
  uint32_t bits = TorchStateReader::ModeBits();
  if (entered) {
    OwnedRef left = OwnedRef::Steal(PyObject_CallMethod(guard.get(), "__exit__", "OOO", Py_None, Py_None, Py_None));
  }
  PyErr_Clear();
  return bits;
}

PyObject* DispatchKeys::CallAsEager(PyObject* callable, PyObject* args, PyObject* kwargs, uint32_t mode_bits,
                                    bool untracked) {
  static ProcessLifetime<std::unordered_map<uint32_t, std::pair<OwnedRef, OwnedRef>>> key_sets;
  KeyObjects& k = K();
  auto& [include, exclude] = (*key_sets)[(mode_bits & ~1u) | (untracked ? 0x100u : 0u)];
  if (!include) {
    KeySets sets = EagerKeySets(mode_bits);
    if (untracked) sets.exclude |= k.view_tracking;
    include = OwnedRef::Steal(
        PyObject_CallMethod(k.key_set_type.get(), "from_raw_repr", "K", static_cast<unsigned long long>(sets.include)));
    exclude = OwnedRef::Steal(
        PyObject_CallMethod(k.key_set_type.get(), "from_raw_repr", "K", static_cast<unsigned long long>(sets.exclude)));
    if (!include || !exclude) return nullptr;
  }
  OwnedRef guard =
      OwnedRef::Steal(PyObject_CallFunctionObjArgs(k.force_guard.get(), include.get(), exclude.get(), nullptr));
  OwnedRef entered = guard ? OwnedRef::Steal(PyObject_CallMethod(guard.get(), "__enter__", nullptr)) : OwnedRef();
  if (!entered) return nullptr;
  PyObject* result = PyObject_Call(callable, args, kwargs);
  ErrorScope errors;
  OwnedRef left = OwnedRef::Steal(PyObject_CallMethod(guard.get(), "__exit__", "OOO", Py_None, Py_None, Py_None));
  PyErr_Clear();
  return result;
}

uint64_t DispatchKeys::autocast_keys() { return K().autocast_cpu | K().autocast_cuda; }

int32_t DispatchKeys::view_tracking_key() { return K().view_tracking_key; }

bool DispatchKeys::IsPlainTensor(uint64_t key_set) {
  // The backend (CPU, CUDA) has the low bits; the rest is what kind of tensor it is. Each backend has an autocast key
  // of its own among the rest.
  constexpr uint64_t kKindBits = ~uint64_t{0xffff};
  const KeyObjects& k = K();
  for (const uint64_t known : k.plain_key_sets) {
    if (((known ^ key_set) & kKindBits) == 0) return true;
    if (((((known & ~k.autocast_cpu) | k.autocast_cuda) ^ key_set) & kKindBits) == 0) return true;
  }
  return false;
}

bool SkippedKeys::Skip() {
  KeyObjects& k = K();
  for (size_t i = 0; i < kCount; ++i) {
    PyObject* key = k.skipped_keys[i].get();
    OwnedRef excluded = OwnedRef::Steal(PyObject_CallOneArg(k.is_excluded.get(), key));
    if (excluded && excluded.get() == Py_True) continue;
    OwnedRef done = OwnedRef::Steal(PyObject_CallFunctionObjArgs(k.set_excluded.get(), key, Py_True, nullptr));
    if (!done) return false;
    skipped_[i] = true;
  }
  return true;
}

void SkippedKeys::Restore() {
  KeyObjects& k = K();
  for (size_t i = 0; i < kCount; ++i) {
    if (!std::exchange(skipped_[i], false)) continue;
    OwnedRef done =
        OwnedRef::Steal(PyObject_CallFunctionObjArgs(k.set_excluded.get(), k.skipped_keys[i].get(), Py_False, nullptr));
  }
}

}  // namespace cuvil::agent
