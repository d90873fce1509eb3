# Turns a soundness program (tests/soundness/harness.py) into a pytest function that compares Cuvil with eager exactly.
#
# CUVIL_TESTS_ACCELERATOR=none runs eager against eager (are the tests themselves right?), fake:NAME one of the
# deliberately wrong accelerators (can the tests fail?).
"""The `eager_twin` decorator and what its tests share."""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

# Call 1 is traced, call 2 compared, call 3 served by the plan; read when cuvil is imported.
os.environ.setdefault("CUVIL_PREPARE", "sync")
os.environ.setdefault("CUVIL_ADOPT", "always")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "soundness"))

import torch.nn as nn  # noqa: E402
from harness import Case, attempt, attempt_in_words, fill, full, ramp, rn, warm  # noqa: E402
from run_cases import describe, load_accelerator, run_one  # noqa: E402

__all__ = [
    "SCENARIOS",
    "Fn",
    "attempt",
    "attempt_in_words",
    "compare_with_eager",
    "eager_twin",
    "fill",
    "full",
    "ramp",
    "rn",
    "warm",
]

ACCELERATOR = os.environ.get("CUVIL_TESTS_ACCELERATOR", "cuvil")
SCENARIOS: dict[str, Case] = {}


def compare_with_eager(program: Case, *, served: bool = False) -> None:
    """Fails unless the program observes the same with Cuvil; with `served`, also unless a plan served a call."""
    accelerator = load_accelerator(None if ACCELERATOR == "none" else ACCELERATOR)
    found, counts = run_one(program, accelerator, exact=True)
    assert not found, "\n".join([describe(counts), *found[:10]])
    if served and counts:
        assert counts["planned"] > 0, f"no plan served a call, so this test shows nothing: {describe(counts)}"


def eager_twin(program: Case | None = None, *, served: bool = False) -> Any:
    """Decorator: the generator becomes a test. `served` says that plans are expected to be in use in it."""

    def deco(fn: Any) -> Callable[[], None]:
        SCENARIOS[f"{fn.__module__}.{fn.__name__}"] = fn

        def test() -> None:
            compare_with_eager(fn, served=served)

        test.__name__, test.__doc__, test.__module__ = fn.__name__, fn.__doc__, fn.__module__
        return test

    return deco if program is None else deco(program)


class Fn(nn.Module):
    """A module whose forward is a given function of (self, *args); keyword arguments become attributes."""

    def __init__(self, fn: Callable[..., Any], **attributes: Any) -> None:
        super().__init__()
        self.fn = fn
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(self, *args, **kwargs)
