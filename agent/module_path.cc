#include "agent/module_path.h"

#include <cstring>
#include <deque>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "agent/py_ref.h"

namespace cuvil::agent {
namespace {

// Nothing that a person wrote has more modules; what a program made of itself shall not hold up a call.
constexpr size_t kMaxModules = 20000;

// The dict of a module's children, or null. Borrowed: the module keeps it.
PyObject* ChildrenOf(PyObject* module) {
  static PyObject* name = PyUnicode_InternFromString("_modules");
  const OwnedRef attributes = OwnedRef::Steal(PyObject_GenericGetDict(module, nullptr));
  PyObject* children =
      attributes && PyDict_Check(attributes.get()) ? PyDict_GetItemWithError(attributes.get(), name) : nullptr;
  PyErr_Clear();
  return children != nullptr && PyDict_Check(children) ? children : nullptr;
}

}  // namespace

std::string ModulePathBelow(PyObject* ancestor, PyObject* module) {
  if (ancestor == module) return "";
  const ErrorScope errors;
  std::deque<std::pair<PyObject*, std::string>> pending = {{ancestor, ""}};
  std::unordered_set<PyObject*> seen = {ancestor};
  while (!pending.empty() && seen.size() < kMaxModules) {
    const auto [parent, path] = std::move(pending.front());
    pending.pop_front();
    PyObject* children = ChildrenOf(parent);
    if (children == nullptr) continue;
    PyObject *key, *child;
    for (Py_ssize_t position = 0; PyDict_Next(children, &position, &key, &child);) {
      if (child == Py_None || !PyUnicode_Check(key)) continue;
      const char* name = PyUnicode_AsUTF8(key);
      if (name == nullptr) {
        PyErr_Clear();
        continue;
      }
      if (child == module) return JoinModulePath(path, name);
      if (seen.insert(child).second) pending.emplace_back(child, JoinModulePath(path, name));
    }
  }
  return "";
}

PyObject* FindInstance(PyObject* module, PyTypeObject* type) {
  const ErrorScope errors;
  std::vector<PyObject*> pending = {module};
  std::unordered_set<PyObject*> seen = {module};
  while (!pending.empty() && seen.size() < kMaxModules) {
    PyObject* const parent = pending.back();
    pending.pop_back();
    if (PyObject_TypeCheck(parent, type)) return parent;
    PyObject* const children = ChildrenOf(parent);
    if (children == nullptr) continue;
    PyObject *key, *child;
    for (Py_ssize_t position = 0; PyDict_Next(children, &position, &key, &child);) {
      if (child != Py_None && seen.insert(child).second) pending.push_back(child);
    }
  }
  return nullptr;
}

std::string ShortTypeName(PyObject* object) {
  const char* name = Py_TYPE(object)->tp_name;
  const char* dot = std::strrchr(name, '.');
  return dot == nullptr ? name : dot + 1;
}

std::string JoinModulePath(const std::string& outer, const std::string& inner) {
  return absl::StrCat(outer, outer.empty() || inner.empty() ? "" : ".", inner);
}

std::string ModuleCallScope::PathOfInnermost() const {
  std::vector<PyObject*> calls;  // innermost first
  for (const ModuleCallScope* scope = innermost_; scope != nullptr && scope != this; scope = scope->outer_) {
    calls.push_back(scope->module_);
  }
  std::string path;
  PyObject* parent = module_;
  for (auto call = calls.rbegin(); call != calls.rend(); ++call) {
    if (*call == parent) continue;  // super().__call__()
    std::string name = ModulePathBelow(parent, *call);
    if (name.empty()) {
      // Called through a reference that is no registration: perhaps registered elsewhere in the model.
      std::string elsewhere = ModulePathBelow(module_, *call);
      path = elsewhere.empty() ? JoinModulePath(path, absl::StrCat("<", ShortTypeName(*call), ">")) : elsewhere;
    } else {
      path = JoinModulePath(path, name);
    }
    parent = *call;
  }
  return path;
}

}  // namespace cuvil::agent
