"""The agent's lifecycle around a scripted tracer, switched on for one test and left as it was found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_switch import switch
from lifecycle_script import Script

fake: Any = pytest.importorskip("_cuvil_lifecycle_fake")

X = torch.arange(6.0).reshape(2, 3)


class Double(torch.nn.Module):
    """y = 2x, unless told otherwise; counts how often its Python ran."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        self.calls += 1
        return x * scale


class Pair(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Double()
        self.second = Double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Structured(torch.nn.Module):
    """Returns what `build` makes of its input."""

    def __init__(self, build: Any) -> None:
        super().__init__()
        self.build = build

    def forward(self, x: torch.Tensor) -> Any:
        return self.build(x)


@pytest.fixture(name="enable")
def enable_fixture(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """As conftest's, of the fake agent."""
    yield from switch(fake, monkeypatch)
    fake.set_script(None)


def use(script: Script) -> Script:
    fake.set_script(script)
    return script
