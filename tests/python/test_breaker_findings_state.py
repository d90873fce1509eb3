# ruff: noqa: RUF015, RUF017, C414, E731, PIE810, UP030, UP032 - lists of C iterators, copies and rows of lambdas are the point
"""State that C code reads or writes on behalf of Python, found by an attack: K1 to K8, K11 and K12.

Each row is a forward, the attributes it reads, and a change that eager notices. Where such a program is refused, only
equality with eager counts.
"""

from __future__ import annotations

import array
import collections
import copy
import ctypes
import dataclasses
import functools
import gc
import itertools
import operator
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from eager_twin import Fn, attempt, eager_twin, ramp, warm

Row = tuple[Callable[..., Any], Callable[[], dict[str, Any]], Callable[[Any], Any]]


def run_row(row: Row) -> None:
    forward, attributes, change = row

    def program():
        m = Fn(forward)
        for name, value in attributes().items():
            setattr(m, name, value)
        kept = {name: value for name, value in vars(m).items() if isinstance(value, (list, dict, set))}
        with torch.no_grad():
            yield from warm("before", m, ramp(3))
            change(m)
            yield from warm("after", m, ramp(3))
        yield "state", {name: repr(value) for name, value in kept.items() if not name.startswith("_")}

    eager_twin(program)()


def put(name: str, key: Any, value: Any) -> Callable[[Any], Any]:
    return lambda m: operator.setitem(getattr(m, name), key, value)


def put_inner(name: str, outer: Any, key: Any, value: Any) -> Callable[[Any], Any]:
    return lambda m: operator.setitem(getattr(m, name)[outer], key, value)


def append_inner(name: str, outer: Any, value: Any) -> Callable[[Any], Any]:
    return lambda m: getattr(m, name)[outer].append(value)


def nothing(m: Any) -> None:
    pass


class Ranked:
    def __init__(self, rank: float) -> None:
        self.rank = rank

    def __repr__(self) -> str:
        return f"Ranked({self.rank})"


class Slots:
    __slots__ = ("__weakref__", "scale")

    def __init__(self, scale: float) -> None:
        self.scale = scale


@dataclasses.dataclass(slots=True)
class SlotData:
    scale: float = 2.0


class Deque(collections.deque):
    pass


class Bytes(bytearray):
    pass


class Space(types.SimpleNamespace):
    pass


class Sequence:
    def __init__(self, *values: Any) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, i: int) -> Any:
        return self.values[i]


def nested(value: Any, depth: int) -> list[Any]:
    result = [value]
    for _ in range(depth):
        result = [result]
    return result


def innermost(value: list[Any]) -> list[Any]:
    while isinstance(value[0], list):
        value = value[0]
    return value


def effect(value: Any, result: Any) -> Any:
    """The result, after something was done for its effect."""
    return result


def set_first(values: Any, value: Any) -> None:
    values[0] = value


LISTS: Callable[[], dict[str, Any]] = lambda: {"a": [[1], [2]]}
RANKED: Callable[[], dict[str, Any]] = lambda: {"a": [Ranked(1.0), Ranked(2.0)]}

K1: dict[str, Row] = {
    "map_append": (lambda s, x: effect(list(map(s.a.append, [1, 2])), x * 2), lambda: {"a": []}, nothing),
    "map_pop": (lambda s, x: effect(list(map(s.a.pop, [0])), x * 2), lambda: {"a": list(range(20))}, nothing),
    "map_setdefault": (
        lambda s, x: effect([*map(s.a.setdefault, ["k"])], x * 2),
        lambda: {"a": {}},
        lambda m: m.a.clear(),
    ),
    "map_method": (
        lambda s, x: effect(list(map(operator.methodcaller("append", 1), s.a)), x * 2),
        lambda: {"a": [[]]},
        nothing,
    ),
    "map_get": (lambda s, x: x * list(map(s.d.get, ("a",)))[0], lambda: {"d": {"a": 1.0}}, put("d", "a", 9.0)),
    "map_getitem": (lambda s, x: x * list(map(s.d.__getitem__, (0,)))[0], lambda: {"d": [1.0]}, put("d", 0, 9.0)),
    "map_contains": (
        lambda s, x: x * 2 if any(map(s.a.__contains__, (1,))) else x,
        lambda: {"a": {5}},
        lambda m: m.a.add(1),
    ),
    "sorted_key": (
        lambda s, x: x * sorted((1.0, 2.0), key=s.d.get)[0],
        lambda: {"d": {1.0: 1, 2.0: 2}},
        put("d", 1.0, 9),
    ),
    "sorted_partial_key": (
        lambda s, x: x * functools.partial(sorted, key=s.d.get)((1.0, 2.0))[0],
        lambda: {"d": {1.0: 1, 2.0: 2}},
        put("d", 1.0, 9),
    ),
    "sorted_index": (
        lambda s, x: x * sorted((1.0, 2.0), key=s.d.index)[0],
        lambda: {"d": [1.0, 2.0]},
        lambda m: m.d.reverse(),
    ),
    "min_key": (lambda s, x: x * min((1.0, 2.0), key=s.d.get), lambda: {"d": {1.0: 1, 2.0: 2}}, put("d", 1.0, 9)),
    "map_len": (lambda s, x: x * list(map(len, s.a))[0], LISTS, append_inner("a", 0, 3)),
    "map_sum": (lambda s, x: x * list(map(sum, s.a))[0], LISTS, append_inner("a", 0, 3)),
    "map_tuple": (lambda s, x: x * list(map(tuple, s.a))[0][0], LISTS, put_inner("a", 0, 0, 9)),
    "map_bool": (lambda s, x: x * sum(map(bool, s.a)), lambda: {"a": [[], [2]]}, append_inner("a", 0, 3)),
    "map_str": (lambda s, x: x * len("".join(map(str, s.a))), LISTS, put_inner("a", 0, 0, 900)),
    "filter_none": (lambda s, x: x * len(list(filter(None, s.a))), lambda: {"a": [[], [2]]}, append_inner("a", 0, 3)),
    "map_itemgetter": (
        lambda s, x: x * list(map(operator.itemgetter(0), s.a))[0],
        LISTS,
        put_inner("a", 0, 0, 9),
    ),
    "map_attrgetter": (
        lambda s, x: x * list(map(operator.attrgetter("rank"), s.a))[0],
        RANKED,
        lambda m: setattr(m.a[0], "rank", 9.0),
    ),
    "sorted_attrgetter": (
        lambda s, x: x * 2 if sorted(s.a, key=operator.attrgetter("rank"))[0] is s.a[0] else x * 3,
        RANKED,
        lambda m: setattr(m.a[0], "rank", 9.0),
    ),
    "groupby_attrgetter": (
        lambda s, x: x * len(list(itertools.groupby(s.a, key=operator.attrgetter("rank")))),
        lambda: {"a": [Ranked(1.0), Ranked(1.0)]},
        lambda m: setattr(m.a[0], "rank", 5.0),
    ),
    "takewhile_get": (
        lambda s, x: x * len(list(itertools.takewhile(s.d.get, (1, 2, 3)))),
        lambda: {"d": {1: 1, 2: 1, 3: 0}},
        put("d", 2, 0),
    ),
    "filterfalse_contains": (
        lambda s, x: x * len(list(itertools.filterfalse(s.d.__contains__, (1, 2, 3)))),
        lambda: {"d": {1}},
        lambda m: m.d.add(2),
    ),
}

FLOATS: Callable[[], dict[str, Any]] = lambda: {"a": array.array("f", [2.0, 3.0])}
DEQUE: Callable[[], dict[str, Any]] = lambda: {"a": Deque([2.0, 3.0])}

K2: dict[str, Row] = {
    "array_index": (lambda s, x: x * s.a[0], FLOATS, put("a", 0, 7.0)),
    "array_tensor": (lambda s, x: x * torch.tensor(s.a)[0], FLOATS, put("a", 0, 7.0)),
    "array_iteration": (lambda s, x: x * next(v for v in s.a), FLOATS, put("a", 0, 7.0)),
    "array_len": (lambda s, x: x * len(s.a), FLOATS, lambda m: m.a.append(1.0)),
    "array_sum": (lambda s, x: x * sum(s.a), FLOATS, put("a", 0, 7.0)),
    "array_in": (lambda s, x: x * 2 if 7.0 in s.a else x, FLOATS, put("a", 0, 7.0)),
    "array_index_of_tensor": (lambda s, x: x[s.a], lambda: {"a": array.array("q", [0, 1])}, put("a", 0, 2)),
    "deque_index": (lambda s, x: x * s.a[0], DEQUE, put("a", 0, 7.0)),
    "deque_iteration": (lambda s, x: x * next(v for v in s.a), DEQUE, put("a", 0, 7.0)),
    "deque_len": (lambda s, x: x * len(s.a), DEQUE, lambda m: m.a.append(1.0)),
    "deque_truth": (lambda s, x: x * 2 if s.a else x, DEQUE, lambda m: m.a.clear()),
    "bytes_index": (lambda s, x: x * s.a[0], lambda: {"a": Bytes(b"\x02\x03")}, put("a", 0, 7)),
    "ctypes_index": (lambda s, x: x * s.a[0], lambda: {"a": (ctypes.c_float * 2)(2.0, 3.0)}, put("a", 0, 7.0)),
    "space_format": (lambda s, x: x * len(f"{s.a}"), lambda: {"a": Space(v=1)}, lambda m: setattr(m.a, "v", 222)),
}

K3: dict[str, Row] = {
    "max_values": (
        lambda s, x: x * max(s.a.values())[0],
        lambda: {"a": {"a": [1.0], "b": [2.0]}},
        put_inner("a", "a", 0, 9.0),
    ),
    "any_values": (lambda s, x: x * 2 if any(s.a.values()) else x, lambda: {"a": {"a": []}}, append_inner("a", "a", 1)),
    "any_generator": (lambda s, x: x * 2 if any(v for v in s.a) else x, lambda: {"a": [[]]}, append_inner("a", 0, 1)),
    "all_generator": (
        lambda s, x: x * 2 if all(v for v in s.a.values()) else x,
        lambda: {"a": {"q": [1]}},
        lambda m: m.a["q"].clear(),
    ),
    "max_generator": (lambda s, x: x * max(v for v in s.a)[0], LISTS, put_inner("a", 0, 0, 9)),
    "sum_values": (lambda s, x: x * len(sum(s.a.values(), [])), lambda: {"a": {"a": [1]}}, append_inner("a", "a", 3)),
    "sum_generator": (lambda s, x: x * len(sum((v for v in s.a), [])), LISTS, append_inner("a", 0, 3)),
    "dict_of_pairs": (lambda s, x: x * dict(s.a)["a"], lambda: {"a": [["a", 1.0]]}, put_inner("a", 0, 1, 9.0)),
    "in_lists": (lambda s, x: x * 2 if [1] in s.a else x, LISTS, put_inner("a", 0, 0, 9)),
    "in_tuple": (lambda s, x: x * 2 if [1] in s.a else x, lambda: {"a": ([1],)}, put_inner("a", 0, 0, 9)),
    "in_values": (lambda s, x: x * 2 if [1] in s.a.values() else x, lambda: {"a": {1: [1]}}, put_inner("a", 1, 0, 9)),
    "in_items": (
        lambda s, x: x * 2 if ("k", [1]) in s.a.items() else x,
        lambda: {"a": {"k": [1]}},
        put_inner("a", "k", 0, 9),
    ),
    "equal_items": (
        lambda s, x: x * 2 if s.a.items() == {"k": [1]}.items() else x,
        lambda: {"a": {"k": [1]}},
        put_inner("a", "k", 0, 9),
    ),
    "index_of_list": (lambda s, x: x * (1 + s.a.index([2])), LISTS, put_inner("a", 0, 0, 2)),
    "index_in_tuple": (lambda s, x: x * (1 + s.a.index([2])), lambda: {"a": ([1], [2])}, put_inner("a", 0, 0, 2)),
    "count_of_list": (lambda s, x: x * s.a.count([2]), LISTS, put_inner("a", 0, 0, 2)),
    "sort_of_copy": (
        lambda s, x: (t := list(s.a), t.sort(), x * 2 if t[0] is s.a[0] else x * 3)[2],
        LISTS,
        put_inner("a", 0, 0, 9),
    ),
    "deep_equality": (
        lambda s, x: x * 2 if s.a == s.b else x,
        lambda: {"a": nested(1, 20), "b": nested(1, 20)},
        lambda m: set_first(innermost(m.a), 9),
    ),
    "compress": (
        lambda s, x: x * len(list(itertools.compress([1, 2], (v for v in s.a)))),
        lambda: {"a": [[], [2]]},
        append_inner("a", 0, 1),
    ),
    "accumulate": (
        lambda s, x: x * len(list(itertools.accumulate(v for v in s.a))[-1]),
        LISTS,
        append_inner("a", 0, 1),
    ),
}

K4_AND_K5: dict[str, Row] = {
    "copy_slots": (
        lambda s, x: x * copy.copy(s.a).scale,
        lambda: {"a": Slots(2.0)},
        lambda m: setattr(m.a, "scale", 9.0),
    ),
    "deepcopy_slots": (
        lambda s, x: x * copy.deepcopy(s.a).scale,
        lambda: {"a": Slots(2.0)},
        lambda m: setattr(m.a, "scale", 9.0),
    ),
    "copy_dataclass": (
        lambda s, x: x * copy.copy(s.a).scale,
        lambda: {"a": SlotData(2.0)},
        lambda m: setattr(m.a, "scale", 9.0),
    ),
    "reduce": (
        lambda s, x: x * s.a.__reduce_ex__(4)[2][1]["scale"],
        lambda: {"a": Slots(2.0)},
        lambda m: setattr(m.a, "scale", 9.0),
    ),
    "dir": (
        lambda s, x: x * len([k for k in s.a.__dir__() if k[:1] == "z"]),
        lambda: {"a": Ranked(2.0)},
        lambda m: setattr(m.a, "zz", 9.0),
    ),
    "format_positional": (
        lambda s, x: x * float("{0.rank}".format(s.a)),
        lambda: {"a": Ranked(2.0)},
        lambda m: setattr(m.a, "rank", 9.0),
    ),
    "format_keyword": (
        lambda s, x: x * float("{c.rank}".format(c=s.a)),
        lambda: {"a": Ranked(2.0)},
        lambda m: setattr(m.a, "rank", 9.0),
    ),
}

K8: dict[str, Row] = {
    "deque_append": (lambda s, x: effect(s.a.append(1), x * 2), DEQUE, nothing),
    "deque_store": (lambda s, x: effect(set_first(s.a, len(s.a) + 0.5), x * 2), DEQUE, put("a", 0, 9)),
    "deque_rotate": (lambda s, x: effect(s.a.rotate(1), x * 2), DEQUE, nothing),
    "array_add": (lambda s, x: effect(set_first(s.a, s.a[0] + 1), x * 2), FLOATS, nothing),
    "bytes_store": (lambda s, x: effect(set_first(s.a, 9), x * 2), lambda: {"a": Bytes(b"ab")}, put("a", 0, 7)),
    "ctypes_add": (
        lambda s, x: effect(set_first(s.a, s.a[0] + 1), x * 2),
        lambda: {"a": (ctypes.c_float * 2)(2.0, 3.0)},
        nothing,
    ),
}


@pytest.mark.parametrize("name", sorted(K1))
def test_k1_c_function_as_callback(name):
    run_row(K1[name])


@pytest.mark.parametrize("name", sorted(K2))
def test_k2_c_types_made_at_run_time(name):
    run_row(K2[name])


@pytest.mark.parametrize("name", sorted(K3))
def test_k3_c_consumer_of_nested_containers(name):
    run_row(K3[name])


@pytest.mark.parametrize("name", sorted(K4_AND_K5))
def test_k4_k5_instance_read_whole_in_c(name):
    run_row(K4_AND_K5[name])


@pytest.mark.parametrize("name", sorted(K8))
def test_k8_c_container_written(name):
    forward, attributes, change = K8[name]

    def program():
        m = Fn(forward)
        m.a = attributes()["a"]
        with torch.no_grad():
            for i in range(6):
                yield f"before {i}", (m(ramp(3)), repr(list(m.a)))
            change(m)
            for i in range(3):
                yield f"after {i}", (m(ramp(3)), repr(list(m.a)))

    eager_twin(program)()


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.tensor(collections.deque([x.sum(), x.max()])),
        lambda x: torch.tensor(Sequence(x.sum(), x.max())),
        lambda x: torch.tensor(nested(x.sum(), 10)),
        lambda x: torch.as_tensor([Sequence(x.sum())]),
        lambda x: x.new_tensor(collections.deque([x.sum()])),
    ],
)
def test_k6_tensor_made_of_tensors_in_containers(make):
    def program():
        m = Fn(lambda s, x: make(x))
        with torch.no_grad():
            for i in range(6):
                yield f"{i}", attempt(m, ramp(3) + i // 3)

    eager_twin(program)()


@pytest.mark.parametrize("kind", ["list", "dict", "nested"])
def test_k7_argument_is_also_state(kind):
    make: Callable[[float], Any] = {
        "list": lambda v: [v],
        "dict": lambda v: {0: v},
        "nested": lambda v: [[v], [v]],
    }[kind]
    read = (lambda c: c[0][0]) if kind == "nested" else (lambda c: c[0])

    def program():
        m = Fn(lambda s, x, c: x * read(c) + read(s.c))
        c = m.c = make(2.0)
        with torch.no_grad():
            yield from warm("the same", m, ramp(3), c)
            set_first(c[0] if kind == "nested" else c, 5.0)
            yield from warm("another", m, ramp(3), make(2.0))
            yield from warm("the same again", m, ramp(3), c)

    eager_twin(program)()


@eager_twin
def test_k7_argument_compared_with_state_by_identity():
    m = Fn(lambda s, x, c: x * 2 if c is s.c else x * 3)
    c = m.c = [2.0]
    with torch.no_grad():
        yield from warm("the same", m, ramp(3), c)
        yield from warm("another", m, ramp(3), [2.0])
        yield from warm("the same again", m, ramp(3), c)


@eager_twin
def test_k7_returned_state_that_was_the_argument():
    m = Fn(lambda s, x, c: (x * 2, s.c))
    c = m.c = [2.0]
    with torch.no_grad():
        for i in range(4):
            y = m(ramp(3), c)
            yield f"the same {i}", (y[0], y[1] is c)
        other = [2.0]
        y = m(ramp(3), other)
        yield "another", (y[0], y[1] is c, y[1] is other)


@pytest.mark.parametrize("of", ["object", "tensor"])
def test_k11_callback_of_a_weak_reference(of):
    def program():
        log: list[Any] = []

        def forward(s, x):
            made = Ranked(1.0) if of == "object" else x * 3
            s.keep = weakref.ref(made, lambda reference: log.append(1)) if s.python else None
            reference = weakref.ref(made, log.append)
            return x * 2 if reference() is made else x

        m = Fn(forward, keep=None, python=False)
        with torch.no_grad():
            for i in range(6):
                yield f"{i}", m(ramp(3))
                gc.collect()
                yield f"log {i}", len(log)

    eager_twin(program)()


@pytest.mark.parametrize("by", ["exc_info", "exception"])
def test_k12_handled_exception_of_the_caller(by):
    read = (lambda: sys.exc_info()[0]) if by == "exc_info" else sys.exception

    def program():
        m = Fn(lambda s, x: x * 2 if read() is None else x * 3)
        with torch.no_grad():
            yield from warm("none", m, ramp(3))
            try:
                raise ZeroDivisionError
            except ZeroDivisionError:
                yield from warm("one", m, ramp(3))

    eager_twin(program)()
