#include "agent/collector_pause.h"

#include <climits>
#include <utility>

#include "agent/process_lifetime.h"

namespace cuvil::agent {
namespace {

// gc's functions, and the thresholds that stand for a pause: larger than any count gets.
struct Collector {
  OwnedRef get_threshold, set_threshold, paused;
};

Collector& TheCollector() {
  static ProcessLifetime<Collector> collector;
  return *collector;
}

CollectorPause* current = nullptr;

}  // namespace

absl::Status CollectorPause::Initialize() {
  Collector& collector = TheCollector();
  if (collector.paused) return absl::OkStatus();
  const OwnedRef gc = OwnedRef::Steal(PyImport_ImportModule("gc"));
  if (gc) {
    collector.get_threshold = OwnedRef::Steal(PyObject_GetAttrString(gc.get(), "get_threshold"));
    collector.set_threshold = OwnedRef::Steal(PyObject_GetAttrString(gc.get(), "set_threshold"));
    collector.paused = OwnedRef::Steal(Py_BuildValue("(iii)", INT_MAX, INT_MAX, INT_MAX));
  }
  if (collector.get_threshold && collector.set_threshold && collector.paused) return absl::OkStatus();
  PyErr_Clear();
  return absl::InternalError("the collector's thresholds cannot be reached");
}

CollectorPause::CollectorPause() {
  const Collector& collector = TheCollector();
  OwnedRef before = OwnedRef::Steal(PyObject_CallNoArgs(collector.get_threshold.get()));
  const OwnedRef done =
      before ? OwnedRef::Steal(PyObject_CallObject(collector.set_threshold.get(), collector.paused.get())) : OwnedRef();
  if (!done) {
    // Without a pause a collection may run Python code, which refuses the trace.
    PyErr_Clear();
    return;
  }
  thresholds_ = std::move(before);
  current = this;
}

void CollectorPause::End() {
  if (!thresholds_) return;
  const OwnedRef thresholds = std::move(thresholds_);
  thresholds_.reset();
  current = nullptr;
  const ErrorScope errors;
  const Collector& collector = TheCollector();
  const OwnedRef now = OwnedRef::Steal(PyObject_CallNoArgs(collector.get_threshold.get()));
  // What a program has set meanwhile stays.
  if (now && PyObject_RichCompareBool(now.get(), collector.paused.get(), Py_EQ) == 1) {
    Py_XDECREF(PyObject_CallObject(collector.set_threshold.get(), thresholds.get()));
  }
}

void CollectorPause::AfterForkInChild() {
  if (current != nullptr) current->End();
}

}  // namespace cuvil::agent
