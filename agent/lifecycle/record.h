#pragma once

#include <Python.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "agent/py_ref.h"

namespace cuvil::agent {

// Builds dicts and lists for Python; the first failure sticks, with its exception set, and later calls do nothing.
//
// Threads: GIL held.
class Record {
 public:
  Record() : dict_(OwnedRef::Steal(PyDict_New())) {}

  void Set(const char* key, OwnedRef value) {
    if (!dict_ || !value || PyDict_SetItemString(dict_.get(), key, value.get()) < 0) dict_.reset();
  }
  void Set(const std::string& key, OwnedRef value) { Set(key.c_str(), std::move(value)); }
  void Set(const char* key, uint64_t value) { Set(key, OwnedRef::Steal(PyLong_FromUnsignedLongLong(value))); }
  void Set(const char* key, std::string_view value) { Set(key, Text(value)); }
  void Set(const char* key, const char* value) { Set(key, Text(value)); }
  void Set(const char* key, bool value) = delete;
  void SetReal(const char* key, double value) { Set(key, OwnedRef::Steal(PyFloat_FromDouble(value))); }
  void SetBool(const char* key, bool value) { Set(key, OwnedRef::New(value ? Py_True : Py_False)); }

  // Null with an exception set if anything failed.
  OwnedRef Take() { return std::move(dict_); }

  static OwnedRef Text(std::string_view text) {
    return OwnedRef::Steal(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
  }

 private:
  OwnedRef dict_;
};

class RecordList {
 public:
  RecordList() : list_(OwnedRef::Steal(PyList_New(0))) {}
  void Add(OwnedRef value) {
    if (!list_ || !value || PyList_Append(list_.get(), value.get()) < 0) list_.reset();
  }
  OwnedRef Take() { return std::move(list_); }

 private:
  OwnedRef list_;
};

}  // namespace cuvil::agent
