# Says in words how two model outputs differ: structure, dtype, device, shape, strides, flags, values.
"""Comparison of model outputs for the corpus."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

# Relative to the largest magnitude of the reference; plans call the operators eager calls, so most models are exact.
RELATIVE_TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-5, torch.float64: 1e-12}
_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size, slice)


@dataclasses.dataclass
class Difference:
    """`wrong` are faults; `max_relative` is the largest numeric deviation that was tolerated (0.0 means bit-exact)."""

    wrong: list[str] = dataclasses.field(default_factory=list)
    max_relative: float = 0.0
    tensors: int = 0
    not_finite: int = 0


def compare(expected: Any, actual: Any) -> Difference:
    """Walks both outputs together; objects are compared through their attributes."""
    result = Difference()
    _walk(expected, actual, "out", result, set())
    return result


def _walk(a: Any, b: Any, path: str, result: Difference, seen: set[tuple[int, int]]) -> None:
    if type(a) is not type(b):
        result.wrong.append(f"{path}: {type(a).__name__} became {type(b).__name__}")
    elif isinstance(a, torch.Tensor):
        _tensors(a, b, path, result)
    elif isinstance(a, float):
        if a != b and not (math.isnan(a) and math.isnan(b)):
            result.wrong.append(f"{path}: {a!r} became {b!r}")
    elif isinstance(a, _PLAIN):
        if a != b:
            result.wrong.append(f"{path}: {a!r} became {b!r}")
    elif (id(a), id(b)) not in seen:
        seen.add((id(a), id(b)))
        if isinstance(a, dict):
            if list(a) != list(b):
                result.wrong.append(f"{path}: keys {list(a)} became {list(b)}")
            else:
                for key in a:
                    _walk(a[key], b[key], f"{path}[{key!r}]", result, seen)
        elif isinstance(a, (list, tuple)):
            if len(a) != len(b):
                result.wrong.append(f"{path}: length {len(a)} became {len(b)}")
            else:
                for index, (x, y) in enumerate(zip(a, b, strict=True)):
                    _walk(x, y, f"{path}[{index}]", result, seen)
        if hasattr(a, "__dict__") and not isinstance(a, (type, torch.nn.Module)):
            _walk(vars(a), vars(b), f"{path}.__dict__", result, seen)


def _tensors(a: torch.Tensor, b: torch.Tensor, path: str, result: Difference) -> None:
    result.tensors += 1
    for name in ("dtype", "shape", "device", "layout", "requires_grad", "is_leaf"):
        if getattr(a, name) != getattr(b, name):
            result.wrong.append(f"{path}: {name} {getattr(a, name)} became {getattr(b, name)}")
            return
    for name in ("is_inference", "is_conj", "is_neg", "_is_view"):
        if getattr(a, name)() != getattr(b, name)():
            result.wrong.append(f"{path}: {name}() {getattr(a, name)()} became {getattr(b, name)()}")
    if a.layout != torch.strided:
        a, b = a.to_dense(), b.to_dense()
    if a.stride() != b.stride():
        result.wrong.append(f"{path}: strides {a.stride()} became {b.stride()}")
    if a.storage_offset() != b.storage_offset() or a.untyped_storage().nbytes() != b.untyped_storage().nbytes():
        result.wrong.append(
            f"{path}: storage (offset, bytes) "
            f"({a.storage_offset()}, {a.untyped_storage().nbytes()}) became "
            f"({b.storage_offset()}, {b.untyped_storage().nbytes()})"
        )
    if not (a.is_floating_point() or a.is_complex()):
        if not torch.equal(a, b):
            result.wrong.append(f"{path}: values differ in {int((a != b).sum())} places")
        return
    wide = torch.complex128 if a.is_complex() else torch.float64
    x, y = a.detach().to(wide), b.detach().to(wide)
    finite = torch.isfinite(torch.view_as_real(x) if a.is_complex() else x)
    result.not_finite += int((~finite).sum())
    if torch.equal(x.nan_to_num(123.0), y.nan_to_num(123.0)):
        return
    scale = float(x.abs().nan_to_num(0.0, 0.0, 0.0).max())
    deviation = float(
        (x - y).abs().nan_to_num(math.inf, math.inf, math.inf)[~((x == y) | (x.isnan() & y.isnan()))].max()
    )
    relative = deviation / scale if scale else deviation
    result.max_relative = max(result.max_relative, relative)
    if not relative <= RELATIVE_TOLERANCE.get(a.dtype, 1e-5):
        result.wrong.append(f"{path}: values differ, max abs {deviation:.3g} at scale {scale:.3g}")
