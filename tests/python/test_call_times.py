"""What benchmarks/guards_bench.py measures is a planned call without its operators, and leaves the model as it was."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import cuvil
import pytest
import torch
from cuvil import _native


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(40))

    def forward(self, x: torch.Tensor, *, scale: float) -> dict[str, torch.Tensor]:
        first = x
        for layer in self.layers:
            x = torch.relu(layer(x))
        return {"scaled": x * scale, "given": first}


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Model, torch.Tensor]]:
    monkeypatch.setenv("CUVIL_PREPARE", "sync")
    monkeypatch.setenv("CUVIL_ADOPT", "always")
    model = Model().eval()
    x = torch.randn(64, 256)
    with cuvil.scope(), torch.inference_mode():
        for _ in range(3):
            model(x, scale=2.0)
        yield model, x


def test_dispatch_is_more_than_guards_and_less_than_a_call(planned: tuple[Model, torch.Tensor]) -> None:
    model, x = planned
    before = cuvil.stats()
    checks = _native._check_times(model, (x,), {"scale": 2.0}, 200)
    calls = _native._dispatch_times(model, (x,), {"scale": 2.0}, 200)
    after = cuvil.stats()
    assert len(checks) == len(calls) == 200
    assert after["planned"] - before["planned"] == 201  # the first one is not timed
    assert after["eager"] == before["eager"]
    assert min(checks) < min(calls)
    # The operators alone take 40 times 8 MFLOP, which is milliseconds.
    assert min(calls) < 200_000


def test_the_model_is_as_before_and_still_planned(planned: tuple[Model, torch.Tensor]) -> None:
    model, x = planned
    expected = model(x, scale=2.0)
    _native._dispatch_times(model, (x,), {"scale": 2.0}, 50)
    before = cuvil.stats()
    result = model(x, scale=2.0)
    assert cuvil.stats()["planned"] - before["planned"] == 1
    assert torch.equal(result["scaled"], expected["scaled"])
    assert result["given"] is x


def test_another_thread_gets_its_own_results_meanwhile(planned: tuple[Model, torch.Tensor]) -> None:
    model, x = planned
    expected = model(x, scale=2.0)["scaled"]
    done = threading.Event()
    wrong: list[torch.Tensor] = []
    calls = 0

    def serve() -> None:
        nonlocal calls
        with torch.inference_mode():
            while not done.is_set():
                result = model(x, scale=2.0)["scaled"]
                calls += 1
                if not torch.equal(result, expected):
                    wrong.append(result)

    before = cuvil.stats()["guard_failures"]
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        while not calls:
            time.sleep(0.001)
        # Each of these calls gives up the GIL once, which another thread gets every five milliseconds.
        _native._dispatch_times(model, (x,), {"scale": 2.0}, 30_000)
    finally:
        done.set()
        thread.join()
    assert not wrong
    # It did come across the plan without operators, which then answers as if it did not fit.
    assert cuvil.stats()["guard_failures"] > before


def test_a_call_without_a_plan_has_no_times(planned: tuple[Model, torch.Tensor]) -> None:
    model, x = planned
    assert _native._check_times(model, (x[:3],), {"scale": 2.0}, 5) == []
    with pytest.raises(RuntimeError, match="no plan serves this call"):
        _native._dispatch_times(model, (x[:3],), {"scale": 2.0}, 5)
