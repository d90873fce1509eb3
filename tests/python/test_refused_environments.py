"""Where Cuvil cannot work, enable() says so in one sentence and changes nothing."""

from __future__ import annotations

import platform
import subprocess
import sys
import sysconfig
from typing import Any

import pytest
from cuvil import unavailable

# enable() in a process of its own; then whether anything is changed.
PROGRAM = """
import sys
BEFORE
import torch, cuvil
from cuvil import _native
def state():
    return (torch.nn.Module.__call__, torch.nn.Module._wrapped_call_impl, sys.gettrace(), sys.getprofile(),
            _native.enabled(), list(sys.meta_path), threading_hooks())
def threading_hooks():
    import threading
    return threading._trace_hook, threading._profile_hook
CHANGE
before = state()
try:
    cuvil.enable()
except RuntimeError as error:
    print(error)
else:
    print("enabled")
assert state() == before and not cuvil.enabled()
model, x = torch.nn.Linear(2, 2).eval(), torch.ones(1, 2)
with torch.no_grad():
    for _ in range(5): model(x)
assert cuvil.stats().get("calls", 0) == 0, cuvil.stats()
"""


def says(before: str = "", change: str = "") -> str:
    program = PROGRAM.replace("BEFORE", before).replace("CHANGE", change)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    lines = ran.stdout.splitlines()
    assert len(lines) == 1, ran.stdout
    return lines[0]


@pytest.mark.parametrize("version", ["2.9.1", "2.9.0+cu128", "1.13.1", "2.0.0a0+git1234"])
def test_an_older_torch(version: str) -> None:
    told = says(change=f"torch.__version__ = {version!r}")
    assert told == f"torch {version} is too old: Cuvil needs torch 2.10 or later"


def test_a_torch_of_no_known_version() -> None:
    assert says(change="torch.__version__ = 'main'") == "torch main is no version Cuvil understands"


def test_a_replaced_module_call() -> None:
    told = says(change="import functools; torch.nn.Module.__call__ = functools.partial(lambda *a: None)")
    assert told == (
        "torch.nn.Module.__call__ is a functools.partial, no plain function; remove what replaced it before enable()"
    )


@pytest.mark.parametrize("version", ["2.10.0", "2.11.0+cpu", "3.0.0"])
def test_a_newer_torch_is_no_reason(version: str) -> None:
    program = f"import torch, cuvil; torch.__version__ = {version!r}; cuvil.enable(); assert cuvil.enabled()"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_missing_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = None; import cuvil\n"
        "try: cuvil.enable()\n"
        "except RuntimeError as e: print(e)\n"
        "assert not cuvil.enabled()\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout.startswith("torch cannot be imported:") and ran.stdout.count("\n") == 1, ran.stdout


def reason(monkeypatch: pytest.MonkeyPatch, change: Any) -> str:
    change(monkeypatch)
    with pytest.raises(RuntimeError) as caught:
        unavailable.enable()
    text = str(caught.value)
    assert "\n" not in text and not unavailable.enabled()
    return text


WANTED = "Cuvil needs CPython 3.11, 3.12 or 3.13, a release build with the GIL"


@pytest.mark.parametrize("version", [(3, 10, 4), (3, 14, 0), (3, 15, 1)])
def test_another_python(monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int]) -> None:
    def change(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(sys, "version_info", (*version, "final", 0))
        patch.setattr(platform, "python_version", lambda: ".".join(map(str, version)))

    assert reason(monkeypatch, change) == f"{WANTED}; this is CPython {'.'.join(map(str, version))}"


def test_another_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    text = reason(monkeypatch, lambda patch: patch.setattr(platform, "python_implementation", lambda: "PyPy"))
    assert text.startswith(f"{WANTED}; this is PyPy ")


def test_a_free_threaded_build(monkeypatch: pytest.MonkeyPatch) -> None:
    text = reason(monkeypatch, lambda patch: patch.setattr(sysconfig, "get_config_var", lambda name: 1))
    assert text.startswith(f"{WANTED}; this is CPython 3.") and text.endswith(" without the GIL")


def test_a_debug_build(monkeypatch: pytest.MonkeyPatch) -> None:
    text = reason(monkeypatch, lambda patch: patch.setattr(sys, "gettotalrefcount", lambda: 1, raising=False))
    assert text.startswith(f"{WANTED}; this is a debug build of CPython 3.")
