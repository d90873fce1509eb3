"""explain() tells of every branch how often it went which way, over all traces of a module."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import cuvil
import pytest
import torch


@pytest.fixture(autouse=True)
def _on(enable: Callable[..., Any]) -> None:
    enable()


class Truthy:
    """Its truth is told by Python code."""

    def __init__(self, value: bool) -> None:
        self.value = value

    def __bool__(self) -> bool:
        return self.value


class Sized:
    def __len__(self) -> int:
        return 0


class Fails:
    def __bool__(self) -> bool:
        raise ValueError("no")


class Branches(torch.nn.Module):
    """Calls what it is given, so that a test's branches stand in the test."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.body(x, *args)


def of(module: torch.nn.Module) -> dict[str, Any]:
    record: dict[str, Any] = cuvil.explain(module).to_dict()["modules"][0]
    return record


def counted(model: Branches, where: object = None) -> list[tuple[int, str, int, int]]:
    """Line below the def of the body (or of `where`), kind, yes, no: of the branches there, in the order of the code."""
    lines, first = inspect.getsourcelines(where or model.body)
    found = [
        (branch["line"] - first, branch["instruction"], branch["kind"], branch["taken"], branch["not_taken"])
        for branch in of(model)["branches"]
        if branch["file"] == __file__ and first <= branch["line"] < first + len(lines)
    ]
    return [(line, kind, yes, no) for line, _, kind, yes, no in sorted(found)]


def test_counts_are_added_up_over_traces() -> None:
    def body(x: torch.Tensor, flag: bool) -> torch.Tensor:
        if flag:
            return x + 1
        return x + 2

    model = Branches(body)
    for flag, rows in ((True, 1), (False, 1), (True, 2), (True, 3)):
        for _ in range(3):  # traced once each
            model(torch.ones(rows), flag)
    assert counted(model) == [(1, "truth", 3, 1)]
    (branch,) = (b for b in of(model)["branches"] if b["line"] == inspect.getsourcelines(body)[1] + 1)
    assert branch["probability"] == 0.75
    assert branch["column"] in (9, 12)  # of the statement, or of what it tests: versions differ
    assert "true 3 of 4 times (75%)" in str(cuvil.explain(model))


def test_refused_traces_count_with_what_follows_the_refusal() -> None:
    def body(x: torch.Tensor, first: bool, second: bool) -> torch.Tensor:
        y = x + 1 if first else x
        y.sum().item()  # refused here
        return y + 1 if second else y

    model = Branches(body)
    for rows in range(1, 5):
        model(torch.ones(rows), rows < 4, rows == 1)
    refused = [refusal["code"] for refusal in of(model)["refusals"]]
    assert refused == ["data-read"]
    # Back-off may skip calls; each trace that was made counts at both places alike.
    (line, kind, yes, no), after = counted(model)
    assert (line, kind) == (1, "truth")
    assert yes >= 1
    assert after[:2] == (3, "truth")
    assert yes + no == after[2] + after[3] == sum(refusal["count"] for refusal in of(model)["refusals"])


def test_code_made_after_a_refusal_is_counted_where_it_stands() -> None:
    def body(x: torch.Tensor, flag: bool) -> torch.Tensor:
        x.sum().item()
        for number in range(20):  # code objects that die at once, and whose addresses are used again
            name = f"made{number}.py"
            scope: dict[str, Any] = {}
            exec(
                compile("def f(v):\n    if v: return 1\n    return 0\nr = f(flag)", name, "exec"), {"flag": flag}, scope
            )
        return x

    model = Branches(body)
    model(torch.ones(2), True)
    made = {b["file"]: (b["line"], b["taken"], b["not_taken"]) for b in of(model)["branches"] if "made" in b["file"]}
    assert made == {f"made{number}.py": (2, 1, 0) for number in range(20)}


@pytest.mark.parametrize(
    ("value", "truth"),
    [
        (True, True),
        (False, False),
        (None, False),
        ([], False),
        ([1], True),
        ({}, False),
        (0, False),
        (2.5, True),
        ("", False),
        ((1, 2), True),
        (Truthy(True), True),
        (Truthy(False), False),
        (Sized(), False),
        (object(), True),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, bool) else str(value),
)
def test_the_truth_of_every_kind_of_object_counts(value: object, truth: bool) -> None:
    state = Branches(lambda x: x)

    def body(x: torch.Tensor) -> torch.Tensor:
        if state.value:
            x = x + 1
        if not state.value:
            x = x + 2
        return x + 3 if state.value and state.other else x

    state.value = value
    state.other = [1]
    model = Branches(body)
    model(torch.ones(2))
    want = [(1, "truth", int(truth), int(not truth)), (3, "truth", int(truth), int(not truth))]
    want += [(5, "truth", int(truth), int(not truth))] + ([(5, "truth", 1, 0)] if truth else [])
    assert counted(model) == want


def test_values_that_and_and_or_hand_on_count() -> None:
    def body(x: torch.Tensor, a: list[int], b: list[int]) -> object:
        return (a and b, a or b)

    model = Branches(body)
    model(torch.ones(2), [], [1])
    model(torch.ones(3), [2], [1])
    assert counted(model) == [(1, "truth", 1, 1), (1, "truth", 1, 1)]


def test_none_tests_say_how_often_it_was_none() -> None:
    def body(x: torch.Tensor, a: int | None) -> torch.Tensor:
        if a is None:
            x = x + 1
        if a is not None:
            x = x + 2
        return x

    model = Branches(body)
    for rows, a in ((1, None), (2, None), (3, 5)):
        model(torch.ones(rows), a)
    assert counted(model) == [(1, "none", 2, 1), (3, "none", 2, 1)]


def test_loops_say_how_often_they_went_on() -> None:
    def items(n: int) -> Iterator[int]:
        yield from range(n)

    def body(x: torch.Tensor, n: int) -> torch.Tensor:
        for _ in range(n):
            x = x + 1
        for i in items(2):
            if i == 1:
                break
        while n > 0:
            n -= 1
        return x

    model = Branches(body)
    for n in (0, 3):
        model(torch.ones(2), n)
    loops = counted(model)
    assert loops[0] == (1, "loop", 3, 2)
    assert loops[1] == (3, "loop", 4, 0)  # both calls leave it by break
    assert loops[2] == (4, "truth", 2, 2)
    # A while loop's test stands twice in the code: at its entry and at its end.
    assert [loop[:2] for loop in loops[3:]] == [(6, "truth")] * len(loops[3:])
    assert (sum(loop[2] for loop in loops[3:]), sum(loop[3] for loop in loops[3:])) == (3, 2)


def test_a_comprehension_is_a_loop_of_its_own() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return x + sum([i for i in (1, 2, 3) if i != 2])

    model = Branches(body)
    model(torch.ones(2))
    assert sorted(counted(model)) == [(1, "loop", 3, 1), (1, "truth", 2, 1)]


def test_a_test_that_raises_is_no_outcome() -> None:
    fails, stops = Fails(), iter(lambda: 1 / 0, None)

    def body(x: torch.Tensor) -> torch.Tensor:
        try:
            if fails:
                x = x + 1
        except ValueError:
            x = x + 2
        try:
            for _ in stops:
                x = x + 3
        except ZeroDivisionError:
            x = x + 4
        return x

    model = Branches(body)
    assert torch.equal(model(torch.zeros(1)), torch.full((1,), 6.0))
    # Only whether the handlers were the right ones.
    assert counted(model) == [(4, "truth", 1, 0), (9, "truth", 1, 0)]


def test_branches_of_one_line_are_told_apart() -> None:
    def body(x: torch.Tensor, a: bool, b: bool) -> torch.Tensor:
        f, g = (lambda: 1 if a else 2), (lambda: 1 if b else 2)
        return x + f() + g() if a or b else x

    model = Branches(body)
    model(torch.ones(1), False, True)
    # Both lambdas have their branch at the same offset.
    assert [(line, yes, no) for line, _, yes, no in counted(model)] == [(1, 0, 1), (1, 1, 0), (2, 0, 1), (2, 1, 0)]
    branches = [b for b in of(model)["branches"] if b["file"] == __file__]
    places = [(b["line"], b["column"], b["instruction"]) for b in branches]
    assert len(set(places)) == len(places)


def test_code_made_anew_is_one_place() -> None:
    def body(x: torch.Tensor, flag: bool) -> torch.Tensor:
        scope: dict[str, Any] = {}
        exec(compile("def f(v):\n    return 1 if v else 0\n", "made.py", "exec"), scope)
        return x + scope["f"](flag)

    model = Branches(body)
    for rows in (1, 2, 3):
        model(torch.ones(rows), rows == 1)
    made = [(b["taken"], b["not_taken"]) for b in of(model)["branches"] if b["file"] == "made.py"]
    assert len(made) == 1
    assert sum(made[0]) >= 1


def test_each_module_has_its_own_book_which_reset_clears() -> None:
    def body(x: torch.Tensor, flag: bool) -> torch.Tensor:
        return x if flag else x + 1

    first, second = Branches(body), Branches(body)
    first(torch.ones(1), True)
    second(torch.ones(1), False)
    assert counted(first) == [(1, "truth", 1, 0)]
    assert counted(second) == [(1, "truth", 0, 1)]
    cuvil.reset()
    first(torch.ones(2), False)
    assert counted(first) == [(1, "truth", 0, 1)]


def test_the_book_dies_with_the_module() -> None:
    def body(x: torch.Tensor, flag: bool) -> torch.Tensor:
        return x if flag else x + 1

    model = Branches(body)
    model(torch.ones(1), True)
    gc.collect()  # models of other tests
    assert cuvil.stats()["modules"] == 1
    del model
    gc.collect()
    assert cuvil.stats()["modules"] == 0


def test_the_book_is_bounded() -> None:
    source = "def f(v):\n" + "".join(f"    v.append(0) if v[{n}] else v.append(1)\n" for n in range(4500))
    scope: dict[str, Any] = {}
    exec(compile(source, "many.py", "exec"), scope)
    many = scope["f"]

    def body(x: torch.Tensor) -> torch.Tensor:
        many([1])
        return x

    model = Branches(body)
    model(torch.ones(1))
    record = of(model)
    assert len(record["branches"]) == 4096
    assert record["branches_dropped"] >= 404
    assert "outcomes at further places, which are not kept" in str(cuvil.explain(model))
