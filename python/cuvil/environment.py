"""What a measurement or a diagnosis must say about the machine it ran on. Reads; imports no framework by itself."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from cuvil import _native


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
        pass  # /proc is hidden: the generic name stays.
    return Cpu(name, len(os.sched_getaffinity(0)), features)


def disabled() -> str:
    """How CUVIL_DISABLE reads if it keeps enable() from doing anything, or "": the engine's own rule (settings.cc)."""
    value = os.environ.get("CUVIL_DISABLE", "")
    return "" if value in ("", "0") else f"CUVIL_DISABLE={value}"


def git_sha() -> str:
    """The commit this package was built from, or else the one it is run from; "unknown" outside a repository."""
    built = _native.build_info().get("git_sha", "")
    if built and built != "unknown":
        return built
    here = os.path.dirname(os.path.realpath(__file__))
    command = ["git", "-C", here, "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except OSError:
        return "unknown"  # No git on this machine.
    return found.stdout.strip() or "unknown"


def describe() -> dict[str, Any]:
    """For the JSON of a benchmark; torch's part only if torch is loaded."""
    processor = cpu()
    machine = _native.machine_report()
    driver = machine["driver"]
    record: dict[str, Any] = {
        "git_sha": git_sha(),
        "python": platform.python_version(),
        "cpu": processor.name,
        "cores": processor.usable_cores,
        "avx2": "avx2" in processor.features,
        "avx512": "avx512f" in processor.features,
        "numa_nodes": len(machine["numa_nodes"]),
        "gpu": [gpu["name"] for gpu in driver["gpus"]],
        "driver": driver["problem"] or f"CUDA {cuda_version(driver)}",
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        record["torch"] = torch.__version__
        record["threads"] = torch.get_num_threads()
    return record


def cuda_version(driver: dict[str, Any]) -> str:
    """ "13.0" for 13000."""
    number = int(driver["cuda_version"])
    return f"{number // 1000}.{number % 1000 // 10}"
