#include "agent/attr_conversion.h"

#include <complex>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "absl/strings/match.h"
#include "agent/call_table.h"
#include "agent/process_lifetime.h"
#include "agent/py_ref.h"

namespace cuvil::agent {
namespace {

using Constants = std::unordered_map<PyObject*, cir::Attr>;  // owned keys: dtypes, layouts, memory formats

Constants& TorchConstants() {
  static ProcessLifetime<Constants> constants;
  return *constants;
}

}  // namespace

absl::Status AttrConversion::Initialize(PyObject* torch) {
  Constants& constants = TorchConstants();
  OwnedRef dtype_names = OwnedRef::Steal(PyObject_Dir(torch));
  for (Py_ssize_t i = 0; dtype_names && i < PyList_GET_SIZE(dtype_names.get()); ++i) {
    OwnedRef value = OwnedRef::Steal(PyObject_GetAttr(torch, PyList_GET_ITEM(dtype_names.get(), i)));
    if (!value) {
      PyErr_Clear();
      continue;
    }
    PyTypeObject* type = Py_TYPE(value.get());
    OwnedRef text = OwnedRef::Steal(PyObject_Str(value.get()));
    const char* name = text ? PyUnicode_AsUTF8(text.get()) : nullptr;
    if (name == nullptr || !absl::StartsWith(name, "torch.")) continue;
    std::string_view plain = std::string_view(name).substr(6);
    if (type == Types().dtype) {
      if (std::optional<cir::DType> dtype = cir::ParseDType(plain)) constants.emplace(value.release(), *dtype);
    } else if (type == Types().layout) {
      if (std::optional<cir::Layout> layout = cir::ParseLayout(plain)) constants.emplace(value.release(), *layout);
    } else if (type == Types().memory_format) {
      if (absl::EndsWith(plain, "_format")) plain.remove_suffix(7);
      if (std::optional<cir::MemoryFormat> format = cir::ParseMemoryFormat(plain)) {
        constants.emplace(value.release(), *format);
      }
    }
  }
  PyErr_Clear();
  if (constants.empty()) return absl::UnavailableError("torch has no dtypes; install torch >= 2.10");
  return absl::OkStatus();
}

bool AttrConversion::FromPython(PyObject* object, cir::Attr* attr) {
  if (object == Py_None) {
    *attr = cir::NoneAttr();
  } else if (PyBool_Check(object)) {
    *attr = object == Py_True;
  } else if (PyLong_Check(object)) {
    int overflow = 0;
    int64_t value = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (overflow != 0) return false;
    *attr = value;
  } else if (PyFloat_Check(object)) {
    *attr = PyFloat_AS_DOUBLE(object);
  } else if (PyComplex_CheckExact(object)) {
    Py_complex value = PyComplex_AsCComplex(object);
    *attr = std::complex<double>(value.real, value.imag);
  } else if (PyUnicode_Check(object)) {
    const char* text = PyUnicode_AsUTF8(object);
    if (text == nullptr) return false;
    *attr = std::string(text);
  } else if (Py_TYPE(object) == Types().device) {
    OwnedRef text = OwnedRef::Steal(PyObject_Str(object));
    const char* name = text ? PyUnicode_AsUTF8(text.get()) : nullptr;
    std::optional<cir::Device> device = name == nullptr ? std::nullopt : cir::ParseDevice(name);
    if (!device) return false;
    *attr = *device;
  } else {
    auto found = TorchConstants().find(object);
    if (found == TorchConstants().end()) return false;
    *attr = found->second;
  }
  return true;
}

bool AttrConversion::FromItems(std::vector<cir::Attr> attrs, cir::ArgKind kind, cir::Attr* result) {
  switch (kind) {
    case cir::ArgKind::kIntList:
    case cir::ArgKind::kOptionalIntList:
    case cir::ArgKind::kSymIntList:
    case cir::ArgKind::kOptionalSymIntList: {
      std::vector<int64_t> values;
      for (const cir::Attr& attr : attrs) {
        const int64_t* value = attr.get_if<int64_t>();
        if (value == nullptr) return false;
        values.push_back(*value);
      }
      *result = std::move(values);
      return true;
    }
    case cir::ArgKind::kFloatList:
    case cir::ArgKind::kOptionalFloatList: {
      std::vector<double> values;
      for (const cir::Attr& attr : attrs) {
        if (const double* real = attr.get_if<double>()) {
          values.push_back(*real);
        } else if (const int64_t* integer = attr.get_if<int64_t>()) {
          values.push_back(static_cast<double>(*integer));
        } else {
          return false;
        }
      }
      *result = std::move(values);
      return true;
    }
    case cir::ArgKind::kBoolList:
    case cir::ArgKind::kBoolArray2:
    case cir::ArgKind::kBoolArray3:
    case cir::ArgKind::kBoolArray4: {
      std::vector<bool> values;
      for (const cir::Attr& attr : attrs) {
        const bool* value = attr.get_if<bool>();
        if (value == nullptr) return false;
        values.push_back(*value);
      }
      *result = std::move(values);
      return true;
    }
    case cir::ArgKind::kScalarList:
      *result = std::move(attrs);
      return true;
    default:
      return false;
  }
}

}  // namespace cuvil::agent
