"""What a measurement or a diagnosis must say about the machine it ran on. Reads; imports no framework by itself."""

from __future__ import annotations

import ctypes
import glob
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Cpu:
    """The processor as seen by this process."""

    name: str
    usable_cores: int
    features: frozenset[str]  # The kernel's flag names, e.g. avx2, avx512f.


def cpu() -> Cpu:
    name, features = platform.processor() or platform.machine(), frozenset[str]()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                key, _, value = line.partition(":")
                if key.strip() == "model name":
                    name = value.strip()
                elif key.strip() == "flags":
                    features = frozenset(value.split())
                    break  # One processor's entry is enough.
    except OSError:
        pass  # Not Linux, or /proc is hidden: the generic name stays.
    return Cpu(name, len(os.sched_getaffinity(0)), features)


def numa_nodes() -> dict[int, str]:
    """Node number to its CPU list; empty where the kernel tells nothing."""
    nodes: dict[int, str] = {}
    for path in glob.glob("/sys/devices/system/node/node[0-9]*/cpulist"):
        with open(path, encoding="utf-8") as file:
            nodes[int(path.split("/")[-2][len("node") :])] = file.read().strip()
    return dict(sorted(nodes.items()))


@dataclass(frozen=True)
class Gpu:
    """One device as the CUDA driver names it."""

    name: str
    capability: str
    memory_bytes: int


@dataclass(frozen=True)
class Driver:
    """The CUDA driver: what it supports, or why it cannot be used."""

    problem: str  # "" if it works
    version: str = ""
    gpus: tuple[Gpu, ...] = ()


def cuda_driver() -> Driver:
    """Asks libcuda.so.1 itself, without torch and without making a context."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Driver("no NVIDIA driver (libcuda.so.1) on this machine")
    code = library.cuInit(0)
    if code != 0:
        return Driver(f"cuInit returned {code}")
    version, number = ctypes.c_int(), ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    library.cuDeviceGetCount(ctypes.byref(number))
    gpus = []
    for index in range(number.value):
        device, name, total = ctypes.c_int(), ctypes.create_string_buffer(128), ctypes.c_size_t()
        major, minor = ctypes.c_int(), ctypes.c_int()
        library.cuDeviceGet(ctypes.byref(device), index)
        library.cuDeviceGetName(name, len(name), device)
        library.cuDeviceTotalMem_v2(ctypes.byref(total), device)
        library.cuDeviceGetAttribute(ctypes.byref(major), 75, device)  # COMPUTE_CAPABILITY_MAJOR
        library.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)  # COMPUTE_CAPABILITY_MINOR
        gpus.append(Gpu(name.value.decode(errors="replace"), f"{major.value}.{minor.value}", total.value))
    return Driver("", f"{version.value // 1000}.{version.value % 1000 // 10}", tuple(gpus))


def find_library(*names: str) -> str:
    """The first of `names` that can be loaded, as a path where it came from a Python package; "" if none."""
    for name in names:
        candidates = [name]
        for folder in sys.path:
            candidates += glob.glob(os.path.join(folder, "nvidia", "*", "lib", name))
        for candidate in candidates:
            try:
                ctypes.CDLL(candidate)
            except OSError:
                continue
            return candidate
    return ""


def git_sha() -> str:
    """The commit this package was built or run from; "unknown" outside a repository."""
    try:
        from cuvil import _native

        built = str(_native.build_info().get("git_sha", ""))
    except (ImportError, AttributeError):
        built = ""
    if built:
        return built
    here = os.path.dirname(os.path.realpath(__file__))
    found = subprocess.run(
        ["git", "-C", here, "rev-parse", "HEAD"], capture_output=True, text=True, check=False, timeout=10
    )
    return found.stdout.strip() or "unknown"


def describe() -> dict[str, Any]:
    """For the JSON of a benchmark; torch's part only if torch is loaded."""
    processor = cpu()
    driver = cuda_driver()
    record: dict[str, Any] = {
        "git_sha": git_sha(),
        "python": platform.python_version(),
        "cpu": processor.name,
        "cores": processor.usable_cores,
        "avx2": "avx2" in processor.features,
        "avx512": "avx512f" in processor.features,
        "numa_nodes": len(numa_nodes()) or 1,
        "gpu": [gpu.name for gpu in driver.gpus],
        "driver": driver.version or driver.problem,
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        record["torch"] = torch.__version__
        record["threads"] = torch.get_num_threads()
    return record
