// A constant argument of an operator: every non-tensor value that an operator schema can hold.
//
// Threads:   plain values.
// Note:      equality is by type and bit pattern: 1, 1.0 and true differ, 0.0 and -0.0 differ, a NaN equals itself.
#pragma once

#include <complex>
#include <concepts>
#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "jit/cir/tensor_type.h"

namespace cuvil::cir {

struct NoneAttr {
  bool operator==(const NoneAttr&) const = default;
};

// The default generator of the device the operator runs on. Other generators have no CIR form.
struct DefaultGenerator {
  bool operator==(const DefaultGenerator&) const = default;
};

struct Attr {
  using Variant = std::variant<NoneAttr, bool, int64_t, double, std::complex<double>, std::string, std::vector<int64_t>,
                               std::vector<double>, std::vector<bool>, DType, Layout, MemoryFormat, Device,
                               DefaultGenerator, std::vector<Attr>>;

  Attr() = default;
  // Exact types only: a conversion would turn a pointer into a bool or an int into a double.
  template <typename T>
  requires(std::same_as<T, NoneAttr> || std::same_as<T, bool> || std::same_as<T, int64_t> || std::same_as<T, double> ||
           std::same_as<T, std::complex<double>> || std::same_as<T, std::string> ||
           std::same_as<T, std::vector<int64_t>> || std::same_as<T, std::vector<double>> ||
           std::same_as<T, std::vector<bool>> || std::same_as<T, DType> || std::same_as<T, Layout> ||
           std::same_as<T, MemoryFormat> || std::same_as<T, Device> || std::same_as<T, DefaultGenerator> ||
           std::same_as<T, std::vector<Attr>>) Attr(T v)  // NOLINT(google-explicit-constructor): on purpose, see above
      : value(std::move(v)) {}

  template <typename T>
  const T* get_if() const {
    return std::get_if<T>(&value);
  }
  bool is_none() const { return std::holds_alternative<NoneAttr>(value); }
  // bool, int, double or complex: what torch calls a Scalar.
  bool is_number() const;

  Variant value;
};

bool operator==(const Attr& a, const Attr& b);

}  // namespace cuvil::cir
