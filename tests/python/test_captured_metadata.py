"""Weights and buffers whose metadata changes under a live plan, of few dimensions and of more than a tensor holds
inline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import cuvil
import pytest
import torch
from cuvil import _native
from torch import nn


class Adds(nn.Module):
    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("held", buffer)

    def forward(self, x: torch.Tensor) -> Any:
        total = self.held + x
        return total, total.dtype, tuple(total.shape), self.held.stride()


@pytest.fixture(autouse=True)
def enabled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUVIL_PREPARE", "sync")
    monkeypatch.setenv("CUVIL_ADOPT", "always")
    _native.reset()
    cuvil.enable()
    with torch.no_grad():
        yield
    cuvil.disable()
    _native._quiesce()
    _native.reset()


def other_sizes(t: torch.Tensor) -> torch.Tensor:
    return torch.randn(*t.shape[:-1], 1) if t.dim() else torch.randn(2)


def other_strides(t: torch.Tensor) -> torch.Tensor:
    return torch.randn(*t.shape, 2)[..., 0]


def other_offset(t: torch.Tensor) -> torch.Tensor:
    return torch.randn(t.numel() + 3)[3:].view(t.shape)


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sizes": other_sizes,
    "strides": other_strides,
    "offset": other_offset,
    "dtype": lambda t: torch.randn(t.shape, dtype=torch.float64),
    "memory": lambda t: torch.randn(t.shape),
}


@pytest.mark.parametrize("dimension", [0, 1, 3, 5, 6, 7])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_metadata_is_noticed(change: str, dimension: int) -> None:
    shape = [2] * dimension
    model, x = Adds(torch.randn(shape)), torch.randn(shape)
    twin = cuvil.opt_out(Adds(model.held))
    for _ in range(4):
        model(x)
    assert cuvil.stats()["planned"] == 2
    model.held.data = CHANGES[change](model.held)
    actual, expected = model(x), twin(x)
    assert torch.equal(actual[0], expected[0])
    assert actual[1:] == expected[1:]
    assert actual[0].stride() == expected[0].stride()
    # New memory is read in place; a scalar has no strides that could differ.
    same_plan = change == "memory" or (change == "strides" and dimension == 0)
    assert cuvil.stats()["planned"] == (3 if same_plan else 2)


@pytest.mark.parametrize("dimension", [2, 6])
def test_a_weight_that_stops_requiring_a_gradient_is_noticed(dimension: int) -> None:
    shape = [2] * dimension
    model, x = Adds(torch.zeros(shape)), torch.randn(shape)
    del model.held
    model.held = nn.Parameter(torch.randn(shape))
    for _ in range(4):
        model(x)
    assert cuvil.stats()["planned"] == 2
    model.held.requires_grad_(False)
    model(x)
    assert cuvil.stats()["planned"] == 2
