"""Where CPython tells of changes of dicts, plans look at them only after one: every change must still be noticed."""

from __future__ import annotations

import argparse
import ctypes
import gc
import subprocess
import sys
import textwrap
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import cuvil
import pytest
import torch
from eager_twin import Fn, eager_twin, ramp, warm
from sanitizers import UNDER_ASAN
from torch import nn

needs_watchers = pytest.mark.skipif(sys.version_info < (3, 12), reason="CPython 3.11 has no watchers of dicts")

SETTINGS: dict[str, float] = {"scale": 2.0, "unused": 0.0}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.factor = 3.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.factor * SETTINGS["scale"]


def guards(model: nn.Module) -> dict[str, int]:
    plans = [plan for module in cuvil.explain(model).to_dict()["modules"] for plan in module["plans"]]
    return dict(plans[-1]["guards"])


def num_looked_at(model: nn.Module, x: torch.Tensor) -> int:
    """The dicts that the model's newest plan looks at, after some calls."""
    for _ in range(4):
        model(x)
    return guards(model).get("dicts", 0)


def num_noisy_before() -> int:
    """Dicts of torch's or of the tests' that have become noisy in this process and that every model reads."""
    return num_looked_at(Fn(lambda s, x: s.layer(x) * 0.5, layer=nn.Linear(4, 4).eval()), ramp(1, 4))


@needs_watchers
def test_dicts_are_watched() -> None:
    model = Scaled().eval()
    with cuvil.scope(), torch.no_grad():
        assert num_looked_at(model, ramp(1, 4)) == num_noisy_before()
        assert guards(model)["watched dicts"] > 10


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "factor", 5.0),
        lambda m: m.__dict__.update(factor=7.0),
        lambda m: m.__dict__.__setitem__("factor", 11.0),
        lambda m: object.__setattr__(m, "factor", 13.0),
        lambda m: SETTINGS.__setitem__("scale", 17.0),
        lambda m: SETTINGS.update({"scale": 19.0}),
        lambda m: SETTINGS.__ior__({"scale": 23.0}),
        lambda m: (SETTINGS.pop("scale"), SETTINGS.setdefault("scale", 29.0)),
        lambda m: (SETTINGS.clear(), SETTINGS.update(scale=31.0)),
        lambda m: (SETTINGS.popitem(), SETTINGS.__setitem__("scale", 37.0)),
        lambda m: m.layer.register_forward_hook(lambda module, args, result: result + 1.0),
        lambda m: m.layer._parameters.__setitem__("bias", nn.Parameter(torch.ones(4))),
        lambda m: m._modules.__setitem__("layer", nn.Linear(4, 4).eval()),
        lambda m: setattr(m, "__dict__", {**m.__dict__, "factor": 41.0}),
        lambda m: globals().__setitem__("SETTINGS", {"scale": 43.0}),
    ],
)
def test_every_change_is_noticed(change: Callable[[Any], Any]) -> None:
    original = SETTINGS
    values = dict(SETTINGS)

    def program() -> Iterator[Any]:
        globals()["SETTINGS"] = original
        original.clear()
        original.update(values)
        torch.manual_seed(0)
        model = Scaled().eval()
        with torch.no_grad():
            yield from warm("before", model, ramp(2, 4))
            torch.manual_seed(1)
            change(model)
            yield from warm("after", model, ramp(2, 4))
            # Whatever was noticed once must be noticed again.
            model.factor = 0.5
            yield from warm("again", model, ramp(2, 4))

    try:
        eager_twin(served=True)(program)()
    finally:
        globals()["SETTINGS"] = original
        original.clear()
        original.update(values)


@eager_twin(served=True)
def test_a_dict_that_keeps_changing() -> Iterator[Any]:
    noisy = {"read": 2.0, "counter": 0}
    model = Fn(lambda s, x: x * noisy["read"])
    with torch.no_grad():
        yield from warm("first", model, ramp(3))
        for i in range(100):
            noisy["counter"] = i
            yield f"call {i}", model(ramp(3))
        noisy["read"] = 3.0
        yield from warm("changed", model, ramp(3))


@needs_watchers
def test_a_noisy_dict_costs_no_plan() -> None:
    noisy = {"read": 2.0, "counter": 0}
    model = Fn(lambda s, x: x * noisy["read"])
    with cuvil.scope(), torch.no_grad():
        for _ in range(4):
            model(ramp(3))
        before = cuvil.stats()
        for i in range(200):
            noisy["counter"] = i
            model(ramp(3))
        after = cuvil.stats()
        assert after["planned"] - before["planned"] == 200
        assert after["traces"] == before["traces"]
        # A plan that is made now looks at it by itself.
        other = Fn(lambda s, x: s.layer(x) + noisy["read"], layer=nn.Linear(4, 4).eval())
        assert num_looked_at(other, ramp(1, 4)) == num_noisy_before() + 1
        noisy["read"] = 5.0
        assert torch.equal(other(ramp(1, 4)), other.layer(ramp(1, 4)) + 5.0)
        assert torch.equal(model(ramp(3)), ramp(3) * 5.0)


@eager_twin(served=True)
def test_many_models_share_a_dict() -> Iterator[Any]:
    shared = {"scale": 2.0}
    models = [Fn(lambda s, x, i=i: x * shared["scale"] + float(i)) for i in range(5)]
    with torch.no_grad():
        for model in models:
            yield from warm("first", model, ramp(3))
        for scale in (3.0, 4.0, 5.0):
            shared["scale"] = scale
            for i, model in enumerate(models):
                yield from warm(f"{scale} {i}", model, ramp(3))
        del models[0], model
        gc.collect()
        shared["scale"] = 6.0
        for model in models:
            yield from warm("after one is gone", model, ramp(3))


@eager_twin(served=True)
def test_ordered_dicts_and_subclasses() -> Iterator[Any]:
    class Named(dict):  # type: ignore[type-arg]
        pass

    ordered, named = OrderedDict(scale=2.0), Named(shift=1.0)
    model = Fn(lambda s, x: x * ordered["scale"] + named["shift"])
    with torch.no_grad():
        yield from warm("first", model, ramp(3))
        ordered["scale"] = 3.0
        yield from warm("ordered", model, ramp(3))
        named["shift"] = 4.0
        yield from warm("named", model, ramp(3))
        ordered.move_to_end("scale")
        ordered.pop("scale")
        ordered["scale"] = 5.0
        yield from warm("again", model, ramp(3))


@needs_watchers
def test_without_a_watcher_dicts_are_looked_at() -> None:
    program = textwrap.dedent(
        """
        import ctypes, os
        import torch  # takes one of the eight for itself
        os.environ.update(CUVIL_PREPARE="sync", CUVIL_ADOPT="always")
        callback = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, *[ctypes.c_void_p] * 3)(lambda *a: 0)
        add = ctypes.pythonapi.PyDict_AddWatcher
        taken = 0
        while True:
            try:
                if add(callback) < 0:
                    break
            except RuntimeError:
                break
            taken += 1
        import cuvil
        state = {"scale": 2.0}
        class M(torch.nn.Module):
            def forward(self, x):
                return x * state["scale"]
        m = M().eval()
        with cuvil.scope(), torch.no_grad():
            for _ in range(4):
                m(torch.ones(2))
            plan = [p for e in cuvil.explain(m).to_dict()["modules"] for p in e["plans"]][-1]
            assert "watched dicts" not in plan["guards"], plan["guards"]
            state["scale"] = 3.0
            assert m(torch.ones(2)).tolist() == [3.0, 3.0]
            assert cuvil.stats()["planned"] >= 2
        print("taken", taken)
        """
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.split()[-1]) >= 1
    assert ctypes.sizeof(ctypes.c_void_p) == 8


def at_the_same_address(replace: Callable[[], None], where: Callable[[], Any]) -> None:
    """Has a dict die and an equal one take its place, at its address."""
    address = id(where())
    for _ in range(100):
        replace()
        if id(where()) == address:
            return
    assert UNDER_ASAN, "no dict came to the address of the one that died"  # there freed memory is kept back


@eager_twin(served=True)
def test_an_equal_dict_takes_the_place_of_one_that_died() -> Iterator[Any]:
    model = Fn(lambda s, x: x * s.settings["scale"])
    model.settings = {"scale": 2.0}

    def replace() -> None:
        model.settings = None
        model.settings = {"scale": 2.0}

    with torch.no_grad():
        yield from warm("first", model, ramp(3))
        at_the_same_address(replace, lambda: model.settings)
        yield from warm("replaced", model, ramp(3))
        model.settings["scale"] = 5.0
        yield from warm("changed", model, ramp(3))


@eager_twin(served=True)
def test_a_list_in_a_dict_that_took_the_place_of_another() -> Iterator[Any]:
    box: dict[str, Any] = {"inner": {"values": [1.5] * 1000}}
    kept = [box["inner"]["values"]]
    model = Fn(lambda s, x: x * box["inner"]["values"][0])

    def replace() -> None:
        box["inner"] = None
        box["inner"] = {"values": kept[0]}

    with torch.no_grad():
        yield from warm("first", model, ramp(3))
        at_the_same_address(replace, lambda: box["inner"])
        yield from warm("replaced", model, ramp(3))
        kept.clear()
        box["inner"]["values"] = [7.0] * 1000
        yield from warm("changed", model, ramp(3))


@eager_twin(served=True)
def test_attributes_that_are_made_anew() -> Iterator[Any]:
    class Options:
        pass

    options = Options()
    options.scale = 2.0
    model = Fn(lambda s, x: x * options.scale)

    def replace() -> None:
        del options.__dict__
        options.scale = 2.0

    with torch.no_grad():
        yield from warm("first", model, ramp(3))
        at_the_same_address(replace, lambda: vars(options))
        yield from warm("replaced", model, ramp(3))
        options.scale = 3.0
        yield from warm("changed", model, ramp(3))


@eager_twin(served=True)
def test_a_dict_that_is_an_objects_attributes() -> Iterator[Any]:
    options = argparse.Namespace(scale=2.0)
    attributes = vars(options)
    model = Fn(lambda s, x: x * attributes["scale"])
    with torch.no_grad():
        yield from warm("first", model, ramp(3))
        for scale in (3.0, 4.0):
            options.scale = scale  # 3.13 writes to the object and moves nothing of the dict
            yield from warm(f"{scale}", model, ramp(3))


class Chameleon:
    """A key that may say that it is another one."""

    def __init__(self, name: str) -> None:
        self.name, self.same = name, False

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return self.same


@eager_twin(served=True)
def test_a_key_that_decides_whether_it_is_equal() -> Iterator[Any]:
    settings: dict[Any, float] = {"scale": 2.0}
    key = Chameleon("scale")
    model = Fn(lambda s, x: x * settings["scale"])
    with torch.no_grad():
        yield from warm("first", model, ramp(3))
        del settings["scale"]
        settings[key] = 9.0
        settings["scale"] = 2.0
        yield from warm("beside it", model, ramp(3))
        key.same = True
        yield from warm("in its place", model, ramp(3))


@needs_watchers
def test_a_change_that_is_told_before_it_happens() -> None:
    """Another tool's callback calls the model between the notice of a change and the change."""
    settings = {"scale": 2.0}
    model = Fn(lambda s, x: x * settings["scale"])
    seen: list[float] = []

    def on_event(event: int, owner: int, key: int, value: int) -> int:
        seen.append(float(model(torch.ones(1))))
        return 0

    callback = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, *[ctypes.c_void_p] * 3)(on_event)
    with cuvil.scope(), torch.no_grad():
        for _ in range(4):
            model(torch.ones(1))
        watcher = ctypes.pythonapi.PyDict_AddWatcher(callback)
        try:
            ctypes.pythonapi.PyDict_Watch(watcher, ctypes.py_object(settings))
            settings["scale"] = 3.0
            assert seen == [2.0]
            assert float(model(torch.ones(1))) == 3.0
            ctypes.pythonapi.PyDict_Unwatch(watcher, ctypes.py_object(settings))
        finally:
            ctypes.pythonapi.PyDict_ClearWatcher(watcher)


@needs_watchers
def test_noisy_dicts_that_die_leave_nothing() -> None:
    def make() -> Any:
        return Fn(lambda s, x: s.layer(x) * s.settings["scale"], layer=nn.Linear(4, 4).eval())

    x = ramp(1, 4)
    with cuvil.scope(), torch.no_grad():
        for round_number in range(40):
            model = make()
            model.settings = {"scale": float(round_number), "counter": 0}
            for _ in range(4):
                model(x)
            for i in range(40):
                model.settings["counter"] = i
            assert torch.equal(model(x), model.layer(x) * float(round_number))
        model = make()
        model.settings = {"scale": 0.5, "counter": 0}
        # At whatever address, a new dict is watched.
        assert num_looked_at(model, x) == num_noisy_before()


def test_code_in_files_named_like_torchs(tmp_path: Any) -> None:
    folder = tmp_path / "mytorch"
    folder.mkdir()
    (folder / "_ops.py").write_text(
        "SCALE = {'k': 2.0}\nclass Settings:\n    def __getattr__(self, name):\n        return SCALE['k']\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        import mytorch._ops as mine  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(tmp_path))
    settings = mine.Settings()
    model = Fn(lambda s, x: x * settings.k)
    with cuvil.scope(), torch.no_grad():
        for _ in range(4):
            model(ramp(3))
        mine.SCALE["k"] = 3.0
        assert torch.equal(model(ramp(3)), ramp(3) * 3.0)
