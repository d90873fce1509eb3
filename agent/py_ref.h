// References to Python objects whose ownership is part of the type, and a scope that keeps the error indicator.
//
// Threads:   GIL held for everything except moving and testing for null.
// Ownership: OwnedRef owns one reference. BorrowedRef owns none and must not outlive the call it is passed to.
#pragma once

#include <Python.h>

#include <utility>

namespace cuvil::agent {

class BorrowedRef {
 public:
  constexpr BorrowedRef() = default;
  explicit constexpr BorrowedRef(PyObject* object) : object_(object) {}
  constexpr PyObject* get() const { return object_; }
  explicit constexpr operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

class OwnedRef {
 public:
  OwnedRef() = default;
  OwnedRef(const OwnedRef&) = delete;
  OwnedRef& operator=(const OwnedRef&) = delete;
  OwnedRef(OwnedRef&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  OwnedRef& operator=(OwnedRef&& other) noexcept {
    // The old object dies last: its finalizer may look at *this.
    PyObject* old = std::exchange(object_, std::exchange(other.object_, nullptr));
    Py_XDECREF(old);
    return *this;
  }
  ~OwnedRef() { Py_XDECREF(object_); }

  // Takes over the reference that the caller owns; null stays null.
  static OwnedRef Steal(PyObject* object) { return OwnedRef(object); }
  // Adds a reference; null stays null.
  static OwnedRef New(PyObject* object) {
    Py_XINCREF(object);
    return OwnedRef(object);
  }

  PyObject* get() const { return object_; }
  BorrowedRef borrow() const { return BorrowedRef(object_); }
  explicit operator bool() const { return object_ != nullptr; }
  // Hands the reference to the caller.
  [[nodiscard]] PyObject* release() { return std::exchange(object_, nullptr); }
  void reset() { *this = OwnedRef(); }

 private:
  explicit OwnedRef(PyObject* object) : object_(object) {}
  PyObject* object_ = nullptr;
};

// Leaves the error indicator as it was found: takes a pending exception away for the scope and puts it back at the end.
// An exception that is raised inside the scope and still pending at its end is dropped.
class ErrorScope {
 public:
  ErrorScope() { PyErr_Fetch(&type_, &value_, &traceback_); }
  ~ErrorScope() { PyErr_Restore(type_, value_, traceback_); }
  ErrorScope(const ErrorScope&) = delete;
  ErrorScope& operator=(const ErrorScope&) = delete;

 private:
  PyObject* type_;
  PyObject* value_;
  PyObject* traceback_;
};

}  // namespace cuvil::agent
