"""Torch's ambient state as libtorch's own functions show it: it must say what torch's Python functions say."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cuvil import _native
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


def states() -> tuple[dict[str, Any], dict[str, Any]]:
    problem, native, asked = _native._torch_state()
    assert problem == ""
    return native, asked


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def transformed() -> Iterator[None]:
    torch._C._functorch._vmap_increment_nesting(2, "error")
    try:
        yield
    finally:
        torch._C._functorch._vmap_decrement_nesting()


def autocast(device: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no GPU
        return torch.autocast(device, dtype=torch.bfloat16)


CHANGES: dict[str, tuple[Callable[[], Any], str]] = {
    "no_grad": (torch.no_grad, "grad_enabled"),
    "inference_mode": (torch.inference_mode, "inference_mode"),
    "autocast_cpu": (lambda: autocast("cpu"), "autocast_cpu"),
    "default_dtype": (lambda: default_dtype(torch.float64), "default_dtype"),
    "no_torch_function": (torch._C.DisableTorchFunction, "torch_function_enabled"),
    "function_mode": (FunctionMode, "function_modes"),
    "dispatch_mode": (DispatchMode, "dispatch_modes"),
    "functorch": (transformed, "functorch"),
    "profiler": (torch.profiler.profile, "profiler"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_native_state_differs_whenever_what_python_says_does(name: str) -> None:
    make, field = CHANGES[name]
    native, asked = states()
    with make():
        native_within, asked_within = states()
    native_after, asked_after = states()
    assert asked_within[field] != asked[field]
    assert native_within != native
    assert (native_after, asked_after) == (native, asked)


@pytest.mark.parametrize("name", CHANGES)
def test_fields_with_one_name_agree(name: str) -> None:
    with CHANGES[name][0]():
        native, asked = states()
    for field in ("grad_enabled", "inference_mode", "functorch", "profiler", "function_modes", "dispatch_modes"):
        assert native[field] == asked[field], field
    assert (native["function_state"] == 0) == asked["torch_function_enabled"]


def test_state_is_the_threads_own() -> None:
    seen = []
    with torch.inference_mode(), autocast("cpu"):
        thread = threading.Thread(target=lambda: seen.append(states()))
        thread.start()
        thread.join()
        native, asked = states()
    elsewhere = seen[0]
    assert (native["inference_mode"], asked["autocast_cpu"]) == (True, True)
    assert (elsewhere[0]["inference_mode"], elsewhere[1]["autocast_cpu"]) == (False, False)
    assert elsewhere == states()


def test_default_dtype_is_a_scalar_type() -> None:
    with default_dtype(torch.float64):
        assert states()[0]["default_dtype"] == 7
    with default_dtype(torch.float32):
        assert states()[0]["default_dtype"] == 6
