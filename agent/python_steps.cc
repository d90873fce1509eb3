#include "agent/python_steps.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "agent/gil.h"

namespace cuvil::agent {
namespace {

using torch_abi::OwnedTensor;
using torch_abi::TensorRef;

OwnedRef Text(std::string_view text) {
  return OwnedRef::Steal(PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size())));
}

template <typename T, typename Convert>
OwnedRef List(const std::vector<T>& values, const Convert& convert) {
  OwnedRef list = OwnedRef::Steal(PyList_New(0));
  for (const auto& value : values) {
    const OwnedRef item = convert(value);
    if (!list || !item || PyList_Append(list.get(), item.get()) < 0) return OwnedRef();
  }
  return list;
}

// A constant argument as the Python object that torch's own bindings would take. Null: an exception is set.
struct AttrConverter {
  PyObject* torch;

  OwnedRef Attribute(std::string_view name) const {
    return OwnedRef::Steal(PyObject_GetAttrString(torch, std::string(name).c_str()));
  }

  OwnedRef operator()(const cir::NoneAttr&) const { return OwnedRef::New(Py_None); }
  OwnedRef operator()(bool v) const { return OwnedRef::New(v ? Py_True : Py_False); }
  OwnedRef operator()(int64_t v) const { return OwnedRef::Steal(PyLong_FromLongLong(v)); }
  OwnedRef operator()(double v) const { return OwnedRef::Steal(PyFloat_FromDouble(v)); }
  OwnedRef operator()(const std::complex<double>& v) const {
    return OwnedRef::Steal(PyComplex_FromDoubles(v.real(), v.imag()));
  }
  OwnedRef operator()(const std::string& v) const { return Text(v); }
  OwnedRef operator()(const std::vector<int64_t>& v) const {
    return List(v, [this](int64_t x) { return (*this)(x); });
  }
  OwnedRef operator()(const std::vector<double>& v) const {
    return List(v, [this](double x) { return (*this)(x); });
  }
  OwnedRef operator()(const std::vector<bool>& v) const {
    return List(v, [this](bool x) { return (*this)(x); });
  }
  OwnedRef operator()(cir::DType v) const { return Attribute(cir::DTypeName(v)); }
  OwnedRef operator()(cir::Layout v) const { return Attribute(cir::LayoutName(v)); }
  OwnedRef operator()(cir::MemoryFormat v) const {
    return Attribute(
        absl::StrCat(cir::MemoryFormatName(v),
                     v == cir::MemoryFormat::kContiguous || v == cir::MemoryFormat::kPreserve ? "_format" : ""));
  }
  OwnedRef operator()(const cir::Device& v) const {
    return OwnedRef::Steal(PyObject_CallMethod(torch, "device", "s", cir::DeviceName(v).c_str()));
  }
  // None means the default generator everywhere.
  OwnedRef operator()(const cir::DefaultGenerator&) const { return OwnedRef::New(Py_None); }
  OwnedRef operator()(const std::vector<cir::Attr>& v) const {
    return List(v, [this](const cir::Attr& x) { return std::visit(*this, x.value); });
  }
};

// Takes the pending exception away and makes a status of it.
absl::Status StatusFromException() {
  PyObject* type = nullptr;
  PyObject* value = nullptr;
  PyObject* traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  const OwnedRef own_type = OwnedRef::Steal(type);
  const OwnedRef own_value = OwnedRef::Steal(value);
  const OwnedRef own_traceback = OwnedRef::Steal(traceback);
  const OwnedRef text = OwnedRef::Steal(value != nullptr ? PyObject_Str(value) : nullptr);
  const char* utf8 = text ? PyUnicode_AsUTF8(text.get()) : nullptr;
  absl::Status status = absl::AbortedError(utf8 != nullptr ? utf8 : "an exception without a text");
  PyErr_Clear();
  return status;
}

}  // namespace

absl::Status PythonSteps::Run(const cir::Op& op, absl::Span<const TensorRef> operands,
                              std::vector<OwnedTensor>* results) {
  const GilAcquire gil_held;
  const ErrorScope keep_pending_exception;
  return Call(op, operands, results);
}

absl::StatusOr<std::vector<OwnedTensor>> PythonSteps::Materialize(const cir::Op& op) {
  const GilAcquire gil_held;
  const ErrorScope keep_pending_exception;
  std::vector<OwnedTensor> results;
  if (absl::Status status = Call(op, {}, &results); !status.ok()) return status;
  return results;
}

OwnedRef PythonSteps::FindOverload(PyObject* torch, const cir::Op& op) const {
  const size_t colons = op.name.find("::");
  OwnedRef object = OwnedRef::Steal(PyObject_GetAttrString(torch, "ops"));
  for (const std::string& name :
       {op.name.substr(0, colons), op.name.substr(colons + 2), op.overload.empty() ? "default" : op.overload}) {
    if (!object) return object;
    object = OwnedRef::Steal(PyObject_GetAttrString(object.get(), name.c_str()));
  }
  return object;
}

OwnedRef PythonSteps::ConvertTensor(TensorRef tensor) const {
  return OwnedRef::Steal(bridge_->ToPyObject(api_->NewReference(tensor)));
}

OwnedRef PythonSteps::ConvertOperand(PyObject* torch, const cir::Operand& operand, const TensorRef** next) const {
  if (std::holds_alternative<cir::ValueId>(operand)) return ConvertTensor(*(*next)++);
  if (const auto* list = std::get_if<cir::ValueList>(&operand)) {
    return List(*list, [&](const std::optional<cir::ValueId>& id) {
      return id.has_value() ? ConvertTensor(*(*next)++) : OwnedRef::New(Py_None);
    });
  }
  return std::visit(AttrConverter{torch}, std::get<cir::Attr>(operand).value);
}

absl::Status PythonSteps::Call(const cir::Op& op, absl::Span<const TensorRef> operands,
                               std::vector<OwnedTensor>* results) const {
  const OwnedRef torch = OwnedRef::Steal(PyImport_ImportModule("torch"));
  if (!torch) return StatusFromException();
  const OwnedRef overload = FindOverload(torch.get(), op);
  if (!overload) return StatusFromException();
  const OwnedRef schema = OwnedRef::Steal(PyObject_GetAttrString(overload.get(), "_schema"));
  const OwnedRef arguments = schema ? OwnedRef::Steal(PyObject_GetAttrString(schema.get(), "arguments")) : OwnedRef();
  const OwnedRef positional = OwnedRef::Steal(PyList_New(0));
  const OwnedRef keywords = OwnedRef::Steal(PyDict_New());
  if (!arguments || !positional || !keywords) return StatusFromException();

  const TensorRef* next = operands.data();
  for (size_t i = 0; i < op.operands.size(); ++i) {
    const OwnedRef argument = OwnedRef::Steal(PySequence_GetItem(arguments.get(), static_cast<Py_ssize_t>(i)));
    const OwnedRef kwarg_only =
        argument ? OwnedRef::Steal(PyObject_GetAttrString(argument.get(), "kwarg_only")) : OwnedRef();
    const OwnedRef name = argument ? OwnedRef::Steal(PyObject_GetAttrString(argument.get(), "name")) : OwnedRef();
    const OwnedRef value = ConvertOperand(torch.get(), op.operands[i], &next);
    if (!kwarg_only || !name || !value) return StatusFromException();
    const int failed = kwarg_only.get() == Py_True ? PyDict_SetItem(keywords.get(), name.get(), value.get())
                                                   : PyList_Append(positional.get(), value.get());
    if (failed < 0) return StatusFromException();
  }
  const OwnedRef tuple = OwnedRef::Steal(PyList_AsTuple(positional.get()));
  if (!tuple) return StatusFromException();
  const OwnedRef returned = OwnedRef::Steal(PyObject_Call(overload.get(), tuple.get(), keywords.get()));
  if (!returned) return StatusFromException();

  if (op.results.size() == 1) return StoreResult(op.results[0], returned.get(), results);
  for (size_t i = 0; i < op.results.size(); ++i) {
    const OwnedRef item = OwnedRef::Steal(PySequence_GetItem(returned.get(), static_cast<Py_ssize_t>(i)));
    if (!item) return StatusFromException();
    if (absl::Status status = StoreResult(op.results[i], item.get(), results); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status PythonSteps::StoreResult(const cir::Result& result, PyObject* returned,
                                      std::vector<OwnedTensor>* results) const {
  const auto add = [&](PyObject* object) {
    if (!bridge_->IsTensor(object)) return false;
    results->push_back(api_->NewReference(bridge_->FromPyObject(object)));
    return true;
  };
  if (result.form == cir::ResultForm::kNew) {
    return add(returned) ? absl::OkStatus() : absl::InternalError("returned no tensor");
  }
  if (result.form != cir::ResultForm::kList) return absl::OkStatus();
  const OwnedRef items = OwnedRef::Steal(PySequence_Fast(returned, "a sequence of tensors is expected"));
  if (!items) return StatusFromException();
  const auto count = static_cast<size_t>(PySequence_Fast_GET_SIZE(items.get()));
  if (count != result.values.size()) {
    return absl::InternalError(absl::StrCat("returned ", count, " tensors, ", result.values.size(), " in the trace"));
  }
  for (size_t i = 0; i < count; ++i) {
    if (!add(PySequence_Fast_GET_ITEM(items.get(), static_cast<Py_ssize_t>(i)))) {
      return absl::InternalError("returned no tensor");
    }
  }
  return absl::OkStatus();
}

}  // namespace cuvil::agent
