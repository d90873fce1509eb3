"""A failure inside of Cuvil, at any stage: the call runs as CPython would, a counter moves, one line tells, plans go on."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuvil import _native
from torch import nn

SOURCE = """
def forward(self, x):
    self.wait()
    y = torch.tanh(x @ self.weight)
    z = torch.sigmoid(y) + y
    return torch.nn.functional.dropout(z * y, 0.5, self.random)
"""
NUMBERS = itertools.count()

# A fault that is armed once the plan serves; at the others a call comes by earlier.
SERVING = {"match", "guard", "collect", "run-begin", "run", "rebuild"}
# No internal failure, but a decision: the plan is refused or retired, for good or for a while.
DECISIONS = {"differ", "retire"}
POINTS = [point for point in _native._fault_points() if point not in DECISIONS]


class Model(nn.Module):
    """Each has a code object of its own, which no call has instrumented."""

    def __init__(self, random: bool = False, seconds: float = 0.0) -> None:
        super().__init__()
        self.place = f"<model {next(NUMBERS)}>"
        namespace: dict[str, Any] = {"torch": torch}
        exec(compile(SOURCE, self.place, "exec"), namespace)
        kind = type("Model", (Model,), {"forward": namespace["forward"]})
        self.__class__ = kind
        self.weight = nn.Parameter(torch.eye(4), requires_grad=False)
        self.random = random
        self.seconds = seconds

    def wait(self) -> None:
        if self.seconds:
            time.sleep(self.seconds)


def eager(model: Model, x: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(x @ model.weight)
    z = torch.sigmoid(y) + y
    return nn.functional.dropout(z * y, 0.5, model.random)


def check(model: Model, x: torch.Tensor, seed: int = 5) -> None:
    """One call gives eager's answer and leaves the generator where eager does."""
    torch.manual_seed(seed)
    expected = eager(model, x)
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    assert torch.equal(model(x), expected)
    assert torch.equal(torch.get_rng_state(), state)
    _native._quiesce()


def lines(capfd: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capfd.readouterr().err.splitlines() if line.startswith("cuvil:")]


def start(enable: Any, point: str) -> tuple[Model, Callable[[], None]]:
    """A model, and what calls it in such a way that the point is reached."""
    enable(
        "background" if point == "submit" else "sync",
        "measure" if point == "adopt" else "always",
        **({"CUVIL_PLANS": "1"} if point == "evict" else {}),
    )
    model = Model(random=point == "random-save")
    shapes = itertools.cycle([torch.ones(2, 4), torch.ones(3, 4)] if point == "evict" else [torch.ones(2, 4)])
    # Two plans that take turns in one place are evicted all the time: each gets some calls.
    inputs = itertools.chain.from_iterable(itertools.repeat(x, 5) for x in shapes)
    if point in SERVING:
        for _ in range(4):
            check(model, next(inputs))
        assert _native.stats()["planned"] == 2
    return model, lambda: check(model, next(inputs))


@pytest.mark.parametrize("point", POINTS)
def test_one_failure(enable: Any, capfd: pytest.CaptureFixture[str], point: str) -> None:
    model, call = start(enable, point)
    _native._fault_inject(point, 1)
    for _ in range(20):
        call()
    assert _native._fault_left(point) == 0, "no call came by"
    assert _native.stats()["faults"] == 1, _native.stats()
    (line,) = lines(capfd)
    assert f"forward ({model.place}:2): " in line, line
    assert "failed, the call ran as CPython would: " in line, line
    assert "injected fault" in line or point == "instrument", line
    assert _native.stats()["compare_failures"] == 0
    before = _native.stats()["planned"]
    for _ in range(20):
        call()
    assert _native.stats()["planned"] > before, "calls are planned again"
    assert _native.stats()["faults"] == 1 and lines(capfd) == []


def test_models_with_decorated_forwards_have_lines_of_their_own(enable: Any, capfd: pytest.CaptureFixture[str]) -> None:
    class First(nn.Module):
        @torch.no_grad()
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    class Second(nn.Module):
        @torch.no_grad()
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 2

    enable()
    for kind in (First, Second):
        _native._fault_inject("plan-build", 1)
        model = kind()
        for _ in range(3):
            model(torch.ones(2))
    first, second = lines(capfd)
    assert "First.forward (" in first and __file__ in first, first
    assert "Second.forward (" in second and __file__ in second, second


@pytest.mark.parametrize("point", POINTS)
def test_failures_without_end(enable: Any, capfd: pytest.CaptureFixture[str], point: str) -> None:
    model, call = start(enable, point)
    _native._fault_inject(point, -1)
    for _ in range(40):
        call()
    assert _native.stats()["faults"] > (0 if point == "submit" else 1), "a plan is handed over once"
    (line,) = lines(capfd)
    assert f"forward ({model.place}:2): " in line, "one for the code object, not for each call"
    assert _native.stats()["compare_failures"] == 0


@pytest.mark.parametrize(
    "point", ["collect", "run-begin", "run", "rebuild", "compare", "plan-build", "publish", "memory-plan"]
)
def test_a_plan_that_fails_before_it_serves_is_tried_three_times_more(enable: Any, point: str) -> None:
    enable()
    model, x = Model(), torch.ones(2, 4)
    _native._fault_inject(point, 3)
    for _ in range(8):
        check(model, x)
    assert _native._fault_left(point) == 0
    stats = _native.stats()
    assert stats["faults"] == 3 and stats["compare_failures"] == 0 and stats["planned"] > 0, stats
    assert stats["traces"] == 1, "the capture is kept"


@pytest.mark.parametrize("point", ["collect", "run-begin", "run", "rebuild", "plan-build", "publish", "memory-plan"])
def test_a_plan_that_fails_again_and_again_is_given_up_with_the_true_reason(enable: Any, point: str) -> None:
    enable()
    model, x = Model(), torch.ones(2, 4)
    _native._fault_inject(point, -1)
    for _ in range(12):
        check(model, x)
    stats = _native.stats()
    assert stats["faults"] == 4 and stats["compare_failures"] == 0 and stats["planned"] == 0, stats
    state = _native.module_state(model)
    assert state is not None
    (refusal,) = state["refusals"]
    assert refusal["code"] == "internal" and "failed again and again: " in refusal["message"], refusal
    assert "was not eager's" not in refusal["message"]
    assert f"injected fault: {point}" in refusal["message"], refusal
