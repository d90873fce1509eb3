"""What Python reads of a weight's shape and type is guarded, also where no operator uses the weight."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
from eager_twin import compare_with_eager, warm

READS: dict[str, Callable[[Any], Any]] = {
    "shape": lambda m: m.w.shape[0],
    "size": lambda m: m.w.size(0),
    "whole size": lambda m: len(m.w.size()),
    "dim": lambda m: m.w.dim(),
    "ndim": lambda m: m.w.ndim,
    "numel": lambda m: m.w.numel(),
    "torch.numel": lambda m: torch.numel(m.w),
    "len": lambda m: len(m.w),
    "contiguous": lambda m: m.w.is_contiguous(),
    "stride": lambda m: m.w.stride(0),
    "floating": lambda m: m.w.is_floating_point(),
    "torch.floating": lambda m: torch.is_floating_point(m.w),
    "element size": lambda m: m.w.element_size(),
    "dtype": lambda m: m.w.dtype.itemsize,
    "nbytes": lambda m: m.w.nbytes,
    "requires grad": lambda m: m.w.requires_grad,
    "result type": lambda m: torch.result_type(m.w, 1).itemsize,
    "type": lambda m: len(m.w.type()),
    "two sizes": lambda m: m.w.size() == m.other.size(),
    "same size": lambda m: m.w.is_same_size(m.other),
    "in shape": lambda m: 3 in m.w.shape,
    "format": lambda m: len(f"{m.w.shape}"),
    "list": lambda m: sum(p.shape[0] for p in m.listed),
    "tuple": lambda m: m.pair[1].shape[0],
    "dict": lambda m: m.table["w"].dtype.itemsize,
    "buffer": lambda m: m.b.shape[0],
}
CHANGES = {
    "longer": lambda: torch.ones(5),
    "wider": lambda: torch.ones(3, 4),
    "strided": lambda: torch.ones(2, 4)[:, 1:3],
    "double": lambda: torch.ones(2, 2, dtype=torch.float64),
    "int": lambda: torch.ones(2, 2, dtype=torch.int32),
}


class Reads(nn.Module):
    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.w, self.other = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
        self.register_buffer("b", torch.ones(2, 2))
        self.listed, self.pair, self.table = [self.w, self.b], (1, self.w), {"w": self.w}
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.5 + self.read(self)


def program(what: str) -> Iterator[Any]:
    for name, change in CHANGES.items():
        model, x = Reads(READS[what]).eval(), torch.ones(3)
        with torch.no_grad():
            yield from warm("start", model, x)
            model.w.requires_grad_(False)
            model.w.data, model.b.data = change(), change()
            yield name, model(x)
            yield name + " again", model(x)


@pytest.mark.parametrize("what", READS)
def test_a_weight_changes_its_shape_or_type(what: str) -> None:
    compare_with_eager(functools.partial(program, what), served=True)
