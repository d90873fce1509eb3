"""The lifecycle on real captures and plans: what the scripted tracer cannot show."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import sys
import threading
import weakref
from typing import Any

import cuvil
import pytest
import torch
from cuvil import _native
from sanitizers import UNDER_ASAN
from torch import nn


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4), nn.Softmax(-1)).eval()


def planned(model: nn.Module) -> int:
    return sum(module["planned_calls"] for module in _native.explain(model)["modules"])


def test_a_model_is_planned_from_the_third_call_on(enable: Any) -> None:
    model, x = mlp(), torch.randn(3, 8)
    expected = model(x)
    enable()
    for i in range(6):
        assert torch.equal(model(x), expected)
        assert planned(model) == max(0, i - 1)


class TwoLines(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x)
        return torch.exp(x) * torch.sin(x)


def test_explain_counts_operators_at_their_own_lines(enable: Any) -> None:
    enable()
    model = TwoLines()
    for _ in range(3):
        model(torch.ones(2))
    first = TwoLines.forward.__code__.co_firstlineno
    (plan,) = _native.explain(model)["modules"][0]["plans"]
    assert [(line["file"], line["line"] - first, line["operators"]) for line in plan["lines"]] == [
        (__file__, 1, 1),
        (__file__, 2, 3),
    ]


def test_default_settings_reach_a_verdict(enable: Any) -> None:
    model, x = mlp(), torch.randn(3, 8)
    expected = model(x)
    enable(prepare="background", adopt="measure")
    for _ in range(80):
        assert torch.equal(model(x), expected)
        _native._quiesce()
    assert _native.module_state(model)["state"] in ("planned", "retired")
    assert planned(model) >= 3


def test_the_model_dies_with_its_plans(enable: Any) -> None:
    enable()

    class Cyclic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.inner.parent = [self]
            self.register_forward_hook(self.hook)

        def hook(self, module: nn.Module, args: Any, output: Any) -> None:
            return None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * 2.0

    x = torch.randn(3, 8)
    for make, collect in ((mlp, False), (Cyclic, True)):
        model = make()
        for _ in range(5):
            model(x)
        assert planned(model) == 3, _native.explain(model)
        weight, dead = weakref.ref(next(model.parameters())), weakref.ref(model)
        del model
        if collect:
            gc.collect()
        assert dead() is None and weight() is None
    assert _native.stats()["modules"] == 0


def test_copies_and_pickles_are_as_without(enable: Any) -> None:
    model, x = mlp(), torch.randn(3, 8)
    keys = set(vars(model))
    enable()
    for _ in range(4):
        expected = model(x)
    assert set(vars(model)) == keys
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for _ in range(4):
            assert torch.equal(other(x), expected)
        assert planned(other) == 2


def test_32_threads_share_one_model(enable: Any) -> None:
    model = mlp()
    inputs = [torch.randn(n, 8) for n in (1, 2, 5)]
    expected = [model(x) for x in inputs]
    enable()
    errors: list[BaseException] = []

    def body(index: int) -> None:
        try:
            with torch.no_grad():
                for _ in range(1_000):
                    assert torch.equal(model(inputs[index % 3]), expected[index % 3])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(i,)) for i in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    stats = _native.stats()
    assert stats["calls"] == 32_000 and stats["planned"] > 30_000 and stats["faults"] == 0


def test_weights_are_replaced_from_another_thread(enable: Any) -> None:
    enable()
    model, x = nn.Linear(64, 64), torch.ones(32, 64)
    nn.init.zeros_(model.bias)
    nn.init.zeros_(model.weight)
    stop = threading.Event()

    def replace() -> None:
        value = 0.0
        while not stop.is_set():
            value = (value + 1.0) % 7.0
            model.weight = nn.Parameter(torch.full((64, 64), value))

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        for _ in range(2_000):
            y = model(x)
            # Whatever weight was current, the result is that of one weight as a whole.
            assert torch.equal(y, y[0, 0].expand_as(y)) and y[0, 0].item() in {64.0 * v for v in range(7)}
    finally:
        stop.set()
        thread.join()


@pytest.mark.skipif(torch.get_num_threads() != 1, reason="torch hangs in a forked child once it has OpenMP threads")
def test_plans_go_on_in_a_forked_child(enable: Any) -> None:
    enable()
    model, x = mlp(), torch.randn(3, 8)
    for _ in range(4):
        expected = model(x)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(60)
            before = planned(model)
            assert torch.equal(model(x), expected) and planned(model) == before + 1
            fresh = mlp()
            for _ in range(4):
                fresh(x)
            assert planned(fresh) == 2
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def test_an_operator_error_is_eagers(enable: Any) -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table(x) + 1.0

    enable()
    model = Lookup()
    good, bad = torch.tensor([0, 3]), torch.tensor([0, 9])
    for _ in range(4):
        expected = model(good)
    with pytest.raises(IndexError, match="index out of range") as caught:
        model(bad)
    assert "forward" in [entry.name for entry in caught.traceback]
    assert _native.stats()["replay_errors"] == 1
    assert torch.equal(model(good), expected)
    assert planned(model) == 3


def test_a_random_plan_leaves_the_generator_where_eager_does(enable: Any) -> None:
    model, x = nn.Dropout(0.5).train(), torch.ones(64)
    torch.manual_seed(7)
    expected = [model(x) for _ in range(6)]
    state = torch.get_rng_state()
    enable()
    torch.manual_seed(7)
    got = [model(x) for _ in range(6)]
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert planned(model) == 4


def test_prepare_and_explain(enable: Any) -> None:
    enable(prepare="background", adopt="measure")
    model, x = mlp(), torch.randn(3, 8)
    assert cuvil.prepare(model, x) is True
    record = cuvil.explain(model).to_dict()
    (module,) = record["modules"]
    (plan,) = module["plans"]
    assert module["state"] == "planned" and plan["signature"] == "(3, 8) float32"
    assert plan["operators"] == 4 and sum(plan["guards"].values()) > 10
    assert plan["mechanisms"]["python"] == 0
    assert {"trace", "build", "compare"} == set(plan["stages_ns"])
    assert "planned whole" in str(cuvil.explain(model))


def test_a_refusal_names_its_line(enable: Any) -> None:
    class Peek(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            return y * 2 if y.sum().item() > 0 else y  # the refused line

    enable()
    model, x = Peek(), torch.randn(3, 8)
    expected = model(x)
    for _ in range(8):
        assert torch.equal(model(x), expected)
    root, inner = _native.explain(model)["modules"][:2]
    (refusal,) = root["refusals"]
    line = Peek.forward.__code__.co_firstlineno + 2
    assert (os.path.basename(refusal["file"]), refusal["line"]) == (os.path.basename(__file__), line)
    assert refusal["message"] and refusal["advice"]
    assert inner["path"] == "inner" and inner["planned_calls"] > 0, "the module inside is planned on its own"


def test_many_calls_keep_memory_and_references(enable: Any) -> None:
    enable()
    model, x = mlp(), torch.randn(3, 8)

    def resident_kib() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024

    def run(calls: int) -> None:
        for _ in range(calls):
            model(x)

    run(2_000)
    gc.collect()
    before = (sys.getrefcount(x), sys.getrefcount(model[0].weight), len(gc.get_objects()))
    resident = resident_kib()
    run(20_000)
    gc.collect()
    after = (sys.getrefcount(x), sys.getrefcount(model[0].weight), len(gc.get_objects()))
    assert after[:2] == before[:2] and abs(after[2] - before[2]) < 50
    assert resident_kib() - resident < 4_000


@pytest.mark.skipif(UNDER_ASAN, reason="memory that nobody wrote is filled alike")
def test_memory_that_nobody_wrote_refuses_a_plan_with_its_line(enable: Any) -> None:
    class Shows(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.empty_like(x)

    enable()
    model, x = Shows(), torch.zeros(2000)
    for _ in range(8):
        # What the next calls find: no two of these blocks hold the same, and a call leaves its own as it was.
        blocks = [torch.full((2000,), float(i)) for i in range(12)]
        del blocks
        kept = [model(x) for _ in range(2)]
    del kept
    (refusal,) = _native.explain(model)["modules"][0]["refusals"]
    line = Shows.forward.__code__.co_firstlineno + 1
    assert (refusal["code"], refusal["file"], refusal["line"]) == ("uninitialized", __file__, line)
    assert _native.stats()["compare_failures"] == 0


def test_memory_that_is_written_before_it_is_shown_is_planned(enable: Any) -> None:
    class Writes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scratch = torch.empty(8)
            scratch.copy_(x[0])
            return torch.relu(x) + scratch

    enable()
    model, x = Writes(), torch.randn(3, 8)
    expected = model(x)
    for _ in range(6):
        assert torch.equal(model(x), expected)
    assert planned(model) > 0
