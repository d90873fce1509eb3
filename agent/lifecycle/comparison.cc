#include "agent/lifecycle/comparison.h"

#include <cmath>
#include <cstring>
#include <initializer_list>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "agent/cpython_compat.h"
#include "agent/py_ref.h"

namespace cuvil::agent {
namespace {

constexpr int kMaxDepth = 64;

// Multiples of the dtype's epsilon, relative to the largest magnitude in the tensor. The same operators on the same
// values only differ through the alignment of their operands and the partition among threads: a few roundings per
// accumulation, which later layers amplify. 16-bit types round at each operator and not within it.
constexpr double kWideEpsilons = 128;
constexpr double kNarrowEpsilons = 4;

using Verdict = Comparison::Verdict;

OwnedRef Attribute(PyObject* object, const char* name) { return OwnedRef::Steal(PyObject_GetAttrString(object, name)); }

OwnedRef Method(PyObject* object, const char* name) {
  return OwnedRef::Steal(PyObject_CallMethod(object, name, nullptr));
}

OwnedRef Method(PyObject* object, const char* name, PyObject* argument) {
  // Not the format "O", which would take a tuple apart.
  const OwnedRef method = OwnedRef::Steal(PyObject_GetAttrString(object, name));
  return method ? OwnedRef::Steal(PyObject_CallOneArg(method.get(), argument)) : OwnedRef();
}

std::string Repr(PyObject* object) {
  const OwnedRef text = OwnedRef::Steal(PyObject_Repr(object));
  const char* utf8 = text ? PyUnicode_AsUTF8(text.get()) : nullptr;
  if (utf8 == nullptr) {
    PyErr_Clear();
    return "?";
  }
  return std::string(utf8).substr(0, 200);
}

bool IsAtomicType(PyTypeObject* type) {
  return type == &PyUnicode_Type || type == &PyLong_Type || type == &PyBool_Type || type == &PyBytes_Type ||
         type == &PyRange_Type || type == &PySlice_Type || type == &PyFrozenSet_Type || type == &PySet_Type;
}

// One comparison. Functions return false once there is a difference, or an exception (raised() tells).
class Comparer {
 public:
  Comparer(PyObject* torch, Comparison::Values values) : torch_(torch), values_(values) {}

  bool Prepare(const CallArgs& call);
  bool Equal(PyObject* eager, PyObject* planned, PyObject* rerun, const std::string& path, int depth);

  bool raised() const { return PyErr_Occurred() != nullptr; }
  const Comparison::Result& result() const { return result_; }

 private:
  bool Differ(const std::string& path, const std::string& what) {
    result_ = {Verdict::kDiffer, absl::StrCat(path, ": ", what)};
    return false;
  }
  bool CollectStorages(PyObject* object, int depth);
  bool CollectModuleStorages(PyObject* module, int depth);
  bool SameTensor(PyObject* eager, PyObject* planned, PyObject* rerun, const std::string& path, int depth);
  bool SameStorage(PyObject* eager, PyObject* planned, const std::string& path);
  bool SameValues(PyObject* eager, PyObject* planned, PyObject* rerun, const std::string& path);
  bool SameSequence(PyObject* eager, PyObject* planned, PyObject* rerun, const std::string& path, int depth);
  bool SameDict(PyObject* eager, PyObject* planned, PyObject* rerun, const std::string& path, int depth);
  // What a subclass, or an object of a user class, keeps beside its C part.
  bool IsPythonClass(PyTypeObject* type) const { return type->tp_dealloc == python_class_dealloc_; }
  // The nearest class written in C: what instances hold beside attributes and slots is laid out by it.
  PyTypeObject* CBase(PyTypeObject* type) const {
    while (IsPythonClass(type) && type->tp_base != nullptr) type = type->tp_base;
    return type;
  }
  bool SameByType(PyTypeObject* base, PyObject* eager, PyObject* planned, const std::string& path);
  bool SameSlots(PyObject* eager, PyObject* planned, const std::string& path, int depth);
  bool SameInstanceDict(PyObject* eager, PyObject* planned, const std::string& path, int depth);
  // Bytes of the tensor's values as a flat uint8 tensor.
  OwnedRef Bytes(PyObject* tensor);
  // Largest absolute difference over elements that are not equal (NaN equals NaN); -1 with an exception set. Infinite
  // if NaNs or infinities disagree.
  double MaxDifference(PyObject* a, PyObject* b);
  bool StoragePointer(PyObject* tensor, void** pointer);

  PyObject* torch_;
  Comparison::Values values_;
  destructor python_class_dealloc_ = nullptr;  // classes made by Python share it
  OwnedRef tensor_type_, parameter_type_, uint8_, float64_, strided_;
  std::unordered_set<void*> old_storages_;  // of tensors that existed before the call
  std::unordered_map<void*, void*> eager_to_planned_, planned_to_eager_;
  std::unordered_set<PyObject*> visiting_;
  Comparison::Result result_;
};

bool Comparer::Prepare(const CallArgs& call) {
  tensor_type_ = Attribute(torch_, "Tensor");
  const OwnedRef nn = Attribute(torch_, "nn");
  if (!nn) return false;
  parameter_type_ = Attribute(nn.get(), "Parameter");
  const OwnedRef module = Attribute(nn.get(), "Module");
  if (!module || !PyType_Check(module.get())) return false;
  python_class_dealloc_ = reinterpret_cast<PyTypeObject*>(module.get())->tp_dealloc;
  uint8_ = Attribute(torch_, "uint8");
  float64_ = Attribute(torch_, "float64");
  strided_ = Attribute(torch_, "strided");
  if (!tensor_type_ || !parameter_type_ || !uint8_ || !float64_ || !strided_) return false;
  const Py_ssize_t num_arguments = call.num_arguments();
  for (Py_ssize_t i = 0; i < num_arguments; ++i) {
    if (!CollectStorages(call.args[i], 0)) return false;
  }
  return CollectModuleStorages(call.args[0], 0);
}

// The module's own tensors. Its methods may be overridden, so the dicts are read.
bool Comparer::CollectModuleStorages(PyObject* module, int depth) {
  if (depth > kMaxDepth || _PyObject_GetDictPtr(module) == nullptr) return true;
  const OwnedRef attributes = OwnedRef::Steal(PyObject_GenericGetDict(module, nullptr));
  if (!attributes) return false;
  // Plain attributes hold tensors, too; the two registries are reached as items one level down.
  if (!CollectStorages(attributes.get(), 0)) return false;
  PyObject* modules = PyDict_GetItemString(attributes.get(), "_modules");
  if (modules == nullptr || !PyDict_Check(modules)) return true;
  Py_ssize_t position = 0;
  PyObject *key, *value;
  while (PyDict_Next(modules, &position, &key, &value)) {
    if (value != Py_None && !CollectModuleStorages(value, depth + 1)) return false;
  }
  return true;
}

bool Comparer::CollectStorages(PyObject* object, int depth) {
  if (depth > 4) return true;
  if (Py_TYPE(object) == reinterpret_cast<PyTypeObject*>(tensor_type_.get()) ||
      Py_TYPE(object) == reinterpret_cast<PyTypeObject*>(parameter_type_.get())) {
    void* pointer = nullptr;
    if (!StoragePointer(object, &pointer)) {
      PyErr_Clear();  // A tensor without storage (sparse, meta): nothing can be shared with it.
      return true;
    }
    old_storages_.insert(pointer);
    return true;
  }
  if (PyTuple_Check(object) || PyList_Check(object)) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i) {
      if (!CollectStorages(PySequence_Fast_GET_ITEM(object, i), depth + 1)) return false;
    }
  } else if (PyDict_Check(object)) {
    Py_ssize_t position = 0;
    PyObject *key, *value;
    while (PyDict_Next(object, &position, &key, &value)) {
      if (!CollectStorages(value, depth + 1)) return false;
    }
  }
  return true;
}

bool Comparer::Equal(PyObject* eager, PyObject* planned, PyObject* rerun, const std::string& path, int depth) {
  if (eager == planned) return true;
  PyTypeObject* type = Py_TYPE(eager);
  if (type != Py_TYPE(planned)) {
    return Differ(path, absl::StrCat("a ", Py_TYPE(planned)->tp_name, " instead of a ", type->tp_name));
  }
  if (depth > kMaxDepth) return Differ(path, "nested too deeply to be compared");
  if (rerun != nullptr && Py_TYPE(rerun) != type) return Differ(path, "the plan returns another type at a second run");

  if (type == reinterpret_cast<PyTypeObject*>(tensor_type_.get()) ||
      type == reinterpret_cast<PyTypeObject*>(parameter_type_.get())) {
    return SameTensor(eager, planned, rerun, path, depth);
  }
  if (PyFloat_CheckExact(eager)) {
    const double a = PyFloat_AS_DOUBLE(eager), b = PyFloat_AS_DOUBLE(planned);
    if (std::memcmp(&a, &b, sizeof a) == 0 || (std::isnan(a) && std::isnan(b))) return true;
    return Differ(path, absl::StrCat(Repr(planned), " instead of ", Repr(eager)));
  }
  if (PyComplex_CheckExact(eager)) {
    const Py_complex a = PyComplex_AsCComplex(eager), b = PyComplex_AsCComplex(planned);
    if (std::memcmp(&a, &b, sizeof a) == 0) return true;
    return Differ(path, absl::StrCat(Repr(planned), " instead of ", Repr(eager)));
  }
  if (IsAtomicType(type)) {
    const int same = PyObject_RichCompareBool(eager, planned, Py_EQ);
    if (same < 0) return false;
    return same == 1 || Differ(path, absl::StrCat(Repr(planned), " instead of ", Repr(eager)));
  }

  // A cycle that was entered through this pair is compared already.
  if (!visiting_.insert(eager).second) return true;
  bool same;
  if (PyTuple_Check(eager) || PyList_Check(eager)) {
    same = SameSequence(eager, planned, rerun, path, depth);
  } else if (PyDict_Check(eager)) {
    same = SameDict(eager, planned, rerun, path, depth);
  } else if (PyTypeObject* base = CBase(type); base != &PyBaseObject_Type) {
    same = SameByType(base, eager, planned, path);
  } else {
    same = true;
  }
  return same && SameSlots(eager, planned, path, depth) && SameInstanceDict(eager, planned, path, depth);
}

bool Comparer::SameByType(PyTypeObject* base, PyObject* eager, PyObject* planned, const std::string& path) {
  // torch.device, enumerations of C libraries, deques, and Python classes derived from such: what they hold is only
  // known to their type.
  const OwnedRef equal = base->tp_richcompare == nullptr ? OwnedRef::New(Py_NotImplemented)
                                                         : OwnedRef::Steal(base->tp_richcompare(eager, planned, Py_EQ));
  if (!equal) return false;
  if (equal.get() == Py_NotImplemented) return Differ(path, absl::StrCat("a ", base->tp_name, " cannot be compared"));
  const int truth = PyObject_IsTrue(equal.get());
  if (truth < 0) return false;
  return truth == 1 || Differ(path, absl::StrCat(Repr(planned), " instead of ", Repr(eager)));
}

bool Comparer::SameSequence(PyObject* eager, PyObject* planned, PyObject* rerun, const std::string& path, int depth) {
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(eager);
  if (PySequence_Fast_GET_SIZE(planned) != size || (rerun != nullptr && PySequence_Fast_GET_SIZE(rerun) != size)) {
    return Differ(path, absl::StrCat(PySequence_Fast_GET_SIZE(planned), " items instead of ", size));
  }
  for (Py_ssize_t i = 0; i < size; ++i) {
    if (!Equal(PySequence_Fast_GET_ITEM(eager, i), PySequence_Fast_GET_ITEM(planned, i),
               rerun == nullptr ? nullptr : PySequence_Fast_GET_ITEM(rerun, i), absl::StrCat(path, "[", i, "]"),
               depth + 1)) {
      return false;
    }
  }
  return true;
}

bool Comparer::SameDict(PyObject* eager, PyObject* planned, PyObject* rerun, const std::string& path, int depth) {
  if (PyDict_GET_SIZE(eager) != PyDict_GET_SIZE(planned)) {
    return Differ(path, absl::StrCat(PyDict_GET_SIZE(planned), " keys instead of ", PyDict_GET_SIZE(eager)));
  }
  Py_ssize_t eager_position = 0, planned_position = 0;
  PyObject *eager_key, *eager_value, *planned_key, *planned_value;
  while (PyDict_Next(eager, &eager_position, &eager_key, &eager_value)) {
    if (!PyDict_Next(planned, &planned_position, &planned_key, &planned_value)) return Differ(path, "other keys");
    const std::string item = absl::StrCat(path, "[", Repr(eager_key), "]");
    if (!Equal(eager_key, planned_key, nullptr, absl::StrCat(item, "'s key"), depth + 1)) return false;
    PyObject* rerun_value = rerun == nullptr ? nullptr : PyDict_GetItemWithError(rerun, eager_key);
    if (PyErr_Occurred() != nullptr) return false;
    if (!Equal(eager_value, planned_value, rerun_value, item, depth + 1)) return false;
  }
  return true;
}

bool Comparer::SameSlots(PyObject* eager, PyObject* planned, const std::string& path, int depth) {
  PyObject* mro = Py_TYPE(eager)->tp_mro;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(mro); ++i) {
    PyObject *name, *descriptor;
    Py_ssize_t position = 0;
    auto* type = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(mro, i));
    if (!IsPythonClass(type)) continue;
    PyObject* names = TypeNamespace(type);
    while (PyDict_Next(names, &position, &name, &descriptor)) {
      if (Py_TYPE(descriptor) != &PyMemberDescr_Type) continue;
      const OwnedRef a = OwnedRef::Steal(PyObject_GetAttr(eager, name));
      PyErr_Clear();  // a slot that is not set
      const OwnedRef b = OwnedRef::Steal(PyObject_GetAttr(planned, name));
      PyErr_Clear();
      if (!a && !b) continue;
      const std::string where = absl::StrCat(path, ".", Repr(name));
      if (!a || !b) return Differ(where, "set in one result only");
      if (!Equal(a.get(), b.get(), nullptr, where, depth + 1)) return false;
    }
  }
  return true;
}

bool Comparer::SameInstanceDict(PyObject* eager, PyObject* planned, const std::string& path, int depth) {
  if (_PyObject_GetDictPtr(eager) == nullptr) return true;
  const OwnedRef eager_dict = OwnedRef::Steal(PyObject_GenericGetDict(eager, nullptr));
  const OwnedRef planned_dict = OwnedRef::Steal(PyObject_GenericGetDict(planned, nullptr));
  if (!eager_dict || !planned_dict) return false;
  if (PyDict_GET_SIZE(eager_dict.get()) == 0 && PyDict_GET_SIZE(planned_dict.get()) == 0) return true;
  return SameDict(eager_dict.get(), planned_dict.get(), nullptr, absl::StrCat(path, ".__dict__"), depth + 1);
}

bool Comparer::StoragePointer(PyObject* tensor, void** pointer) {
  const OwnedRef storage = Method(tensor, "untyped_storage");
  if (!storage) return false;
  const OwnedRef address = Attribute(storage.get(), "_cdata");
  if (!address) return false;
  *pointer = PyLong_AsVoidPtr(address.get());
  return PyErr_Occurred() == nullptr;
}

bool Comparer::SameTensor(PyObject* eager, PyObject* planned, PyObject* rerun, const std::string& path, int depth) {
  struct Property {
    const char* name;
    bool is_method;
  };
  static constexpr Property kProperties[] = {
      {"dtype", false},         {"shape", false},       {"device", false},       {"layout", false},
      {"requires_grad", false}, {"is_inference", true}, {"is_conj", true},       {"is_neg", true},
      {"_is_view", true},       {"is_leaf", false},     {"is_quantized", false},
  };
  static constexpr Property kStridedProperties[] = {{"stride", true}, {"storage_offset", true}};
  auto same_property = [&](const Property& property) {
    const OwnedRef a = property.is_method ? Method(eager, property.name) : Attribute(eager, property.name);
    const OwnedRef b = property.is_method ? Method(planned, property.name) : Attribute(planned, property.name);
    if (!a || !b) return false;
    const int same = PyObject_RichCompareBool(a.get(), b.get(), Py_EQ);
    if (same < 0) return false;
    return same == 1 || Differ(path, absl::StrCat(property.name, " ", Repr(b.get()), " instead of ", Repr(a.get())));
  };
  for (const Property& property : kProperties) {
    if (!same_property(property)) return false;
  }
  const OwnedRef layout = Attribute(eager, "layout");
  if (!layout) return false;
  if (layout.get() != strided_.get()) return Differ(path, "a tensor that is not strided cannot be compared");
  for (const Property& property : kStridedProperties) {
    if (!same_property(property)) return false;
  }
  const OwnedRef inference = Method(eager, "is_inference");
  if (!inference) return false;
  if (inference.get() == Py_False && !same_property({"_version", false})) return false;
  return SameStorage(eager, planned, path) && SameValues(eager, planned, rerun, path) &&
         SameInstanceDict(eager, planned, path, depth);
}

bool Comparer::SameStorage(PyObject* eager, PyObject* planned, const std::string& path) {
  void *a = nullptr, *b = nullptr;
  if (!StoragePointer(eager, &a) || !StoragePointer(planned, &b)) return false;
  // Shared with each other: something that existed before, or the plan could not have it.
  if (a == b) return true;
  if (old_storages_.count(a) != 0) return Differ(path, "does not share memory with the argument that eager returns");
  if (old_storages_.count(b) != 0) return Differ(path, "shares memory with an argument, which eager's result does not");
  const auto forward = eager_to_planned_.emplace(a, b).first;
  const auto backward = planned_to_eager_.emplace(b, a).first;
  if (forward->second != b || backward->second != a) return Differ(path, "other outputs share its memory");
  const OwnedRef storage_a = Method(eager, "untyped_storage"), storage_b = Method(planned, "untyped_storage");
  if (!storage_a || !storage_b) return false;
  const OwnedRef size_a = Method(storage_a.get(), "nbytes"), size_b = Method(storage_b.get(), "nbytes");
  if (!size_a || !size_b) return false;
  const int same = PyObject_RichCompareBool(size_a.get(), size_b.get(), Py_EQ);
  if (same < 0) return false;
  return same == 1 ||
         Differ(path, absl::StrCat("a storage of ", Repr(size_b.get()), " bytes instead of ", Repr(size_a.get())));
}

OwnedRef Comparer::Bytes(PyObject* tensor) {
  OwnedRef value = Method(tensor, "detach");
  for (const char* step : {"resolve_conj", "resolve_neg", "contiguous", "flatten"}) {
    if (!value) return value;
    value = Method(value.get(), step);
  }
  // One element counts as contiguous whatever its stride, but view() of another type demands 1.
  const OwnedRef count = value ? Method(value.get(), "numel") : OwnedRef();
  if (!count) return OwnedRef();
  value = OwnedRef::Steal(PyObject_CallMethod(value.get(), "as_strided", "((O)(i))", count.get(), 1));
  return value ? Method(value.get(), "view", uint8_.get()) : OwnedRef();
}

double Comparer::MaxDifference(PyObject* a, PyObject* b) {
  // Complex values differ by their parts.
  auto widen = [&](PyObject* tensor) {
    OwnedRef value = Method(tensor, "detach");
    const OwnedRef is_complex = value ? Method(value.get(), "is_complex") : OwnedRef();
    if (!is_complex) return OwnedRef();
    if (is_complex.get() == Py_True) {
      value = Method(value.get(), "resolve_conj");
      const OwnedRef function = Attribute(torch_, "view_as_real");
      if (!value || !function) return OwnedRef();
      value = OwnedRef::Steal(PyObject_CallOneArg(function.get(), value.get()));
      if (!value) return OwnedRef();
    }
    return Method(value.get(), "to", float64_.get());
  };
  const OwnedRef wide_a = widen(a), wide_b = widen(b);
  if (!wide_a || !wide_b) return -1;
  OwnedRef difference = Method(wide_a.get(), "sub", wide_b.get());
  if (!difference) return -1;
  difference = Method(difference.get(), "abs");
  if (!difference) return -1;
  const OwnedRef equal = Method(wide_a.get(), "eq", wide_b.get());
  const OwnedRef nan_a = Method(wide_a.get(), "isnan"), nan_b = Method(wide_b.get(), "isnan");
  if (!equal || !nan_a || !nan_b) return -1;
  const OwnedRef both_nan = Method(nan_a.get(), "logical_and", nan_b.get());
  if (!both_nan) return -1;
  const OwnedRef ignored = Method(equal.get(), "logical_or", both_nan.get());
  if (!ignored) return -1;
  difference = OwnedRef::Steal(PyObject_CallMethod(difference.get(), "masked_fill", "Od", ignored.get(), 0.0));
  if (!difference) return -1;
  difference = Method(difference.get(), "amax");
  if (!difference) return -1;
  const OwnedRef number = Method(difference.get(), "item");
  if (!number) return -1;
  const double value = PyFloat_AsDouble(number.get());
  if (value == -1.0 && PyErr_Occurred() != nullptr) return -1;
  return std::isnan(value) ? HUGE_VAL : value;
}

bool Comparer::SameValues(PyObject* eager, PyObject* planned, PyObject* rerun, const std::string& path) {
  const OwnedRef bytes_a = Bytes(eager), bytes_b = Bytes(planned);
  if (!bytes_a || !bytes_b) return false;
  const OwnedRef equal = Method(bytes_a.get(), "equal", bytes_b.get());
  if (!equal) return false;
  if (equal.get() == Py_True) return true;
  if (values_ == Comparison::Values::kBits) {
    result_ = {Verdict::kValuesDiffer, absl::StrCat(path, ": other values")};
    return true;
  }

  const OwnedRef dtype = Attribute(eager, "dtype");
  const OwnedRef floating = dtype ? Attribute(dtype.get(), "is_floating_point") : OwnedRef();
  const OwnedRef complex = dtype ? Attribute(dtype.get(), "is_complex") : OwnedRef();
  if (!floating || !complex) return false;
  if (floating.get() != Py_True && complex.get() != Py_True) return Differ(path, "other values");
  const double difference = MaxDifference(eager, planned);
  if (difference < 0) return false;
  if (difference == 0) return true;  // NaNs with other payloads, or zeros of the other sign.
  if (rerun == nullptr) {
    if (result_.verdict == Verdict::kEqual) {
      result_ = {Verdict::kValuesDiffer, absl::StrCat(path, ": values differ by up to ", difference)};
    }
    return true;
  }
  const double variation = MaxDifference(planned, rerun);
  const OwnedRef zero = Method(eager, "new_zeros", OwnedRef::Steal(PyTuple_New(0)).get());
  if (variation < 0 || !zero) return false;
  const OwnedRef flat_zero = Method(zero.get(), "expand_as", eager);
  if (!flat_zero) return false;
  const double magnitude = MaxDifference(eager, flat_zero.get());
  const OwnedRef finfo = Attribute(torch_, "finfo");
  if (magnitude < 0 || !finfo) return false;
  const OwnedRef info = OwnedRef::Steal(PyObject_CallOneArg(finfo.get(), dtype.get()));
  const OwnedRef epsilon = info ? Attribute(info.get(), "eps") : OwnedRef();
  if (!epsilon) return false;
  const double eps = PyFloat_AsDouble(epsilon.get());
  // NaN and infinity in eager's own values make the magnitude useless; then only the run-to-run part counts.
  const double rounding =
      std::isfinite(magnitude) ? (eps > 1e-5 ? kNarrowEpsilons : kWideEpsilons) * eps * magnitude : 0;
  if (std::isfinite(difference) && difference <= 2 * variation + rounding) return true;
  return Differ(path, absl::StrCat("values differ by up to ", difference, ", where ", 2 * variation + rounding,
                                   " is within the operators' own error"));
}

}  // namespace

absl::StatusOr<Comparison::Result> Comparison::Compare(const CallArgs& call, PyObject* eager, PyObject* planned,
                                                       PyObject* rerun, Values values) {
  const ErrorScope errors;
  const OwnedRef torch = OwnedRef::Steal(PyImport_ImportModule("torch"));
  if (!torch) return absl::InternalError("torch cannot be imported");
  Comparer comparer(torch.get(), values);
  const bool same = comparer.Prepare(call) && comparer.Equal(eager, planned, rerun, "result", 0);
  if (comparer.raised()) {
    const OwnedRef type = OwnedRef::New(PyErr_Occurred());
    const std::string name = reinterpret_cast<PyTypeObject*>(type.get())->tp_name;
    return absl::InternalError(absl::StrCat("comparing the results raised ", name));
  }
  if (!same && comparer.result().verdict != Verdict::kDiffer) {
    return absl::InternalError("comparing the results ended early");
  }
  return comparer.result();
}

}  // namespace cuvil::agent
