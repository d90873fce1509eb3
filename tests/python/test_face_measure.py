"""Interleaved timing and tables."""

from __future__ import annotations

from cuvil.measure import Timing, interleaved, table


def test_contenders_take_turns_and_who_starts_rotates() -> None:
    log: list[str] = []
    interleaved({"a": lambda: log.append("a"), "b": lambda: log.append("b")}, seconds=0.0, min_rounds=4, max_rounds=4)
    assert "".join(log) == "abbaabba"


def test_all_contenders_get_the_same_number_of_samples() -> None:
    timings = interleaved({"a": lambda: None, "b": lambda: sum(range(100))}, seconds=0.01, min_rounds=10)
    assert timings["a"].n == timings["b"].n >= 10


def test_between_runs_before_each_call() -> None:
    log: list[str] = []
    interleaved({"a": lambda: log.append("call")}, seconds=0.0, min_rounds=2, max_rounds=2, between=log.append)
    assert log == ["a", "call", "a", "call"]


def test_percentile_is_a_measured_value() -> None:
    timing = Timing.of([float(n) for n in range(1, 201)])
    assert (timing.median_ns, timing.p99_ns, timing.min_ns, timing.total_ns) == (100.5, 198.0, 1.0, 20100.0)


def test_table_aligns_columns() -> None:
    assert table(["", "ms"], [["eager", "1.5"], ["x", "10"]]) == "        ms\n-----  ---\neager  1.5\nx       10"
