"""Switches an engine on for one test, Cuvil's or the fake one, and leaves it as it was found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch


def switch(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Yields a function that enables an engine with the given environment; leaves nothing behind."""

    def start(prepare: str = "sync", adopt: str = "always", **environment: str) -> Any:
        monkeypatch.setenv("CUVIL_PREPARE", prepare)
        monkeypatch.setenv("CUVIL_ADOPT", adopt)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        engine.reset()
        engine.enable()
        return engine

    with torch.no_grad():
        yield start
    engine.disable()
    for point in engine._fault_points():
        engine._fault_inject(point, 0)
    engine._quiesce()
    engine.reset()
