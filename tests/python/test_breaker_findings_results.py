"""Parts of results that a plan must not hand out from the traced call, nor keep alive, found by an attack."""

from __future__ import annotations

import collections
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from eager_twin import Fn, eager_twin, full
from torch import nn


class Thing:
    def make(self) -> float:
        return 1.0


def is_freed(reference: Any) -> bool:
    gc.collect()
    return reference() is None


@eager_twin
def test_factory_made_by_the_call():
    def forward(self, x):
        y = x * 2
        return collections.defaultdict(lambda: y, a=x + 1)

    m = Fn(forward)
    with torch.no_grad():
        for i in range(6):
            result = m(full(i, 2))
            yield f"present {i}", result["a"]
            yield f"missing {i}", result["b"]


@eager_twin(served=True)
def test_factory_of_the_module():
    m = Fn(lambda self, x: collections.defaultdict(self.factory, a=x + 1), factory=list)
    with torch.no_grad():
        for row, factory in enumerate((list, dict, None, Thing().make, Thing, lambda: 7)):
            m.factory = factory
            for i in range(5):
                result = m(full(i, 2))
                yield f"{row} {i}", result["a"]
                yield "must:the same factory", result.default_factory is factory
        reference = weakref.ref(m)
        del m, result
    yield "must:freed", is_freed(reference)


@eager_twin(served=True)
def test_factory_that_reaches_the_module():
    m = Fn(lambda self, x: collections.defaultdict(self.factory, a=x + 1))
    m.factory = m.eval
    with torch.no_grad():
        for i in range(6):
            yield f"{i}", m(full(i, 2))["a"]
    reference = weakref.ref(m)
    del m
    yield "must:freed", is_freed(reference)


@eager_twin(served=True)
def test_modules_as_keys():
    m = Fn(lambda self, x: {self: x + 1, self.child: self.child(x), (self.child, 1): x, "name": x}, child=nn.ReLU())
    with torch.no_grad():
        for i in range(6):
            result = m(full(i, 2))
            yield f"{i}", list(result.values())
            yield "must:the same keys", list(result) == [m, m.child, (m.child, 1), "name"]
        replaced = weakref.ref(m.child)
        m.child = nn.Tanh()
        del result
        yield "must:the replaced key is freed", is_freed(replaced)
        for i in range(4):
            result = m(full(i, 2))
            yield f"replaced {i}", list(result.values())
            yield "must:the new keys", list(result) == [m, m.child, (m.child, 1), "name"]
    reference = weakref.ref(m)
    del m, result
    yield "must:freed", is_freed(reference)


@eager_twin(served=True)
def test_arguments_as_keys():
    m, key = Fn(lambda self, x, key: {key: x + 1}), Thing()
    with torch.no_grad():
        for i in range(6):
            yield "must:the argument is the key", next(iter(m(full(i, 2), key))) is key
        for i in range(4):
            other = Thing()
            yield "must:another argument is the key", next(iter(m(full(i, 2), other))) is other
    references = [weakref.ref(key), weakref.ref(other)]
    del key, other
    yield "must:freed", all(map(is_freed, references))


@eager_twin(served=True)
def test_class_of_a_result_reaches_the_module():
    class Result:
        pass

    def forward(self, x):
        result = self.result_class()
        result.value = x + 1
        return result

    m = Fn(forward, result_class=Result)
    Result.model = m
    with torch.no_grad():
        for i in range(6):
            result = m(full(i, 2))
            yield f"{i}", result.value
            yield "must:its class", type(result) is Result
    reference = weakref.ref(m)
    del m, result, Result, forward
    yield "must:freed", is_freed(reference)


class Attributes:
    pass


class AttributeDict(dict):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Shared:
    everybodys: ClassVar[dict[str, Any]] = {"v": 1}

    def __init__(self) -> None:
        self.__dict__ = self.everybodys


def with_attributes_of(attributes: Any) -> Attributes:
    made = Attributes()
    made.__dict__ = attributes
    return made


def beside_its_attributes(self, x):
    made = Attributes()
    made.y = x + 1
    return made, vars(made)


def two_with_the_same_attributes(self, x):
    made = with_attributes_of({"y": x + 1})
    return made, with_attributes_of(made.__dict__)


FORWARDS: dict[str, Callable[..., Any]] = {
    "itself": lambda self, x: (AttributeDict(y=x + 1),),
    "of a class": lambda self, x: (Shared(), x + 1),
    "of the module": lambda self, x: (with_attributes_of(self.kept), x + 1),
    "beside its attributes": beside_its_attributes,
    "behind its attributes": lambda self, x: beside_its_attributes(self, x)[::-1],
    "two with the same": two_with_the_same_attributes,
    "a dict of another kind": lambda self, x: (with_attributes_of(collections.Counter(y=1)), x + 1),
}


@pytest.mark.parametrize("forward", FORWARDS.values(), ids=FORWARDS)
def test_attributes_that_something_else_holds(forward):
    def program():
        m = Fn(forward, kept={"v": 1})
        with torch.no_grad():
            for i in range(6):
                result = m(full(i, 2))
                first = result[0]
                (first if isinstance(first, dict) else vars(first))["stored"] = i
                yield f"type {i}", [type(getattr(item, "__dict__", None)).__name__ for item in result]
                for item in result:
                    yield f"stored {i}", getattr(item, "stored", None)
                    yield f"kept {i}", ("stored" in m.kept, "stored" in Shared.everybodys)
                    yield f"item {i}", dict.get(item, "stored") if isinstance(item, dict) else None
                m.kept.pop("stored", None)
                Shared.everybodys.pop("stored", None)

    eager_twin(program)()


@eager_twin
def test_full_cache_reuses_its_entry():
    misses = []

    @functools.lru_cache(maxsize=1)
    def number(key):
        misses.append(key)
        return len(misses)

    m = Fn(lambda self, x: x * number(2))
    with torch.no_grad():
        for i in range(5):
            yield f"before {i}", m(full(i, 2))
        number(3)
        for i in range(5):
            yield f"after {i}", m(full(i, 2))
