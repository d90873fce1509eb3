// Notices the C++ warnings of the calling thread instead of printing them, for as long as it lives.
//
// Torch's Python functions turn TORCH_WARN into Python's warnings by a handler of their own around each call. Nobody
// does so around a plan's operators: the default handler would print to stderr, and `-W error` would not raise. Whoever
// runs operators outside of Python asks noticed() and lets eager, which warns as it should, do the work again.
//
// Threads:   torch's handler is the thread's own; made and destroyed on one thread, nested like a scope.
// GIL:       not needed.
// Source:    c10::WarningHandler (c10/util/Exception.h): a virtual destructor, then process(const Warning&). Itanium
// C++
//            ABI; SelfTest compares torch's own table with this form and lets an operator warn.
#pragma once

#include "scheduler/torch/torch_api.h"

namespace cuvil::torch_abi {

class WarningNotice {
 public:
  explicit WarningNotice(const TorchApi& api) : api_(api), outer_(api.get_warning_handler()) {
    api_.set_warning_handler(&handler_);
  }
  ~WarningNotice() { api_.set_warning_handler(outer_); }
  WarningNotice(const WarningNotice&) = delete;
  WarningNotice& operator=(const WarningNotice&) = delete;

  bool noticed() const { return handler_.noticed; }

 private:
  class Handler {
   public:
    virtual ~Handler();
    virtual void Process(const void* warning);
    bool noticed = false;
  };

  const TorchApi& api_;
  void* const outer_;
  Handler handler_;
};

}  // namespace cuvil::torch_abi
