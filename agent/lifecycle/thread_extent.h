#pragma once

#include <cstdint>

namespace cuvil::agent {

// What this thread is in the middle of; a module call inside of anything but kNone runs as CPython would.
enum class Extent : uint8_t {
  kNone,
  kEager,    // a call whose module decides for the modules inside it; they are not looked at
  kTracing,  // a traced call
  kPlanned,  // a plan's steps, which may run Python
};

inline thread_local constinit Extent thread_extent = Extent::kNone;

// True if a module that was opted out was entered in this thread's traced call; reset when a trace begins.
inline thread_local constinit bool entered_opted_out = false;

class ExtentScope {
 public:
  explicit ExtentScope(Extent extent) : before_(thread_extent) { thread_extent = extent; }
  ~ExtentScope() { thread_extent = before_; }
  ExtentScope(const ExtentScope&) = delete;
  ExtentScope& operator=(const ExtentScope&) = delete;

 private:
  Extent before_;
};

}  // namespace cuvil::agent
