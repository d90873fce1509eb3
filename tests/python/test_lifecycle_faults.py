"""A failure at any stage boundary leaves the program's results as they are, is counted, and is told once."""

from __future__ import annotations

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


@pytest.mark.parametrize("point", ["match", "guard", "collect", "run", "rebuild"])
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
    assert len(script.plans) <= 2


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
