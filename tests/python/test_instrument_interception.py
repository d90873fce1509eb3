"""Calls of an intercepted function reach the C function on every path that can."""

# The form of these programs decides their bytecode.
# ruff: noqa: C416, C420, PIE804, RUF015, RUF021, RUF059, UP033, UP050

from __future__ import annotations

import functools
import inspect
import operator
import sys

import pytest
from cuvil import _native

PY311 = sys.version_info < (3, 12)


def build():
    class Module:
        def _wrapped_call_impl(self, x=None, k=None):
            return ("py", x)

        __call__ = _wrapped_call_impl

    class Super(Module):
        def __call__(self, x):
            return super().__call__(x)

    class Named(Module):
        def __call__(self, x):
            return Module.__call__(self, x)

    o, s, m = Module(), Super(), Named()
    bound = o.__call__
    through_slot = {
        "obj(x)": lambda: o(7),
        "obj(x=x)": lambda: o(x=7),
        "obj(*a)": lambda: o(*(7,)),
        "obj(*a, **k)": lambda: o(*(7,), **{"k": 1}),
        "map": lambda: next(map(o, (7,))),
        "sorted(key=obj)": lambda: sorted([7], key=o),
        "partial": functools.partial(o, 7),
        "partial of the function": functools.partial(Module.__call__, o, 7),
        "operator.call": lambda: operator.call(o, 7),
    }
    bare = {
        "super().__call__(x)": lambda: s(7),
        "Module.__call__(m, x)": lambda: m(7),
        "m.__call__(x)": lambda: o.__call__(7),
        "saved bound method": lambda: bound(7),
    }
    return Module, through_slot, bare


@pytest.fixture
def module():
    yield build()
    _native._debug_intercept_remove()


def hits_of(call):
    _native._debug_intercept_hits()
    call()
    return _native._debug_intercept_hits()


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "specialised"])
def test_calls_reach_the_interception(module, warm):
    Module, through_slot, bare = module
    calls = through_slot if PY311 else {**through_slot, **bare}
    if warm:
        for call in calls.values():
            for _ in range(2000):
                call()
    _native._debug_intercept(Module.__call__, False)
    assert {name for name, call in calls.items() if hits_of(call) == 0} == set()
    for call in calls.values():
        for _ in range(300):
            call()
    assert {name for name, call in calls.items() if hits_of(call) == 0} == set()
    _native._debug_intercept_remove()
    assert {name for name, call in calls.items() if hits_of(call) != 0} == set()
    assert Module()(7) == ("py", 7)


def test_calls_that_pass_by_the_interception_run_the_original(module):
    Module, through_slot, bare = module
    _native._debug_intercept(Module.__call__, False)
    for call in bare.values():
        assert call() == ("py", 7)


def test_serving_and_forwarding(module):
    Module, *_ = module
    _native._debug_intercept(Module.__call__, True)
    assert Module()("served") == "served"
    _native._debug_intercept_remove()
    _native._debug_intercept(Module.__call__, False)
    assert Module()(7) == ("py", 7) and Module()(x=8) == ("py", 8)
    with pytest.raises(TypeError):
        Module()(nonsense=1)


def test_what_python_sees_is_unchanged(module):
    Module, *_ = module
    function = Module.__call__
    before = (function.__code__, function.__defaults__, str(inspect.signature(function)), function.__qualname__)
    _native._debug_intercept(function, False)
    assert Module.__call__ is function and type(function) is type(build)
    assert before == (function.__code__, function.__defaults__, str(inspect.signature(function)), function.__qualname__)
    assert "__call__" not in Module.__dict__["__call__"].__dict__


def test_interception_survives_changes_of_the_function(module):
    Module, *_ = module
    o = Module()
    _native._debug_intercept(Module.__call__, False)
    Module.__call__.__code__ = (lambda self, x=None: "patched").__code__
    Module.__call__.__defaults__ = (5,)
    assert hits_of(lambda: o(3)) == 1 and o(3) == "patched"

    class Sub(Module):
        pass

    class Own(Module):
        def __call__(self, x):
            return "own"

    assert hits_of(lambda: Sub()(1)) == 1
    assert hits_of(lambda: Own()(1)) == 0


def test_a_second_interception_is_refused(module):
    Module, *_ = module
    _native._debug_intercept(Module.__call__, False)
    with pytest.raises(RuntimeError):
        _native._debug_intercept(build()[0].__call__, False)
    with pytest.raises(ValueError):
        _native._debug_intercept(len, False)


def test_recursion_through_the_interception(module):
    class Nest:
        def __call__(self, n):
            return self(n - 1) + 1 if n else 0

    _native._debug_intercept(Nest.__call__, False)
    assert hits_of(lambda: Nest()(50)) == 51
