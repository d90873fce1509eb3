"""C code of CPython asks classes for special methods; a class that gets another one after the trace ends the plan."""

from __future__ import annotations

import collections.abc
import enum
import functools
import io
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


@case
def position_in_a_pattern(c: Any) -> Any:
    c.__match_args__ = ("k",)
    a = c()
    a.k = 2.0

    def forward(s: Any, x: Any) -> Any:
        match a:
            case c(k):
                return x * k
        return x

    return forward, sets(a, k=5.0)


@case
def registered_as_a_sequence(c: Any) -> Any:
    c.__len__, c.__getitem__ = always(1), always(1.0)
    a = c()

    def forward(s: Any, x: Any) -> Any:
        match a:
            case [_]:
                return x * 2
        return x

    return forward, lambda: collections.abc.Sequence.register(c)


@case
def attribute_of_a_parameter(c: Any) -> Any:
    class Scaled(torch.nn.Parameter):
        gain = 2.0

    w = Scaled(torch.ones(3))
    return (lambda s, x: x * w.gain), sets(w, gain=5.0)


@case
def item_by_a_bound_method(c: Any) -> Any:
    table = {"k": 2.0}
    c.__getitem__ = table.__getitem__
    a = c()
    return (lambda s, x: x * a["k"]), lambda: table.update(k=5.0)


@case
def attribute_by_a_bound_method(c: Any) -> Any:
    table = {"k": 2.0}
    c.__getattr__ = table.get
    a = c()
    return (lambda s, x: x * a.k), lambda: table.update(k=5.0)


@case
def length_by_a_bound_method(c: Any) -> Any:
    values = [1]
    c.__len__ = values.__len__
    a = c()
    return (lambda s, x: x * len(a)), lambda: values.append(1)


@case
def any_of_a_generator(c: Any) -> Any:
    values = [c()]
    return (lambda s, x: x * 2 if any(v for v in values) else x - 1), sets(c, __bool__=always(False))


@case
def any_of_an_iterator(c: Any) -> Any:
    values = [c()]
    return (lambda s, x: x * 2 if any(iter(values)) else x - 1), sets(c, __bool__=always(False))


@case
def all_of_a_module_list(c: Any) -> Any:
    class Layer(torch.nn.Module):
        pass

    values = torch.nn.ModuleList([Layer()])
    return (lambda s, x: x * 2 if all(values) else x - 1), sets(Layer, __len__=always(0))


@case
def result_of_a_special_method(c: Any) -> Any:
    class Answer:
        pass

    c.__contains__ = always(Answer())
    a = c()
    return (lambda s, x: x * 2 if 1 in a else x - 1), sets(Answer, __bool__=always(False))


@case
def key_that_hashes_alike(c: Any) -> Any:
    c.__hash__ = lambda s: hash("name")
    c.__eq__ = always(False)
    values = {c(): 1.0, "name": 2.0}
    return (lambda s, x: x * values.get("name", 5.0)), sets(c, __eq__=always(True))


@case
def union_of_sets(c: Any) -> Any:
    c.__hash__ = always(1)
    c.__eq__ = always(False)
    a, b = {c()}, {c()}
    return (lambda s, x: x * len(a | b)), sets(c, __eq__=always(True))


@case
def index_of_a_store(c: Any) -> Any:
    c.__index__ = always(0)
    i = c()

    def forward(s: Any, x: Any) -> Any:
        values = [1.0, 2.0]
        values[i] = 7.0
        return x * values[0]

    return forward, sets(c, __index__=always(1))


@case
def slice_of_a_tensor(c: Any) -> Any:
    c.__index__ = always(1)
    i = c()
    return (lambda s, x: x[i:]), sets(c, __index__=always(2))


@case
def class_attribute_of_a_class_becomes_a_descriptor(c: Any) -> Any:
    class Value:
        k = 2.0

    c.v = Value()
    return (lambda s, x: x * c.v.k), sets(Value, __get__=lambda s, o, t: type("V", (), {"k": 5.0}))


@case
def class_of_a_class(c: Any) -> Any:
    class First(type):
        pass

    class Second(First):
        def __len__(cls) -> int:
            return 0

    made = First("Made", (), {})
    return (lambda s, x: x * 2 if made else x - 1), sets(made, __class__=Second)


@case
def class_that_is_raised(c: Any) -> Any:
    class Failure(Exception):
        pass

    def forward(s: Any, x: Any) -> Any:
        try:
            raise Failure
        except Failure:
            return x * 2
        except ValueError:
            return x * 3

    def refuse(self: Any) -> None:
        raise ValueError

    return forward, sets(Failure, __init__=refuse)


@case
def sorted_in_place(c: Any) -> Any:
    c.__lt__ = lambda s, o: s.k < o.k
    a, b = c(), c()
    a.k, b.k = 1, 2

    def forward(s: Any, x: Any) -> Any:
        values = [b, a]
        values.sort()
        return x * values[0].k

    return forward, sets(c, __lt__=lambda s, o: s.k > o.k)


@case
def list_with_an_iterator_of_its_own(c: Any) -> Any:
    class Values(list):
        pass

    def add(a: float, b: float = 0.0) -> float:
        return a + b

    values = Values([1.0, 2.0])
    return (lambda s, x: x * add(*values)), sets(Values, __iter__=lambda s: iter([5.0]))


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


@eager_twin
def test_init_that_is_a_bound_method() -> Iterator[Any]:
    log: list[Any] = []
    made = type("Made", (), {"__init__": log.append})

    def forward(s: Any, x: Any) -> Any:
        made(1)
        return x * 2

    with torch.no_grad():
        yield from warm("x", Fn(forward), ramp(3))
    yield "log", list(log)


@eager_twin
def test_setter_that_is_a_bound_method() -> Iterator[Any]:
    log: list[Any] = []
    holder = type("Holder", (), {"v": property(None, functools.partial(log.__setitem__, 0))})()
    log.append(0)

    def forward(s: Any, x: Any) -> Any:
        try:
            holder.v = 1
        except TypeError:
            log.append("raised")
        return x * 2

    with torch.no_grad():
        yield from warm("x", Fn(forward), ramp(3))
    yield "log", list(map(str, log))[1:]


@eager_twin
def test_exit_that_is_written_in_c() -> Iterator[Any]:
    left = io.StringIO()
    scope = type("Scope", (), {"__enter__": lambda s: s, "__exit__": functools.partial(print, file=left)})()

    def forward(s: Any, x: Any) -> Any:
        try:
            with scope:
                raise ValueError
        except ValueError:
            return x * 2

    with torch.no_grad():
        yield from warm("x", Fn(forward), ramp(3))
    yield "left", left.getvalue().count("ValueError")
