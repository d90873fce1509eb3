#pragma once

#include <Python.h>

#include <cstdint>

#include "absl/status/status.h"
#include "agent/tensor_bridge.h"

namespace cuvil::agent {

// The dispatch keys that a thread includes and excludes: what eager code has, and how an operator is run with them.
//
// Threads: GIL held; the keys are the calling thread's.
class DispatchKeys {
 public:
  // Finds torch's functions for them and notes the keys of plain eager code; once.
  static absl::Status Initialize(const TensorBridge& bridge);

  // Whether this thread's keys are those of plain eager code.
  static bool StateIsUsual();
  // TorchStateReader::ModeBits() as Python called the operator: inside of a handler autocast always looks off.
  static uint32_t ModeBitsOfCaller();
  // Calls an operator's C function with the keys of a thread in this mode, from the top. `untracked`: as torch's own
  // Python functions make new tensors, without tracking their versions.
  static PyObject* CallAsEager(PyObject* callable, PyObject* args, PyObject* kwargs, uint32_t mode_bits,
                               bool untracked);

  // Number of the key that tracks views and versions in this torch; negative if unknown.
  static int32_t view_tracking_key();
  // The bits of a set of keys that autocast takes out of the excluded ones, one by one.
  static uint64_t autocast_keys();
  // Whether the keys are those of an ordinary or an inference tensor, whatever its backend.
  static bool IsPlainTensor(uint64_t key_set);
};

// What Python's calls skip during a trace: autograd, and view and version tracking.
class SkippedKeys {
 public:
  // False with an exception set if torch refuses; what was skipped until then is restored by Restore().
  bool Skip();
  void Restore();

 private:
  static constexpr size_t kCount = 4;
  bool skipped_[kCount] = {};
};

}  // namespace cuvil::agent
