#include "agent/lifecycle/python_step.h"

#include <string>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "agent/gil.h"
#include "agent/op_recorder.h"
#include "agent/tensor_bridge.h"

namespace cuvil::agent {
namespace {

using torch_abi::OwnedTensor;
using torch_abi::TensorRef;

template <typename T, typename Convert>
OwnedRef ListOf(const std::vector<T>& values, Convert convert) {
  OwnedRef list = OwnedRef::Steal(PyList_New(0));
  for (const auto& value : values) {
    const OwnedRef item = convert(value);
    if (!list || !item || PyList_Append(list.get(), item.get()) < 0) return OwnedRef();
  }
  return list;
}

OwnedRef FromInt(int64_t value) { return OwnedRef::Steal(PyLong_FromLongLong(value)); }
OwnedRef FromFloat(double value) { return OwnedRef::Steal(PyFloat_FromDouble(value)); }
OwnedRef FromBool(bool value) { return OwnedRef::New(value ? Py_True : Py_False); }

// dtypes, layouts and memory formats may be given by number, devices by name.
struct AttrToPython {
  OwnedRef operator()(const cir::NoneAttr&) const { return OwnedRef::New(Py_None); }
  OwnedRef operator()(const cir::DefaultGenerator&) const { return OwnedRef::New(Py_None); }
  OwnedRef operator()(bool value) const { return FromBool(value); }
  OwnedRef operator()(int64_t value) const { return FromInt(value); }
  OwnedRef operator()(double value) const { return FromFloat(value); }
  OwnedRef operator()(const std::complex<double>& value) const {
    return OwnedRef::Steal(PyComplex_FromDoubles(value.real(), value.imag()));
  }
  OwnedRef operator()(const std::string& value) const {
    return OwnedRef::Steal(PyUnicode_FromStringAndSize(value.data(), static_cast<Py_ssize_t>(value.size())));
  }
  OwnedRef operator()(const std::vector<int64_t>& values) const { return ListOf(values, FromInt); }
  OwnedRef operator()(const std::vector<double>& values) const { return ListOf(values, FromFloat); }
  OwnedRef operator()(const std::vector<bool>& values) const { return ListOf(values, FromBool); }
  OwnedRef operator()(cir::DType value) const { return FromInt(static_cast<int64_t>(value)); }
  OwnedRef operator()(cir::Layout value) const { return FromInt(static_cast<int64_t>(value)); }
  OwnedRef operator()(cir::MemoryFormat value) const { return FromInt(static_cast<int64_t>(value)); }
  OwnedRef operator()(const cir::Device& value) const { return (*this)(cir::DeviceName(value)); }
  OwnedRef operator()(const std::vector<cir::Attr>& values) const {
    return ListOf(values, [this](const cir::Attr& value) { return std::visit(*this, value.value); });
  }
};

// The C function of the operator: OpOverload._op, without OpOverload.__call__ in Python.
OwnedRef FindOperator(const cir::Op& op) {
  const size_t colons = op.name.find("::");
  if (colons == std::string::npos) return OwnedRef();
  const std::string overload = op.overload.empty() ? "default" : op.overload;
  const OwnedRef torch = OwnedRef::Steal(PyImport_ImportModule("torch"));
  OwnedRef object = torch ? OwnedRef::Steal(PyObject_GetAttrString(torch.get(), "ops")) : OwnedRef();
  for (const std::string& name :
       {op.name.substr(0, colons), op.name.substr(colons + 2), overload, std::string("_op")}) {
    if (!object) return object;
    object = OwnedRef::Steal(PyObject_GetAttrString(object.get(), name.c_str()));
  }
  return object;
}

// The pending exception as a status; clears it unless it is none of the operator's.
absl::Status TakeError(const cir::Op& op) {
  if (PyErr_ExceptionMatches(PyExc_Exception) == 0) return absl::CancelledError("interrupted");
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  const OwnedRef owned_type = OwnedRef::Steal(type), owned_value = OwnedRef::Steal(value);
  const OwnedRef owned_traceback = OwnedRef::Steal(traceback);
  const OwnedRef text = value == nullptr ? OwnedRef() : OwnedRef::Steal(PyObject_Str(value));
  const char* utf8 = text ? PyUnicode_AsUTF8(text.get()) : nullptr;
  PyErr_Clear();
  return absl::AbortedError(absl::StrCat(cir::QualifiedName(op), ": ", utf8 != nullptr ? utf8 : "raised"));
}

}  // namespace

absl::Status OperatorSteps::Run(const cir::Op& op, absl::Span<const TensorRef> operands,
                                std::vector<OwnedTensor>* results) {
  const GilAcquire gil_held;
  const OwnedRef function = FindOperator(op);
  if (!function) {
    PyErr_Clear();
    return absl::NotFoundError(absl::StrCat("torch has no operator ", cir::QualifiedName(op)));
  }
  size_t next_operand = 0;
  const auto next_tensor = [&] {
    return OwnedRef::Steal(Bridge().ToPyObject(api_->NewReference(operands[next_operand++])));
  };
  const OwnedRef arguments = OwnedRef::Steal(PyTuple_New(static_cast<Py_ssize_t>(op.operands.size())));
  if (!arguments) return TakeError(op);
  for (size_t i = 0; i < op.operands.size(); ++i) {
    OwnedRef argument;
    if (std::holds_alternative<cir::ValueId>(op.operands[i])) {
      argument = next_tensor();
    } else if (const auto* list = std::get_if<cir::ValueList>(&op.operands[i])) {
      argument = ListOf(*list, [&](const std::optional<cir::ValueId>& element) {
        return element.has_value() ? next_tensor() : OwnedRef::New(Py_None);
      });
    } else {
      argument = std::visit(AttrToPython(), std::get<cir::Attr>(op.operands[i]).value);
    }
    if (!argument) return TakeError(op);
    PyTuple_SET_ITEM(arguments.get(), static_cast<Py_ssize_t>(i), argument.release());
  }
  const OwnedRef returned = OwnedRef::Steal(PyObject_CallObject(function.get(), arguments.get()));
  if (!returned) return TakeError(op);

  const absl::Status other_results =
      absl::InternalError(absl::StrCat(cir::QualifiedName(op), " returned something else than in the trace"));
  const auto add = [&](PyObject* object) {
    if (!Bridge().IsTensor(object)) return false;
    results->push_back(api_->NewReference(Bridge().FromPyObject(object)));
    return true;
  };
  for (size_t i = 0; i < op.results.size(); ++i) {
    const cir::Result& result = op.results[i];
    PyObject* object = returned.get();
    if (op.results.size() > 1) {
      if (!PyTuple_Check(object) || PyTuple_GET_SIZE(object) != static_cast<Py_ssize_t>(op.results.size())) {
        return other_results;
      }
      object = PyTuple_GET_ITEM(object, static_cast<Py_ssize_t>(i));
    }
    if (result.form == cir::ResultForm::kNew) {
      if (!add(object)) return other_results;
    } else if (result.form == cir::ResultForm::kList) {
      if (!PyList_Check(object) || PyList_GET_SIZE(object) != static_cast<Py_ssize_t>(result.values.size())) {
        return other_results;
      }
      for (Py_ssize_t k = 0; k < PyList_GET_SIZE(object); ++k) {
        if (!add(PyList_GET_ITEM(object, k))) return other_results;
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace cuvil::agent
