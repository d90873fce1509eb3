"""Guards compare addresses first: an object that takes the place and the address of the one of the trace is another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import cuvil
import pytest
import torch
from eager_twin import Fn, eager_twin, ramp, warm


def at_address(address: int, make: Callable[[], Any]) -> Any:
    """An object of `make` at that address, where another one has just died; any if the allocator does not give it."""
    kept = []
    for _ in range(10_000):
        made = make()
        if id(made) == address:
            return made
        kept.append(made)
    return kept[-1]


class Slotted:
    __slots__ = ("k",)


class Doubled(Slotted):
    __slots__ = ()


@eager_twin(served=True)
def test_code_at_the_address_of_the_old_one() -> Iterator[Any]:
    helper = eval("lambda x: x * 2.0")
    other = eval("lambda x: x * 7.0")
    m = Fn(lambda s, x: helper(x))
    with torch.no_grad():
        yield from warm("two", m, ramp(3))
        address = id(helper.__code__)
        helper.__code__ = other.__code__
        helper.__code__ = at_address(address, lambda: other.__code__.replace(co_consts=(None, 3.0)))
        yield from warm("three", m, ramp(3))


@pytest.mark.parametrize("owned", [True, False])
def test_defaults_at_the_address_of_the_old_ones(owned: bool) -> None:
    def program() -> Iterator[Any]:
        def make(factor: float) -> tuple[Any, ...]:
            return (factor, None if owned else lambda: factor)

        def helper(x, k=0.0, unused=None):
            return x * k

        helper.__defaults__ = make(2.0)
        m = Fn(lambda s, x: helper(x))
        with torch.no_grad():
            yield from warm("two", m, ramp(3))
            address = id(helper.__defaults__)
            helper.__defaults__ = None
            helper.__defaults__ = at_address(address, lambda: make(3.0))
            yield from warm("three", m, ramp(3))

    eager_twin(program, served=True)()


@eager_twin(served=True)
def test_closure_of_another_function_at_the_same_address() -> Iterator[Any]:
    def make(factor: float) -> Callable[[Any], Any]:
        return lambda x: x * factor

    helper = make(2.0)

    def forward(s, x):
        return helper(x)

    m = Fn(forward)
    with torch.no_grad():
        yield from warm("two", m, ramp(3))
        address = id(helper)
        helper = None
        helper = at_address(address, lambda: make(3.0))
        yield from warm("three", m, ramp(3))


@eager_twin(served=True)
def test_class_of_a_slot_changed() -> Iterator[Any]:
    holder, value = Slotted(), Slotted()
    holder.k = value
    m = Fn(lambda s, x: x * 2 if type(holder.k) is Doubled else x)
    with torch.no_grad():
        yield from warm("as it is", m, ramp(3))
        value.__class__ = Doubled
        yield from warm("doubled", m, ramp(3))
        value.__class__ = Slotted
        yield from warm("back", m, ramp(3))


def test_equal_defaults_keep_the_plan() -> None:
    def helper(x, k=2.0, name="name"):
        return x * k

    m = Fn(lambda s, x: helper(x))
    with cuvil.scope(), torch.no_grad():
        for _ in range(4):
            m(ramp(3))
        helper.__defaults__ = (float("2"), "".join(["na", "me"]))
        before = cuvil.stats()["planned"]
        m(ramp(3))
        assert cuvil.stats()["planned"] == before + 1


def test_a_piece_of_state_counts_once() -> None:
    def helper(x, k=2.0):
        return x * k

    m = Fn(lambda s, x: helper(x))
    with cuvil.scope(), torch.no_grad():
        for _ in range(4):
            m(ramp(3))
    plans = [plan for module in cuvil.explain(m).to_dict()["modules"] for plan in module["plans"]]
    assert plans[0]["guards"]["closure cells"] == 1
