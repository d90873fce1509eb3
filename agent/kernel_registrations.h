#pragma once

#include <Python.h>

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace cuvil::agent {

// Which kernels Python code has registered for operators of plans and for the dispatch keys that plain tensors reach.
struct KernelRegistrations {
  uint64_t keys = 0;      // equal for equal sets of (operator, dispatch key), torch's own included
  bool own_cpu = false;   // the program's own stand for an operator, not for CUDA tensors only
  bool own_cuda = false;  // the program's own stand for an operator, for CUDA tensors at least

  bool operator==(const KernelRegistrations&) const = default;
};

// Knows what torch.library was told: Library.impl, torch.library.impl and register_kernel all note it in one set.
//
// A plan does what the operators do as torch made them: it computes constants once, writes over operands, calls what
// composite operators call. None of that is right any more for a kernel that does something else, and a kernel in
// Python may do something else each time.
//
// What the set does not show is not seen: kernels that C++ code registers (TORCH_LIBRARY_IMPL in an extension that is
// loaded later), fallbacks for whole dispatch keys, and a kernel that replaces one of torch's own Python kernels with
// allow_override=True.
//
// Threads: GIL held.
// Source:  torch/library.py; torch._C._dispatch_dump for where a kernel comes from.
class KernelRegistrationsReader {
 public:
  // Unavailable: this torch keeps no such set.
  static absl::Status Initialize();
  // A few loads if nothing was registered since the last time; runs no Python code.
  static KernelRegistrations Read() { return IsCurrent() ? last_ : ReadAgain(); }
  // One of the operators for which a kernel of the program's own stands, with the dispatch key, of those for CUDA
  // tensors only or of the others; empty if none does.
  static std::string OwnKernel(bool for_cuda);

 private:
  // A set that grew or shrank differs in one of these: removing leaves a filled entry behind until a new table is made.
  struct Mark {
    Py_ssize_t used, fill, mask;
    const void* table;
    bool operator==(const Mark&) const = default;
  };

  static Mark MarkOf(const PySetObject* set) { return {set->used, set->fill, set->mask, set->table}; }
  static bool IsCurrent() { return set_ != nullptr && MarkOf(set_) == mark_; }
  static KernelRegistrations ReadAgain();

  static inline PySetObject* set_ = nullptr;
  static inline Mark mark_{-1, -1, -1, nullptr};
  static inline KernelRegistrations last_;
};

}  // namespace cuvil::agent
