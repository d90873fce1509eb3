"""enable() checks each assumption about the interpreter and torch; one that does not hold is named, and nothing changes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from cuvil import _native

# The self-tests run once in a process, so each assumption gets a process of its own: a fork of one that has imported
# torch. It prints what enable() raises, or what else is wrong.
PROGRAM = """
import json, os, sys
import torch, cuvil
from cuvil import _native

def state():
    tools = [sys.monitoring.get_tool(i) for i in range(6)] if sys.version_info >= (3, 12) else []
    call = torch.nn.Module.__call__
    return (call, call.__code__, sys.gettrace(), sys.getprofile(), list(sys.meta_path), tools,
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), cuvil.enabled())

def told_by_enable(name):
    before = state()
    _native._corrupt_assumption(name)
    try:
        cuvil.enable()
    except RuntimeError as error:
        told = str(error)
    else:
        return "enabled"
    assert state() == before, (before, state())
    _native._corrupt_assumption("")
    model, x = torch.nn.Linear(2, 2).eval(), torch.ones(1, 2)
    with torch.no_grad():
        for _ in range(5): model(x)
    assert cuvil.stats().get("calls", 0) == 0 and not cuvil.enabled(), cuvil.stats()
    return told

def in_child(name):
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = told_by_enable(name)
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write_end, text.encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        text = pipe.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return text if status == 0 else f"exit status {status}"

print(json.dumps({name: in_child(name) for name in ["", *_native._assumptions()]}))
"""

ASSUMPTIONS = _native._assumptions()
# On 3.11 C calls do not count towards the recursion limit of Python, so there is nothing to check.
if sys.version_info < (3, 12):
    ASSUMPTIONS.remove("recursion")

OF_TORCH = {name for name in ASSUMPTIONS if name.startswith(("tensor-", "storage-", "dispatch-", "torch-"))}
VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"


@pytest.fixture(scope="module", name="told")
def told_fixture() -> dict[str, str]:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    told: dict[str, str] = json.loads(ran.stdout)
    return told


@pytest.mark.parametrize("name", ASSUMPTIONS)
def test_an_assumption_that_does_not_hold_is_named(told: dict[str, str], name: str) -> None:
    text = told[name]
    assert "\n" not in text and text.endswith("or report this with the output of `python -m cuvil doctor`"), text
    if name in OF_TORCH:
        expected = "torch's C shim: " if name == "torch-calls" else "this torch keeps "
        assert text.startswith(expected) and "; use a release of torch from 2.10 on, " in text, text
    else:
        assert text.startswith(f"this interpreter differs from CPython {VERSION}: "), text
        assert "; use a release of CPython 3.11, 3.12 or 3.13, " in text, text
    assert [other for other in ASSUMPTIONS if told[other] == text] == [name], "each has a sentence of its own"


def test_where_all_hold_it_is_enabled(told: dict[str, str]) -> None:
    assert told[""] == "enabled"


def test_an_assumption_of_no_known_name() -> None:
    with pytest.raises(ValueError, match="no assumption is called 'nonsense'"):
        _native._corrupt_assumption("nonsense")
