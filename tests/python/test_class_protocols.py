"""C code of CPython asks classes for special methods; a class that gets another one after the trace ends the plan."""

from __future__ import annotations

import collections
import enum
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from eager_twin import Fn, attempt, eager_twin, ramp, warm

Change = Callable[[], object]
CASES: dict[str, Callable[[type], tuple[Callable[[Any, Any], Any], Change]]] = {}


def case(function: Callable[[Any], tuple[Callable[[Any, Any], Any], Change]]) -> Any:
    CASES[function.__name__] = function
    return function


def sets(target: Any, **methods: Any) -> Change:
    def change() -> None:
        for name, method in methods.items():
            setattr(target, name, method)

    return change


def always(value: Any) -> Callable[..., Any]:
    return lambda *args: value


EQUAL = {"__eq__": always(True), "__hash__": always(1)}


@case
def tuples_compared(c: Any) -> Any:
    a, b = (c(), 1), (c(), 1)
    return (lambda s, x: x * 2 if a == b else x - 1), sets(c, **EQUAL)


@case
def lists_compared(c: Any) -> Any:
    a, b = [c(), 1], [c(), 1]
    return (lambda s, x: x * 2 if a == b else x - 1), sets(c, **EQUAL)


@case
def dicts_compared(c: Any) -> Any:
    a, b = {1: c()}, {1: c()}
    return (lambda s, x: x * 2 if a == b else x - 1), sets(c, **EQUAL)


@case
def named_tuples_compared(c: Any) -> Any:
    n = collections.namedtuple("n", "v")
    a, b = n(c()), n(c())
    return (lambda s, x: x * 2 if a == b else x - 1), sets(c, **EQUAL)


@case
def tuples_ordered(c: Any) -> Any:
    c.__lt__ = always(True)
    a, b = (c(), 1), (c(), 1)
    return (lambda s, x: x * 2 if a < b else x - 1), sets(c, __lt__=always(False))


@case
def smallest(c: Any) -> Any:
    c.__lt__ = lambda s, o: s.k < o.k
    a, b = c(), c()
    a.k, b.k = 1, 2
    return (lambda s, x: x * min([a, b]).k), sets(c, __lt__=lambda s, o: s.k > o.k)


@case
def place_in_a_list(c: Any) -> Any:
    a = c()
    values = [c(), a]
    return (lambda s, x: x * (1 + values.index(a))), sets(c, **EQUAL)


@case
def in_a_deque(c: Any) -> Any:
    a, values = c(), collections.deque([c()])
    return (lambda s, x: x * 2 if a in values else x - 1), sets(c, **EQUAL)


@case
def in_a_module_list(c: Any) -> Any:
    class Layer(torch.nn.Module):
        pass

    a, values = Layer(), torch.nn.ModuleList([Layer()])
    return (lambda s, x: x * 2 if a in values else x - 1), sets(Layer, **EQUAL)


@case
def any_of(c: Any) -> Any:
    values = [c()]
    return (lambda s, x: x * 2 if any(values) else x - 1), sets(c, __bool__=always(False))


@case
def all_of(c: Any) -> Any:
    values = (c(),)
    return (lambda s, x: x * 2 if all(values) else x - 1), sets(c, __len__=always(0))


@case
def filtered(c: Any) -> Any:
    values = (c(),)
    return (lambda s, x: x * len(list(filter(None, values)))), sets(c, __len__=always(0))


@case
def truth(c: Any) -> Any:
    a = c()
    return (lambda s, x: x * 2 if a else x - 1), sets(c, __len__=always(0))


@case
def summed(c: Any) -> Any:
    c.__radd__ = always(3)
    values = [c()]
    return (lambda s, x: x * sum(values)), sets(c, __radd__=always(4))


@case
def index_of_a_list(c: Any) -> Any:
    c.__index__ = always(0)
    i, values = c(), [2.0, 3.0]
    return (lambda s, x: x * values[i]), sets(c, __index__=always(1))


@case
def end_of_a_slice(c: Any) -> Any:
    c.__index__ = always(1)
    i, values = c(), [2.0, 3.0]
    return (lambda s, x: x * len(values[:i])), sets(c, __index__=always(2))


@case
def index_of_a_tensor(c: Any) -> Any:
    c.__index__ = always(1)
    i = c()
    return (lambda s, x: x[i]), sets(c, __index__=always(2))


@case
def class_attribute_becomes_a_descriptor(c: Any) -> Any:
    class Value:
        def __get__(self, instance: Any, owner: Any = None) -> float:
            return 5.0

    c.k = Value()
    a = c()
    a.__dict__["k"] = 2.0
    return (lambda s, x: x * a.k), sets(Value, __set__=always(None))


@case
def set_made_of_objects(c: Any) -> Any:
    a, b = c(), c()
    return (lambda s, x: x * len({a, b})), sets(c, **EQUAL)


@case
def dict_made_of_objects(c: Any) -> Any:
    a, b = c(), c()
    return (lambda s, x: x * len({a: 1, b: 2})), sets(c, **EQUAL)


@case
def dict_comprehension(c: Any) -> Any:
    values = [c(), c()]
    return (lambda s, x: x * len(dict.fromkeys(values)) * len({k: k is None for k in values})), sets(c, **EQUAL)


@case
def enum_members(c: Any) -> Any:
    class E(enum.Enum):
        A = 1
        B = 2

    a, b = E.A, E.B
    return (lambda s, x: x * 2 if a == b else x - 1), sets(E, **EQUAL)


@case
def metaclass(c: Any) -> Any:
    class Meta(type):
        pass

    class Base(metaclass=Meta):
        pass

    a = c()
    return (lambda s, x: x * 2 if isinstance(a, (int, Base)) else x - 1), sets(Meta, __instancecheck__=always(True))


@case
def partial_of_an_object(c: Any) -> Any:
    c.__call__ = lambda s, x: x * 2
    p = functools.partial(c())
    return (lambda s, x: p(x)), sets(c, __call__=lambda s, x: x * 3)


@case
def item_getter(c: Any) -> Any:
    c.__getitem__ = always(2.0)
    a, get = c(), operator.itemgetter(0)
    return (lambda s, x: x * get(a)), sets(c, __getitem__=always(3.0))


@case
def text_of_a_list(c: Any) -> Any:
    c.__repr__ = always("ab")
    a = c()
    return (lambda s, x: x * len(f"{[a]}")), sets(c, __repr__=always("abc"))


@case
def torch_function(c: Any) -> Any:
    c.__rmul__ = lambda s, o: o + 1
    a = c()
    return (lambda s, x: x * a), sets(c, __torch_function__=classmethod(always(7)))


@pytest.mark.parametrize("name", CASES)
def test_class_gets_another_method(name: str) -> None:
    def program() -> Iterator[Any]:
        forward, change = CASES[name](type("C", (), {}))
        m = Fn(forward)
        with torch.no_grad():
            yield from warm("as it is", m, ramp(3))
            change()
            yield "changed", attempt(m, ramp(3))
            yield "again", attempt(m, ramp(3))

    eager_twin(program)()
