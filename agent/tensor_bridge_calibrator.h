// Finds out where this torch keeps what TensorBridge reads. Used by TensorBridge::Calibrate only.
//
// Threads:   GIL held.
// Errors:    Unavailable          torch is not importable, or has no THPVariable_Wrap
//            FailedPrecondition   a probe tensor did not show the expected pattern; the message names the field
#pragma once

#include <Python.h>

#include "absl/status/status.h"
#include "agent/py_ref.h"
#include "agent/tensor_bridge.h"

namespace cuvil::agent {

class TensorBridgeCalibrator {
 public:
  absl::Status Run(TensorBridge* bridge);

 private:
  absl::Status MakeProbes();
  absl::Status FindWrap();
  absl::Status FindCell();
  absl::Status FindGeometry();
  absl::Status FindKeys();
  absl::Status CheckAutograd();
  absl::Status CheckStorage();
  absl::Status CheckVersions();
  absl::Status CrossCheck();
  absl::Status CheckRoundTrip();

  // A probe tensor or number by name; borrowed from the namespace that MakeProbes ran in.
  PyObject* Probe(const char* name) const;
  const char* Impl(const char* name) const;
  int64_t Number(const char* name) const;

  TensorBridge* bridge_ = nullptr;
  OwnedRef probes_;
};

}  // namespace cuvil::agent
