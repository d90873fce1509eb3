"""From the first call of a signature to a plan that serves, is retired, or is refused; with a scripted tracer."""

from __future__ import annotations

import collections
import gc
import os
import pickle
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
from lifecycle_agent import Double, Pair, Structured, X, enable_fixture, fake, use  # noqa: F401
from lifecycle_script import Plan, Script


def test_sync_mode_traces_compares_and_then_serves(enable: Any) -> None:
    enable()
    script = use(Script(lambda x: x * 2.0))
    model = Double()
    for i in range(6):
        assert torch.equal(model(X), X * 2.0)
        assert script.traced == 1
        assert model.calls == min(i + 1, 2)
    assert script.plans[0].runs == 1 + 4
    stats = fake.stats()
    assert (stats["calls"], stats["planned"], stats["eager"]) == (6, 4, 2)
    assert (stats["traces"], stats["captures"], stats["compared"], stats["adopted"]) == (1, 1, 1, 1)
    assert fake.module_state(model)["state"] == "planned"


def test_background_mode_traces_at_the_second_sighting_and_eager_answers_meanwhile(enable: Any) -> None:
    enable(prepare="background")
    script = use(Script(lambda x: x * 2.0, build_seconds=0.2))
    model = Double()
    model(X)
    assert script.traced == 0
    model(X)
    assert script.traced == 1
    for _ in range(3):
        assert torch.equal(model(X), X * 2.0)
    assert model.calls == 5 and script.plans[0].runs == 0
    assert fake.module_state(model)["state"] == "preparing"
    fake._quiesce()
    assert fake.module_state(model)["state"] == "comparing"
    model(X)
    assert script.plans[0].runs == 1 and model.calls == 6
    model(X)
    assert script.plans[0].runs == 2 and model.calls == 6


def test_keyword_arguments_reach_plan_and_original(enable: Any) -> None:
    enable()
    use(Script(lambda x, scale: x * scale))
    model = Double()
    for _ in range(4):
        assert torch.equal(model(x=X, scale=3.0), X * 3.0)
    assert model.calls == 2


def test_a_stream_of_new_shapes_is_never_traced(enable: Any) -> None:
    enable(prepare="background")
    script = use(Script(lambda x: x * 2.0))
    model = Double()
    for n in range(1, 201):
        model(torch.ones(n))
    assert script.traced == 0
    assert script.hashed == 200
    assert fake.stats()["eager"] == 200


def test_a_faster_plan_is_adopted(enable: Any) -> None:
    enable(adopt="measure")

    class Slow(torch.nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Slow.calls += 1
            torch.mm(torch.ones(300, 300), torch.ones(300, 300))
            return x * 2.0

    use(Script(lambda x: x * 2.0))
    model = Slow()
    for _ in range(60):
        model(X)
    state = fake.module_state(model)
    assert state["state"] == "planned"
    assert state["plans"][0]["planned_ns"] < state["plans"][0]["eager_ns"]
    assert fake.stats()["adopted"] == 1
    before = Slow.calls
    for _ in range(20):
        model(X)
    assert Slow.calls == before


def test_a_slower_plan_is_retired(enable: Any) -> None:
    enable(adopt="measure")
    script = use(Script(lambda x: x * 2.0, delay=0.003))
    model = Double()
    for _ in range(30):
        model(X)
    assert fake.module_state(model)["state"] == "retired"
    assert fake.stats()["retired"] == 1
    runs, checks = script.plans[0].runs, script.plans[0].guard_checks
    for _ in range(50):
        assert torch.equal(model(X), X * 2.0)
    assert script.plans[0].runs == runs
    assert script.plans[0].guard_checks == checks, "a retired plan's guards cost nothing"


def test_a_plan_that_becomes_slower_is_retired(enable: Any) -> None:
    enable(adopt="measure")

    class Slow(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.mm(torch.ones(64, 64), torch.ones(64, 64))
            return x * 2.0

    script = use(Script(lambda x: x * 2.0))
    model = Slow()
    for _ in range(60):
        model(X)
    assert fake.module_state(model)["state"] == "planned"
    fake._fault_inject("retire", -1)
    for _ in range(2_100):
        model(X)
    assert fake.module_state(model)["state"] == "retired"
    assert script.traced == 1


def test_a_plan_that_differs_is_refused_for_good_and_loudly(enable: Any, capfd: pytest.CaptureFixture[str]) -> None:
    enable()
    script = use(Script(lambda x: x * 2.0 + (x == 3.0)))
    model = Double()
    for _ in range(300):
        assert torch.equal(model(X), X * 2.0)
    assert script.traced == 1
    assert script.plans[0].runs == 2, "compared once; the second run measures the operators' own variation"
    stats = fake.stats()
    assert stats["planned"] == 0 and stats["compare_failures"] == 1
    (refusal,) = fake.module_state(model)["refusals"]
    assert refusal["code"] == "differs" and "values differ by up to 1" in refusal["message"]
    assert "refused for good" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("answer", "difference"),
    [
        (lambda x: (x * 2.0).tolist(), "a list instead of a Tensor"),
        (lambda x: (x * 2.0).double(), "dtype"),
        (lambda x: (x * 2.0).reshape(3, 2), "shape"),
        (lambda x: torch.empty_strided((2, 3), (1, 2)).copy_(x * 2.0), "stride"),
        (lambda x: torch.cat([x * 2.0, x])[:2], "_is_view"),
        (lambda x: torch.nn.Parameter(x * 2.0, requires_grad=False), "Parameter"),
        (lambda x: (x * 2.0).add_(0.0), "_version"),
    ],
)
def test_a_comparison_sees(enable: Any, answer: Any, difference: str) -> None:
    enable()
    use(Script(answer))
    model = Double()
    for _ in range(4):
        assert torch.equal(model(X), X * 2.0)
    (refusal,) = fake.module_state(model)["refusals"]
    assert refusal["code"] == "differs" and difference in refusal["message"]


class Queue(collections.deque):
    pass


class Base:
    __slots__ = ("slot",)


class Slotted(Base):
    """A slot of the base and an attribute of its own."""

    def __init__(self, slot: int, attribute: int) -> None:
        self.slot, self.attribute = slot, attribute


@pytest.mark.parametrize(
    ("eager", "planned", "same"),
    [
        (lambda x: (x, None, 1), lambda x: (x, None, 1), True),
        (lambda x: (x, None, 1), lambda x: (x, None, True), False),
        (lambda x: (x,), lambda x: [x], False),
        (lambda x: {"a": x + 1, "b": 0.5}, lambda x: {"a": x + 1, "b": 0.5}, True),
        (lambda x: {"a": x + 1, "b": 0.5}, lambda x: {"b": 0.5, "a": x + 1}, False),
        (lambda x: {"a": 0.0}, lambda x: {"a": -0.0}, False),
        (lambda x: float("nan"), lambda x: float("nan"), True),
        (lambda x: torch.max(x, 0), lambda x: torch.max(x, 0), True),
        (lambda x: torch.max(x, 0), lambda x: tuple(torch.max(x, 0)), False),
        (lambda x: x, lambda x: x, True),
        (lambda x: x, lambda x: x.clone(), False),
        (lambda x: x.clone(), lambda x: x, False),
        (lambda x: x.t(), lambda x: x.t(), True),
        (lambda x: (x + 1).expand(1, 2, 3).chunk(2), lambda x: (x + 1).expand(1, 2, 3).chunk(2), True),
        (lambda x: [x + 1] * 2, lambda x: [x + 1] * 2, True),
        (lambda x: [x + 1] * 2, lambda x: [x + 1, x + 1], False),
        (lambda x: torch.full((2,), float("nan")), lambda x: torch.full((2,), float("nan")), True),
        (lambda x: x > 1, lambda x: x >= 1, False),
        (lambda x: x.to(torch.complex64), lambda x: x.to(torch.complex64), True),
        (lambda x: x.to(torch.complex64).conj(), lambda x: x.to(torch.complex64).conj_physical(), False),
        (lambda x: torch.empty(0), lambda x: torch.empty(0), True),
        (lambda x: x * (1 + 1e-7), lambda x: x * (1 + 2e-7), True),
        (lambda x: x * 1.0, lambda x: x * 1.001, False),
        (lambda x: torch.tensor(2), lambda x: torch.tensor(3), False),
        (lambda x: (x + 1)[:1, ::4], lambda x: (x + 1)[:1, ::4], True),  # one element, its stride is not 1
        (lambda x: (x + 1)[:1, ::4], lambda x: (x + 2)[:1, ::4], False),
        (lambda x: collections.deque([1, 2]), lambda x: collections.deque([1, 2]), True),
        (lambda x: collections.deque([1, 2]), lambda x: collections.deque([1, 3]), False),
        (lambda x: Queue([1, 2]), lambda x: Queue([1, 2]), True),
        (lambda x: Queue([1, 2]), lambda x: Queue([1, 3]), False),
        (lambda x: ValueError(1), lambda x: ValueError(1), False),  # compared by nothing but identity
        (lambda x: torch.device("cpu"), lambda x: torch.device("cpu"), True),
        (lambda x: Slotted(1, 2), lambda x: Slotted(1, 2), True),
        (lambda x: Slotted(1, 2), lambda x: Slotted(3, 2), False),
        (lambda x: Slotted(1, 2), lambda x: Slotted(1, 3), False),
    ],
)
def test_a_comparison_judges_results(enable: Any, eager: Any, planned: Any, same: bool) -> None:
    enable()
    script = use(Script(planned))
    model = Structured(eager)
    for _ in range(4):
        model(X)
    state = fake.module_state(model)
    assert (state["state"] == "planned") is same, state
    assert script.traced == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_other_values_in_memory_that_nobody_wrote_refuse_the_plan_with_their_reason(enable: Any, dtype: Any) -> None:
    enable()
    use(Script(lambda x: torch.zeros(3, dtype=dtype), uninitialized=True))
    model = Structured(lambda x: torch.ones(3, dtype=dtype))
    for _ in range(3):
        model(X)
    state = fake.module_state(model)
    assert state["state"] == "refused", state
    (refusal,) = state["refusals"]
    assert (refusal["code"], refusal["file"], refusal["line"]) == ("uninitialized", "model.py", 7), refusal
    assert "torch.zeros" in refusal["advice"]


def test_memory_that_nobody_wrote_is_compared_by_bits_and_not_within_its_own_magnitude(enable: Any) -> None:
    garbage = [float("nan"), 3e38, 1.0]
    enable()
    use(Script(lambda x: torch.tensor(garbage), uninitialized=True))
    model = Structured(lambda x: torch.tensor(garbage))
    for _ in range(3):
        model(X)
    assert fake.module_state(model)["state"] == "planned"

    use(Script(lambda x: torch.tensor(garbage[:2] + [2.0]), uninitialized=True))
    other = Structured(lambda x: torch.tensor(garbage))
    for _ in range(3):
        other(X)
    assert [r["code"] for r in fake.module_state(other)["refusals"]] == ["uninitialized"]


def test_another_shape_beside_memory_that_nobody_wrote_is_a_difference(enable: Any) -> None:
    enable()
    use(Script(lambda x: (torch.zeros(3), torch.zeros(2)), uninitialized=True))
    model = Structured(lambda x: (torch.ones(3), torch.zeros(3)))
    for _ in range(3):
        model(X)
    assert [r["code"] for r in fake.module_state(model)["refusals"]] == ["differs"]


def test_a_failed_build_is_a_refusal(enable: Any) -> None:
    enable()
    script = use(Script(lambda x: x * 2.0, build_error="aten::whatever has no mechanism"))
    model = Double()
    for _ in range(100):
        model(X)
    assert script.traced == 1 and script.plans[0].runs == 0
    (refusal,) = fake.module_state(model)["refusals"]
    assert refusal["code"] == "build" and "aten::whatever" in refusal["message"]


def test_a_changed_state_is_traced_again_and_both_plans_live(enable: Any) -> None:
    enable()
    state = [1.0]
    script = use(Script())
    model = Structured(lambda x: x * state[0])

    def trace(args: Any, kwargs: Any, result: Any) -> Plan:
        factor = state[0]
        plan = Plan(lambda x: x * factor, (tuple(X.shape),), guard=lambda: state[0] == factor)
        script.plans.append(plan)
        return plan

    script.trace = trace  # type: ignore[method-assign]
    for _ in range(4):
        assert torch.equal(model(X), X)
    state[0] = 3.0
    for _ in range(4):
        assert torch.equal(model(X), X * 3.0)
    assert len(script.plans) == 2
    for i in range(20):
        state[0] = 1.0 if i % 2 else 3.0
        assert torch.equal(model(X), X * state[0])
    assert len(script.plans) == 2
    assert fake.stats()["planned"] == 2 + 2 + 20


def test_a_state_that_never_settles_is_traced_less_and_less(enable: Any) -> None:
    enable(prepare="background")
    counter = [0]
    script = use(Script(lambda x: x * 2.0, guard=lambda: False))

    def call() -> None:
        counter[0] += 1
        model(X)
        fake._quiesce()

    model = Double()
    for _ in range(600):
        call()
    assert script.traced <= 9
    assert model.calls == 600


def test_plans_are_bounded(enable: Any) -> None:
    enable(CUVIL_PLANS="4")
    script = use(Script(lambda x: x * 2.0))
    model = Double()
    for n in range(1, 11):
        for _ in range(3):
            model(torch.ones(n))
    assert len(fake.module_state(model)["plans"]) == 4
    assert fake.stats()["evicted"] == 6
    alive = [weakref.ref(plan) for plan in script.plans]
    script.plans.clear()
    gc.collect()
    assert sum(ref() is not None for ref in alive) == 4


def test_refused_modules_leave_their_children_a_chance(enable: Any) -> None:
    enable()
    script = use(Script(lambda x: x * 2.0))
    model = Pair()
    in_pair = [True]

    def trace(args: Any, kwargs: Any, result: Any) -> Any:
        script.traced += 1
        if torch.equal(result, X * 4.0):
            return ("data-read", "reads tensor data", False)
        plan = Plan(lambda x: x * 2.0, (tuple(X.shape),))
        script.plans.append(plan)
        return plan

    script.trace = trace  # type: ignore[method-assign]
    for i in range(4):
        assert torch.equal(model(X), X * 4.0)
    assert in_pair and script.traced >= 2
    # first(x) = 2x is planned; second(2x) = 4x looks like the refused result to this script.
    assert fake.module_state(model)["state"] == "refused"
    assert fake.module_state(model.first)["state"] == "planned"
    record = fake.explain(model)
    assert [m["path"] for m in record["modules"]] == ["", "first", "second"]
    (refusal,) = record["modules"][0]["refusals"]
    assert (refusal["file"], refusal["line"], refusal["advice"]) == ("script.py", 7, "change the script")
    assert fake.stats()["refusals"]["data-read"] >= 1


def test_children_of_an_undecided_module_are_left_alone(enable: Any) -> None:
    enable(prepare="background")
    use(Script(lambda x: x * 4.0))
    model = Pair()
    model(X)
    assert fake.module_state(model.first) is None
    assert fake.stats()["calls"] == 1


def test_a_refusal_that_settles_is_tried_again_at_once(enable: Any) -> None:
    enable()
    script = use(Script(lambda x: x * 2.0))
    left = [2]

    def refuse(args: Any, kwargs: Any) -> tuple[str, str, bool] | None:
        left[0] -= 1
        return ("cache-filled", "a cache was filled", True) if left[0] >= 0 else None

    script.refuse = refuse
    model = Double()
    for _ in range(6):
        model(X)
    assert script.traced == 3
    assert fake.module_state(model)["state"] == "planned"


def test_equal_refusals_are_one_and_those_beyond_the_bound_are_counted(enable: Any) -> None:
    enable()
    script = use(Script())
    model = Double()

    def refuse_until(traced: int, reason: Any) -> None:
        script.refuse = lambda args, kwargs: ("data-read", reason(), True)
        for rows in range(1, 5000):
            if script.traced >= traced:
                return
            model(torch.ones(rows % 100 + 1, 3))
        raise AssertionError("traced too seldom")

    refuse_until(3, lambda: "reads tensor data")
    (refusal,) = fake.module_state(model)["refusals"]
    assert refusal["count"] == 3
    refuse_until(40, lambda: f"reason {script.traced}")
    state = fake.module_state(model)
    assert len(state["refusals"]) == 32
    assert state["refusals_dropped"] == 40 - 3 - 31
    assert sum(refusal["count"] for refusal in state["refusals"]) + state["refusals_dropped"] == script.traced
    fake.reset()
    model(X)
    assert fake.module_state(model)["refusals_dropped"] == 0


def test_refusals_without_a_place_get_that_of_forward(enable: Any) -> None:
    enable()
    use(Script(lambda x: x * 3.0))  # differs from eager
    model = Double()
    for _ in range(3):
        model(X)
    (refusal,) = fake.module_state(model)["refusals"]
    assert refusal["code"] == "differs"
    assert refusal["file"].endswith("lifecycle_agent.py")
    assert refusal["line"] == Double.forward.__code__.co_firstlineno


def test_refused_calls_cost_no_hash(enable: Any) -> None:
    enable(prepare="background")
    script = use(Script())
    script.refuse = lambda args, kwargs: ("net-write", "writes", False)
    model = Double()
    for _ in range(1_000):
        model(X)
    assert script.hashed <= 16
    assert script.traced <= 8


def test_a_model_that_dies_takes_everything_along(enable: Any) -> None:
    enable()
    script = use(Script(lambda x: x * 2.0))
    model = Double()
    for _ in range(4):
        model(X)
    plan, module = weakref.ref(script.plans[0]), weakref.ref(model)
    script.plans.clear()
    assert fake.stats()["modules"] == 1
    del model
    assert module() is None and plan() is None
    assert fake.stats()["modules"] == 0


def test_a_model_in_a_cycle_dies_in_a_collection(enable: Any) -> None:
    enable()
    script = use(Script(lambda x: x * 2.0))
    model = Double()
    model.me = [model]
    for _ in range(4):
        model(X)
    plan, module = weakref.ref(script.plans[0]), weakref.ref(model)
    script.plans.clear()
    del model
    gc.collect()
    assert module() is None and plan() is None and fake.stats()["modules"] == 0


def test_a_model_that_is_called_by_its_own_finaliser(enable: Any) -> None:
    enable()
    use(Script(lambda x: x * 2.0))
    results = []

    class Last(Double):
        def __del__(self) -> None:
            results.append(self(X))

    for cyclic in (False, True):
        model = Last()
        if cyclic:
            model.me = [model]
        for _ in range(4):
            model(X)
        del model
        gc.collect()
    assert len(results) == 2 and all(torch.equal(r, X * 2.0) for r in results)
    assert fake.stats()["modules"] == 0


def test_nothing_is_seen_on_the_module(enable: Any) -> None:
    import copy

    enable()
    use(Script(lambda x: x * 2.0))
    model, fresh = Double(), Double()
    for _ in range(4):
        model(X)
    assert set(vars(model)) == set(vars(fresh))
    assert pickle.dumps(model.state_dict()) == pickle.dumps(fresh.state_dict())
    clone = pickle.loads(pickle.dumps(model))
    deep = copy.deepcopy(model)
    for other in (clone, deep):
        assert type(other) is Double and fake.module_state(other) is None
        assert torch.equal(other(X), X * 2.0)


def test_opting_out_and_in(enable: Any) -> None:
    enable()
    script = use(Script(lambda x: x * 4.0))
    model = Pair()
    for _ in range(4):
        model(X)
    assert fake.module_state(model)["state"] == "planned"
    fake.opt_out(model.first, True)
    for _ in range(4):
        assert torch.equal(model(X), X * 4.0)
    assert fake.module_state(model)["state"] == "refused"
    assert fake.module_state(model)["refusals"][0]["code"] == "opted-out"
    assert fake.module_state(model.first)["state"] == "opted_out"
    fake.opt_out(model.first, False)
    planned = fake.stats()["planned"]
    for _ in range(4):
        model(X)
    assert fake.stats()["planned"] > planned
    fake.opt_out(model, True)
    traced = script.traced
    model(X)
    assert script.traced == traced and fake.module_state(model)["state"] == "opted_out"
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, not a str"):
        fake.opt_out("model", True)


def test_prepare_uses_real_calls_and_returns_when_ready(enable: Any) -> None:
    enable(prepare="background", adopt="measure")
    use(Script(lambda x: x * 2.0, build_seconds=0.05))
    model = Double()
    assert fake.prepare(model, (X,), {}) is True
    assert model.calls == 2
    model(X)
    assert model.calls == 2 and fake.stats()["planned"] == 1
    assert fake.prepare(model, (X,), {}) is True
    assert model.calls == 2


def test_prepare_of_a_refused_model_prepares_what_is_inside(enable: Any) -> None:
    enable(prepare="background")
    script = use(Script(lambda x: x * 2.0))
    script.refuse = lambda args, kwargs: None
    model = Pair()
    first = model.first

    def trace(args: Any, kwargs: Any, result: Any) -> Any:
        if torch.equal(result, X * 4.0) and torch.equal(args[0], X):
            return ("data-read", "reads tensor data", False)
        return Plan(lambda x: x * 2.0, (tuple(X.shape),))

    script.trace = trace  # type: ignore[method-assign]
    assert fake.prepare(model, (X,), {}) is False
    assert fake.module_state(first)["state"] == "planned"
    assert fake.module_state(model.second)["state"] == "planned"
    calls = first.calls
    model(X)
    assert first.calls == calls


def test_prepare_raises_what_the_model_raises(enable: Any) -> None:
    enable()
    use(Script(lambda x: x))
    with pytest.raises(TypeError, match="unexpected keyword"):
        fake.prepare(Double(), (X,), {"nonsense": 1})
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module"):
        fake.prepare(3, (X,), {})


def test_a_random_plan_draws_what_eager_draws(enable: Any) -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(3)

    torch.manual_seed(3)
    expected = [noisy(X) for _ in range(6)]
    enable()
    script = use(Script(noisy, is_random=True))
    model = Structured(noisy)
    torch.manual_seed(3)
    got = [model(X) for _ in range(6)]
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert fake.stats()["planned"] == 4 and script.traced == 1


def test_a_plan_that_draws_more_than_eager_differs(enable: Any) -> None:
    enable()

    def greedy(x: torch.Tensor) -> torch.Tensor:
        torch.rand(1)
        return x * 2.0

    use(Script(greedy, is_random=True))
    model = Double()
    for _ in range(4):
        model(X)
    assert "random generator" in fake.module_state(model)["refusals"][0]["message"]


@pytest.mark.parametrize("is_random", [False, True])
def test_eager_that_finds_no_memory_beside_the_plans_result_runs_again(enable: Any, is_random: bool) -> None:
    enable()
    calls = [0]

    def thirsty(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        noise = torch.rand(3) if is_random else torch.zeros(3)
        if calls[0] == 2:  # the comparing call
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x + noise

    use(Script(lambda x: x + (torch.rand(3) if is_random else 0), is_random=is_random))
    model = Structured(thirsty)
    torch.manual_seed(3)
    got = [model(X) for _ in range(5)]
    torch.manual_seed(3)
    for result in got:
        assert torch.equal(result, X + (torch.rand(3) if is_random else 0))
    assert calls[0] == 4, "traced, compared twice over, compared again; then the plan serves"
    assert fake.stats()["planned"] == 2


def test_memory_that_eager_does_not_find_alone_either_is_its_error(enable: Any) -> None:
    enable()
    fail = [False]

    def thirsty(x: torch.Tensor) -> torch.Tensor:
        if fail[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x * 2

    use(Script(lambda x: x * 2))
    model = Structured(thirsty)
    model(X)
    fail[0] = True
    with pytest.raises(torch.OutOfMemoryError):
        model(X)


def test_an_error_in_a_random_plan_puts_the_generator_back(enable: Any) -> None:
    enable()
    fail = [False]

    def noisy(x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(3)
        if fail[0]:
            raise RuntimeError("in the plan only")
        return x + noise

    use(Script(noisy, is_random=True))
    model = Structured(lambda x: x + torch.rand(3))
    for _ in range(3):
        model(X)
    fail[0] = True
    torch.manual_seed(5)
    got = model(X)
    torch.manual_seed(5)
    assert torch.equal(got, X + torch.rand(3))
    assert fake.stats()["replay_errors"] == 1


def test_disable_restores_and_enable_is_idempotent(enable: Any) -> None:
    before = torch.nn.Module.__call__
    attributes = (before.__code__, before.__defaults__, before.__kwdefaults__, before.__dict__.copy())
    enable()
    fake.enable()
    assert torch.nn.Module.__call__ is before
    assert (before.__code__, before.__defaults__, before.__kwdefaults__, before.__dict__.copy()) == attributes
    script = use(Script(lambda x: x * 2.0))
    model = Double()
    model(X)
    fake.disable()
    fake.disable()
    assert not fake.enabled()
    for _ in range(3):
        model(X)
    assert script.traced == 1 and fake.stats()["calls"] == 1
    fake.enable()
    for _ in range(2):
        model(X)
    assert fake.stats()["planned"] == 1, "plans outlive a pause"


def test_cuvil_disable_wins(enable: Any) -> None:
    enable(CUVIL_DISABLE="1")
    assert not fake.enabled()


def test_nonsense_in_the_environment_is_told_and_ignored(enable: Any, capfd: pytest.CaptureFixture[str]) -> None:
    enable(CUVIL_PLANS="many", CUVIL_FAULT="nowhere:1")
    assert fake.enabled()
    error = capfd.readouterr().err
    assert "CUVIL_PLANS=many is ignored" in error and "no fault point is called 'nowhere'" in error


def test_info_log_tells_one_line_per_event(enable: Any, capfd: pytest.CaptureFixture[str]) -> None:
    enable(CUVIL_LOG="info")
    use(Script(lambda x: x * 2.0))
    model = Double()
    for _ in range(20):
        model(X)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("cuvil: Double")]
    assert [line.split(": ")[2].split(" in ")[0] for line in lines] == ["traced", "plan equal to eager"]


def test_an_observed_thread_runs_the_original(enable: Any) -> None:
    enable()
    use(Script(lambda x: x * 2.0))
    model = Double()
    for _ in range(3):
        model(X)
    seen = []
    sys.setprofile(lambda frame, event, arg: seen.append(frame.f_code.co_name) if event == "call" else None)
    try:
        model(X)
    finally:
        sys.setprofile(None)
    assert "forward" in seen and fake.stats()["observed"] == 1
    calls = model.calls
    model(X)
    assert model.calls == calls


def test_exit_with_live_plans_is_clean() -> None:
    program = """
import torch, atexit, _cuvil_lifecycle_fake as fake
from lifecycle_script import Script
fake.set_script(Script(lambda x: x * 2.0, build_seconds=0.2))
fake.enable()
class Double(torch.nn.Module):
    def forward(self, x): return x * 2.0
    def __del__(self): print("last", float(self(torch.ones(1))))
keep = [Double() for _ in range(20)]
atexit.register(lambda: print("atexit", float(keep[0](torch.ones(1)))))
with torch.no_grad():
    for _ in range(3):
        for m in keep: m(torch.ones(1))
import builtins; builtins.keep = keep
"""
    here = os.path.dirname(__file__)
    environment = dict(os.environ, CUVIL_PREPARE="background", PYTHONPATH=f"{here}:{os.environ.get('PYTHONPATH', '')}")
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "atexit 2.0" in done.stdout and "Traceback" not in done.stderr
