"""Guards compare addresses first: an object that takes the place and the address of the one of the trace is another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import cuvil
import pytest
import torch
from eager_twin import Fn, attempt, eager_twin, ramp, warm


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


def with_another_class(value: Any, other: type, m: Fn) -> Iterator[Any]:
    """Calls before, while and after the value is of the other class."""
    own = type(value)
    with torch.no_grad():
        yield from warm("as it is", m, ramp(3))
        value.__class__ = other
        yield from warm("of another class", m, ramp(3))
        value.__class__ = own
        yield from warm("and back", m, ramp(3))


@eager_twin(served=True)
def test_class_of_a_slot_changed() -> Iterator[Any]:
    holder, value = Slotted(), Slotted()
    holder.k = value
    yield from with_another_class(value, Doubled, Fn(lambda s, x: x * 2 if type(holder.k) is Doubled else x))


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


def planned_calls(call: Callable[[], Any]) -> int:
    before = cuvil.stats()["planned"]
    call()
    return cuvil.stats()["planned"] - before


@eager_twin(served=True)
def test_keys_that_were_looked_for_in_a_set() -> Iterator[Any]:
    known = {1, 2, *(f"name {i}" for i in range(40))}
    m = Fn(lambda s, x: x * 2 if "name 7" in known and "other" not in known else x - 1)
    with torch.no_grad():
        yield from warm("as it is", m, ramp(3))
        known.add("unrelated")
        yield from warm("more", m, ramp(3))
        known.discard("name 7")
        yield from warm("without", m, ramp(3))
        known.add("".join(["name", " 7"]))
        yield from warm("an equal one", m, ramp(3))
        known.add("other")
        yield from warm("with the other", m, ramp(3))
        known.clear()
        yield from warm("empty", m, ramp(3))


def test_other_keys_of_a_set_do_not_matter() -> None:
    known = {torch.Tensor, torch.nn.Module}
    m = Fn(lambda s, x: x * 2 if type(x) in known and Slotted not in known else x)
    x = ramp(3)
    with cuvil.scope(), torch.no_grad():
        for _ in range(4):
            m(x)
        known.update([Doubled, 1, "name", *range(100)])
        assert planned_calls(lambda: m(x)) == 1
        known.add(Slotted)
        assert planned_calls(lambda: m(x)) == 0
        assert torch.equal(m(x), x)


class SameHash:
    """Equal to what it is told, with the hash of it."""

    def __init__(self, key: Any) -> None:
        self.key = key

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return other == self.key


@eager_twin(served=True)
def test_a_key_in_a_set_that_compares_equal() -> Iterator[Any]:
    known: set[Any] = {1, 2}
    m = Fn(lambda s, x: x * 2 if "key" in known else x)
    with torch.no_grad():
        yield from warm("without", m, ramp(3))
        known.add(SameHash("key"))
        yield from warm("equal", m, ramp(3))
        known.clear()
        known.add(True)
        yield from warm("without again", m, ramp(3))


@eager_twin(served=True)
def test_a_set_that_is_asked_written_and_read() -> Iterator[Any]:
    known = {1, 2}

    def forward(s, x):
        if 3 in known:
            return x
        known.add(3)
        x = x * len(known)
        known.discard(3)
        return x + len([k for k in known if k > 1])

    m = Fn(forward)
    with torch.no_grad():
        yield from warm("as it is", m, ramp(3))
        known.add(5)
        yield from warm("another", m, ramp(3))
        known.add(3)
        yield from warm("there", m, ramp(3))


@pytest.mark.parametrize("noisy", [False, True])
def test_dicts_that_a_changed_dict_holds(noisy: bool) -> None:
    def program() -> Iterator[Any]:
        inner = {"k": 2.0}
        outer = {"inner": inner, "other": 0}
        m = Fn(lambda s, x: x * outer["inner"]["k"])
        with torch.no_grad():
            yield from warm("two", m, ramp(3))
            if noisy:
                for i in range(300):
                    outer["other"] = i
                    yield "written", m(ramp(3))
            outer["other"] = 1
            inner["k"] = 3.0
            yield from warm("both changed", m, ramp(3))
            outer["other"] = 2
            address = id(inner)
            del outer["inner"], inner
            outer["inner"] = at_address(address, lambda: {"k": 4.0})
            yield from warm("another one there", m, ramp(3))
            outer["other"] = 3
            yield from warm("and as it was", m, ramp(3))

    eager_twin(program, served=True)()


@eager_twin(served=True)
def test_a_dict_in_the_place_of_another_type() -> Iterator[Any]:
    class Table(dict):
        def __getitem__(self, key: str) -> float:
            return 7.0

    outer: dict[str, Any] = {"inner": {"k": 2.0}, "other": 0}
    m = Fn(lambda s, x: x * outer["inner"]["k"])
    with torch.no_grad():
        yield from warm("two", m, ramp(3))
        address = id(outer["inner"])
        outer["other"] = 1
        outer["inner"] = None
        outer["inner"] = at_address(address, lambda: Table(k=2.0))
        yield from warm("a table", m, ramp(3))


@eager_twin(served=True)
def test_the_class_of_a_dict_in_a_dict_is_changed() -> Iterator[Any]:
    class Plain(dict):
        pass

    class Table(dict):
        def __getitem__(self, key: str) -> float:
            return 7.0

    inner = Plain(k=2.0)
    m = Fn(lambda s, x: x * s.outer["inner"]["k"], outer={"inner": inner})
    yield from with_another_class(inner, Table, m)


class Key:
    """Hashes and compares as object does, until a test changes that."""


# A dict finds a key by identity wherever it looks; with these hashes it looks at the place behind the key's.
class Hashed(Key):
    def __hash__(self) -> int:
        return object.__hash__(self) + 1


def assign_class(key: Key) -> None:
    key.__class__ = Hashed


def define_hash(key: Key) -> None:
    Key.__hash__ = lambda s: object.__hash__(s) + 1


def forbid_hash(key: Key) -> None:
    Key.__hash__ = None


def become_equal(key: Key) -> None:
    Key.__eq__ = lambda s, other: other == "a"
    Key.__hash__ = lambda s: hash("a")


# Where a dict looks for a tuple depends on addresses.
@pytest.mark.parametrize(
    ("kind", "within"),
    [(kind, within) for kind in (set, frozenset, list, tuple) for within in ("itself", "a tuple")]
    + [(dict.fromkeys, "itself")],
)
@pytest.mark.parametrize("change", [assign_class, define_hash, forbid_hash, become_equal])
def test_what_decides_how_a_key_hashes(kind: Callable[..., Any], change: Callable[[Key], None], within: str) -> None:
    def program() -> Iterator[Any]:
        key = Key()
        looked_for = key if within == "itself" else (key, 1)
        known = kind([looked_for if change is not become_equal else "a"])
        m = Fn(lambda s, x: x * 2 if looked_for in known else x - 1)
        with torch.no_grad():
            yield from warm("as it is", m, ramp(3))
            try:
                change(key)
                yield "changed", attempt(m, ramp(3))
            finally:
                for name in ("__hash__", "__eq__"):
                    if name in vars(Key):
                        delattr(Key, name)

    eager_twin(program, served=True)()
