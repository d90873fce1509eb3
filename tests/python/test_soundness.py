"""The soundness programs off and on, at several lengths of warm-up, and the wrong accelerators that they must catch."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
import run_cases
from eager_twin import ACCELERATOR
from fakes import FAKES
from harness import problems, run_case

_SCRIPT = pathlib.Path(run_cases.__file__)
_CASES = {name: fn for suite in run_cases.SUITES for name, fn in run_cases.iter_cases(suite)}


@pytest.mark.parametrize("name", _CASES)
def test_case_observes_what_eager_observes(name):
    accelerator = run_cases.load_accelerator(None if ACCELERATOR == "none" else ACCELERATOR)
    found, counts = run_cases.run_one(_CASES[name], accelerator)
    assert not found, "\n".join([run_cases.describe(counts), *found[:10]])


def _run(*arguments: str, warm: int) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("CUVIL_", "CASES_"))}
    environment.update(CASES_WARM=str(warm), OMP_NUM_THREADS="1")
    command = [sys.executable, str(_SCRIPT), "--accelerator", "cuvil", *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-3000:]
    return result.stdout


@pytest.mark.skipif(ACCELERATOR != "cuvil", reason="counts plans")
@pytest.mark.parametrize("warm", [3, 4, 8])
def test_plans_serve_calls_in_enough_cases(warm):
    """run_cases.py fails when plans served calls in fewer cases than its table demands."""
    print(_run(warm=warm))


@pytest.mark.skipif(ACCELERATOR != "cuvil", reason="is about cuvil's settings")
def test_cases_pass_with_background_preparation():
    print(_run("--defaults", warm=4))


@pytest.mark.parametrize("fake", FAKES)
def test_fakes_are_caught(fake):
    accelerator = FAKES[fake]()
    caught = [name for name, fn in _CASES.items() if run_cases.run_one(fn, accelerator)[0]]
    assert len(caught) >= 4, f"a wrong accelerator got away with all but {caught}"


def test_case_that_raises_is_a_problem():
    def raises():
        yield "fine", 1
        raise ValueError("no")

    assert problems(run_case(raises), run_case(raises))
