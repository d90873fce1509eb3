"""What scripts/wheels.sh asks of an installed wheel in each patch release of its Python.

Not collected with the other tests: those import cuvil from a build tree. With CUVIL_CHECK_TORCH=1 the interpreter has a
torch that was installed for another patch release of the same Python.
"""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import cuvil
import pytest


def test_the_version_is_the_installed_one() -> None:
    distribution = importlib.metadata.distribution("cuvil")
    assert Path(str(distribution.locate_file("cuvil"))) == Path(cuvil.__file__).parent
    assert cuvil.__version__ == distribution.version


def test_the_interpreters_internals_are_as_expected() -> None:
    assert cuvil._native.__name__ == "cuvil._native"
    assert cuvil._native.interpreter_self_test() == ""


def test_a_kernel_is_compiled_and_runs() -> None:
    assert cuvil._native.llvm_self_test()["vector_width_bytes"] >= 16


@pytest.mark.skipif(os.environ.get("CUVIL_CHECK_TORCH") != "1", reason="no torch for this Python")
def test_a_plan_serves_and_answers_as_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("CUVIL_PREPARE", "sync")
    monkeypatch.setenv("CUVIL_ADOPT", "always")
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)).eval()
    inputs = [torch.randn(3, 16) for _ in range(8)]
    with torch.inference_mode():
        expected = [model(x) for x in inputs]
        cuvil.enable()
        try:
            before = cuvil.stats()["planned"]
            results = [model(x) for x in inputs]
            served = cuvil.stats()["planned"] - before
        finally:
            cuvil.disable()
    assert served > 0, str(cuvil.explain(model))
    assert all(torch.equal(result, eager) for result, eager in zip(results, expected, strict=True))
