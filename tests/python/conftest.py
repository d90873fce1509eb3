"""Paths, markers and shared fixtures of all Python tests."""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

# Tests import `eager_twin` and `benchmarks/corpus_*` by plain name.

_ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(_ROOT / "tests" / "python"), str(_ROOT / "tests" / "soundness"), str(_ROOT / "benchmarks")]


@pytest.hookimpl(tryfirst=True)  # before fixtures, which use the GPU
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked `gpu` need one; with CUVIL_REQUIRE_GPU=1 its absence is a failure."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if torch.cuda.is_available():
        return
    if os.environ.get("CUVIL_REQUIRE_GPU") == "1":
        pytest.fail("CUVIL_REQUIRE_GPU=1, but torch finds no GPU")
    pytest.skip("needs a GPU")


@pytest.fixture(name="enable")
def enable_fixture(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Enables Cuvil for one test: enable(prepare="sync", adopt="always", **environment)."""
    from cuvil import _native
    from engine_switch import switch

    yield from switch(_native, monkeypatch)
