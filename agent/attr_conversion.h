#pragma once

#include <Python.h>

#include <vector>

#include "absl/status/status.h"
#include "jit/cir/attr.h"
#include "jit/cir/schema.h"

namespace cuvil::agent {

// Python values that operators take beside tensors, as the program's constants.
//
// Threads: GIL held. No exception is set on return.
class AttrConversion {
 public:
  // Notes torch's dtypes, layouts and memory formats; once.
  static absl::Status Initialize(PyObject* torch);

  // False for what has no constant form.
  static bool FromPython(PyObject* object, cir::Attr* attr);
  // A list or tuple of an operator's argument of this kind, from its items.
  static bool FromItems(std::vector<cir::Attr> items, cir::ArgKind kind, cir::Attr* attr);
};

}  // namespace cuvil::agent
