"""Many threads, forks, signals and long runs on one agent."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from lifecycle_agent import Double, Structured, X, enable_fixture, fake, use  # noqa: F401
from lifecycle_script import Script


def in_threads(count: int, body: Any) -> None:
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            with torch.no_grad():
                body(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]


@pytest.mark.parametrize("prepare", ["sync", "background"])
@pytest.mark.parametrize("adopt", ["always", "measure"])
def test_32_threads_of_1000_calls(enable: Any, prepare: str, adopt: str) -> None:
    enable(prepare=prepare, adopt=adopt)
    script = use(Script(lambda x: x * 2.0))
    model = Double()
    inputs = {n: torch.arange(float(n)) for n in (2, 3, 5)}
    expected = {n: x * 2.0 for n, x in inputs.items()}

    def body(index: int) -> None:
        n = (2, 3, 5)[index % 3]
        for _ in range(1_000):
            assert torch.equal(model(inputs[n]), expected[n])

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        in_threads(32, body)
    finally:
        sys.setswitchinterval(before)
    stats = fake.stats()
    assert stats["calls"] == 32_000 and stats["planned"] + stats["eager"] == 32_000
    assert stats["faults"] == 0 and stats["compare_failures"] == 0
    assert len(script.plans) <= 6


def test_only_one_thread_traces_and_others_run_meanwhile(enable: Any) -> None:
    enable()
    inside, leave = threading.Event(), threading.Event()
    first = [True]

    def build(x: torch.Tensor) -> torch.Tensor:
        if first[0]:
            first[0] = False
            inside.set()
            assert leave.wait(30)
        return x * 2.0

    script = use(Script(lambda x: x * 2.0))
    model, other = Structured(build), Double()
    thread = threading.Thread(target=lambda: model(X))
    thread.start()
    assert inside.wait(30)
    for _ in range(5):
        assert torch.equal(other(X), X * 2.0)
    assert script.traced == 0 and fake.stats()["traces"] == 1
    leave.set()
    thread.join()
    for _ in range(3):
        other(X)
    assert script.traced == 2


def test_reset_and_opt_out_while_plans_run(enable: Any) -> None:
    enable()
    use(Script(lambda x: x * 2.0))
    model = Double()
    stop = threading.Event()

    def disturb() -> None:
        while not stop.is_set():
            fake.reset()
            fake.opt_out(model, True)
            fake.opt_out(model, False)

    thread = threading.Thread(target=disturb)
    thread.start()

    def body(index: int) -> None:
        for _ in range(300):
            assert torch.equal(model(X), X * 2.0)

    try:
        in_threads(8, body)
    finally:
        stop.set()
        thread.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.parametrize("prepare", ["sync", "background"])
def test_plans_go_on_working_in_a_forked_child(enable: Any, prepare: str) -> None:
    enable(prepare=prepare)
    use(Script(lambda x: x * 2.0, build_seconds=0.05))
    served, half_way = Double(), Double()
    for _ in range(5):
        served(X)
        fake._quiesce()
    # Traced, and being built at the moment of the fork.
    half_way(X)
    half_way(X)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(60)
            planned = fake.stats()["planned"]
            assert torch.equal(served(X), X * 2.0)
            assert fake.stats()["planned"] == planned + 1
            fresh = Double()
            for model in (half_way, fresh):
                for _ in range(6):
                    assert torch.equal(model(X), X * 2.0)
                    fake._quiesce()
                assert fake.module_state(model)["state"] == "planned", fake.module_state(model)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status == 0
    fake._quiesce()
    for _ in range(3):
        assert torch.equal(half_way(X), X * 2.0)
    assert fake.module_state(half_way)["state"] == "planned"


def test_keyboard_interrupt_is_delivered() -> None:
    program = """
import os, signal, threading, torch, _cuvil_lifecycle_fake as fake
from lifecycle_script import Script
fake.set_script(Script(lambda x: x * 2.0))
fake.enable()
class Double(torch.nn.Module):
    def forward(self, x): return x * 2.0
model, x, count = Double(), torch.ones(2), 0
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored
threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    with torch.no_grad():
        while True:
            model(x); count += 1
except KeyboardInterrupt:
    print("interrupted", count > 10, fake.stats()["planned"] > 10)
"""
    here = os.path.dirname(__file__)
    environment = dict(
        os.environ,
        CUVIL_PREPARE="sync",
        CUVIL_ADOPT="always",
        PYTHONPATH=f"{here}:{os.environ.get('PYTHONPATH', '')}",
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "interrupted True True", done.stderr


def test_many_calls_leak_nothing(enable: Any) -> None:
    enable(adopt="measure")
    use(Script(lambda x: x * 2.0))
    model = Double()

    def resident_kib() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024

    def run(calls: int) -> None:
        for _ in range(calls):
            model(X)

    run(5_000)
    gc.collect()
    references, resident = sys.getrefcount(X), resident_kib()
    objects = len(gc.get_objects())
    run(50_000)
    gc.collect()
    assert sys.getrefcount(X) == references
    assert abs(len(gc.get_objects()) - objects) < 50
    assert resident_kib() - resident < 4_000


def test_many_models_leak_nothing(enable: Any) -> None:
    enable()
    use(Script(lambda x: x * 2.0))
    script = Script(lambda x: x * 2.0)
    counts = []
    for _ in range(2):
        for _ in range(500):
            model = Double()
            for _ in range(3):
                model(X)
            del model
        script.plans.clear()
        fake.set_script(Script(lambda x: x * 2.0))
        gc.collect()
        counts.append(len(gc.get_objects()))
    assert counts[1] <= counts[0] + 50
    assert fake.stats()["modules"] == 0 and fake.stats()["plans"] == 0
