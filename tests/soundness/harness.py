# Runs a program with the accelerator off and on and compares everything the program observed.
#
# A program ("case") is a generator that builds a tiny model, calls it, changes something that a cached plan might have
# baked in, calls it again, and yields (label, output) pairs:
# - structure is identical: types, keys, lengths, dtypes, shapes, strides, requires_grad, tensor class, storage, views;
# - values are bit-exact in `exact` mode, else close (exact for integers and booleans);
# - a label that starts with "must:" has to be True in both runs.
#
# Environment: CASES_DEVICE (default cpu), CASES_WARM (calls before each change, so that a plan is really in use).
"""Off/on comparison of soundness programs."""

from __future__ import annotations

import dataclasses
import math
import os
import random
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn as nn

DEVICE = os.environ.get("CASES_DEVICE", "cpu")
WARM = int(os.environ.get("CASES_WARM", "4"))
CHECK_STRIDES = os.environ.get("CASES_STRIDES", "1") != "0"
DEVICE_TYPE = torch.device(DEVICE).type

Case = Callable[[], Iterator[tuple[str, Any]]]
Stream = list[tuple[str, Any]]


# ---------------------------------------------------------------- what cases are written with
def rn(*shape: int, **kw: Any) -> torch.Tensor:
    return torch.randn(*shape, **kw).to(DEVICE)


def full(value: Any, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, value, dtype=dtype, device=DEVICE)


def ramp(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    n = int(math.prod(shape))
    return torch.arange(n, dtype=torch.float32).reshape(shape).to(dtype).to(DEVICE)


def fill(module: Any, value: float | None = None) -> Any:
    """Give a module simple, known weights."""
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            if value is None:
                p.copy_(torch.linspace(-1.0, 1.0, p.numel()).reshape(p.shape) * (1 + 0.1 * i))
            else:
                p.fill_(value)
    return module.to(DEVICE)


def warm(label: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
    """Call fn WARM times, yielding each output."""
    for i in range(WARM):
        yield f"{label}/warm{i}", fn(*args, **kwargs)


def attempt(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, Any]:
    """Return the output, or the exception as comparable data."""
    try:
        return ("ok", fn(*args, **kwargs))
    except Exception as e:
        return ("raised", type(e).__name__)


def attempt_in_words(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """As `attempt`, with the message and the functions of the traceback: eager's own are part of the contract."""
    try:
        return ("ok", fn(*args, **kwargs))
    except Exception as e:
        names = [frame.name for frame in traceback.extract_tb(e.__traceback__)[1:]]
        return ("raised", type(e).__name__, str(e), names)


def case(kind: str, *refs: str) -> Callable[[Case], Case]:
    """Tag a case with its group and the reports that inspired it."""

    def deco(fn: Any) -> Any:
        fn.kind, fn.refs = kind, refs
        return fn

    return deco


# ---------------------------------------------------------------- snapshots
class TensorShot:
    """Everything about a tensor that an accelerator must not change."""

    def __init__(self, t: torch.Tensor) -> None:
        self.cls = type(t).__name__
        self.dtype, self.shape, self.device = t.dtype, tuple(t.shape), t.device.type
        self.requires_grad, self.is_leaf = t.requires_grad, t.is_leaf
        self.inference = t.is_inference()
        self.grad_fn = type(t.grad_fn).__name__
        self.view = t._is_view()
        self.conj, self.neg = t.is_conj(), t.is_neg()
        self.offset: int | None = None
        self.storage_bytes: int | None = None
        if t.layout == torch.strided and type(t) in (torch.Tensor, nn.Parameter):
            self.offset, self.storage_bytes = t.storage_offset(), t.untyped_storage().nbytes()
        with torch.no_grad():
            plain = t.detach().as_subclass(torch.Tensor) if type(t) is not torch.Tensor else t.detach()
            self.stride = tuple(plain.stride()) if plain.layout == torch.strided else None
            self.value = plain.clone().cpu()

    def __repr__(self) -> str:
        return f"{self.cls}({str(self.dtype).replace('torch.', '')}, {self.shape})"


FLAGS = (
    "cls",
    "dtype",
    "shape",
    "device",
    "requires_grad",
    "is_leaf",
    "inference",
    "grad_fn",
    "view",
    "conj",
    "neg",
    "offset",
    "storage_bytes",
)


def snapshot(o: Any) -> Any:
    if isinstance(o, torch.Tensor):
        return TensorShot(o)
    if isinstance(o, (str, bytes, int, float, complex, bool, type(None), torch.dtype, slice, torch.Size)):
        return (type(o).__name__, o)
    if dataclasses.is_dataclass(o) and not isinstance(o, type):
        return (
            type(o).__name__,
            [(f.name, snapshot(getattr(o, f.name))) for f in dataclasses.fields(o)],
            [(k, snapshot(v)) for k, v in o.items()] if isinstance(o, dict) else None,
        )
    if isinstance(o, dict):
        return (type(o).__name__, [(snapshot(k), snapshot(v)) for k, v in o.items()])
    if isinstance(o, (list, tuple)):
        return (type(o).__name__, [snapshot(v) for v in o])
    return (type(o).__name__, repr(o) if not hasattr(o, "__dict__") else "object")


# ---------------------------------------------------------------- comparison
TOL = {
    torch.float16: (1e-2, 1e-3),
    torch.bfloat16: (2e-2, 1e-2),
    torch.float32: (2e-4, 2e-5),
    torch.float64: (1e-9, 1e-11),
    torch.complex64: (2e-4, 2e-5),
    torch.complex128: (1e-9, 1e-11),
}


def _same_strides(a: TensorShot, b: TensorShot) -> bool:
    if a.stride is None or b.stride is None or 0 in a.shape:
        return a.stride == b.stride or 0 in a.shape
    return all(n == 1 or s == t for n, s, t in zip(a.shape, a.stride, b.stride, strict=True))


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equality that tells -0.0 from 0.0 and takes NaNs as equal."""
    if a.is_complex():
        return _same_bits(torch.view_as_real(a), torch.view_as_real(b))
    if not a.is_floating_point():
        return torch.equal(a, b)
    nan = a.isnan()
    return (
        torch.equal(nan, b.isnan())
        and torch.equal(a.masked_fill(nan, 0), b.masked_fill(nan, 0))
        and torch.equal(a.signbit() & ~nan, b.signbit() & ~nan)
    )


def _tensor_differences(a: TensorShot, b: TensorShot, path: str, exact: bool) -> list[str]:
    for k in FLAGS:
        if getattr(a, k) != getattr(b, k):
            return [f"{path}: {k} {getattr(a, k)!r} -> {getattr(b, k)!r}"]
    if CHECK_STRIDES and not (a.stride == b.stride if exact else _same_strides(a, b)):
        return [f"{path}: stride {a.stride!r} -> {b.stride!r}"]
    x, y = a.value.resolve_conj().resolve_neg(), b.value.resolve_conj().resolve_neg()
    if x.layout != torch.strided:
        x, y = x.to_dense(), y.to_dense()
    if exact:
        same = _same_bits(x, y)
    elif x.is_floating_point() or x.is_complex():
        rtol, atol = TOL.get(a.dtype, (1e-3, 1e-4))
        same = torch.allclose(x, y, rtol=rtol, atol=atol, equal_nan=True)
    else:
        same = torch.equal(x, y)
    if same:
        return []
    worst = (x.double() - y.double()).abs().nan_to_num(0).max().item() if x.numel() and not x.is_complex() else 0.0
    return [f"{path}: values differ (max abs {worst:.3g})"]


def differences(a: Any, b: Any, path: str = "out", exact: bool = False) -> list[str]:
    if isinstance(a, TensorShot) and isinstance(b, TensorShot):
        return _tensor_differences(a, b, path, exact)
    if type(a) is not type(b):
        return [f"{path}: {a!r} -> {b!r}"]
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return [f"{path}: length {len(a)} -> {len(b)}"]
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{path}[{i}]", exact)]
    if isinstance(a, float):
        same = (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
        if not exact:
            same = same or a == b or math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-7)
        return [] if same else [f"{path}: {a!r} -> {b!r}"]
    return [] if a == b else [f"{path}: {a!r} -> {b!r}"]


def run_case(fn: Case) -> Stream:
    """Run one case; snapshots are taken as each pair is yielded."""
    torch.manual_seed(1234)
    random.seed(1234)
    out: Stream = []
    try:
        for label, value in fn():
            out.append((label, snapshot(value)))
    except Exception as e:
        out.append(("<raised>", ("exception", type(e).__name__, str(e)[:300], traceback.format_exc()[-1500:])))
    return out


def problems(off: Stream, on: Stream, exact: bool = False) -> list[str]:
    """How the second run differs from the first, and what either run broke by itself."""
    found = []
    for name, run in (("off", off), ("on", on)):
        for label, shot in run:
            if label.startswith("must:") and shot != ("bool", True):
                found.append(f"{name} run broke {label}")
            if label == "<raised>":
                found.append(f"{name} run raised {shot[1]}: {shot[2]}\n{shot[3]}")
    labels_off, labels_on = [label for label, _ in off], [label for label, _ in on]
    if labels_off != labels_on:
        pairs = enumerate(zip(labels_off, labels_on, strict=False))
        found.append(f"label streams differ at {next((i for i, (p, q) in pairs if p != q), min(len(off), len(on)))}")
    for (l1, s1), (l2, s2) in zip(off, on, strict=False):
        if l1 == l2 and l1 != "<raised>" and not l1.startswith("must:"):
            found += [f"{l1}: {d}" for d in differences(s1, s2, exact=exact)]
    return found
