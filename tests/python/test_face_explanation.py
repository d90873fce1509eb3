"""The text and the data of explain()."""

from __future__ import annotations

import sysconfig
from typing import Any

import pytest
from cuvil.explanation import Explanation, byte_size, duration

SITE = sysconfig.get_paths()["purelib"]

PLAN: dict[str, Any] = {
    "signature": "f32[1,64] cpu",
    "state": "planned",
    "planned_calls": 97,
    "operators": 8,
    "python_frames": 21,
    "mechanisms": {"dispatcher": 7, "unboxed": 1, "python": 0},
    "guards": {"dict": 30, "type": 12},
    "max_width": 2,
    "subgraphs": [{"operators": 3, "cost_ns": 10}, {"operators": 5, "cost_ns": 10}],
    "memory": {"bytes_sum": 4096, "bytes_peak": 1024},
    "stages_ns": {"trace": 21_000_000, "lower": 400_000},
    "eager_ns": 90_000,
    "planned_ns": 30_000,
    "lines": [{"file": "m.py", "line": 7, "operators": 8, "python_steps": 1}],
}


def branch(file: str, line: int, taken: int, not_taken: int, kind: str = "truth", column: int = 5) -> dict[str, Any]:
    return {
        "file": file,
        "line": line,
        "column": column,
        "instruction": 20,
        "kind": kind,
        "taken": taken,
        "not_taken": not_taken,
        "probability": taken / (taken + not_taken),
    }


def record(**changes: Any) -> dict[str, Any]:
    module = {
        "path": "",
        "type": "torch.nn.modules.container.Sequential",
        "state": "planned",
        "calls": 100,
        "planned_calls": 97,
        "eager_calls": 3,
        "refusals": [],
        "plans": [PLAN],
        "branches": [
            branch(f"{SITE}/torch/nn/modules/module.py", 1776, 3, 9, column=12),
            branch("m.py", 3, 3, 0),
        ],
        "branches_dropped": 0,
    }
    return {"type": "torch.nn.modules.container.Sequential", "modules": [{**module, **changes}]}


REFUSAL = {
    "code": "data-read",
    "file": "m.py",
    "line": 12,
    "message": "Tensor.item() moves data into Python",
    "advice": "compute the condition with torch.where",
    "count": 4,
}


def test_planned_model_shows_time_operators_guards_and_stages() -> None:
    text = str(Explanation(record()))
    assert "planned whole; 100 calls, 97 by plan" in text
    assert "30 µs by plan, 90 µs by eager (3.00×)" in text
    assert "operators 8: dispatcher 7, unboxed 1, python 0; in place of 21 Python frames" in text
    assert "guards    42: dict 30, type 12" in text
    assert "2 chains of operators, up to 2 independent at a time" in text
    assert "1 KiB at the peak, 4 KiB made in all" in text
    assert "trace 21 ms, lower 400 µs" in text
    assert "m.py:7  8 operators, 1 Python step" in text


def graph_plan(**streams: Any) -> dict[str, Any]:
    graph = {"captured": True, "kernels": 300, "capture_ns": 4_000_000, "input_copy_bytes": 2048, "streams": streams}
    graph |= dict.fromkeys(("own_bytes", "pool_bytes", "budget_used_bytes", "budget_bytes"), 1 << 20)
    return {**PLAN, "cuda_graph": graph}


def test_streams_show_what_was_measured_and_when_each_is_busy() -> None:
    plan = graph_plan(
        count=2,
        skipped="",
        launches=20,
        trial_ns=31_000_000,
        launch_ns=6_000,
        timeline="stream 0 |##..|\nstream 1 |.##.|\n",
        candidates=[
            {"name": "serial", "replay_ns": 900_000, "pool_bytes": 1 << 20, "rejected": "", "chosen": False},
            {"name": "2 streams", "replay_ns": 700_000, "pool_bytes": 2 << 20, "rejected": "", "chosen": True},
            {"name": "3 streams", "replay_ns": 0, "pool_bytes": 0, "rejected": "takes too much memory"},
        ],
    )
    text = str(Explanation(record(plans=[plan])))
    assert (
        "streams   2, by 20 launches in 31 ms: serial 900 µs, 1 MiB; 2 streams 700 µs, 2 MiB (used); 3 streams takes "
        "too much memory; a launch takes 6 µs of host time" in text
    )
    assert "      stream 0 |##..|\n      stream 1 |.##.|" in text


def test_a_serial_graph_says_why() -> None:
    candidates = [{"name": "serial", "replay_ns": 900_000, "rejected": "", "chosen": True}]
    streams = {"count": 1, "skipped": "its steps wait for each other", "launch_ns": 6_000, "timeline": "stream 0 |#|"}
    text = str(Explanation(record(plans=[graph_plan(candidates=candidates, **streams)])))
    assert (
        "    streams   1: its steps wait for each other; 900 µs on the device; a launch takes 6 µs of host time" in text
    )
    assert "stream 0" not in text
    assert "streams   " not in str(Explanation(record(plans=[graph_plan()])))


def test_a_plan_in_parts_shows_its_graphs_and_what_runs_between_them() -> None:
    captured = graph_plan(candidates=[])["cuda_graph"]
    parts = [
        {"operators": 40, "reason": "", "cuda_graph": captured},
        {"operators": 1, "reason": "reads memory of cpu: #40 aten::index (m.py:7 in forward)"},
        {"operators": 9, "reason": "", "cuda_graph": {"captured": False, "reason": "", "waits_for_memory": False}},
        {"operators": 2, "reason": ""},
        {"operators": 12, "reason": "", "cuda_graph": {"captured": False, "reason": "capture: no"}},
    ]
    text = str(Explanation(record(plans=[{**PLAN, "parts": parts}])))
    assert "    in parts  5 parts, 3 graphs of them\n" in text
    assert "    CUDA graph part 0, 40 operators: 300 kernels; captured in 4 ms" in text
    assert "    part 1, 1 operator one by one: reads memory of cpu: #40 aten::index (m.py:7 in forward)\n" in text
    assert "    part 2, 9 operators: CUDA graph that has not been captured yet\n" in text
    assert "    part 3, 2 operators one by one: too few for a graph\n" in text
    assert "    part 4, 12 operators: no CUDA graph, its operators run one by one: capture: no\n" in text


def test_branches_that_went_both_ways_show_their_probability() -> None:
    text = str(Explanation(record()))
    assert "\n  branches  2 places, 1 of them went both ways\n" in text
    assert "torch/nn/modules/module.py:1776:12 true 3 of 12 times (25%)" in text
    assert "m.py:3" not in text  # Always the same way: a guard, not a probability.


def test_the_programs_own_branches_come_first_and_loops_last() -> None:
    branches = [branch(f"{SITE}/torch/a.py", n, 500, 500) for n in range(5)]
    branches += [branch("m.py", 1, 90, 10, "loop"), branch("m.py", 2, 1, 3, "none"), branch("m.py", 3, 1, 1)]
    lines = str(Explanation(record(branches=branches, branches_dropped=7))).splitlines()
    first = lines.index("  branches  8 places, 8 of them went both ways")
    assert lines[first + 1 : first + 4] == [
        "    m.py:2:5 None 1 of 4 times (25%)",
        "    m.py:3:5 true 1 of 2 times (50%)",
        "    m.py:1:5 went on 90 of 100 times (90%)",
    ]
    assert lines[first + 6 : first + 8] == [
        "    … 3 places more in to_dict()",
        "    … and 7 outcomes at further places, which are not kept",
    ]


def test_refusal_shows_reason_place_and_advice() -> None:
    explanation = Explanation(record(state="refused", plans=[], planned_calls=0, refusals=[REFUSAL]))
    text = str(explanation)
    assert "not planned [data-read] (4×): m.py:12: Tensor.item() moves data into Python" in text
    assert "advice: compute the condition with torch.where" in text
    assert explanation.summary() == "runs as CPython would; 100 calls, 0 by plan"


def test_refusals_that_are_not_shown_or_not_kept_are_counted() -> None:
    refusals = [{**REFUSAL, "line": n} for n in range(14)]
    text = str(Explanation(record(state="refused", plans=[], refusals=refusals, refusals_dropped=5)))
    assert text.endswith(
        "\n    … 2 refusals more in to_dict()\n    … and 5 refusals more, at places or for reasons that are not kept"
    )


def test_children_planned_in_place_of_a_refused_parent_are_counted() -> None:
    data = record(state="refused", plans=[], planned_calls=0, refusals=[REFUSAL])
    data["modules"] += [
        {**record()["modules"][0], "path": "encoder.0", "planned_calls": 5},
        {**record()["modules"][0], "path": "encoder.1", "planned_calls": 6},
    ]
    explanation = Explanation(data)
    assert explanation.summary() == "2 modules planned, 1 module not; 100 calls, 11 module calls by plan"
    assert "encoder.0  torch.nn.modules.container.Sequential: planned" in str(explanation)
    assert "and so 1 module more: encoder.1" in str(explanation)


def test_layers_that_fared_alike_are_shown_once() -> None:
    data = record()
    data["modules"] += [{**record()["modules"][0], "path": f"layers.{n}", "type": "Layer"} for n in range(32)]
    text = str(Explanation(data))
    assert "and so 31 modules more: layers.1, layers.2 … layers.31" in text
    assert text.count("by line of Python") == 2


def test_only_the_busiest_plan_is_shown_in_full() -> None:
    plans = [{**PLAN, "signature": f"f32[{n}]", "planned_calls": n, "guards": {"dict": n}} for n in (3, 9, 5)]
    text = str(Explanation(record(plans=plans)))
    assert [f"plan {n}  f32[{m}]" in text for n, m in ((1, 3), (2, 9), (3, 5))] == [True] * 3
    assert "plan 2, the busiest:" in text
    assert text.count("guards ") == 1
    assert "guards    9: dict 9" in text


def test_brief_has_a_line_for_each_module_and_the_refusals() -> None:
    text = Explanation(record(refusals=[REFUSAL])).brief()
    assert len(text.splitlines()) == 5
    assert "1 plan, one for each kind of input; the busiest: 8 operators in place of 21 Python frames" in text
    assert "30 µs by plan, 90 µs by eager (3.00×)" in text
    assert "[data-read]" in text


def test_unseen_model_says_what_to_do() -> None:
    text = str(Explanation({"type": "Net", "modules": []}))
    assert "not seen yet" in text
    assert "pass arguments to explain()" in text


def test_long_lists_are_cut_in_text_but_whole_in_data() -> None:
    lines = [{"file": "m.py", "line": n, "operators": 1, "python_steps": 0} for n in range(40)]
    explanation = Explanation(record(plans=[{**PLAN, "lines": lines}]))
    assert "28 lines more in to_dict()" in str(explanation)
    assert len(explanation.to_dict()["modules"][0]["plans"][0]["lines"]) == 40


def test_changing_the_data_does_not_change_the_explanation() -> None:
    explanation = Explanation(record())
    explanation.to_dict()["modules"].clear()
    assert len(explanation.to_dict()["modules"]) == 1


@pytest.mark.parametrize(
    ("nanoseconds", "text"), [(0, "0 ns"), (850, "850 ns"), (1_500, "1.5 µs"), (2.5e6, "2.5 ms"), (3e9, "3 s")]
)
def test_durations_use_the_unit_that_fits(nanoseconds: float, text: str) -> None:
    assert duration(nanoseconds) == text


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (1024, "1 KiB"), (3 * 2**20, "3 MiB"), (2**31, "2 GiB")])
def test_byte_sizes_use_the_unit_that_fits(size: int, text: str) -> None:
    assert byte_size(size) == text
