# ruff: noqa: E731, RUF005, RUF015, B905, UP031, PIE807, PIE810 - rows of lambdas that call C code in many ways are the point
"""State that C code reads: iterators, builtin functions, containers, namespaces, classes and functions.

Each row is a forward, its attributes, and changes after each of which eager gives something else.
"""

from __future__ import annotations

import collections
import functools
import itertools
import operator
import types
from typing import Any

import pytest
import torch
from eager_twin import Fn, attempt, eager_twin, ramp

Row = tuple[Any, ...]  # forward, attributes, changes


def with_attribute(name: str, value: Any, function: Any) -> Any:
    setattr(function, name, value)
    return function


ROWS: dict[str, Row] = {
    "zip_strict": (
        lambda s, x: x * sum(a * b for a, b in zip(s.a, s.b, strict=True)),
        lambda: {"a": [1.0, 2.0], "b": [3.0, 4.0]},
        lambda m: m.b.__setitem__(0, 9.0),
        lambda m: m.b.append(1.0),
    ),
    "enumerate_start": (
        lambda s, x: x * sum(i * v for i, v in enumerate(s.a, s.k)),
        lambda: {"a": [1.0, 2.0], "k": 1},
        lambda m: setattr(m, "k", 5),
        lambda m: m.a.pop(),
    ),
    "reversed": (lambda s, x: x * list(reversed(s.a))[0], lambda: {"a": [1.0, 2.0]}, lambda m: m.a.append(7.0)),
    "chain_from": (
        lambda s, x: x * sum(itertools.chain.from_iterable(s.a)),
        lambda: {"a": [[1.0], [2.0]]},
        lambda m: m.a[0].append(7.0),
    ),
    "product": (
        lambda s, x: x * sum(a * b for a, b in itertools.product(s.a, repeat=2)),
        lambda: {"a": [1.0, 2.0]},
        lambda m: m.a.append(7.0),
    ),
    "islice": (
        lambda s, x: x * sum(itertools.islice(s.a, s.k)),
        lambda: {"a": [1.0, 2.0, 3.0], "k": 2},
        lambda m: setattr(m, "k", 3),
        lambda m: m.a.__setitem__(0, 9.0),
    ),
    "pairwise": (
        lambda s, x: x * sum(b - a for a, b in itertools.pairwise(s.a)),
        lambda: {"a": [1.0, 2.0, 5.0]},
        lambda m: m.a.append(9.0),
    ),
    "batched_like": (
        lambda s, x: x * len(list(zip(*[iter(s.a)] * 2))),
        lambda: {"a": [1.0, 2.0, 5.0, 6.0]},
        lambda m: m.a.extend([9.0, 1.0]),
    ),
    "starmap": (
        lambda s, x: x * sum(itertools.starmap(operator.mul, s.a)),
        lambda: {"a": [[1.0, 2.0], [3.0, 4.0]]},
        lambda m: m.a[0].__setitem__(0, 9.0),
    ),
    "starmap_py": (
        lambda s, x: x * sum(itertools.starmap(lambda a, b: a * b * s.k, s.a)),
        lambda: {"a": [[1.0, 2.0], [3.0, 4.0]], "k": 1.0},
        lambda m: m.a[0].__setitem__(0, 9.0),
        lambda m: setattr(m, "k", 3.0),
    ),
    "tee": (lambda s, x: x * sum(itertools.tee(s.a)[0]), lambda: {"a": [1.0, 2.0]}, lambda m: m.a.append(5.0)),
    "zip_longest": (
        lambda s, x: x * sum(a + b for a, b in itertools.zip_longest(s.a, s.b, fillvalue=1.0)),
        lambda: {"a": [1.0, 2.0], "b": [1.0]},
        lambda m: m.b.append(5.0),
    ),
    "accumulate_fn": (
        lambda s, x: x * list(itertools.accumulate(s.a, func=operator.mul, initial=2.0))[-1],
        lambda: {"a": [1.0, 2.0]},
        lambda m: m.a.append(5.0),
    ),
    "accumulate_attr": (
        lambda s, x: x * list(itertools.accumulate(s.a, max))[-1][0],
        lambda: {"a": [[1.0], [2.0]]},
        lambda m: m.a[0].__setitem__(0, 9.0),
    ),
    "groupby": (
        lambda s, x: x * len([1 for k, g in itertools.groupby(s.a, key=lambda v: v // s.k)]),
        lambda: {"a": [1, 2, 3, 4], "k": 2},
        lambda m: setattr(m, "k", 4),
    ),
    "dropwhile": (
        lambda s, x: x * len(list(itertools.dropwhile(lambda v: v < s.k, s.a))),
        lambda: {"a": [1, 2, 3, 4], "k": 2},
        lambda m: setattr(m, "k", 4),
    ),
    "old_count": (lambda s, x: x * next(s.it), lambda: {"it": itertools.count(1)}, lambda m: None),
    "old_gen": (lambda s, x: x * next(s.it), lambda: {"it": (float(i) for i in range(50))}, lambda m: None),
    "old_cycle": (lambda s, x: x * next(s.it), lambda: {"it": itertools.cycle([1.0, 2.0, 3.0])}, lambda m: None),
    "iter_hint": (lambda s, x: x * operator.length_hint(s.it), lambda: {"it": iter([1, 2, 3])}, lambda m: next(m.it)),
    "sum_start": (lambda s, x: x * sum(s.a, s.k), lambda: {"a": [1.0], "k": 2.0}, lambda m: setattr(m, "k", 5.0)),
    "min_default": (
        lambda s, x: x * min(s.a, default=s.k),
        lambda: {"a": [], "k": 2.0},
        lambda m: setattr(m, "k", 5.0),
        lambda m: m.a.append(1.0),
    ),
    "str_methods": (
        lambda s, x: x * len(s.a.join(s.b)),
        lambda: {"a": "-", "b": ["a", "b"]},
        lambda m: m.b.append("ccc"),
        lambda m: setattr(m, "a", "----"),
    ),
    "str_translate": (
        lambda s, x: x * len("abc".translate(s.t)),
        lambda: {"t": {97: "xx"}},
        lambda m: m.t.__setitem__(97, "yyyy"),
    ),
    "percent_obj": (lambda s, x: x * len("%s" % (s.o,)), lambda: {"o": [1]}, lambda m: m.o.append(1000)),
    "fstring_spec": (lambda s, x: x * len(f"{1.5:{s.w}}"), lambda: {"w": "10"}, lambda m: setattr(m, "w", "20")),
    "int_base": (lambda s, x: x * int(s.a, s.b), lambda: {"a": "11", "b": 2}, lambda m: setattr(m, "b", 10)),
    "round_obj": (lambda s, x: x * round(s.a, s.n), lambda: {"a": 1.23456, "n": 1}, lambda m: setattr(m, "n", 4)),
    "divmod": (lambda s, x: x * divmod(s.a, 3)[1], lambda: {"a": 4}, lambda m: setattr(m, "a", 5)),
    "slice_indices": (
        lambda s, x: x * len(range(*s.a.indices(s.n))),
        lambda: {"a": slice(0, 5), "n": 3},
        lambda m: setattr(m, "n", 7),
        lambda m: setattr(m, "a", slice(0, 2)),
    ),
    "slice_obj_index": (
        lambda s, x: x[s.a],
        lambda: {"a": slice(0, 2)},
        lambda m: setattr(m, "a", slice(1, 2)),
        lambda m: setattr(m, "a", slice(None)),
    ),
    "range_state": (lambda s, x: x * len(s.a), lambda: {"a": range(3)}, lambda m: setattr(m, "a", range(5))),
    "dict_or": (
        lambda s, x: x * (s.a | s.b)["k"],
        lambda: {"a": {"k": 1.0}, "b": {"k": 2.0}},
        lambda m: m.b.__setitem__("k", 7.0),
        lambda m: m.b.clear(),
    ),
    "dict_fromkeys": (lambda s, x: x * len(dict.fromkeys(s.a)), lambda: {"a": ["a", "b"]}, lambda m: m.a.append("c")),
    "set_ops": (
        lambda s, x: x * len(s.a & s.b) + len(s.a ^ s.b),
        lambda: {"a": {1, 2}, "b": {2}},
        lambda m: m.b.add(1),
    ),
    "frozenset": (
        lambda s, x: x * len(s.a | s.b),
        lambda: {"a": frozenset({1, 2}), "b": {2}},
        lambda m: m.b.add(5),
        lambda m: setattr(m, "a", frozenset()),
    ),
    "keys_ops": (
        lambda s, x: x * len(s.a.keys() - s.b.keys()),
        lambda: {"a": {1: 1, 2: 1}, "b": {2: 2}},
        lambda m: m.b.__setitem__(1, 1),
    ),
    "defaultdict": (
        lambda s, x: x * s.a["k"],
        lambda: {"a": collections.defaultdict(lambda: 2.0, {"k": 3.0})},
        lambda m: m.a.pop("k"),
        lambda m: m.a.__setitem__("k", 6.0),
    ),
    "counter": (
        lambda s, x: x * s.a.most_common(1)[0][1],
        lambda: {"a": collections.Counter("aab")},
        lambda m: m.a.update("bbb"),
    ),
    "deque_max": (
        lambda s, x: x * len(collections.deque(s.a, s.n)),
        lambda: {"a": [1, 2, 3], "n": 2},
        lambda m: setattr(m, "n", 3),
    ),
    "proxy_nested": (
        lambda s, x: x * s.p["a"]["b"],
        lambda: {"p": types.MappingProxyType({"a": {"b": 2.0}})},
        lambda m: m.p["a"].__setitem__("b", 9.0),
        lambda m: setattr(m, "p", types.MappingProxyType({"a": {"b": 5.0}})),
    ),
    "ns_nested": (
        lambda s, x: x * s.p.a.b,
        lambda: {"p": types.SimpleNamespace(a=types.SimpleNamespace(b=2.0))},
        lambda m: setattr(m.p.a, "b", 9.0),
        lambda m: setattr(m.p, "a", types.SimpleNamespace(b=5.0)),
        lambda m: m.p.__dict__.__setitem__("a", types.SimpleNamespace(b=6.0)),
        lambda m: m.p.__init__(a=types.SimpleNamespace(b=1.0)),
    ),
    "ns_vars": (
        lambda s, x: x * sum(vars(s.p).values()),
        lambda: {"p": types.SimpleNamespace(a=1.0)},
        lambda m: setattr(m.p, "b", 9.0),
    ),
    "ns_hasattr": (
        lambda s, x: x * 2 if hasattr(s.p, "b") else x * 3,
        lambda: {"p": types.SimpleNamespace(a=1.0)},
        lambda m: setattr(m.p, "b", 9.0),
        lambda m: delattr(m.p, "b"),
    ),
    "ns_getattr_default": (
        lambda s, x: x * getattr(s.p, "b", 2.0),
        lambda: {"p": types.SimpleNamespace(a=1.0)},
        lambda m: setattr(m.p, "b", 9.0),
    ),
    "fn_attr": (
        lambda s, x: x * s.f.k,
        lambda: {"f": with_attribute("k", 2.0, lambda: 0)},
        lambda m: setattr(m.f, "k", 9.0),
    ),
    "fn_doc": (
        lambda s, x: x * len(s.f.__doc__ or ""),
        lambda: {"f": lambda: 0},
        lambda m: setattr(m.f, "__doc__", "abcd"),
    ),
    "fn_module": (
        lambda s, x: x * len(s.f.__module__ or ""),
        lambda: {"f": lambda: 0},
        lambda m: setattr(m.f, "__module__", "abcdefgh"),
    ),
    "builtin_self": (lambda s, x: x * len(s.f.__self__), lambda: {"f": [1].append}, lambda m: m.f(1)),
    "class_doc": (
        lambda s, x: x * len(type(s).__doc__ or ""),
        lambda: {},
        lambda m: setattr(type(m), "__doc__", "abc"),
    ),
    "class_module": (
        lambda s, x: x * len(type(s).__module__),
        lambda: {},
        lambda m: setattr(type(m), "__module__", "abcdefghijk"),
    ),
    "class_subclasses": (
        lambda s, x: x * len(type(s).__subclasses__()),
        lambda: {},
        lambda m: setattr(m, "sub", type("S", (type(m),), {})),
    ),
    "class_dict": (
        lambda s, x: x * len([k for k in type(s).__dict__ if k[:2] == "zq"]),
        lambda: {},
        lambda m: setattr(type(m), "zq1", 1),
    ),
    "code_replace": (
        lambda s, x: x * s.f(),
        lambda: {"f": eval("lambda: 2.")},
        lambda m: setattr(m.f, "__code__", (lambda: 9.0).__code__),
        lambda m: setattr(m.f, "__defaults__", ()),
    ),
    "is_frozenset": (
        lambda s, x: x * 2 if s.a is s.b else x * 3,
        lambda: (lambda q: {"a": q, "b": q})(frozenset([1, 2])),
        lambda m: setattr(m, "a", frozenset([1, 2])),
    ),
    "op_is": (
        lambda s, x: x * 2 if operator.is_(s.a, s.b) else x * 3,
        lambda: (lambda q: {"a": q, "b": q})((1, [2])),
        lambda m: setattr(m, "a", (1, m.b[1])),
    ),
}


@pytest.mark.parametrize("name", sorted(ROWS))
def test_state_read_by_c_code(name):
    forward, attributes, *changes = ROWS[name]

    def program():
        m = type("Fresh", (Fn,), {})(forward)  # changes of the class stay here
        for key, value in attributes().items():
            setattr(m, key, value)
        with torch.no_grad():
            for i, change in enumerate([lambda m: None, *changes]):
                change(m)
                for call in range(4):
                    yield f"change {i}, call {call}", attempt(m, ramp(3) + 1)

    eager_twin(program)()


class Slots:
    __slots__ = ("v",)

    def __init__(self, v: Any) -> None:
        self.v = v


# How an object without weak references is made of a number, and how forward reads it: each is freed before the next one
# is made, so that many come to the same address.
SUCCESSORS: dict[str, tuple[Any, Any]] = {
    "slots": (Slots, lambda o: o.v),
    "slots_of_slots": (lambda v: Slots(Slots(v)), lambda o: o.v.v),
    "slots_in_tuple": (lambda v: (Slots(v),), lambda o: o[0].v),
    "slots_in_list": (lambda v: [Slots(v), Slots(1.0)], lambda o: sum(item.v for item in o)),
    "slots_in_dict": (lambda v: {"k": Slots(v)}, lambda o: o["k"].v),
    "slots_in_slice": (lambda v: slice(Slots(v), None), lambda o: o.start.v),
    "namespace": (lambda v: types.SimpleNamespace(v=v), lambda o: o.v),
    "slice": (lambda v: slice(v, None), lambda o: o.start),
    "proxy": (lambda v: types.MappingProxyType({"k": v}), lambda o: o["k"]),
    "property": (lambda v: property(lambda s, v=v: v), lambda o: o.fget(None)),
    "slot_wrapper": (lambda v: v.__add__, lambda o: o(1.0)),
    "itemgetter": (lambda v: operator.itemgetter(int(v)), lambda o: o((1.0, 2.0, 3.0, 4.0))),
    "range": (lambda v: range(10**9, 10**9 + int(v)), lambda o: len(o)),
    "large_int": (lambda v: 10**18 + int(v), lambda o: o - 10**18),
    "int_enum": (lambda v: type("N", (int,), {})(10**12 + int(v)), lambda o: o - 10**12),
    "bytes_subclass": (lambda v: type("B", (bytes,), {})(bytes([int(v)])), lambda o: o[0]),
    "exception": (
        lambda v: ValueError(v) if v > 1 else KeyError(v),
        lambda o: 2.0 if isinstance(o, ValueError) else 3.0,
    ),
    "cell": (lambda v: types.CellType(v), lambda o: o.cell_contents),
}


@pytest.mark.parametrize("where", ["state", "argument"])
@pytest.mark.parametrize("name", sorted(SUCCESSORS))
def test_object_made_where_another_was(name, where):
    make, read = SUCCESSORS[name]

    def program():
        m = Fn(lambda s, x, o=None: x * read(s.o if o is None else o))
        with torch.no_grad():
            for i in range(16):
                m.o = None
                made = make(float(i % 4))
                if where == "state":
                    m.o, made = made, None
                yield f"{i}", [attempt(m, ramp(3), *([] if made is None else [made])) for _ in range(3)]
                made = None

    eager_twin(program)()


class Key:
    pass


def keys() -> dict[str, Any]:
    return {
        "object": Key(),
        "class": Key,
        "function": lambda: 0,
        "size": torch.Size([3]),
        "tuple": (torch.float32, torch.device("cpu"), 1),
        "tuple_of_object": (Key(), 1),
        "tuple_of_class": (Key, "k"),
        "frozenset": frozenset([1, 2]),
    }


@pytest.mark.parametrize("kind", sorted(keys()))
def test_dict_with_such_a_key(kind):
    """The key is found again after other entries came and went, and its value is the present one."""

    def program():
        m = Fn(lambda s, x: x * s.d.get(s.key, 5.0))
        m.key = keys()[kind]
        m.d = {m.key: 2.0}
        changes = [
            lambda: None,
            lambda: m.d.update({m.key: 8.0}),
            lambda: m.d.update(other=1),
            lambda: m.d.pop(m.key),
            lambda: m.d.update({m.key: 3.0}),
            lambda: m.d.clear(),
        ]
        with torch.no_grad():
            for i, change in enumerate(changes):
                change()
                for call in range(4):
                    yield f"change {i}, call {call}", m(ramp(3))

    eager_twin(program, served=True)()


@eager_twin
def test_identity_of_objects_without_weak_references():
    m = Fn(lambda s, x, a, b: x * 2 if a is b else x * 3 if a is s.o else x * 5)
    first, second = Slots(1.0), Slots(1.0)
    m.o = first
    with torch.no_grad():
        for a, b in [(first, first), (first, second), (second, second), (second, first), (first, first)]:
            for _ in range(4):
                yield "pair", m(ramp(3), a, b)
        m.o = second
        for a, b in [(first, second), (second, first)]:
            for _ in range(4):
                yield "other state", m(ramp(3), a, b)


@eager_twin(served=True)
def test_returned_object_without_weak_references():
    m = Fn(lambda s, x: (x * 2, s.o, s.where))
    with torch.no_grad():
        for i in range(3):
            m.o, m.where = Slots(i), slice(i, None)
            for _ in range(5):
                y = m(ramp(3))
                yield f"{i}", (y[0], y[1] is m.o, y[2] is m.where)
                del y


@pytest.mark.parametrize("read", ["call", "func", "wrapped", "get"])
def test_static_method_object_initialised_again(read):
    def program():
        held = staticmethod(lambda *args: 2.0)
        reads = {
            "call": lambda: held(),
            "func": lambda: held.__func__(),
            "wrapped": lambda: held.__wrapped__(),
            "get": lambda: held.__get__(None, int)(),
        }
        m = Fn(lambda s, x: x * reads[read]())
        with torch.no_grad():
            for i in range(3):
                for _ in range(4):
                    yield f"{i}", m(ramp(3))
                held.__init__(lambda *args, i=i: 9.0 + i)

    eager_twin(program)()


RESULTS: dict[str, tuple[Any, Any]] = {
    "deque": (lambda y: collections.deque([y], maxlen=3), lambda o: (o.maxlen, list(o))),
    "deque_subclass": (lambda y: type("D", (collections.deque,), {})([y]), lambda o: list(o)),
    "partial": (lambda y: functools.partial(torch.add, y, alpha=2), lambda o: o(y_of_call())),
    "itemgetter": (lambda y: operator.itemgetter(0, 1), lambda o: o("ab")),
    "count": (lambda y: itertools.count(3), lambda o: next(o)),
    "repeat": (lambda y: itertools.repeat(y, 2), lambda o: list(o)),
    "iterator": (lambda y: iter([y, y]), lambda o: list(o)),
    "namespace": (lambda y: types.SimpleNamespace(y=y), lambda o: o.y),
    "proxy": (lambda y: types.MappingProxyType({"y": y}), lambda o: o["y"]),
    "exception": (lambda y: ValueError(y), lambda o: o.args),
}


def y_of_call() -> torch.Tensor:
    return ramp(3) + 5


@pytest.mark.parametrize("name", sorted(RESULTS))
def test_result_is_an_object_of_c(name):
    make, use = RESULTS[name]

    def program():
        m = Fn(lambda s, x: make(x * 2))
        with torch.no_grad():
            for i in range(6):
                yield f"{i}", use(m(ramp(3)))

    eager_twin(program)()
