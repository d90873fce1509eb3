// Names of libtorch's unboxed operator entry points, computed from an operator's schema.
//
// `at::_ops::<name>_<overload>::call` takes the schema's arguments as C++ types; its mangled name spells those types,
// so a name that dlsym finds is a proof of the signature that the packer relies on.
//
// Threads:   pure; any thread.
// Source:    Itanium C++ ABI, 5.1 (mangling) with substitutions; torchgen/api/types/signatures.py for the C++ types.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "jit/cir/graph.h"

namespace cuvil::torch_abi {

// How the parts that the schema leaves open are spelled: structured operators take tensor lists as IListRef, and a few
// in-place operators (resize_, as_strided_) take what they write as `const Tensor&`.
struct SignatureVariant {
  bool list_ref = false;
  bool const_written = false;
};

// Empty if the operator can have no such entry point (another namespace, an argument kind without a C++ type).
std::string UnboxedSymbol(const cir::Op& op, SignatureVariant variant);

// The variants that make sense for the operator, likeliest first.
std::vector<SignatureVariant> SignatureVariants(const cir::Op& op);

}  // namespace cuvil::torch_abi
