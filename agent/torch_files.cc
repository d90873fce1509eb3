#include "agent/torch_files.h"

#include <Python.h>

#include <string>

#include "absl/strings/match.h"
#include "agent/process_lifetime.h"
#include "agent/py_ref.h"

namespace cuvil::agent {
namespace {

// "/env/lib/python3.12/site-packages/torch/"; empty before torch has been imported.
std::string TorchFolder() {
  const std::string path = ModuleFile("torch");
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "" : path.substr(0, slash + 1);
}

}  // namespace

std::string ModuleFile(const char* name) {
  const ErrorScope errors;
  PyObject* module = PyDict_GetItemString(PyImport_GetModuleDict(), name);
  PyObject* file = module != nullptr && PyModule_Check(module)
                       ? PyDict_GetItemString(PyModule_GetDict(module), "__file__")
                       : nullptr;
  const char* text = file != nullptr && PyUnicode_Check(file) ? PyUnicode_AsUTF8(file) : nullptr;
  if (text == nullptr) PyErr_Clear();
  return text == nullptr ? "" : text;
}

bool IsTorchFile(std::string_view path) {
  static ProcessLifetime<std::string> folder;
  if (folder->empty()) *folder = TorchFolder();
  return !folder->empty() && absl::StartsWith(path, *folder);
}

}  // namespace cuvil::agent
