"""Stands in for the engine where it cannot be loaded: ``enable()`` says why in one sentence, everything else goes on.

A program that says ``import cuvil`` must not fail on a Python for which there is no engine; it only stays as it is.
"""

from __future__ import annotations

import platform
import sys
import sysconfig
import time
from typing import Any, NoReturn

load_error = ""  # Set by the package when the import failed.


def reason() -> str:
    """One sentence on why there is no engine for this Python."""
    name = f"{platform.python_implementation()} {platform.python_version()}"
    wanted = "Cuvil needs CPython 3.11, 3.12 or 3.13, a release build with the GIL"
    if platform.python_implementation() != "CPython" or not (3, 11) <= sys.version_info[:2] <= (3, 13):
        return f"{wanted}; this is {name}"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return f"{wanted}; this is {name} without the GIL"
    if hasattr(sys, "gettotalrefcount"):
        return f"{wanted}; this is a debug build of {name}"
    return f"Cuvil's engine cannot be loaded: {load_error}"


def enable() -> NoReturn:
    raise RuntimeError(reason())


def disable() -> None:
    pass


def enabled() -> bool:
    return False


def reset() -> None:
    pass


def prepare(module: object, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    return False


def opt_out(module: object, value: bool) -> None:
    pass


def stats() -> dict[str, Any]:
    return {}


def explain(module: object) -> dict[str, Any]:
    return {"type": f"{type(module).__module__}.{type(module).__qualname__}", "modules": []}


def profile_start(no_kernels: str = "") -> int:
    return 0


def profile_stop(number: int, shared: bool = False) -> dict[str, Any] | None:
    now = time.monotonic_ns()
    empty: dict[str, Any] = {"dropped": 0, "notes": [], "sites": [], "threads": [], "device": None, "counters": []}
    return {"start_ns": now, "end_ns": now, "enabled": False, **empty}


def interpreter_self_test() -> str:
    return reason()


def torch_self_test() -> str:
    return reason()


def llvm_self_test() -> NoReturn:
    raise RuntimeError(reason())


def build_info() -> dict[str, str]:
    return {}


def sample_gpus(milliseconds: int) -> dict[str, Any]:
    return {"problem": reason(), "samples": [], "rounds": 0, "cpu_ns": 0, "wall_ns": 0, "period_ns": 0}


def machine_report() -> dict[str, Any]:
    return {
        "driver": {"cuda_version": 0, "problem": "not looked for", "gpus": []},
        "libraries": [],
        "numa_nodes": [],
    }
