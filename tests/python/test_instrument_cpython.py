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
    line, as_expected, tests, probes = run.compare(module, "instrumented", 120)
    assert as_expected, line
    assert tests > 0 and probes > 0, line


def test_the_comparison_notices_failures_and_crashes(monkeypatch):
    good = {"tests": 3, "bad": ["test_a"], "details": {}, "report": {}}
    bad = {**good, "bad": ["test_a", "test_b"]}
    lost = {**good, "report": {"mismatches": 2, "unknown": 0, "enters": 5, "leaves": 5}}
    for subject, as_expected in ((good, True), (bad, False), (lost, False), ("exit status -11", False)):
        monkeypatch.setattr(run, "run_worker", lambda mode, *_, s=subject: good if mode == "plain" else s)
        assert run.compare("test_x", "instrumented", 1)[1] is as_expected
    monkeypatch.setitem(modules.EXPECTED, "test_x", {"test_b": "reason"})
    monkeypatch.setattr(run, "run_worker", lambda mode, *_: good if mode == "plain" else bad)
    assert run.compare("test_x", "instrumented", 1)[1]
