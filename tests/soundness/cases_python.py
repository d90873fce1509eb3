"""Calling conventions and containers; grad modes, autocast, function modes."""

import collections
import contextlib
import dataclasses
import enum
import functools
import itertools
import typing

import torch
import torch.nn as nn
import torch.nn.functional as F
from harness import DEVICE, DEVICE_TYPE, attempt, case, fill, ramp, warm

Pair = collections.namedtuple("Pair", "first second")


class Typed(typing.NamedTuple):
    logits: torch.Tensor
    count: int = 0


@dataclasses.dataclass
class Result:
    hidden: torch.Tensor
    extras: dict
    loss: torch.Tensor | None = None


@dataclasses.dataclass
class DictLike(collections.OrderedDict):
    """The OrderedDict-plus-dataclass shape that model libraries like to return."""

    last: torch.Tensor | None = None
    states: tuple | None = None

    def __post_init__(self):
        for f in dataclasses.fields(self):
            v = getattr(self, f.name)
            if v is not None:
                self[f.name] = v

    def __getitem__(self, k):
        if isinstance(k, str):
            return dict(self.items())[k]
        return tuple(self.values())[k]


@case("containers", "pytorch#126027", "pytorch#102878")
def case_nested_output_containers():
    class M(nn.Module):
        def forward(self, x, how):
            y = x * 2
            if how == "dict":
                return {"y": y, "k": [y + 1, None, "s", 3], "t": (y,)}
            if how == "ordered":
                return collections.OrderedDict([("b", y), ("a", y + 1)])
            if how == "pair":
                return Pair(y, Pair(y + 1, None))
            if how == "typed":
                return Typed(y)
            if how == "dataclass":
                return Result(hidden=y, extras={"n": x.shape[0]})
            if how == "dictlike":
                return DictLike(last=y, states=(y, y + 1))
            if how == "none":
                return None
            if how == "default":
                d = collections.defaultdict(list)
                d["z"].append(y)
                return d
            return y, [], {}, (), torch.Size([2]), x.dtype, slice(1, 2)

    m, x = M(), ramp(3)
    for how in ("dict", "ordered", "pair", "typed", "dataclass", "dictlike", "none", "default", "misc"):
        for i in range(2):
            yield f"{how}{i}", m(x, how)
    d = m(x, "dictlike")
    yield "indexing", (d[0], d["last"], d[1][1], list(d.keys()), d.last)


@case("args")
def case_args_kwargs_and_defaults():
    class M(nn.Module):
        def forward(self, x, *more, scale=1.0, mask=None, **kw):
            y = x * scale
            for t in more:
                y = y + t
            if mask is not None:
                y = y.masked_fill(mask, 0.0)
            for k in kw:
                y = y + kw[k]
            return y, sorted(kw), len(more)

    m, x = M(), ramp(3)
    mask = torch.tensor([True, False, True], device=DEVICE)
    yield from warm("plain", m, x)
    yield "more", m(x, x, x + 1)
    yield "scale", m(x, scale=3)
    yield "mask", m(x, mask=mask)
    yield "mask-none", m(x, mask=None)
    yield "mask-other", m(x, mask=~mask)
    yield "kw", m(x, q=x, r=2.0)
    yield "kw-order", m(x, r=2.0, q=x)
    yield "by-name", m(x=x)
    yield "star", m(*[x, x], **{"scale": 0.5, "z": x})  # noqa: PIE804
    yield "missing", attempt(m)
    yield "plain-again", m(x)


class Mode(enum.IntEnum):
    PREFILL = 1
    DECODE = 2

    def is_decode(self):
        return self == Mode.DECODE


@case("args", "pytorch#142050")
def case_non_tensor_arguments():
    class M(nn.Module):
        def forward(self, x, mode=Mode.PREFILL, act="relu", dtype=None, where=slice(None), fn=None):
            y = x[where]
            y = getattr(torch, act)(y)
            if mode.is_decode():
                y = y[-1:]
            if dtype is not None:
                y = y.to(dtype)
            return fn(y) if fn else y

    m, x = M(), ramp(4) - 2
    yield from warm("default", m, x)
    yield "decode", m(x, Mode.DECODE)
    yield "tanh", m(x, act="tanh")
    yield "f64", m(x, dtype=torch.float64)
    yield "int", m(x, dtype=torch.int32)
    yield "slice", m(x, where=slice(1, 3))
    yield "slice2", m(x, where=slice(None, None, 2))
    yield "fn", m(x, fn=torch.sum)
    yield "fn-partial", m(x, fn=functools.partial(torch.clamp, min=0.5))
    yield "fn-lambda", m(x, fn=lambda t: t * 10)
    yield "fn-lambda2", m(x, fn=lambda t: t * 20)
    yield "isinstance", m(x, mode=Mode(2))


@case("python", "pytorch#122649")
def case_properties():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self._s, self.reads = 2.0, 0

        @property
        def scale(self):
            self.reads += 1
            return self._s

        @scale.setter
        def scale(self, v):
            self._s = v * 10

        @functools.cached_property
        def once(self):
            return self._s + 1

        def forward(self, x):
            return x * self.scale + self.once

    m, x = M(), ramp(3)
    yield from warm("start", m, x)
    m.scale = 3.0
    yield "set", m(x)
    yield "reads", m.reads
    del m.__dict__["once"]
    yield "cached-property-reset", m(x)
    M.scale = property(lambda self: 7.0)
    yield "property-replaced", m(x)


@case("python")
def case_generator_expressions_and_itertools():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])

        def pieces(self, x):
            for i, layer in enumerate(self.layers):
                got = yield layer(x) * i
                if got:
                    return

        def forward(self, x, stop=False):
            a = sum(layer(x) for layer in self.layers)
            b = torch.stack([t for t in self.pieces(x)])  # noqa: C416
            c = {i: t for i, t in zip(itertools.count(1), itertools.chain([x], (x + k for k in range(2))))}  # noqa: C416
            d = any(t.sum() > 0 for t in self.pieces(x)), all(bool(t.sum() > -1e9) for t in c.values())
            g = self.pieces(x)
            e = next(g)
            if stop:
                try:
                    g.send(True)
                except StopIteration:
                    e = e - 1
            return a, b, c, d, e, max((t.sum() for t in c.values()), key=float)

    m, x = fill(M()), ramp(2, 3)
    with torch.no_grad():
        yield from warm("run", m, x)
        yield "stop", m(x, stop=True)
        del m.layers[2]
        yield "fewer", m(x)


@case("python", "torchdynamo#318", "pytorch#112865")
def case_try_except_finally_in_forward():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 2)
            self.events = []

        def forward(self, x):
            try:
                y = self.lin(x)
            except RuntimeError:
                self.events.append("fallback")
                y = x.sum(-1, keepdim=True)
            else:
                self.events.append("ok")
            finally:
                self.events.append("finally")
            try:
                idx = {"k": 1}["missing" if x.shape[0] == 1 else "k"]
            except KeyError as e:
                idx = len(e.args)
            try:
                return y * (1 // (x.shape[0] - 3)), idx
            except ZeroDivisionError:
                return y, -1

    m = fill(M())
    with torch.no_grad():
        for s in ((2, 4), (2, 4), (2, 4), (2, 5), (1, 4), (3, 4), (2, 4)):
            yield str(s), m(ramp(*s))
        yield "events", m.events


@case("python", "pytorch#136033")
def case_context_managers_in_forward():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.depth, self.log, self.gain = 0, [], 1.0

        @contextlib.contextmanager
        def boosted(self, k):
            old, self.gain = self.gain, self.gain * k
            self.log.append(("in", self.gain))
            try:
                yield self
            finally:
                self.gain = old
                self.log.append(("out", old))

        def forward(self, x, fail=False):
            with self.boosted(2) as a, self.boosted(3):
                y = x * a.gain
                if fail:
                    raise ValueError("inside")
            with contextlib.suppress(ZeroDivisionError):
                1 // 0  # noqa: B018 - the exception is the point
            return y + self.gain

    m, x = M(), ramp(3)
    yield from warm("run", m, x)
    yield "fails", attempt(m, x, fail=True)
    yield "gain-restored", m.gain
    yield "again", m(x)
    yield "log", m.log


@case("python")
def case_nested_functions_and_nonlocal():
    class M(nn.Module):
        def forward(self, x, n):
            total, seen = 0, []

            def visit(t, d):
                nonlocal total
                total += 1
                seen.append(d)
                return t if d == 0 else visit(t * 2, d - 1) + 1

            y = visit(x, n)
            return y, total, seen, [f(x) for f in [lambda t, k=k: t + k for k in range(3)]]

    m, x = M(), ramp(2)
    for n in (2, 2, 2, 0, 5, 2):
        yield f"n{n}", m(x, n)


# --------------------------------------------------------------------------


def case_grad_mode_switching():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 2)

        def forward(self, x):
            y = self.lin(x)
            return y, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), y.requires_grad

    m, x = fill(M()), ramp(2, 3)
    with torch.no_grad():
        yield from warm("no_grad", m, x)
    yield from warm("grad", m, x)
    with torch.inference_mode():
        y = m(x)
        yield from warm("inference", m, x)
    yield "is_inference", y[0].is_inference()
    yield "inference-input-outside", attempt(lambda: m(y[0].new_ones(2, 3)))[0]
    with torch.no_grad():
        yield "no_grad-again", m(x)
        with torch.enable_grad():
            yield "enable_grad-inside", m(x)
    with torch.set_grad_enabled(False):
        yield "set_grad_enabled", m(x)
    m.requires_grad_(False)
    yield "frozen", m(x)
    m.lin.bias.requires_grad_(True)
    yield "bias-thawed", m(x)
    yield "input-grad", m(x.clone().requires_grad_(True))


@case("grad")
def case_backward_through_model():
    m = fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    with torch.no_grad():
        yield from warm("no_grad", m, ramp(2, 3))
    for i in range(3):
        x = (ramp(2, 3) * 0.1 + i).requires_grad_(True)
        m.zero_grad(set_to_none=True)
        m(x).sum().backward()
        yield f"x.grad{i}", x.grad
        yield f"p.grad{i}", [p.grad for p in m.parameters()]
    opt = torch.optim.SGD(m.parameters(), lr=0.5)
    opt.step()
    with torch.no_grad():
        yield from warm("after-step", m, ramp(2, 3))
    x = ramp(2, 3).requires_grad_(True)
    (g,) = torch.autograd.grad(m(x).pow(2).sum(), x, create_graph=True)
    (gg,) = torch.autograd.grad(g.sum(), x)
    yield "second-order", (g, gg)


@case("autocast", "pytorch#194329", "pytorch#179804", "pytorch#181564")
def case_autocast_inside_and_outside():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            y = self.a(x)
            with torch.autocast(DEVICE_TYPE, enabled=False):
                z = self.b(y.float())
            return y, z, y @ z.to(y.dtype).t()

    m, x = fill(M()), ramp(4, 4) * 0.1
    with torch.no_grad():
        yield from warm("plain", m, x)
        with torch.autocast(DEVICE_TYPE, dtype=torch.bfloat16):
            yield from warm("bf16", m, x)
            with torch.autocast(DEVICE_TYPE, enabled=False):
                yield "disabled", m(x)
        yield "plain-again", m(x)
        m.a.weight.mul_(2)
        with torch.autocast(DEVICE_TYPE, dtype=torch.bfloat16):
            yield "bf16-weight-changed-between-contexts", m(x)
    with torch.autocast(DEVICE_TYPE, dtype=torch.bfloat16):
        yield "bf16-with-grad", m(x)

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x):
            with torch.autocast(DEVICE_TYPE, dtype=torch.bfloat16):
                y = self.lin(x)
            return y, self.lin(x)

    own = fill(Own())
    with torch.no_grad():
        yield from warm("own-autocast", own, x)


class Tagged(torch.Tensor):
    """A tensor subclass that keeps its type and adds 1 to every addition."""

    @classmethod
    def __torch_function__(cls, func, types_, args=(), kwargs=None):
        out = super().__torch_function__(func, types_, args, kwargs or {})
        if func is torch.Tensor.add or getattr(func, "__name__", "") == "add":
            with torch._C.DisableTorchFunction():
                out = torch.Tensor.add(out, 1)
            out = out.as_subclass(cls)
        return out


@case("modes")
def case_torch_function_mode_active():
    from torch.overrides import TorchFunctionMode

    class Count(TorchFunctionMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_function__(self, func, types_, args=(), kwargs=None):
            self.names.append(getattr(func, "__name__", str(func)))
            if func is F.relu or func is torch.relu:
                return args[0] * 0 + 42
            return func(*args, **(kwargs or {}))

    m, x = fill(nn.Sequential(nn.Linear(3, 3), nn.ReLU())), ramp(2, 3)
    with torch.no_grad():
        yield from warm("off", m, x)
        with Count() as c:
            yield "on", m(x)
        yield "must:mode-saw-calls", "linear" in c.names and "relu" in c.names
        yield "off-again", m(x)


# --------------------------------------------------------------------------
