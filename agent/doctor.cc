#include "agent/doctor.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "agent/boundary.h"
#include "agent/gil.h"
#include "agent/interpreter_self_test.h"
#include "agent/py_ref.h"
#include "agent/tensor_bridge.h"
#include "jit/probe_kernel.h"
#include "scheduler/live_sampler.h"
#include "scheduler/machine_report.h"
#include "scheduler/monotonic_clock.h"
#include "scheduler/torch/torch_api.h"

namespace cuvil::agent {
namespace {

// Probing waits for code generation, or for a GPU to wake up.
template <typename Result>
Result WithoutGil(Result (*probe)()) {
  AssertGilHeld();
  const GilRelease no_gil;
  return probe();
}

PyObject* BuildInfo(PyObject*, PyObject*) noexcept {
  return Boundary([] {
    return OwnedRef::Steal(Py_BuildValue("{s:s,s:s,s:s,s:s,s:s,s:s}", "version", CUVIL_VERSION, "git_sha",
                                         CUVIL_GIT_SHA, "compiler", CUVIL_COMPILER, "python", PY_VERSION, "llvm",
                                         CUVIL_LLVM, "build_type", CUVIL_BUILD));
  });
}

PyObject* LlvmSelfTest(PyObject*, PyObject*) noexcept {
  return Boundary([]() -> absl::StatusOr<OwnedRef> {
    absl::StatusOr<jit::ProbeResult> probe = WithoutGil(&jit::RunProbeKernel);
    if (!probe.ok()) return probe.status();
    return OwnedRef::Steal(Py_BuildValue("{s:s,s:s,s:s,s:i,s:L}", "version", probe->llvm_version.c_str(), "host_cpu",
                                         probe->host.name.c_str(), "features", probe->host.features.c_str(),
                                         "vector_width_bytes", probe->host.vector_width_bytes, "compile_ns",
                                         static_cast<long long>(probe->compile_ms * 1e6)));
  });
}

// "" for OK, else the one sentence.
OwnedRef Sentence(const absl::Status& status) {
  const absl::string_view message = status.ok() ? absl::string_view() : status.message();
  return OwnedRef::Steal(PyUnicode_FromStringAndSize(message.data(), static_cast<Py_ssize_t>(message.size())));
}

PyObject* InterpreterSelfTestBinding(PyObject*, PyObject*) noexcept {
  return Boundary([] { return Sentence(InterpreterSelfTest()); });
}

PyObject* TorchSelfTestBinding(PyObject*, PyObject*) noexcept {
  return Boundary([] {
    if (const auto api = torch_abi::TorchApi::Load(); !api.ok()) return Sentence(api.status());
    return Sentence(TensorBridge::Calibrate().status());
  });
}

OwnedRef ToPython(const absl::StatusOr<device::DriverReport>& driver) {
  if (!driver.ok()) {
    return OwnedRef::Steal(Py_BuildValue("{s:i,s:s,s:[]}", "cuda_version", 0, "problem",
                                         std::string(driver.status().message()).c_str(), "gpus"));
  }
  OwnedRef gpus = OwnedRef::Steal(PyList_New(0));
  if (!gpus) return gpus;
  for (const device::Gpu& gpu : driver->gpus) {
    OwnedRef entry = OwnedRef::Steal(
        Py_BuildValue("{s:s,s:(ii),s:i,s:K}", "name", gpu.name.c_str(), "compute_capability",
                      gpu.compute_capability_major, gpu.compute_capability_minor, "num_multiprocessors",
                      gpu.num_multiprocessors, "memory_bytes", static_cast<unsigned long long>(gpu.memory_bytes)));
    if (!entry || PyList_Append(gpus.get(), entry.get()) < 0) return OwnedRef();
  }
  return OwnedRef::Steal(
      Py_BuildValue("{s:i,s:s,s:O}", "cuda_version", driver->cuda_version, "problem", "", "gpus", gpus.get()));
}

OwnedRef ToPython(const device::VendorLibrary& library) {
  return OwnedRef::Steal(Py_BuildValue("{s:s,s:s,s:s,s:s,s:s,s:s,s:s,s:O}", "id", library.id.c_str(), "name",
                                       library.name.c_str(), "use", library.use.c_str(), "problem",
                                       std::string(library.status.message()).c_str(), "soname", library.soname.c_str(),
                                       "path", library.path.c_str(), "version", library.version.c_str(), "was_loaded",
                                       library.was_loaded ? Py_True : Py_False));
}

OwnedRef ToPython(const device::NumaNode& node) {
  OwnedRef cpus = OwnedRef::Steal(PyList_New(0));
  if (!cpus) return cpus;
  for (int cpu : node.cpus) {
    OwnedRef number = OwnedRef::Steal(PyLong_FromLong(cpu));
    if (!number || PyList_Append(cpus.get(), number.get()) < 0) return OwnedRef();
  }
  return OwnedRef::Steal(Py_BuildValue("{s:i,s:O}", "id", node.id, "cpus", cpus.get()));
}

template <typename Rows>
OwnedRef ToList(const Rows& rows) {
  OwnedRef list = OwnedRef::Steal(PyList_New(0));
  if (!list) return list;
  for (const auto& row : rows) {
    OwnedRef entry = ToPython(row);
    if (!entry || PyList_Append(list.get(), entry.get()) < 0) return OwnedRef();
  }
  return list;
}

PyObject* MachineReport(PyObject*, PyObject*) noexcept {
  return Boundary([]() -> OwnedRef {
    const scheduler::MachineReport report = WithoutGil(&scheduler::ProbeMachine);
    OwnedRef driver = ToPython(report.driver);
    if (!driver) return driver;
    OwnedRef libraries = ToList(report.libraries);
    if (!libraries) return libraries;
    OwnedRef nodes = ToList(report.numa_nodes);
    if (!nodes) return nodes;
    return OwnedRef::Steal(Py_BuildValue("{s:O,s:O,s:O}", "driver", driver.get(), "libraries", libraries.get(),
                                         "numa_nodes", nodes.get()));
  });
}

// Holds the sampler for so many milliseconds and tells what it saw.
PyObject* SampleGpus(PyObject*, PyObject* milliseconds) noexcept {
  return Boundary([&]() -> OwnedRef {
    const long wanted = PyLong_AsLong(milliseconds);
    if (PyErr_Occurred() != nullptr) return OwnedRef();
    scheduler::LiveSampler::Report report;
    {
      AssertGilHeld();
      const GilRelease no_gil;
      scheduler::LiveSampler& sampler = scheduler::LiveSampler::ForProcess();
      const uint64_t begin_ns = scheduler::MonotonicNs();
      {
        const scheduler::LiveSampler::Use use = sampler.Start();
        std::this_thread::sleep_for(std::chrono::milliseconds(std::clamp<long>(wanted, 0, 600'000)));
      }
      report = sampler.Samples(begin_ns, scheduler::MonotonicNs());
    }
    OwnedRef samples = OwnedRef::Steal(PyList_New(0));
    if (!samples) return samples;
    for (const scheduler::LiveSample& sample : report.samples) {
      const OwnedRef row = OwnedRef::Steal(Py_BuildValue("(Kissd)", static_cast<unsigned long long>(sample.time_ns),
                                                         int{sample.device}, scheduler::LiveCounterName(sample.counter),
                                                         scheduler::LiveCounterUnit(sample.counter), sample.value));
      if (!row || PyList_Append(samples.get(), row.get()) < 0) return OwnedRef();
    }
    return OwnedRef::Steal(Py_BuildValue(
        "{s:s,s:O,s:K,s:K,s:K,s:K}", "problem", std::string(report.status.message()).c_str(), "samples", samples.get(),
        "rounds", static_cast<unsigned long long>(report.num_rounds), "cpu_ns",
        static_cast<unsigned long long>(report.cpu_ns), "wall_ns", static_cast<unsigned long long>(report.wall_ns),
        "period_ns", static_cast<unsigned long long>(report.period_ns)));
  });
}

PyMethodDef kMethods[] = {
    {"build_info", BuildInfo, METH_NOARGS, "What this binary was made from."},
    {"llvm_self_test", LlvmSelfTest, METH_NOARGS, "Compiles and runs one kernel; RuntimeError if that fails."},
    {"interpreter_self_test", InterpreterSelfTestBinding, METH_NOARGS,
     "What is unexpected in this interpreter, or ''."},
    {"torch_self_test", TorchSelfTestBinding, METH_NOARGS, "What is unexpected in the imported torch, or ''."},
    {"sample_gpus", SampleGpus, METH_O, "Samples the GPUs that this process uses, for so many milliseconds."},
    {"machine_report", MachineReport, METH_NOARGS, "The CUDA driver, optional libraries and memory nodes."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

int RegisterDoctor(PyObject* module) noexcept { return PyModule_AddFunctions(module, kMethods); }

}  // namespace cuvil::agent
