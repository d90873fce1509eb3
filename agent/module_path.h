// Names modules by where they stand in the module that contains them, as named_modules() would.
//
// Threads:   GIL held. No Python code runs, nothing is changed.
// Ownership: borrows.
#pragma once

#include <Python.h>

#include <string>

namespace cuvil::agent {

// The path of `module` below `ancestor` ("layer1.0.conv1"), the shortest one; empty if they are the same object or the
// one is not below the other.
std::string ModulePathBelow(PyObject* ancestor, PyObject* module);

// The module itself or one below it that is an instance of that type; null if none is.
PyObject* FindInstance(PyObject* module, PyTypeObject* type);

// "Linear" for an instance of torch.nn.modules.linear.Linear.
std::string ShortTypeName(PyObject* object);

// One module call that this thread is in the middle of; the scopes of a thread are a list. Kept up only while a call is
// being traced.
class ModuleCallScope {
 public:
  explicit ModuleCallScope(PyObject* module) noexcept : module_(module), outer_(innermost_) { innermost_ = this; }
  ~ModuleCallScope() { innermost_ = outer_; }
  ModuleCallScope(const ModuleCallScope&) = delete;
  ModuleCallScope& operator=(const ModuleCallScope&) = delete;

  PyObject* module() const { return module_; }
  static const ModuleCallScope* innermost() { return innermost_; }
  // Where the innermost call's module stands below this one's; a module that is called without being registered below
  // its caller is named by its type, in angle brackets.
  std::string PathOfInnermost() const;

 private:
  inline static thread_local constinit ModuleCallScope* innermost_ = nullptr;

  PyObject* const module_;
  ModuleCallScope* const outer_;
};

// `outer` and the name of a module called inside of it; either may be empty.
std::string JoinModulePath(const std::string& outer, const std::string& inner);

}  // namespace cuvil::agent
