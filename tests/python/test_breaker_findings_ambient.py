"""Differences that an attack found in what surrounds a call: warnings, errors, identity, lifetimes, re-initialised objects.

K9, K10 and K13 to K16; K1 to K8, K11 and K12 are in test_breaker_findings_state.py.
"""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import functools
import gc
import operator
import os
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from eager_twin import Fn, attempt, eager_twin, ramp, warm

WARNING_CALLS: dict[str, tuple[Callable[..., Any], tuple[int, ...], bool]] = {
    # torch warns each time
    "std": (lambda s, x: x[:1].std(), (3,), False),
    "dead_var": (lambda s, x: (x[:1].var(), x * 2)[1], (3,), False),
    "var_mean": (lambda s, x: torch.var_mean(x[:1]), (3,), False),
    # torch warns once per process, or each time when told so
    "transpose": (lambda s, x: x.T, (1, 2, 3), True),
    "dead_transpose": (lambda s, x: (x.T, x * 2)[1], (1, 2, 3), True),
    "complex": (lambda s, x: torch.complex(x, x).float(), (3,), True),
    "out_resized": (lambda s, x: torch.add(x, x, out=torch.empty(2)), (3,), True),
    "padding_same": (lambda s, x: torch.conv1d(x, torch.ones(1, 1, 2), padding="same"), (1, 1, 5), True),
    "uint8_where": (lambda s, x: torch.where((x > 1).to(torch.uint8), x, x), (3,), True),
}


def warned_calls(name: str, action: str) -> Iterator[tuple[str, Any]]:
    forward, shape, always = WARNING_CALLS[name]
    m = Fn(forward)
    torch.set_warn_always(always)
    try:
        with torch.no_grad():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield from warm("quiet", m, ramp(*shape))
            for i in range(3):
                with warnings.catch_warnings(record=True) as seen:
                    warnings.simplefilter(action)  # type: ignore[arg-type]
                    try:
                        y: Any = m(ramp(*shape))
                    except UserWarning as warning:
                        y = str(warning)
                yield f"result {i}", y
                found = [(str(w.message), w.category.__name__, w.lineno, os.path.basename(w.filename)) for w in seen]
                yield f"warnings {i}", found
    finally:
        torch.set_warn_always(False)


@pytest.mark.parametrize("action", ["always", "error"])
@pytest.mark.parametrize("name", sorted(WARNING_CALLS))
def test_k15_operator_warns(name, action, capfd):
    eager_twin(lambda: warned_calls(name, action))()
    assert "Warning" not in capfd.readouterr().err


@eager_twin(served=True)
def test_k15_warning_wanted_after_the_plan():
    """An operator that warned once is planned; when it warns each time, eager does it again."""
    m = Fn(lambda s, x: torch.complex(x, x).float())
    with torch.no_grad(), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield from warm("once", m, ramp(3))
        seen.clear()
        torch.set_warn_always(True)
        try:
            yield "always", m(ramp(3))
            yield "count", len(seen)
        finally:
            torch.set_warn_always(False)


@eager_twin(served=True)
def test_k15_handler_is_put_back():
    """Warnings of eager calls after a planned one are Python's again."""
    m = Fn(lambda s, x: x * 2)
    with torch.no_grad(), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield from warm("planned", m, ramp(3))
        yield "eager", F.relu(ramp(3)[:1].std()).isnan().item()
        yield "count", len(seen)


# ---------------------------------------------------------------- K9: initialised again in place
@eager_twin(served=True)
def test_k9_property_initialised_again():
    class M(nn.Module):
        @property
        def k(self):
            return 2.0

        def forward(self, x):
            return x * self.k

    m = M()
    with torch.no_grad():
        yield from warm("two", m, ramp(3))
        M.__dict__["k"].__init__(lambda self: 9.0)
        yield from warm("nine", m, ramp(3))


@eager_twin(served=True)
def test_k9_property_of_a_base_initialised_again():
    class Base(nn.Module):
        @property
        def k(self):
            return 2.0

    class M(Base):
        @property
        def k(self):
            return super().k

        def forward(self, x):
            return x * self.k

    m = M()
    with torch.no_grad():
        yield from warm("two", m, ramp(3))
        Base.__dict__["k"].__init__(lambda self: 9.0)
        yield from warm("nine", m, ramp(3))


@pytest.mark.parametrize("kind", [staticmethod, classmethod])
@pytest.mark.parametrize("through", ["instance", "class", "super"])
def test_k9_method_initialised_again(kind, through):
    def program():
        class Base(nn.Module):
            k = kind(lambda *owner: 2.0)

        class M(Base):
            def forward(self, x):
                if through == "instance":
                    return x * self.k()
                return x * (M.k() if through == "class" else super().k())

        m = M()
        with torch.no_grad():
            yield from warm("two", m, ramp(3))
            Base.__dict__["k"].__init__(lambda *owner: 9.0)
            yield from warm("nine", m, ramp(3))

    eager_twin(program, served=True)()


@eager_twin(served=True)
def test_k9_partial_given_another_state():
    p = functools.partial(lambda k, x, b=0.0: x * k + b, 2.0)
    m = Fn(lambda s, x: s.p(x), p=p)
    with torch.no_grad():
        yield from warm("two", m, ramp(3))
        p.__setstate__((p.func, (9.0,), {}, None))
        yield from warm("nine", m, ramp(3))
        p.__setstate__((p.func, (9.0,), {"b": 1.0}, None))
        yield from warm("and one", m, ramp(3))
        p.__setstate__((lambda k, x, b: x, (9.0,), {"b": 1.0}, None))
        yield from warm("other function", m, ramp(3))


@eager_twin(served=True)
def test_k9_module_object_becomes_another_class():
    class Sub(types.ModuleType):
        @property
        def k(self):
            return 9.0

    config = types.ModuleType("cuvil_test_config")
    config.k = 2.0
    m = Fn(lambda s, x: x * config.k)
    with torch.no_grad():
        yield from warm("two", m, ramp(3))
        config.__class__ = Sub
        yield from warm("nine", m, ramp(3))


# ---------------------------------------------------------------- K13: what plans keep alive
class Slots:
    __slots__ = ("m", "v")

    def __init__(self, m: Any, v: Any) -> None:
        self.m, self.v = m, v


@dataclasses.dataclass(slots=True)
class SlotData:
    m: Any
    v: Any


HOLDERS: dict[str, tuple[Callable[[Any], Any], Callable[..., Any]]] = {
    "slots": (lambda m: Slots(m, 2.0), lambda s, x: x * s.o.v),
    "dataclass": (lambda m: SlotData(m, 2.0), lambda s, x: x * s.o.v),
    "namespace": (lambda m: types.SimpleNamespace(m=m, v=2.0), lambda s, x: x * s.o.v),
    "proxy": (lambda m: types.MappingProxyType({"m": m, "v": 2.0}), lambda s, x: x * s.o["v"]),
    "slot_wrapper": (lambda m: m.__ne__, lambda s, x: x * 2 if s.o is not None else x),
    "exception": (lambda m: ValueError(m), lambda s, x: x * 2 if s.o else x),
    "slice": (lambda m: slice(m, 2), lambda s, x: x * s.o.stop),
    "context_variable": (
        lambda m: contextvars.ContextVar("cuvil_test_owner", default=m),
        lambda s, x: x * 3 if s.o.get().training else x,
    ),
    "cell": (lambda m: lambda: m.training, lambda s, x: x * 3 if s.o() else x),
    "property": (lambda m: property(m.parameters), lambda s, x: x * 2 if s.o is not None else x),
    "super": (lambda m: super(nn.Module, m), lambda s, x: x * 2 if s.o is not None else x),
    "dict_key": (lambda m: {m: 2.0}, lambda s, x: x * s.o[s]),
    "dict_tuple_key": (lambda m: {(m, 1): 2.0}, lambda s, x: x * s.o[s, 1]),
    "dict_values": (lambda m: {"m": m}.values(), lambda s, x: x * len(s.o)),
}


@pytest.mark.parametrize("name", sorted(HOLDERS))
def test_k13_module_is_freed(name):
    make, forward = HOLDERS[name]

    def program():
        m = Fn(forward)
        m.__dict__["o"] = make(m)
        with torch.no_grad():
            yield from warm("served", m, ramp(3))
        died = weakref.ref(m)
        del m
        gc.collect()
        yield "must:freed", died() is None

    eager_twin(program)()


@pytest.mark.parametrize("as_argument", [False, True])
@pytest.mark.parametrize("name", ["slots", "dataclass", "namespace"])
def test_k13_replaced_object_is_freed(name, as_argument):
    """An object that cannot be referenced weakly dies, with its tensors, when the program lets go of it."""
    make, _ = HOLDERS[name]

    def program():
        m = Fn(lambda s, x, o=None: x * (s.o.v if o is None else o.v))
        args = (make(None),) if as_argument else ()
        with torch.no_grad():
            for value in (2.0, 3.0, 4.0):
                held = make(ramp(3))
                held.v = value
                died = weakref.ref(held.m)
                if as_argument:
                    args = (held,)
                else:
                    m.__dict__["o"] = held
                yield from warm(f"{value}", m, ramp(3), *args)
                m.__dict__["o"], args, held = make(None), (make(None),), None
                m.o.v = args[0].v = 1.0
                if not as_argument:
                    args = ()
                gc.collect()
                yield "must:freed", died() is None
                yield f"after {value}", m(ramp(3), *args)

    eager_twin(program)()


@pytest.mark.parametrize("name", ["slots", "dataclass", "namespace"])
def test_k13_object_at_the_same_address(name):
    """One object after another is freed and made anew, often at the same place; each has a state of its own."""
    make, forward = HOLDERS[name]

    def program():
        m = Fn(forward)
        with torch.no_grad():
            for i in range(40):
                m.__dict__["o"] = None
                m.__dict__["o"] = make(None)
                m.o.v = 2.0 + i % 5
                yield f"{i}", [m(ramp(3)) for _ in range(3)]

    eager_twin(program, served=True)()


@eager_twin(served=True)
def test_namespace_attribute_changes():
    """Attributes of types.SimpleNamespace are read in C, but are as mutable as any."""
    m = Fn(lambda s, x: x * s.o.v, o=types.SimpleNamespace(v=2.0))
    with torch.no_grad():
        yield from warm("two", m, ramp(3))
        m.o.v = 9.0
        yield from warm("nine", m, ramp(3))
        del m.o.v
        yield "gone", attempt(m, ramp(3))


@eager_twin(served=True)
def test_generic_alias_forwards_to_its_class():
    class Registry:
        scale = 2.0
        __class_getitem__ = classmethod(types.GenericAlias)

    alias = Registry[int]
    m = Fn(lambda s, x: x * alias.scale)
    with torch.no_grad():
        yield from warm("two", m, ramp(3))
        Registry.scale = 9.0
        yield from warm("nine", m, ramp(3))


@pytest.mark.parametrize("attribute", ["__name__", "__qualname__"])
@pytest.mark.parametrize("by", ["attribute", "repr", "format", "object"])
def test_class_is_renamed(attribute, by):
    class Named:
        pass

    reads = {
        "attribute": lambda s: getattr(s.kind, attribute),
        "repr": lambda s: repr(s.kind),
        "format": lambda s: f"{s.kind} {s.kind!s} {s.kind!r}",
        "object": lambda s: f"{s.instance}".split(" at ")[0],
    }

    def program():
        Named.__name__ = Named.__qualname__ = "Named"
        m = Fn(lambda s, x: (x * 2, reads[by](s)), kind=Named, instance=Named())
        with torch.no_grad():
            yield from warm("named", m, ramp(3))
            setattr(Named, attribute, "Renamed")
            yield from warm("renamed", m, ramp(3))

    eager_twin(program, served=True)()


# ---------------------------------------------------------------- K14: identity of objects that compare by value
def own_tuple() -> tuple[Any, ...]:
    return tuple(range(1, 3))  # no constant: a new object each time


@pytest.mark.parametrize("make", [own_tuple, lambda: float("1.5"), lambda: "".join(["a", "b c"]), lambda: 10**20 + 1])
@pytest.mark.parametrize("by", ["is", "id"])
def test_k14_equal_values_in_two_places(make, by):
    def forward(s, x):
        same = s.a is s.b if by == "is" else id(s.a) == id(s.b)
        return x * 2 if same else x * 3

    def program():
        m = Fn(forward)
        with torch.no_grad():
            m.a = m.b = make()
            yield from warm("one object", m, ramp(3))
            m.b = make()
            yield from warm("two objects", m, ramp(3))
            m.a = m.b
            yield from warm("one again", m, ramp(3))

    eager_twin(program)()


@pytest.mark.parametrize("make", [own_tuple, lambda: float("1.5"), lambda: ([],)])
def test_k14_argument_of_plain_value(make):
    def program():
        m = Fn(lambda s, x, t: x * 2 if t is s.t else x * 3)
        t = m.t = make()
        with torch.no_grad():
            for _ in range(4):
                yield "the object", m(ramp(3), t)
            yield "an equal one", m(ramp(3), make())
            m.t = make()
            yield "equal state", m(ramp(3), t)
            for _ in range(4):
                yield "two arguments", m(ramp(3), t=t)

    eager_twin(program)()


@eager_twin
def test_k14_two_arguments_of_plain_value():
    m = Fn(lambda s, x, a, b: x * 2 if a is b else x * 3)
    t = own_tuple()
    with torch.no_grad():
        for _ in range(4):
            yield "one object", m(ramp(3), t, t)
        yield "two objects", m(ramp(3), t, own_tuple())


NAN_READS: dict[str, Callable[..., Any]] = {
    "in": lambda s: s.a in [s.b],
    "list": lambda s: [s.a] == [s.b],
    "tuple": lambda s: (1, s.a) == (1, s.b),
    "dict": lambda s: {s.a: 1}.get(s.b) == 1,
    "index": lambda s: [s.b].count(s.a) == 1,
}


@pytest.mark.parametrize("make", [lambda: float("nan"), lambda: complex(float("nan"), 1)])
@pytest.mark.parametrize("name", sorted(NAN_READS))
def test_k14_nan_is_equal_to_itself_only(name, make):
    def program():
        m = Fn(lambda s, x: x * 2 if NAN_READS[name](s) else x * 3)
        with torch.no_grad():
            m.a = m.b = make()
            yield from warm("one object", m, ramp(3))
            m.b = make()
            yield from warm("two objects", m, ramp(3))

    eager_twin(program)()


@eager_twin(served=True)
def test_k14_singletons_and_constants_are_planned():
    m = Fn(lambda s, x, flag=None: x * 2 if flag is None and s.mode is None and s.on is True else x * 3)
    m.mode, m.on = None, True
    with torch.no_grad():
        yield from warm("none", m, ramp(3))
        m.on = False
        yield from warm("off", m, ramp(3))


# ---------------------------------------------------------------- K16, and K12's rest
@eager_twin(served=True)
def test_k16_annotations_replaced():
    def annotated(v):
        pass

    kept = annotated.__annotations__ = {"v": 2.0}
    m = Fn(lambda s, x: x * annotated.__annotations__["v"])
    with torch.no_grad():
        yield from warm("two", m, ramp(3))
        annotated.__annotations__ = {"v": 9.0}
        yield from warm("nine", m, ramp(3))
        annotated.__annotations__["v"] = 4.0
        yield from warm("four", m, ramp(3))
        yield "kept", kept


@eager_twin
def test_k16_annotations_from_the_compiler():
    def annotated(v: 2.0):  # a string, which the import at the top of this file makes of it
        pass

    m = Fn(lambda s, x: x * float(annotated.__annotations__["v"]))
    with torch.no_grad():
        yield from warm("two", m, ramp(3))
        annotated.__annotations__ = {"v": 9.0}
        yield from warm("nine", m, ramp(3))


@eager_twin
def test_k16_methods_called_by_c_iterators():
    calls = operator.methodcaller("tolist"), operator.attrgetter("_version")
    m = Fn(lambda s, x: [list(map(call, [x])) for call in calls])
    with torch.no_grad():
        for i in range(6):
            yield f"{i}", m(ramp(3) + i)


@eager_twin
def test_k16_tensor_made_by_a_partial():
    m = Fn(lambda s, x: functools.partial(torch.tensor, data=[x.sum(), x.max()])())
    n = Fn(lambda s, x: x.new_tensor(collections.deque([x.sum()])))
    with torch.no_grad():
        for i in range(6):
            yield f"{i}", (m(ramp(3) + i), attempt(n, ramp(3) + i))


@eager_twin
def test_k12_context_of_an_exception():
    def forward(s, x):
        try:
            s.d["missing"]
        except KeyError as e:
            return x * 2 if e.__context__ is None else x * 3

    m = Fn(forward, d={})
    with torch.no_grad():
        yield from warm("none handled", m, ramp(3))
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            yield from warm("one handled", m, ramp(3))
