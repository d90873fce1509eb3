// Nothing but a Python exception or a null leaves a function that CPython calls: the only try/catch of the agent.
//
// A function that CPython can call is noexcept, and its body is one call of Boundary (or ContainStatus, where there is
// no caller to tell).
//
// Threads:   GIL held.
// Errors:    Status codes become exceptions: InvalidArgument ValueError, Unimplemented NotImplementedError,
//            ResourceExhausted MemoryError, everything else RuntimeError. std::bad_alloc becomes MemoryError.
#pragma once

#include <Python.h>

#include <exception>
#include <new>
#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "agent/py_ref.h"

namespace cuvil::agent {

// Sets the exception that `status` maps to. An exception that is already pending stays: it is the more exact one.
inline void RaiseStatus(const absl::Status& status) noexcept {
  if (PyErr_Occurred() != nullptr) return;
  PyObject* type = PyExc_RuntimeError;
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
      type = PyExc_ValueError;
      break;
    case absl::StatusCode::kUnimplemented:
      type = PyExc_NotImplementedError;
      break;
    case absl::StatusCode::kResourceExhausted:
      type = PyExc_MemoryError;
      break;
    default:
      break;
  }
  absl::string_view message = status.message();
  OwnedRef text =
      OwnedRef::Steal(PyUnicode_DecodeUTF8(message.data(), static_cast<Py_ssize_t>(message.size()), "replace"));
  if (text) PyErr_SetObject(type, text.get());
}

// Runs `body`, a callable without arguments that returns absl::StatusOr<OwnedRef> or OwnedRef (null: an exception is
// set), and returns what CPython expects: a new reference, or null with an exception set.
template <typename Body>
PyObject* Boundary(Body&& body) noexcept {
  try {
    using Result = std::invoke_result_t<Body>;
    if constexpr (std::is_same_v<Result, OwnedRef>) {
      return std::forward<Body>(body)().release();
    } else {
      absl::StatusOr<OwnedRef> result = std::forward<Body>(body)();
      if (result.ok()) return result->release();
      RaiseStatus(result.status());
      return nullptr;
    }
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_Format(PyExc_RuntimeError, "cuvil: internal error: %s", error.what());
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError, "cuvil: internal error");
  }
  return nullptr;
}

// Runs `body`, a callable without arguments that returns absl::Status, and turns what it throws into a Status.
template <typename Body>
absl::Status ContainStatus(Body&& body) noexcept {
  try {
    return std::forward<Body>(body)();
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("out of memory");
  } catch (const std::exception& error) {
    return absl::InternalError(error.what());
  } catch (...) {
    return absl::InternalError("unknown C++ exception");
  }
}

}  // namespace cuvil::agent
