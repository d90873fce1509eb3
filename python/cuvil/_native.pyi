"""Typed face of the extension module; the public functions and their contracts are in ``cuvil/__init__.py``."""

from typing import Any

def enable() -> None: ...
def disable() -> None: ...
def enabled() -> bool: ...
def reset() -> None: ...
def prepare(module: object, args: tuple[object, ...], kwargs: dict[str, object], /) -> bool: ...
def opt_out(module: object, value: bool, /) -> None: ...
def stats() -> dict[str, Any]: ...
def explain(module: object, /) -> dict[str, Any]:
    """The record behind cuvil.explain(): type, and for each module inside that was looked at, in "modules": path, type,
    state, calls, planned_calls, eager_calls, plans, refusals (code, file, line, message, advice, count),
    refusals_dropped, branches (file, line, column, instruction, kind "truth", "none" or "loop", taken, not_taken, probability) and branches_dropped.
    """

def interpreter_self_test() -> str:
    """Checks every assumption about interpreter internals on throw-away objects; "" or one sentence."""

def torch_self_test() -> str:
    """Checks the torch boundary on throw-away tensors; torch must have been imported. "" or one sentence."""

def llvm_self_test() -> dict[str, Any]:
    """Compiles and runs one tiny kernel: version, host_cpu, features, vector_width_bytes, compile_ns; RuntimeError if that fails."""

def build_info() -> dict[str, str]:
    """What this binary was made from: version, git_sha, compiler, python, llvm, build_type."""

def machine_report() -> dict[str, Any]:
    """What the machine offers, each part with a "problem" that is "" or one sentence.

    driver: cuda_version, problem, gpus (name, compute_capability, num_multiprocessors, memory_bytes);
    libraries: id (nvml, cupti, cudnn, cublaslt, numa), name, use, problem, soname, path, version, was_loaded;
    numa_nodes: id, cpus.
    """

def sample_gpus(milliseconds: int, /) -> dict[str, Any]:
    """What the GPUs that this process uses did for so long: problem ("" or one sentence), samples (time_ns, device,
    counter, unit, value), and of the sampling thread rounds, cpu_ns, wall_ns, period_ns.
    """

def module_state(module: object, /) -> dict[str, Any] | None:
    """What explain() says of one module object; None if no call of it has been seen."""

def profile_start(no_kernels: str = ..., /) -> int:
    """Begins the process's profile and gives its number; RuntimeError if there is one already.

    `no_kernels`: a sentence on why kernels are not to be recorded.
    """

def profile_stop(number: int, shared: bool = ..., /) -> dict[str, Any] | None:
    """Ends that profile; None if a fork has left it to the parent. `shared`: torch.profiler uses CUPTI by now.

    start_ns, end_ns, enabled, dropped, notes; sites: kind ("call", "plan", "preparation", "step"), module, type, file,
    line, function, operator; threads: name, id, records (bytes: start_ns, end_ns, site as 64-bit integers each, in the
    order in which they ended); device: None, or names, recorded_ns, dropped, activities (bytes:
    scheduler/device_activity.h, by start); counters: device, name, unit, samples (bytes: time in ns as a 64-bit integer
    and value as a double each).
    """

def _check_times(module: object, args: tuple[object, ...], kwargs: dict[str, object], count: int, /) -> list[int]:
    """For benchmarks: ns of `count` guard checks of the plan that answers the call."""

def _dispatch_times(
    module: object, args: tuple[object, ...], kwargs: dict[str, object], count: int, num_detaches: int = 1, /
) -> list[int]:
    """For benchmarks: ns of `count` planned calls in which every tensor of the result is made by that many `detach`, and
    other operators are left out; no other thread may make such calls."""

def _fault_inject(name: str, count: int = ..., /) -> None:
    """For tests: makes the named stage boundary fail `count` times."""

def _fault_left(name: str, /) -> int:
    """For tests: how many of the failures asked for have not happened yet."""

def _fault_points() -> list[str]:
    """For tests: the names of the stage boundaries."""

def _assumptions() -> list[str]:
    """For tests: the names of what the self-tests at enable() check."""

def _corrupt_assumption(name: str, /) -> None:
    """For tests, before the process's first enable(): makes the named assumption wrong; "" undoes it."""

def _quiesce() -> None:
    """For tests: waits until the background thread has nothing to do."""
