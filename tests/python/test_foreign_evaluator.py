"""Another PEP 523 evaluator is refused by enable(), refuses traces, and stays where it is (docs/design/0003)."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

pytest.importorskip("cuvil._native")
pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the evaluator is x86-64 code")

# An evaluator in machine code: it counts, and goes on to the interpreter's own. A Python callback could not be one: it
# would be evaluated by itself.
PROGRAM = """
import ctypes, mmap, struct
import torch

class Evaluator:
    def __init__(self):
        api = ctypes.pythonapi
        self.default = ctypes.cast(api._PyEval_EvalFrameDefault, ctypes.c_void_p).value
        api.PyInterpreterState_Get.restype = ctypes.c_void_p
        self.get_function = api._PyInterpreterState_GetEvalFrameFunc
        self.get_function.argtypes, self.get_function.restype = [ctypes.c_void_p], ctypes.c_void_p
        self.set_function = api._PyInterpreterState_SetEvalFrameFunc
        self.set_function.argtypes, self.set_function.restype = [ctypes.c_void_p, ctypes.c_void_p], None
        self.interpreter = api.PyInterpreterState_Get()
        self.count = ctypes.c_uint64()
        # mov rax, &count; lock inc qword [rax]; mov rax, default; jmp rax
        code = (b"\\x48\\xb8" + struct.pack("<Q", ctypes.addressof(self.count)) + b"\\xf0\\x48\\xff\\x00"
                + b"\\x48\\xb8" + struct.pack("<Q", self.default) + b"\\xff\\xe0")
        self.page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        self.page.write(code)
        self.ours = ctypes.addressof(ctypes.c_char.from_buffer(self.page))
    def install(self): self.set_function(self.interpreter, self.ours)
    def remove(self): self.set_function(self.interpreter, self.default)
    def installed(self): return self.get_function(self.interpreter) == self.ours
    def is_default(self): return self.get_function(self.interpreter) == self.default

foreign = Evaluator()

class Model(torch.nn.Module):
    def __init__(self, inside=lambda: None):
        super().__init__()
        self.inside = inside
    def forward(self, x):
        self.inside()
        return torch.relu(x) * 2.0

import cuvil
from cuvil import _native
x = torch.arange(-2.0, 2.0)
expected = torch.relu(x) * 2.0
def call(model, times):
    with torch.no_grad():
        for _ in range(times):
            assert torch.equal(model(x), expected)
BODY
foreign.remove()  # its memory is about to go
"""


def run(body: str) -> str:
    program = PROGRAM.replace("BODY", body)
    environment = os.environ | {
        "CUVIL_PREPARE": "sync",
        "CUVIL_ADOPT": "always",
        "PYTHONPATH": ":".join(p for p in sys.path if p),
    }
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout


def test_enable_refuses_a_foreign_evaluator_and_works_when_it_is_gone() -> None:
    told = run(
        """
foreign.install()
try: cuvil.enable()
except RuntimeError as error: print(error)
assert foreign.installed() and not cuvil.enabled()
call(Model(), 4)
assert foreign.count.value > 0 and cuvil.stats().get("calls", 0) == 0
foreign.remove()
cuvil.enable()
call(Model(), 4)
assert cuvil.stats()["planned"] == 2 and foreign.is_default(), cuvil.stats()
"""
    )
    assert told == (
        "another frame evaluator is installed (torch.compile, a debugger or a profiler); call enable() when that is over\n"
    )


def test_a_foreign_evaluator_refuses_the_trace_and_stays() -> None:
    told = run(
        """
cuvil.enable()
foreign.install()
model = Model()
call(model, 3)
before = foreign.count.value
call(model, 1)
assert foreign.installed() and foreign.count.value > before
assert cuvil.stats()["planned"] == 0 and cuvil.stats()["refused"] > 0, cuvil.stats()
print([r["code"] + ": " + r["message"] for r in _native.module_state(model)["refusals"]][0])
foreign.remove()
other = Model()
call(other, 4)
assert cuvil.stats()["planned"] == 2 and foreign.is_default(), cuvil.stats()
"""
    )
    assert told == "extent: another frame evaluator is installed (torch.compile, a debugger or a profiler)\n"


def test_a_foreign_evaluator_that_comes_during_a_trace_stays() -> None:
    told = run(
        """
cuvil.enable()
model = Model(foreign.install)
call(model, 1)
assert foreign.installed(), "the end of the trace leaves it"
assert cuvil.stats()["traces"] == 1 and cuvil.stats()["captures"] == 0, cuvil.stats()
call(model, 3)
assert foreign.installed() and cuvil.stats()["planned"] == 0
print([r["code"] for r in _native.module_state(model)["refusals"]][0])
"""
    )
    # Calling into ctypes is refused by itself; what counts is that the evaluator is there.
    assert told.strip() in ("extent", "c-callable")


def test_plans_serve_beside_a_foreign_evaluator() -> None:
    run(
        """
cuvil.enable()
model = Model()
call(model, 3)
foreign.install()
call(model, 3)
assert cuvil.stats()["planned"] == 4 and foreign.installed(), cuvil.stats()
"""
    )
