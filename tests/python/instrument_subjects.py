"""Python that the instrumentation tests run: deterministic, and broad in what its bytecode does."""

# The form of these programs decides their bytecode.
# ruff: noqa: C416, C420, PIE804, RUF015, RUF021, RUF059, UP033, UP050

from __future__ import annotations

import contextlib
import sys
import traceback

TABLE = {"k": 3}


class Context:
    def __init__(self, n):
        self.n = n

    def __enter__(self):
        return self

    def __exit__(self, kind, value, tb):
        self.err = kind.__name__ if kind else None
        return kind is ZeroDivisionError


class Base:
    def val(self):
        return 10


class Obj(Base):
    scale = 2

    def __init__(self):
        self.a = 1
        self.lst = [1, 2, 3]

    @property
    def p(self):
        return self.a + 1

    def val(self):
        return super().val() + self.a

    def __getattr__(self, name):
        if name == "made_up":
            return 42
        raise AttributeError(name)

    def __getitem__(self, key):
        return key * self.scale

    def __contains__(self, key):
        return key == self.a

    def __bool__(self):
        return self.a > 0


def keywords(a, /, b, *rest, c=3, **more):
    return a, b, rest, c, sorted(more.items())


def matches(value):
    match value:
        case {"kind": "point", "at": [x, y]}:
            return x + y
        case [first, *others] if len(others) > 1:
            return first, others
        case Obj(a=1) as o:
            return o.p
        case int() | str():
            return "scalar"
        case _:
            return None


def groups():
    out = []
    try:
        raise ExceptionGroup("g", [ValueError(1), KeyError("k")])
    except* ValueError as group:
        out.append(len(group.exceptions))
    except* KeyError as group:
        out.append(repr(group.exceptions[0]))
    return out


def program(o, n):
    out = []
    try:
        out.append(o.a + o.p)
        o.missing
    except AttributeError as e:
        out.append(e.__class__.__name__)
    finally:
        out.append("fin")
    out.append((o.made_up, o[5], 1 in o, 2 not in o, bool(o), not o))
    with Context(5) as c, contextlib.suppress(KeyError):
        out.append(c.n)
        TABLE["nope"]
    with Context(6) as c2:
        1 / 0
    out.append(c2.err)
    out.append(sum(x * o.scale for x in o.lst if x != n))
    k = 7

    def inner(z):
        nonlocal k
        k += z
        return lambda: k + o.a + len(o.lst)

    f = inner(2)
    out.append([f() + j for j in range(n) if o.a])
    out.append({q: o.scale for q in sorted(o.lst)})
    out.append({q % 2 for q in o.lst})
    out.append(o.val())

    def g():
        try:
            r = yield o.a
            out.append(r)
            yield from (y for y in o.lst)
        except ValueError as e:
            out.append(repr(e))
            yield "caught"
        finally:
            out.append("closed")

    it = g()
    next(it)
    it.send("sent")
    it.throw(ValueError("x"))
    it.close()
    for i in range(300):
        if i == 299:
            out.append(i)
        elif o.a is None:
            break
    else:
        out.append(max(o.lst))
    a, *b = o.lst
    out.append(f"{a!r}{b}{o.a:>3}")
    out.append(keywords(1, 2, c=4, d=5))
    out.append(keywords(*(1, 2, 3), **{"c": 9}))
    out.append(keywords(1, b=o.a if o else 0))
    out.append([matches(v) for v in ({"kind": "point", "at": [1, 2]}, [1, 2, 3], o, 4, 2.5)])
    out.append(groups())
    out.append([o.lst[0:2], o.lst[::2], -o.a, +o.a, ~o.a, o.a if o and n or k else None])
    try:
        o.lst.index(99)
    except ValueError:
        out.append(traceback.format_exc(limit=1).splitlines()[1:3])
    out.append(sys._getframe().f_lineno - sys._getframe().f_code.co_firstlineno)

    class Local:
        inside = o.a
        values = [v for v in o.lst]

    out.append((Local.inside, Local.values))
    d = {"x": 1}
    d["y"] = 2
    del d["x"]
    d |= {"z": 3}
    d["y"] += 5
    out.append((d, {**d, "w": 0}, [*o.lst, *d], n < 4 <= 5, n is not None, assert_positive(n)))
    return out


def assert_positive(n):
    assert n > 0, "message"
    while n > 1:
        n -= 1
        if n == 2:
            continue
    return n


def run():
    return program(Obj(), 3)


def count_up(n):
    for i in range(n):
        try:
            yield i
        except ValueError:
            yield "v"
