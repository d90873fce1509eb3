#pragma once

#include <new>
#include <utility>

namespace cuvil::agent {

// A static object that is never destroyed: Python objects and locks in it may be used while the process exits.
//
// The pinned abseil (20220623) has no NoDestructor; this is the part of it that is needed here.
template <typename T>
class ProcessLifetime {
 public:
  template <typename... Args>
  explicit ProcessLifetime(Args&&... args) {
    ::new (static_cast<void*>(storage_)) T(std::forward<Args>(args)...);
  }
  ProcessLifetime(const ProcessLifetime&) = delete;
  ProcessLifetime& operator=(const ProcessLifetime&) = delete;

  T& operator*() { return *std::launder(reinterpret_cast<T*>(storage_)); }
  T* operator->() { return &**this; }

 private:
  alignas(T) unsigned char storage_[sizeof(T)];
};

}  // namespace cuvil::agent
