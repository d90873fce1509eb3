"""Inputs that are nearly the same: numbers, strings, containers, arrays, tensors with other metadata."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import math
import pathlib
import types

import numpy as np
import torch
import torch.nn as nn
from eager_twin import Fn, attempt, eager_twin, fill, ramp, warm


class MyInt(int):
    def __mul__(self, other):
        return int(self) * other * 2

    __rmul__ = __mul__


class MyStr(str):
    def __eq__(self, other):
        return True

    __hash__ = str.__hash__


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Point(collections.namedtuple("Point", "x y")):
    __slots__ = ()

    def total(self):
        return self.x + self.y


@dataclasses.dataclass
class Options:
    scale: float = 1.0
    names: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Frozen:
    t: torch.Tensor
    k: float = 1.0


def _calls(m, values, times=4):
    """Each value several times in a row, then once each: plans exist for all of them when the second pass comes."""
    for i, value in enumerate(values):
        for j in range(times):
            yield f"{i}.{j}", attempt(m, ramp(3) + 1, value)
    for i, value in enumerate(values):
        yield f"again{i}", attempt(m, ramp(3) + 1, value)


@eager_twin(served=True)
def test_numbers_that_compare_equal():
    m = Fn(lambda s, x, k: (x * k, torch.ones(2, dtype=torch.int64) * k, type(k).__name__))
    with torch.no_grad():
        yield from _calls(m, [1, 1.0, True, 1 + 0j, 0, 0.0, -0.0, False, 2, 2.0])


@eager_twin(served=True)
def test_negative_zero_nan_and_infinity():
    nan = float("nan")
    m = Fn(lambda s, x, k: (x * k, x / k if k == k and k else x, math.copysign(1.0, k), k != k))
    with torch.no_grad():
        yield from _calls(m, [0.0, -0.0, nan, float("nan"), math.inf, -math.inf, 5e-324, 1e308])


@eager_twin(served=True)
def test_big_and_boundary_integers():
    m = Fn(lambda s, x, k: (x * k, k // 3, k % 7))
    with torch.no_grad():
        yield from _calls(m, [2**31, 2**62, 2**63 - 1, 2**63, 2**64, 2**100, -(2**63), 256, 257, 10**30])


@eager_twin(served=True)
def test_int_and_str_subclasses():
    m = Fn(lambda s, x, k: x * k if not isinstance(k, str) else (x * 2 if k == "double" else x))
    with torch.no_grad():
        yield from _calls(m, [3, MyInt(3), "double", "other", MyStr("other"), "double"])


@eager_twin(served=True)
def test_strings_equal_but_not_identical():
    m = Fn(lambda s, x, k: x * 2 if k == "mean" else (x * 3 if k in ("sum", "max") else x))
    with torch.no_grad():
        yield from _calls(m, ["mean", "".join(["me", "an"]), "sum", "max", "", b"mean", "mean\0", "MEAN"])


@eager_twin(served=True)
def test_none_ellipsis_and_singletons():
    m = Fn(lambda s, x, k: x[k] if k is not NotImplemented else x)
    with torch.no_grad():
        yield from _calls(
            m, [None, ..., slice(None), slice(0, 2), slice(0, 2, 2), 0, -1, (0,), [0, 2], True, NotImplemented]
        )


@eager_twin(served=True)
def test_indices_of_many_kinds():
    m = Fn(lambda s, x, k: x[k])
    values = [
        np.int64(1),
        np.array([0, 1]),
        torch.tensor(1),
        torch.tensor([0, 2]),
        torch.tensor([True, False, True]),
        range(2),
        [True, False, True],
        (None, 0),
        np.bool_(True),
        [[0], [1]],
    ]
    with torch.no_grad():
        yield from _calls(m, values)


@eager_twin
def test_numpy_scalars_and_arrays():
    m = Fn(lambda s, x, k: (x * k, torch.as_tensor(k) + 1))
    with torch.no_grad():
        yield from _calls(
            m,
            [
                np.float32(2.5),
                np.float64(2.5),
                np.int64(2),
                np.bool_(True),
                np.array([1.0, 2.0, 3.0]),
                np.array([1, 2, 3]),
                np.array(2.0),
            ],
        )
        array = np.ones(3)
        yield from warm("array", m, ramp(3), array)
        array[0] = 9.0
        yield "edited", m(ramp(3), array)


@eager_twin(served=True)
def test_enums_dtypes_devices_and_layouts():
    m = Fn(lambda s, x, k: (x.to(k) if isinstance(k, (torch.dtype, torch.device)) else x * (k is Color.RED), str(k)))
    with torch.no_grad():
        yield from _calls(
            m,
            [
                Color.RED,
                Color.BLUE,
                torch.float64,
                torch.int32,
                torch.device("cpu"),
                torch.bool,
                torch.device("cpu", 0),
            ],
        )


@eager_twin
def test_unusual_value_types():
    m = Fn(lambda s, x, k: (x * float(k) if not isinstance(k, (datetime.date, pathlib.PurePath)) else x, str(k)))
    with torch.no_grad():
        yield from _calls(
            m,
            [
                fractions.Fraction(1, 3),
                fractions.Fraction(2, 3),
                decimal.Decimal("0.5"),
                datetime.date(2020, 1, 1),
                datetime.date(2020, 1, 2),
                pathlib.PurePosixPath("a"),
                pathlib.PurePosixPath("b"),
            ],
            times=3,
        )


@eager_twin(served=True)
def test_nested_containers_of_tensors():
    def forward(s, x, tree):
        return x + tree["a"][0] * tree["b"]["c"][1] + len(tree["a"])

    def make(k, n=1):
        return {"a": [torch.full((3,), k)] * n, "b": {"c": (0, torch.ones(3) * 2)}}

    m = Fn(forward)
    with torch.no_grad():
        yield from warm("one", m, ramp(3), make(1.0))
        yield "other-values", m(ramp(3), make(5.0))
        yield from warm("longer", m, ramp(3), make(1.0, 2))
        yield "back", m(ramp(3), make(3.0))
        tree = make(2.0)
        yield "own", m(ramp(3), tree)
        tree["a"].append(torch.ones(3))
        yield "appended", m(ramp(3), tree)
        tree["b"]["c"] = (0, 3.0)
        yield "number-for-tensor", m(ramp(3), tree)
        tree["extra"] = 1
        yield "extra-key", m(ramp(3), tree)


@eager_twin(served=True)
def test_dict_order_and_kinds_of_dicts():
    m = Fn(lambda s, x, d: (sum((x * v + i for i, v in enumerate(d.values())), x), type(d).__name__))
    values = [
        {"a": 1.0, "b": 2.0},
        {"b": 2.0, "a": 1.0},
        collections.OrderedDict(a=1.0, b=2.0),
        collections.OrderedDict(b=2.0, a=1.0),
        collections.defaultdict(float, a=1.0, b=2.0),
        collections.Counter(a=1, b=2),
        types.MappingProxyType({"a": 1.0}),
        collections.ChainMap({"a": 1.0}, {"b": 3.0}),
    ]
    with torch.no_grad():
        yield from _calls(m, values)


@eager_twin(served=True)
def test_kinds_of_sequences():
    m = Fn(lambda s, x, q: (torch.stack([x * v for v in q]), type(q).__name__, len(q)))
    values = [
        [1.0, 2.0],
        (1.0, 2.0),
        collections.deque([1.0, 2.0]),
        Point(1.0, 2.0),
        range(1, 3),
        np.array([1.0, 2.0]),
        torch.Size([1, 2]),
        bytes([1, 2]),
        bytearray([1, 2]),
        {1.0: 0, 2.0: 0},
        frozenset([1.0]),
        [2.0, 1.0],
    ]
    with torch.no_grad():
        yield from _calls(m, values)


@eager_twin(served=True)
def test_namedtuples_and_dataclasses():
    m = Fn(
        lambda s, x, o: (
            x * (o.total() if isinstance(o, Point) else o.scale) + (len(o.names) if hasattr(o, "names") else 0)
        )
    )
    with torch.no_grad():
        yield from _calls(m, [Point(1.0, 2.0), Point(2.0, 2.0), Options(2.0), Options(2.0, ["a"]), Options(3.0)])
        options = Options(1.0)
        yield from warm("own", m, ramp(3), options)
        options.scale = 4.0
        yield "changed", m(ramp(3), options)
        options.names.append("b")
        yield "appended", m(ramp(3), options)
        Options.scale_hint = property(lambda self: 1)
        yield "class-changed", m(ramp(3), options)


@eager_twin(served=True)
def test_tensor_inside_an_object_argument():
    m = Fn(lambda s, x, o: x * o.t + o.k)
    with torch.no_grad():
        a, b = Frozen(torch.ones(3)), Frozen(torch.full((3,), 4.0), 2.0)
        yield from warm("a", m, ramp(3), a)
        yield from warm("b", m, ramp(3), b)
        a.t.fill_(7.0)
        yield "edited", m(ramp(3), a)
        object.__setattr__(a, "t", torch.zeros(3))
        yield "replaced", m(ramp(3), a)
        yield "fresh", [m(ramp(3), Frozen(torch.full((3,), float(i)))) for i in range(6)]


@eager_twin
def test_shared_and_self_containing_lists():
    def forward(s, x, a, b):
        a.append(x)
        return len(b), x + len(a)

    m = Fn(forward)
    with torch.no_grad():
        for i in range(6):
            yield f"apart{i}", m(ramp(3), [], [])
        shared: list = []
        yield "shared", m(ramp(3), shared, shared)
        loop: list = []
        loop.append(loop)
        yield "loop", m(ramp(3), loop, [])[0]


@eager_twin
def test_iterators_and_generators_as_arguments():
    m = Fn(lambda s, x, it: x + next(it))
    with torch.no_grad():
        counter = iter(range(100))
        yield from warm("iterator", m, ramp(3), counter)
        yield "generator", [m(ramp(3), g) for g in [(float(i) for i in range(k, 9)) for k in range(6)]]
        yield "rest", next(counter)
        consumed = Fn(lambda s, x, it: torch.stack([x * v for v in it]))
        yield "consumed", [consumed(ramp(3), map(float, range(3))) for _ in range(6)]


@eager_twin(served=True)
def test_callables_as_arguments():
    scale = [2.0]
    m = Fn(lambda s, x, f: f(x))
    with torch.no_grad():
        yield from _calls(
            m,
            [
                torch.relu,
                torch.tanh,
                lambda t: t * 2,
                lambda t: t * scale[0],
                nn.Sigmoid(),
                len,
                abs,
                fill(nn.Linear(3, 2)),
                ramp(3).add,
            ],
        )

        def closure(t):
            return t * scale[0]

        yield from warm("closure", m, ramp(3), closure)
        scale[0] = 5.0
        yield "cell", m(ramp(3), closure)
        lin = fill(nn.Linear(3, 2))
        yield from warm("bound", m, ramp(3), lin.forward)
        lin.weight.zero_()
        yield "edited", m(ramp(3), lin.forward)


@eager_twin(served=True)
def test_modules_as_arguments():
    m = Fn(lambda s, x, inner: inner(x) + 1)
    a, b = fill(nn.Linear(3, 3)), fill(nn.Linear(3, 3), 0.5)
    with torch.no_grad():
        yield from warm("a", m, ramp(3), a)
        yield "b", m(ramp(3), b)
        yield from warm("b", m, ramp(3), b)
        a.bias.add_(1)
        yield "a", m(ramp(3), a)
        yield "fresh", [m(ramp(3), fill(nn.Linear(3, 3), float(i))) for i in range(6)]


@eager_twin(served=True)
def test_positional_keyword_and_default():
    class M(nn.Module):
        def forward(self, x, scale=1.0, *rest, shift=0.0, **more):
            return x * scale + shift + sum(rest) + sum(more.values()), sorted(more), len(rest)

    m, x = M(), ramp(3)
    with torch.no_grad():
        yield from warm("plain", m, x)
        for i, call in enumerate(
            (
                lambda: m(x, 1.0),
                lambda: m(x, scale=1.0),
                lambda: m(x=x),
                lambda: m(x, 2.0),
                lambda: m(x, 1.0, 3.0),
                lambda: m(x, shift=2.0),
                lambda: m(x, a=1.0, b=2.0),
                lambda: m(x, b=2.0, a=1.0),
                lambda: m(scale=2.0, x=x),
                lambda: m(*(x, 2.0), q=1),
            )
        ):
            for j in range(4):
                yield f"{i}.{j}", call()
        for i, call in enumerate((lambda: m(), lambda: m(x, x=x), lambda: m(x, 1.0, scale=2.0))):
            yield f"error{i}", attempt(call)
        yield "plain", m(x)


@eager_twin(served=True)
def test_dtype_shape_stride_and_offset_of_tensors():
    m = Fn(lambda s, x: (x + 1, x.sum(), x.reshape(-1), x.contiguous(), x.is_contiguous()))
    base = ramp(6, 6)
    inputs = [
        base[:3, :3],
        base[3:, 3:],
        base[:3, :3].t(),
        ramp(3, 3),
        ramp(3, 3).t(),
        ramp(3, 3).double(),
        ramp(3, 3).long(),
        ramp(3, 3) > 4,
        base[::2, ::2],
        ramp(1, 3).expand(3, 3),
        ramp(3, 3)[:, :0],
        ramp(0, 3),
        ramp(9).view(3, 3),
        ramp(3, 3).half(),
        ramp(1, 3, 3),
        torch.tensor(2.0),
    ]
    with torch.no_grad():
        for i, x in enumerate(inputs):
            for j in range(4):
                yield f"{i}.{j}", attempt(m, x)
        for i, x in enumerate(inputs):
            yield f"again{i}", attempt(m, x)


@eager_twin(served=True)
def test_strides_of_size_one_dimensions():
    m = Fn(
        lambda s, x: (
            x.stride(),
            x * 1,
            x.view(-1),
            x.permute(1, 0, 2, 3),
            x.is_contiguous(memory_format=torch.channels_last),
        )
    )
    with torch.no_grad():
        a = ramp(1, 1, 4, 4)
        b = torch.as_strided(ramp(16), (1, 1, 4, 4), (99, 7, 4, 1))
        yield from warm("a", m, a)
        yield from warm("b", m, b)
        yield "a", m(a)


@eager_twin(served=True)
def test_requires_grad_inputs_and_leafness():
    m = fill(nn.Linear(3, 2))
    with torch.no_grad():
        yield from warm("plain", m, ramp(2, 3))
        yield "leaf", m(ramp(2, 3).requires_grad_())
        yield "again", m(ramp(2, 3))
    m.requires_grad_(False)
    yield from warm("frozen", m, ramp(2, 3))
    x = ramp(2, 3).requires_grad_()
    y = m(x)
    yield "with-grad", y
    y.sum().backward()
    yield "grad", x.grad
    yield from warm("frozen", m, ramp(2, 3))
    yield "non-leaf", m(x * 2)


@eager_twin(served=True)
def test_parameter_buffer_and_subclass_inputs():
    class Tagged(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            out = super().__torch_function__(func, types, args, kwargs or {})
            return out * 2 if getattr(func, "__name__", "") == "relu" else out

    class Quiet(torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl

    m = Fn(lambda s, x: (torch.relu(x), type(x).__name__))
    with torch.no_grad():
        yield from warm("plain", m, ramp(3))
        yield "tagged", m(ramp(3).as_subclass(Tagged))
        yield "quiet", m(ramp(3).as_subclass(Quiet))
        yield "parameter", m(nn.Parameter(ramp(3)))
        yield "buffer", m(nn.Buffer(ramp(3)))
        yield from warm("tagged", m, ramp(3).as_subclass(Tagged))
        yield "plain", m(ramp(3))
        changed = ramp(3)
        yield "before", m(changed)
        changed.__class__ = Tagged
        yield "class-assigned", m(changed)


@eager_twin(served=True)
def test_attributes_on_input_tensors():
    m = Fn(lambda s, x: x * getattr(x, "scale", 1.0))
    with torch.no_grad():
        x = ramp(3)
        yield from warm("none", m, x)
        x.scale = 3.0
        yield "set", m(x)
        x.scale = 4.0
        yield "changed", m(x)
        yield "other", m(ramp(3))
        del x.scale
        yield "deleted", m(x)


@eager_twin(served=True)
def test_same_tensor_several_times():
    m = Fn(lambda s, a, b, c: (a + b * 2 + c * 3, a is b, b is c))
    x, y, z = ramp(3), ramp(3) + 1, ramp(3) + 2
    with torch.no_grad():
        yield from warm("apart", m, x, y, z)
        for i, args in enumerate(((x, x, z), (x, y, x), (z, y, y), (x, x, x), (y, x, z))):
            yield from warm(f"{i}", m, *args)
        yield "apart", m(z, x, y)


@eager_twin(served=True)
def test_overlapping_views_as_inputs():
    def forward(s, a, b):
        y = a.clone()
        y.add_(b)
        return y, a * 1, b.sum()

    m = Fn(forward)
    with torch.no_grad():
        yield from warm("apart", m, ramp(4), ramp(4))
        base = ramp(8)
        yield "overlap", m(base[:4], base[2:6])
        yield "disjoint", m(base[:4], base[4:])
        yield "expanded", m(torch.ones(1).expand(4), base[:4])


@eager_twin(served=True)
def test_inputs_with_pending_conjugation_and_negation():
    m = Fn(lambda s, a, b: (a @ b, a + b, torch.view_as_real(a.resolve_conj()).sum()))
    a = torch.complex(ramp(2, 2), ramp(2, 2) + 1)
    with torch.no_grad():
        yield from warm("plain", m, a, a)
        yield "conj-left", m(a.conj(), a)
        yield "conj-right", m(a, a.conj())
        yield "adjoint", m(a.mH, a)
        yield "transposed", m(a.mT, a)
        yield from warm("both", m, a.conj(), a.mH)


@eager_twin(served=True)
def test_list_argument_extended_between_calls():
    m = Fn(lambda s, xs: torch.cat(xs) if len(xs) < 4 else xs[0])
    xs = [ramp(2)]
    with torch.no_grad():
        for i in range(6):
            for j in range(4):
                yield f"{i}.{j}", m(xs)
            xs.append(ramp(2) + i)
        yield "tuple", m(tuple(xs[:2]))
