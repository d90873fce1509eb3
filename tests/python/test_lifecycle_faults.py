"""A failure at any stage boundary leaves the program's results as they are, is counted, and is told once."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from lifecycle_agent import Double, Structured, X, enable_fixture, fake, use  # noqa: F401
from lifecycle_script import Script

POINTS = fake._fault_points()


def test_points_are_known() -> None:
    assert {"intercept", "signature", "trace-begin", "trace-end", "capture", "plan-build", "publish"} <= set(POINTS)
    assert {"match", "guard", "collect", "run", "rebuild", "compare", "differ", "adopt"} <= set(POINTS)
    with pytest.raises(ValueError, match="no fault point is called 'nowhere'"):
        fake._fault_inject("nowhere", 1)


@pytest.mark.parametrize("prepare", ["sync", "background"])
@pytest.mark.parametrize("adopt", ["always", "measure"])
@pytest.mark.parametrize("count", [1, 3, -1])
@pytest.mark.parametrize("point", POINTS)
def test_results_are_eagers_whatever_fails(
    enable: Any,
    point: str,
    count: int,
    adopt: str,
    prepare: str,
) -> None:
    enable(prepare=prepare, adopt=adopt, CUVIL_PLANS="2")
    use(Script(lambda x: x + torch.rand(3), is_random=True))
    model = Structured(lambda x: x + torch.rand(3))
    torch.manual_seed(11)
    expected = [torch.ones(n) + torch.rand(3) for _ in range(12) for n in (3, 1)]
    fake._fault_inject(point, count)
    torch.manual_seed(11)
    got = []
    for _ in range(12):
        for n in (3, 1):
            got.append(model(torch.ones(n)))
        fake._quiesce()
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.parametrize("point", POINTS)
def test_exceptions_are_eagers_whatever_fails(enable: Any, point: str) -> None:
    enable()
    fail = [False]

    def build(x: torch.Tensor) -> torch.Tensor:
        if fail[0]:
            raise KeyError("from the model")
        return x * 2.0

    use(Script(build))
    model = Structured(build)
    fake._fault_inject(point, -1)
    for i in range(10):
        fail[0] = i % 2 == 1
        if fail[0]:
            with pytest.raises(KeyError, match="from the model"):
                model(X)
        else:
            assert torch.equal(model(X), X * 2.0)


# What counts a failure at each point, and the mode in which a call comes there: a point that no call reaches, or whose
# failure nobody takes notice of, protects nothing.
TOLD_BY: dict[str, tuple[str, str, str]] = {
    "intercept": ("faults", "sync", "always"),
    "lookup": ("faults", "sync", "always"),
    "signature": ("faults", "sync", "always"),
    "trace-begin": ("faults", "sync", "always"),
    "trace-end": ("faults", "sync", "always"),
    "capture": ("faults", "sync", "always"),
    "submit": ("faults", "background", "always"),
    "plan-build": ("faults", "sync", "always"),
    "publish": ("faults", "background", "always"),
    "match": ("faults", "sync", "always"),
    "guard": ("faults", "sync", "always"),
    "collect": ("faults", "sync", "always"),
    "run-begin": ("faults", "sync", "always"),
    "random-save": ("faults", "sync", "always"),
    "run": ("faults", "sync", "always"),
    "rebuild": ("rebuild_failures", "sync", "always"),
    "compare": ("faults", "sync", "always"),
    "differ": ("compare_failures", "sync", "always"),
    "adopt": ("faults", "sync", "measure"),
    "retire": ("retired", "sync", "measure"),
    "evict": ("faults", "sync", "always"),
}


# Below the tracer: test_faults.py has these.
BELOW = {"instrument", "hook", "record", "verify", "memory-plan"}


def test_every_point_is_told_by_a_counter() -> None:
    assert set(TOLD_BY) | BELOW == set(POINTS) and not set(TOLD_BY) & BELOW


@pytest.mark.parametrize("point", sorted(TOLD_BY))
def test_every_point_is_reached_and_its_failure_counted(enable: Any, point: str) -> None:
    counter, prepare, adopt = TOLD_BY[point]
    counts = []
    for fault in (False, True):
        fake.disable()
        fake.reset()
        enable(prepare=prepare, adopt=adopt, CUVIL_PLANS="1")
        if adopt == "measure":
            # Eager is slow enough for every plan to be adopted.
            use(Script(lambda x: x * 2.0))
            model = Structured(lambda x: time.sleep(0.0005) or x * 2.0)
        else:
            use(Script(lambda x: x + torch.rand(3), is_random=True))
            model = Structured(lambda x: x + torch.rand(3))
        # At serving a plan where the failure is about that, from the beginning otherwise.
        for i in range(200):
            if fault and i == (4 if point in ("match", "guard", "collect", "run-begin", "run", "rebuild") else 0):
                fake._fault_inject(point, -1 if point == "retire" else 1)
            model(torch.ones(3))
            fake._quiesce()
        for n in (1, 3, 1):
            for _ in range(3):
                model(torch.ones(n))
                fake._quiesce()
        counts.append(fake.stats()[counter])
        fake._fault_inject(point, 0)
    assert counts[1] > counts[0], counts


@pytest.mark.parametrize("point", ["match", "guard", "collect", "run-begin", "run", "rebuild"])
def test_a_plan_serves_again_when_the_failure_is_over(enable: Any, point: str) -> None:
    enable()
    script = use(Script(lambda x: x * 2.0))
    model = Double()
    for _ in range(4):
        model(X)
    planned = fake.stats()["planned"]
    fake._fault_inject(point, 1)
    assert torch.equal(model(X), X * 2.0)
    assert fake.stats()["planned"] == planned
    for _ in range(3):
        model(X)
    assert fake.stats()["planned"] > planned
    assert len(script.plans) == 1, "the same plan, not another one"


def test_without_a_background_thread_the_call_at_hand_builds(enable: Any) -> None:
    enable(prepare="background")
    use(Script(lambda x: x * 2.0))
    model = Double()
    fake._fault_inject("submit", -1)
    for _ in range(6):
        assert torch.equal(model(X), X * 2.0)
    assert fake.stats()["faults"] == 1 and fake.stats()["planned"] > 0


def test_faults_are_counted_and_told_once(enable: Any, capfd: pytest.CaptureFixture[str]) -> None:
    enable()
    use(Script(lambda x: x * 2.0))
    model = Double()
    fake._fault_inject("rebuild", -1)
    for _ in range(50):
        assert torch.equal(model(X), X * 2.0)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("cuvil:")]
    assert fake.stats()["faults"] + fake.stats()["compare_failures"] > 0
    assert len(lines) == 1, lines


def test_the_environment_arms_points(enable: Any) -> None:
    enable(CUVIL_FAULT="trace-begin:2")
    script = use(Script(lambda x: x * 2.0))
    model = Double()
    for _ in range(5):
        model(X)
    assert fake.stats()["faults"] == 2 and script.traced == 1


def test_a_model_exception_during_a_trace_reaches_the_caller(enable: Any) -> None:
    enable()
    script = use(Script(lambda x: x))
    script.refuse = lambda args, kwargs: ("raised", "the call raised", False)

    def explode(x: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    model = Structured(explode)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            model(X)
    assert fake.stats()["planned"] == 0


def test_a_model_exception_during_a_comparison_reaches_the_caller(enable: Any) -> None:
    enable()
    use(Script(lambda x: x * 2.0))
    calls = [0]

    def second_time_unlucky(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == 2:
            raise ZeroDivisionError("second time")
        return x * 2.0

    model = Structured(second_time_unlucky)
    model(X)
    with pytest.raises(ZeroDivisionError, match="second time") as caught:
        model(X)
    frames = [entry.name for entry in caught.traceback]
    assert frames[-2:] == ["forward", "second_time_unlucky"]
    model(X)
    model(X)
    assert fake.stats()["planned"] == 1, "compared at the next call instead"


def test_an_operator_error_is_raised_by_eager_with_its_own_traceback(enable: Any) -> None:
    enable()

    def gather(x: torch.Tensor) -> torch.Tensor:
        return X[x]

    use(Script(gather))
    model = Structured(gather)
    good, bad = torch.tensor([0, 1]), torch.tensor([0, 7])
    for _ in range(3):
        model(good)
    with pytest.raises(IndexError, match=r"out of bounds|out of range") as caught:
        model(bad)
    assert caught.traceback[-1].name == "gather"
    assert fake.stats()["replay_errors"] == 1
    assert torch.equal(model(good), X)
    assert fake.stats()["planned"] == 2
