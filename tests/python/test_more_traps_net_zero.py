"""Writes that are undone before the call ends, and who may have seen them in between."""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
import weakref

import torch
import torch.nn as nn
from eager_twin import Fn, attempt, eager_twin, fill, ramp, warm


class Config:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


@eager_twin(served=True)
def test_attribute_set_and_restored():
    config = Config(k=1.0)

    def forward(s, x, k=5.0):
        old, config.k = config.k, k
        try:
            return x * config.k
        finally:
            config.k = old

    m = Fn(forward)
    with torch.no_grad():
        yield from warm("five", m, ramp(3))
        yield "restored", config.k
        config.k = 2.0
        yield from warm("outer-changed", m, ramp(3))
        yield from warm("other", m, ramp(3), k=7.0)
        yield "restored", (config.k, list(vars(config)))


@eager_twin(served=True)
def test_attribute_added_and_deleted():
    config = Config(k=1.0)

    def forward(s, x):
        config.extra = 3.0
        y = x * config.extra
        del config.extra
        return y

    m = Fn(forward)
    with torch.no_grad():
        yield from warm("a", m, ramp(3))
        yield "gone", hasattr(config, "extra")
        config.extra = 1.0
        yield "present-before", m(ramp(3))
        yield "gone-now", hasattr(config, "extra")
        yield from warm("b", m, ramp(3))


@eager_twin(served=True)
def test_entry_popped_and_put_back():
    table = {"a": 1.0, "b": 2.0, "c": 3.0}

    def forward(s, x):
        value = table.pop("c")
        y = x * value + len(table)
        table["c"] = value
        return y

    m = Fn(forward)
    with torch.no_grad():
        yield from warm("last-key", m, ramp(3))
        yield "order", list(table)
        table["c"] = 5.0
        yield "five", m(ramp(3))


@eager_twin
def test_entry_popped_and_put_back_changes_the_order():
    table = {"a": 1.0, "b": 2.0}

    def forward(s, x):
        value = table.pop("a")
        table["a"] = value
        return x * list(table.values())[0]  # noqa: RUF015 - the order is what is read

    m = Fn(forward)
    with torch.no_grad():
        for i in range(7):
            yield f"{i}", (m(ramp(3)), list(table))


@eager_twin
def test_setter_counts_writes_that_are_undone():
    class Watched:
        def __init__(self):
            self.writes, self._k = 0, 1.0

        @property
        def k(self):
            return self._k

        @k.setter
        def k(self, value):
            self.writes += 1
            self._k = value

    config = Watched()

    def forward(s, x):
        old, config.k = config.k, 4.0
        y = x * config.k
        config.k = old
        return y

    m = Fn(forward)
    with torch.no_grad():
        for i in range(7):
            yield f"{i}", (m(ramp(3)), config.writes)


@eager_twin
def test_setattr_override_logs_writes_that_are_undone():
    log = []

    class Logged:
        k = 1.0

        def __setattr__(self, name, value):
            log.append((name, value))
            super().__setattr__(name, value)

    config = Logged()

    def forward(s, x):
        config.k = 4.0
        y = x * config.k
        config.k = 1.0
        return y

    m = Fn(forward)
    with torch.no_grad():
        for i in range(6):
            yield f"{i}", (m(ramp(3)), len(log))


@eager_twin
def test_dict_subclass_sees_writes_that_are_undone():
    class Logged(dict):
        writes = 0

        def __setitem__(self, key, value):
            Logged.writes += 1
            super().__setitem__(key, value)

    table = Logged(k=1.0)

    def forward(s, x):
        table["k"] = 4.0
        y = x * table["k"]
        table["k"] = 1.0
        return y

    m = Fn(forward)
    with torch.no_grad():
        for i in range(6):
            yield f"{i}", (m(ramp(3)), Logged.writes)


@eager_twin
def test_hook_sees_the_intermediate_value():
    seen = []
    m = Fn(lambda s, x: _with_temporary(s, x), k=1.0)
    m.inner = nn.Identity()
    m.inner.register_forward_hook(lambda mod, args, out: seen.append(m.k))

    def _with_temporary(s, x):
        s.k = 2.0
        y = s.inner(x)
        s.k = 1.0
        return y

    with torch.no_grad():
        for i in range(6):
            yield f"{i}", (m(ramp(3)), list(seen))


@eager_twin
def test_other_thread_sees_the_intermediate_value():
    config = Config(k=1.0)
    asked, answered = threading.Event(), threading.Event()
    seen = []

    def watch():
        while asked.wait(20):
            asked.clear()
            seen.append(config.k)
            answered.set()
            if len(seen) == 6:
                return

    def forward(s, x):
        config.k = 2.0
        asked.set()
        answered.wait(20)
        answered.clear()
        y = x * config.k
        config.k = 1.0
        return y

    m = Fn(forward)
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    with torch.no_grad():
        for i in range(6):
            yield f"{i}", (m(ramp(3)), list(seen))
    thread.join(20)


@eager_twin
def test_counter_that_wraps_around():
    m = Fn(lambda s, x: _count(s, x), n=0)

    def _count(s, x):
        s.n = (s.n + 1) % 3
        return x * s.n

    with torch.no_grad():
        for i in range(10):
            yield f"{i}", (m(ramp(3)), m.n)


@eager_twin
def test_toggle_twice_in_two_calls():
    m = Fn(lambda s, x: _toggle(s, x), flag=False)

    def _toggle(s, x):
        s.flag = not s.flag
        return x if s.flag else -x

    with torch.no_grad():
        for i in range(9):
            yield f"{i}", (m(ramp(3)), m.flag)


@eager_twin(served=True)
def test_list_appended_and_popped():
    stack: list = []

    def forward(s, x):
        stack.append("frame")
        try:
            return x * len(stack)
        finally:
            stack.pop()

    m = Fn(forward)
    with torch.no_grad():
        yield from warm("empty", m, ramp(3))
        stack.append("outer")
        yield from warm("outer", m, ramp(3))
        yield "stack", list(stack)


@eager_twin(served=True)
def test_cache_filled_at_the_first_call():
    m = Fn(lambda s, x: _cached(s, x), cache=None)

    def _cached(s, x):
        if s.cache is None:
            s.cache = torch.arange(3.0)
        return x + s.cache

    with torch.no_grad():
        yield from warm("a", m, ramp(3))
        yield from warm("b", m, ramp(3))
        kept = m.cache
        m.cache = torch.ones(3)
        yield "replaced", m(ramp(3))
        m.cache = None
        yield from warm("refilled", m, ramp(3))
        m.cache.add_(1)
        yield "edited", m(ramp(3))
        yield "kept", kept


@eager_twin(served=True)
def test_cache_keyed_by_shape():
    m = Fn(lambda s, x: _cached(s, x), cache={})

    def _cached(s, x):
        n = x.shape[0]
        if n not in s.cache:
            s.cache[n] = torch.arange(float(n))
        return x + s.cache[n]

    with torch.no_grad():
        for n in (3, 3, 3, 3, 4, 4, 4, 4, 4, 3, 4):
            yield f"n{n}", m(torch.ones(n))
        m.cache.clear()
        for n in (3, 4, 3, 4, 3, 4, 3, 4):
            yield f"cleared{n}", m(torch.ones(n))
        yield "keys", sorted(m.cache)


@eager_twin
def test_lru_cache_hits_are_counted():
    calls = []

    @functools.lru_cache(maxsize=2)
    def table(n):
        calls.append(n)
        return float(n)

    m = Fn(lambda s, x: x * table(x.shape[0]))
    with torch.no_grad():
        for n in (3, 3, 3, 3, 3, 4, 4, 4, 4, 5, 3, 4, 5):
            yield f"n{n}", m(torch.ones(n))
        # Calls that a plan answers are not counted as hits; what was computed and kept is the same.
        yield "info", (table.cache_info().misses, table.cache_info().currsize)
        yield "calls", list(calls)


@eager_twin
def test_weak_registry_looked_up_and_refreshed():
    registry = weakref.WeakKeyDictionary()
    values = weakref.WeakValueDictionary()

    class Value:
        k = 3.0

    value = Value()

    def forward(s, x):
        registry.setdefault(s, 2.0)
        found = values.get("v")
        return x * registry[s] * (found.k if found is not None else 1.0)

    m = Fn(forward)
    with torch.no_grad():
        yield from warm("no-value", m, ramp(3))
        values["v"] = value
        yield from warm("value", m, ramp(3))
        registry[m] = 5.0
        yield "five", m(ramp(3))
        del value
        yield "value-died", m(ramp(3))
        yield "sizes", (len(registry), len(values))


@eager_twin
def test_weak_set_membership():
    class Thing:
        pass

    thing, members = Thing(), weakref.WeakSet()
    m = Fn(lambda s, x: x * (2.0 if thing in members else 1.0) + len(members))
    with torch.no_grad():
        yield from warm("out", m, ramp(3))
        members.add(thing)
        yield from warm("in", m, ramp(3))
        members.discard(thing)
        yield "out-again", m(ramp(3))


@eager_twin
def test_counters_in_many_places():
    counts = collections.Counter()
    ticks = iter(range(1000))
    totals = [0]
    m = Fn(lambda s, x: _count(s, x))

    def _count(s, x):
        counts["calls"] += 1
        totals[0] += 1
        return x * next(ticks) + counts["calls"] + totals[0]

    with torch.no_grad():
        for i in range(7):
            yield f"{i}", m(ramp(3))
        yield "counts", (counts["calls"], totals[0], next(ticks))


@eager_twin
def test_function_attribute_counter_and_global_counter():
    def helper(x):
        helper.calls += 1
        return x + helper.calls

    helper.calls = 0
    namespace = {"n": 0}
    exec("def tick():\n global n\n n += 1\n return n\n", namespace)
    m = Fn(lambda s, x: helper(x) * namespace["tick"]())
    with torch.no_grad():
        for i in range(7):
            yield f"{i}", m(ramp(3))
        yield "after", (helper.calls, namespace["n"])


@eager_twin
def test_class_attribute_written():
    class Shared:
        n = 0

    def forward(s, x):
        Shared.n += 1
        return x * Shared.n

    m = Fn(forward)
    with torch.no_grad():
        for i in range(6):
            yield f"{i}", m(ramp(3))


@eager_twin
def test_closure_cell_written():
    n = 0

    def forward(s, x):
        nonlocal n
        n += 1
        return x * n

    m = Fn(forward)
    with torch.no_grad():
        for i in range(6):
            yield f"{i}", m(ramp(3))
        n = 100
        yield "hundred", m(ramp(3))


@eager_twin(served=True)
def test_submodule_swapped_for_the_call():
    m = Fn(lambda s, x: _swap(s, x), inner=fill(nn.Linear(3, 3)))
    other = fill(nn.Linear(3, 3), 0.5)

    def _swap(s, x):
        old = s.inner
        s.inner = other
        try:
            return s.inner(x)
        finally:
            s.inner = old

    with torch.no_grad():
        yield from warm("swapped", m, ramp(2, 3))
        yield "restored", m.inner is not other
        other.weight.data.mul_(2)
        yield "edited", m(ramp(2, 3))


@eager_twin(served=True)
def test_training_flag_toggled_for_the_call():
    m = Fn(lambda s, x: _toggle(s, x), drop=nn.Dropout(0.5))

    def _toggle(s, x):
        was = s.drop.training
        s.drop.eval()
        y = s.drop(x)
        s.drop.train(was)
        return y

    with torch.no_grad():
        yield from warm("a", m, ramp(3))
        yield "training", m.drop.training
        m.eval()
        yield from warm("b", m, ramp(3))
        yield "training", m.drop.training


@eager_twin
def test_hook_registered_and_removed_in_the_call():
    seen = []
    m = Fn(lambda s, x: _hooked(s, x), inner=nn.Identity())

    def _hooked(s, x):
        handle = s.inner.register_forward_hook(lambda mod, args, out: seen.append(len(seen)) or out * 2)
        try:
            return s.inner(x)
        finally:
            handle.remove()

    with torch.no_grad():
        for i in range(6):
            yield f"{i}", (m(ramp(3)), len(seen), len(m.inner._forward_hooks))


@eager_twin
def test_in_place_write_undone_on_a_tensor():
    m = Fn(lambda s, x: _undo(s, x), k=torch.ones(3))

    def _undo(s, x):
        s.k.add_(1)
        y = x * s.k
        s.k.sub_(1)
        return y

    with torch.no_grad():
        for i in range(6):
            yield f"{i}", (m(ramp(3)), m.k, m.k._version)


@eager_twin
def test_context_manager_that_counts():
    entered = [0]

    @contextlib.contextmanager
    def counting():
        entered[0] += 1
        yield entered[0]
        entered[0] -= 1

    def forward(s, x):
        with counting() as n:
            return x * n

    m = Fn(forward)
    with torch.no_grad():
        yield from warm("zero", m, ramp(3))
        entered[0] = 5
        yield from warm("five", m, ramp(3))
        yield "after", entered[0]


@eager_twin
def test_exception_leaves_the_write_behind():
    m = Fn(lambda s, x, boom: _write(s, x, boom), k=1.0)

    def _write(s, x, boom):
        s.k += 1
        if boom:
            raise ValueError("boom")
        s.k -= 1
        return x * s.k

    with torch.no_grad():
        yield from warm("fine", m, ramp(3), False)
        yield "boom", attempt(m, ramp(3), True)
        yield "k", m.k
        yield from warm("after", m, ramp(3), False)
