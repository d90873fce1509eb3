"""A few of CPython's own test modules, with every frame instrumented; cpython_suite/run.py has the rest."""

from __future__ import annotations

import pytest
from cpython_suite import modules, run

# Seconds in all; what they leave out is what run.py's lists are for.
QUICK = """
test_generators test_coroutines test_asyncgen test_contextlib test_patma test_except_star test_extcall test_super
""".split()


@pytest.mark.parametrize("module", QUICK)
def test_module_passes_as_it_does_without_instrumentation(module):
    if not modules.exists(module):
        pytest.skip("this Python comes without its tests")
    outcome = run.compare(module, "instrumented", 120)
    assert outcome.verdict is run.Verdict.AS_EXPECTED, outcome.line
    assert outcome.num_tests > 0 and outcome.num_probes > 0, outcome.line


def test_the_comparison_notices_failures_and_crashes(monkeypatch):
    good = {"tests": 3, "bad": ["test_a"], "details": {}, "report": {}}
    bad = {**good, "bad": ["test_a", "test_b"]}
    lost = {**good, "report": {"mismatches": 2, "unknown": 0, "enters": 5, "leaves": 5}}
    as_expected, unexpected = run.Verdict.AS_EXPECTED, run.Verdict.UNEXPECTED
    for subject, verdict in (
        (good, as_expected),
        (bad, unexpected),
        (lost, unexpected),
        ("exit status -11", unexpected),
    ):
        monkeypatch.setattr(run, "run_worker", lambda mode, *_, s=subject: good if mode == "plain" else s)
        assert run.compare("test_x", "instrumented", 1).verdict is verdict
    monkeypatch.setitem(modules.EXPECTED, "test_x", {"test_b": "reason"})
    monkeypatch.setattr(run, "run_worker", lambda mode, *_: good if mode == "plain" else bad)
    assert run.compare("test_x", "instrumented", 1).verdict is as_expected


def test_a_module_that_fails_without_cuvil_is_named_apart(monkeypatch):
    good = {"tests": 3, "bad": [], "details": {}, "report": {}}
    monkeypatch.setattr(run, "run_worker", lambda mode, *_: "no end after 1 s" if mode == "plain" else good)
    outcome = run.compare("test_x", "instrumented", 1)
    assert outcome.verdict is run.Verdict.FAILS_WITHOUT
    outcomes = {
        "test_a": run.Outcome("", run.Verdict.AS_EXPECTED, 3, 5),
        "test_x": outcome,
        "test_y": run.Outcome("", run.Verdict.UNEXPECTED, 2, 1),
    }
    first, *rest = run.summary(outcomes).splitlines()
    assert first.endswith(": 2 modules, 5 tests, 6 probes, 1 unexpected")
    assert rest == ["fails without Cuvil too: 1: test_x", "unexpected: test_y"]
    assert run.exit_status(outcomes) == 1
    # Nothing compared is nothing shown.
    assert run.exit_status({"test_x": outcome}) == 1
    assert run.exit_status({}) == 1
    assert run.exit_status({"test_a": outcomes["test_a"], "test_x": outcome}) == 0
