"""What is computed once for all calls, under the floating-point mode of a thread and torch's switches for values."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch
from eager_twin import Fn, eager_twin, ramp, warm

DENORMAL = 1e-40


def constant(s, x):
    return x * (torch.full((2,), DENORMAL) * 1.0 * 1e38)


def flushes() -> bool:
    # A processor that cannot flush denormals leaves nothing to test.
    able = torch.set_flush_denormal(True)
    torch.set_flush_denormal(False)
    return able


pytestmark = pytest.mark.skipif(not flushes(), reason="this processor cannot flush denormal numbers")


@eager_twin(served=True)
def test_constants_when_denormals_are_flushed_after_the_plan_was_made():
    m = Fn(constant)
    try:
        with torch.no_grad():
            yield from warm("kept", m, torch.ones(2))
            torch.set_flush_denormal(True)
            yield from warm("flushed", m, torch.ones(2))
            torch.set_flush_denormal(False)
            yield from warm("kept-again", m, torch.ones(2))
    finally:
        torch.set_flush_denormal(False)


@eager_twin(served=True)
def test_constants_on_a_thread_that_flushes_denormals():
    m = Fn(constant)
    results = []

    def work():
        torch.set_flush_denormal(True)
        with torch.no_grad():
            results.extend(m(torch.ones(2)) for _ in range(5))

    with torch.no_grad():
        yield from warm("kept", m, torch.ones(2))
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        yield "other-thread", results
        yield "here", m(torch.ones(2))


@eager_twin
def test_a_branch_on_a_constant_that_is_denormal():
    def forward(s, x):
        return x + 1 if float((torch.full((), DENORMAL) * 1.0).item()) > 0 else x - 1

    m = Fn(forward)
    try:
        with torch.no_grad():
            yield from warm("kept", m, ramp(3))
            torch.set_flush_denormal(True)
            yield from warm("flushed", m, ramp(3))
    finally:
        torch.set_flush_denormal(False)


@eager_twin
def test_a_call_that_changes_the_mode_itself():
    def forward(s, x):
        torch.set_flush_denormal(s.on)
        return x * (torch.full((2,), DENORMAL) * 1.0 * 1e38)

    m = Fn(forward, on=True)
    try:
        with torch.no_grad():
            for i in range(8):
                m.on = i % 3 != 0
                yield f"{i}", m(torch.ones(2))
                yield f"{i}-left", torch.full((2,), DENORMAL) * 1.0
    finally:
        torch.set_flush_denormal(False)


BACKGROUND = """
import torch, time, cuvil

class Constant(torch.nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number = number

    def forward(self, x):
        return x * (torch.full((2,), self.number) * 1.0 * 1e38)

cuvil.enable()

def serve(model, number):
    deadline = time.monotonic() + 60
    before = cuvil.stats()["planned"]
    while cuvil.stats()["planned"] < before + 3:
        assert time.monotonic() < deadline, cuvil.explain(model)
        result = model(torch.ones(2)).tolist()
        assert result == [number, number], result

with torch.no_grad():
    # The thread that builds plans is born here, with the mode of a process that has just started.
    ordinary = Constant(1.0)
    serve(ordinary, ordinary(torch.ones(2))[0].item())
    assert torch.set_flush_denormal(True)
    serve(Constant(1e-40), 0.0)
    torch.set_flush_denormal(False)
    serve(Constant(1e-39), Constant(1e-39)(torch.ones(2))[0].item())
assert cuvil.stats()["compare_failures"] == 0, cuvil.stats()
"""


def test_the_background_thread_computes_constants_as_the_traced_thread_does() -> None:
    environment = dict(os.environ, CUVIL_PREPARE="background", CUVIL_ADOPT="always")
    run = subprocess.run([sys.executable, "-c", BACKGROUND], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


# A switch that changes what a constant part of the program computes, thrown after the plan was made.
@eager_twin(served=True)
def test_constant_products_follow_the_switches_of_products():
    def forward(s, x):
        a = torch.linspace(0.1, 1.7, 96 * 96).reshape(96, 96)
        return x + torch.mm(a, a.t()), torch.nn.functional.gelu(a) + x

    m = Fn(forward)
    x = torch.zeros(96, 96)
    precision, mkldnn, threads = torch.get_float32_matmul_precision(), torch.backends.mkldnn, torch.get_num_threads()
    try:
        with torch.no_grad():
            yield from warm("before", m, x)
            torch.set_float32_matmul_precision("medium")
            yield "medium", m(x)
            torch.set_float32_matmul_precision(precision)
            with mkldnn.flags(enabled=False):
                yield "without-onednn", m(x)
            torch.set_num_threads(3)
            yield "threads", m(x)
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads(threads)


@eager_twin(served=True)
def test_large_constant_sums_follow_the_number_of_threads():
    def forward(s, x):
        return x * torch.linspace(0.0, 1.0, 300_001).sum(), torch.linspace(-9.0, 9.0, 100_003).exp() * x

    m = Fn(forward)
    threads = torch.get_num_threads()
    try:
        with torch.no_grad():
            for count in (1, 2, 3, 4):
                torch.set_num_threads(count)
                yield from warm(f"{count}", m, torch.ones(()))
    finally:
        torch.set_num_threads(threads)


@eager_twin(served=True)
def test_a_constant_that_deterministic_algorithms_forbid():
    def forward(s, x):
        return x + torch.put(torch.zeros(4), torch.tensor([1, 2]), torch.ones(2))

    m = Fn(forward)
    try:
        with torch.no_grad():
            yield from warm("allowed", m, ramp(4))
            torch.use_deterministic_algorithms(True)
            try:
                yield "forbidden", m(ramp(4))
            except RuntimeError as error:
                yield "raised", str(error)
    finally:
        torch.use_deterministic_algorithms(False)
