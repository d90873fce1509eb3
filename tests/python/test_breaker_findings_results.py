"""Parts of results that a plan must not hand out from the traced call, nor keep alive, found by an attack."""

from __future__ import annotations

import collections
import gc
import weakref
from typing import Any

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
