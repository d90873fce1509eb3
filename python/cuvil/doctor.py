"""``python -m cuvil doctor``: what will work on this machine, and how to fix what does not."""

from __future__ import annotations

import argparse
import enum
import importlib.util
import json
import os
import platform
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from cuvil import environment
from cuvil.explanation import byte_size, duration


class Level(enum.Enum):
    """How a finding bears on Cuvil."""

    OK = "ok"
    NOTE = "note"  # Something optional is absent; nothing that Cuvil needs.
    WARN = "warn"  # Works, but slower or not everywhere.
    FAIL = "FAIL"  # Cuvil stays off until this is fixed.


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    subject: str
    level: Level
    text: str
    fix: str = ""


_MINIMUM_TORCH = (2, 10)


def _python() -> Iterator[Finding]:
    name = f"{platform.python_implementation()} {platform.python_version()} ({sys.executable})"
    fix = "use CPython 3.11, 3.12 or 3.13"
    if platform.python_implementation() != "CPython" or not (3, 11) <= sys.version_info[:2] <= (3, 13):
        yield Finding("Python", Level.FAIL, name, fix)
    elif sysconfig.get_config_var("Py_GIL_DISABLED"):
        yield Finding("Python", Level.FAIL, f"{name}, free-threaded build", f"{fix} with the GIL")
    elif hasattr(sys, "gettotalrefcount"):
        yield Finding("Python", Level.FAIL, f"{name}, debug build", f"{fix}, not a debug build")
    else:
        yield Finding("Python", Level.OK, name)


def _engine() -> Iterator[Finding]:
    from cuvil import __version__, _native

    if _native.__name__ == "cuvil.unavailable":
        fix = "run `pip install .` in Cuvil's source directory, with CPython 3.11, 3.12 or 3.13"
        yield Finding("cuvil", Level.FAIL, _native.interpreter_self_test(), fix)
        return
    details = ", ".join(f"{key} {value}" for key, value in _native.build_info().items() if value and key != "version")
    yield Finding("cuvil", Level.OK, f"{__version__} ({details})")
    if disabled := environment.disabled():
        yield Finding("cuvil", Level.WARN, f"{disabled} is set: enable() does nothing", "unset CUVIL_DISABLE")


def _cpu() -> Iterator[Finding]:
    cpu = environment.cpu()
    vectors = "AVX-512" if "avx512f" in cpu.features else "AVX2" if "avx2" in cpu.features else "no AVX2"
    text = f"{cpu.name}, {cpu.usable_cores} usable cores, {vectors}"
    if "avx2" in cpu.features:
        yield Finding("CPU", Level.OK, text)
    else:
        yield Finding("CPU", Level.WARN, text, "kernels will use 128-bit vectors; nothing to fix in software")


def _kernels() -> Iterator[Finding]:
    from cuvil import _native

    try:
        kernel = _native.llvm_self_test()
    except RuntimeError as error:
        yield Finding("kernels", Level.WARN, str(error), "plans still run with torch's operators; please report this")
        return
    yield Finding(
        "kernels",
        Level.OK,
        f"LLVM {kernel['version']} for {kernel['host_cpu']}, {8 * kernel['vector_width_bytes']}-bit vectors: compiled and "
        f"ran one in {duration(kernel['compile_ns'])}",
    )


def _interpreter() -> Iterator[Finding]:
    from cuvil import _native

    problem = _native.interpreter_self_test()
    if problem and _native.__name__ == "cuvil.unavailable":
        return  # Said already.
    if problem:
        yield Finding("interpreter", Level.FAIL, problem, "use a released CPython 3.11, 3.12 or 3.13")
    else:
        yield Finding("interpreter", Level.OK, "internals are as expected (self-test passed)")


def _torch() -> Iterator[Finding]:
    install = f"pip install 'torch>={_MINIMUM_TORCH[0]}.{_MINIMUM_TORCH[1]}'"
    if importlib.util.find_spec("torch") is None:
        yield Finding("torch", Level.FAIL, "not installed for this Python", install)
        return
    begin = time.perf_counter()
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - whatever keeps torch from loading is the finding.
        yield Finding("torch", Level.FAIL, f"import fails: {type(error).__name__}: {error}", install)
        return
    seconds = time.perf_counter() - begin
    version = str(torch.__version__)
    if tuple(int(part) for part in version.split("+")[0].split(".")[:2]) < _MINIMUM_TORCH:
        yield Finding("torch", Level.FAIL, f"{version} is too old", install)
        return
    yield Finding("torch", Level.OK, f"{version}, {torch.get_num_threads()} threads, imported in {seconds:.1f} s")

    from cuvil import _native

    problem = _native.torch_self_test()
    if problem:
        yield Finding("torch boundary", Level.FAIL, problem, f"{install}, or the newest cuvil")
    else:
        yield Finding("torch boundary", Level.OK, "operators and tensors are reachable (self-test passed)")
    yield from _end_to_end(torch)


def _end_to_end(torch: Any, device: str = "cpu") -> Iterator[Finding]:
    """A real model of torch's own classes, planned and compared with eager."""
    import cuvil

    on_gpu = device != "cpu"
    subject = "a model on a GPU" if on_gpu else "a real model"
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).eval().to(device)
    with torch.inference_mode():
        x = torch.randn(2, 64, device=device)
        expected = model(x)
        try:
            with cuvil.scope():
                begin = time.perf_counter()
                ready = cuvil.prepare(model, x)
                seconds = time.perf_counter() - begin
                result = model(x)
        except RuntimeError as error:
            yield Finding(subject, Level.FAIL, str(error), "see the lines above")
            return
        # cuBLAS may choose another kernel for another workspace.
        equal = torch.allclose(result, expected, rtol=1e-3, atol=1e-3) if on_gpu else torch.equal(result, expected)
    if not equal:
        yield Finding(subject, Level.FAIL, "a planned call differs from eager", "please report this")
        return
    if disabled := environment.disabled():
        yield Finding(subject, Level.NOTE, f"runs as CPython would, because {disabled} is set")
        return
    explanation = cuvil.explain(model)
    if not ready:
        yield Finding(subject, Level.FAIL, f"was not planned: {explanation.summary()}", "please report this")
        return
    plans = [plan for module in explanation.to_dict()["modules"] for plan in module["plans"]]
    graph = plans[-1].get("cuda_graph", {}) if plans else {}
    if on_gpu and not graph.get("captured"):
        reason = graph.get("reason") or "no reason is known"
        yield Finding(subject, Level.WARN, f"is planned, but not as a CUDA graph: {reason}", "see the lines above")
    else:
        form = f" as one CUDA graph of {graph['kernels']} kernels" if on_gpu else ""
        yield Finding(subject, Level.OK, f"planned{form} in {seconds * 1e3:.0f} ms, same values as eager")


def _machine() -> Iterator[Finding]:
    from cuvil import _native

    machine = _native.machine_report()
    libraries = {library["id"]: library for library in machine["libraries"]}
    nodes = machine["numa_nodes"]
    if len(nodes) <= 1:
        yield Finding("NUMA", Level.OK, "one memory node; nothing to place")
    elif libraries["numa"]["problem"]:
        yield Finding("NUMA", Level.WARN, f"{len(nodes)} nodes, libnuma.so.1 not found", "apt-get install libnuma1")
    else:
        yield Finding("NUMA", Level.OK, f"{len(nodes)} nodes, libnuma found")

    driver = machine["driver"]
    if driver["problem"]:
        yield Finding("GPU", Level.NOTE, f"none usable ({driver['problem']}); models on the CPU are not affected")
        return
    for gpu in driver["gpus"]:
        major, minor = gpu["compute_capability"]
        text = f"{gpu['name']}, compute capability {major}.{minor}, {byte_size(gpu['memory_bytes'])}"
        yield Finding("GPU", Level.OK, f"{text}, driver for CUDA {environment.cuda_version(driver)}")
    torch = sys.modules.get("torch")
    if torch is not None and not torch.cuda.is_available():
        yield Finding(
            "GPU",
            Level.WARN,
            "torch cannot use it (a CPU build, or the driver is older than torch's CUDA)",
            "install a CUDA build of torch, or a newer driver",
        )
    for name in ("nvml", "cupti", "cudnn", "cublaslt"):
        library = libraries[name]
        if library["problem"]:
            text = f"not found ({library['problem']}); without it: no {library['use']}"
            fix = (
                "a newer driver brings it" if name == "nvml" else "a CUDA build of torch brings it (pip install torch)"
            )
            yield Finding(library["name"], Level.WARN, text, fix)
        else:
            yield Finding(library["name"], Level.OK, f"{library['version']} ({library['path'] or library['soname']})")


def _cuda() -> Iterator[Finding]:
    """What can be tried only where torch can use a GPU."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return
    yield from _allocator(torch)
    yield from _end_to_end(torch, "cuda")
    yield from _graph_memory()
    yield from _live_counters()


def _allocator(torch: Any) -> Iterator[Finding]:
    backend = torch.cuda.get_allocator_backend()
    if backend == "native":
        yield Finding("CUDA allocator", Level.OK, "torch's own, which can give CUDA graphs memory of their own")
    else:
        variable = "PYTORCH_ALLOC_CONF" if "PYTORCH_ALLOC_CONF" in os.environ else "PYTORCH_CUDA_ALLOC_CONF"
        yield Finding(
            "CUDA allocator",
            Level.WARN,
            f"{backend}: CUDA graphs are off, operators run one by one",
            f"leave backend:{backend} out of {variable}",
        )


def _graph_memory() -> Iterator[Finding]:
    import cuvil

    stats = cuvil.stats()
    limit = float(stats.get("graph_budget_bytes", 0))
    if limit:
        held = float(stats["graph_bytes"]) + float(stats["graph_workspace_bytes"])
        yield Finding(
            "graph memory",
            Level.OK,
            f"CUDA graphs may hold {byte_size(limit)} and hold {byte_size(held)} (CUVIL_GRAPH_MEMORY sets the limit)",
        )


# Long enough for two of the driver's own refreshes.
_SAMPLING_MILLISECONDS = 350


def _live_counters() -> Iterator[Finding]:
    from cuvil import _native

    report = _native.sample_gpus(_SAMPLING_MILLISECONDS)
    if report["problem"]:
        yield Finding(
            "live counters",
            Level.WARN,
            f"none ({report['problem']}); profiles have no GPU counters",
            "in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility; otherwise a newer driver",
        )
        return
    names = sorted({name for _, _, name, _, _ in report["samples"]})
    cost = report["cpu_ns"] / max(report["wall_ns"], 1)
    text = f"{', '.join(names) or 'none'}; reading them takes {cost:.2%} of a core"
    if "SM occupancy" in names:
        yield Finding("live counters", Level.OK, text)
    else:
        yield Finding(
            "live counters", Level.NOTE, f"{text}; occupancy needs a GPU with GPM (Hopper or later), undivided"
        )


def _compiler() -> Iterator[Finding]:
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++") or shutil.which("clang++")
    if compiler:
        yield Finding("C++ compiler", Level.OK, f"{compiler} (only torch.compile needs it; Cuvil does not)")
    else:
        yield Finding("C++ compiler", Level.NOTE, "none; Cuvil needs none, torch.compile on the CPU cannot run here")


_CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _python,
    _engine,
    _cpu,
    _kernels,
    _interpreter,
    _torch,
    _machine,
    _cuda,
    _compiler,
)


def findings() -> Iterator[Finding]:
    """The report, a line at a time; a check that breaks is itself a finding and stops no other."""
    for check in _CHECKS:
        try:
            yield from check()
        except Exception as error:  # noqa: BLE001 - the doctor reports, whatever it meets.
            subject = check.__name__.strip("_").replace("_", " ")
            yield Finding(subject, Level.FAIL, f"check failed: {type(error).__name__}: {error}", "please report this")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m cuvil doctor",
        description="Tells what will work on this machine and how to fix what does not. "
        "Exit status 0: Cuvil works here; 1: it does not.",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the findings to FILE (- for standard output)")
    options = parser.parse_args(argv)
    quiet = options.json == "-"

    report = []
    for finding in findings():
        report.append(finding)
        if not quiet:
            print(f"{finding.level.value:<5} {finding.subject + ':':<16} {finding.text}", flush=True)
            if finding.fix:
                print(f"{'':<5} {'':<16} → {finding.fix}", flush=True)
    failures = [finding for finding in report if finding.level is Level.FAIL]
    if options.json:
        document = {
            "works": not failures,
            "findings": [
                {"subject": f.subject, "level": f.level.value.lower(), "text": f.text, "fix": f.fix} for f in report
            ],
        }
        text = json.dumps(document, indent=2, ensure_ascii=False)
        if quiet:
            print(text)
        else:
            with open(options.json, "w", encoding="utf-8") as file:
                file.write(text + "\n")
    if not quiet:
        print("\nCuvil works here." if not failures else f"\nCuvil does not work here: {failures[0].text}")
    return 1 if failures else 0
