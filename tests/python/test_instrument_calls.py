"""Every shape of call is decoded to the callable, its self, its arguments and its keyword names."""

# The form of these programs decides their bytecode.
# ruff: noqa: C416, C420, PIE804, RUF015, RUF021, RUF059, UP033, UP050

from __future__ import annotations

import functools

import pytest
from cuvil import _native

CALLS = 8


def f(*args, **kwargs):
    return args, kwargs


class C:
    attribute = staticmethod(f)

    def method(self, *args, **kwargs):
        return args, kwargs

    @classmethod
    def of_class(cls, *args, **kwargs):
        return args, kwargs

    def __call__(self, *args, **kwargs):
        return args, kwargs


c = C()
bound = c.method
holder = type("Holder", (), {})()
holder.f = f
pair = (1, 2)
table = {"x": 3, "y": 4}
partial = functools.partial(f, 0)
condition = True

# source, callable, positional arguments without self, keywords
SHAPES = [
    ("f()", lambda: f, (), {}),
    ("f(1, 2)", lambda: f, (1, 2), {}),
    ("f(1, x=2)", lambda: f, (1,), {"x": 2}),
    ("f(x=1, y=2)", lambda: f, (), {"x": 1, "y": 2}),
    ("f(1, x=2 if condition else 3)", lambda: f, (1,), {"x": 2}),
    ("f(1, x=None or 5)", lambda: f, (1,), {"x": 5}),
    ("f(*pair)", lambda: f, (1, 2), {}),
    ("f(*pair, 3)", lambda: f, (1, 2, 3), {}),
    ("f(**table)", lambda: f, (), table),
    ("f(*pair, **table)", lambda: f, (1, 2), table),
    ("f(0, *pair, z=9, **table)", lambda: f, (0, 1, 2), {"z": 9, **table}),
    ("f(*(i for i in pair))", lambda: f, (1, 2), {}),
    ("c.method()", lambda: C.method, (), {}),
    ("c.method(1, 2)", lambda: C.method, (1, 2), {}),
    ("c.method(1, x=2)", lambda: C.method, (1,), {"x": 2}),
    ("c.method(*pair, x=2)", lambda: C.method, (1, 2), {"x": 2}),
    ("bound(1)", lambda: C.method, (1,), {}),
    ("bound(1, x=2)", lambda: C.method, (1,), {"x": 2}),
    ("C.method(c, 1, x=2)", lambda: C.method, (c, 1), {"x": 2}),
    ("C.of_class(1, x=2)", lambda: C.of_class.__func__, (1,), {"x": 2}),
    ("c.attribute(1, x=2)", lambda: f, (1,), {"x": 2}),
    ("holder.f(1, x=2)", lambda: f, (1,), {"x": 2}),
    ("c(1, x=2)", lambda: c, (1,), {"x": 2}),
    ("partial(1, x=2)", lambda: partial, (1,), {"x": 2}),
    ("len(pair)", lambda: len, (pair,), {}),
    ("dict(x=1)", lambda: dict, (), {"x": 1}),
    ("pair.count(1)", lambda: tuple.count, (1,), {}),
    ("(lambda q: q)(4)", lambda: None, (4,), {}),
]


def decoded(entry):
    """(callable without its self, positional arguments, keywords) of a log entry."""
    if entry[0] == "call":
        _, _, _, callable_, self_, args, names = entry
        count = len(names or ())
        positional, keywords = args[: len(args) - count], dict(zip(names or (), args[len(args) - count :]))
        if self_ is None:
            callable_ = getattr(callable_, "__func__", callable_)
    else:
        _, _, _, callable_, positional, keywords = entry
        keywords = keywords or {}
        callable_ = getattr(callable_, "__func__", callable_)
    return callable_, positional, keywords


@pytest.mark.parametrize("rounds", [1, 40])
@pytest.mark.parametrize("source,callable_,positional,keywords", SHAPES, ids=[s[0] for s in SHAPES])
def test_call_is_decoded(source, callable_, positional, keywords, rounds):
    _native._debug_self_test()
    namespace = {}
    exec(f"def caller():\n  return {source}\n", globals(), namespace)
    caller = namespace["caller"]
    expected = repr(caller())
    for _ in range(rounds):
        result, error, report = _native._debug_run(CALLS, caller)
        assert error is None and repr(result) == expected
        assert report["status"] == "" and report["mismatches"] == 0
    entries = [e for e in report["log"] if e[1] == "caller"]
    if "for i in" in source:  # the generator expression is called first
        entries = [e for e in entries if e[0] == "call_ex"]
        assert len(entries) == 1 and entries[0][3] is f
        return
    assert len(entries) == 1
    got_callable, got_positional, got_keywords = decoded(entries[0])
    if callable_() is not None:
        assert got_callable == callable_()
    assert tuple(got_positional) == tuple(positional)
    assert got_keywords == keywords


def test_self_of_a_loaded_method_is_reported_once():
    def caller():
        return c.method(1)

    _, _, report = _native._debug_run(CALLS, caller)
    (entry,) = [e for e in report["log"] if e[1].endswith("caller")]
    assert entry[3] is C.method and entry[4] is c and entry[5] == (1,)


def test_decorator_class_and_import_machinery_calls_are_announced():
    def caller():
        @functools.lru_cache(maxsize=None)
        def cached(x):
            return x

        class Made(C, metaclass=type):
            pass

        return cached(3), Made().method(4)

    result, error, report = _native._debug_run(CALLS, caller)
    assert error is None and result == (3, ((4,), {}))
    names = [getattr(e[3], "__name__", "") for e in report["log"] if e[1].endswith("caller")]
    assert "__build_class__" in names and "lru_cache" in names
