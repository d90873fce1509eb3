"""What plans run in place of an operator: the same bits, and nothing that the caller could see."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import cuvil
import pytest
import torch
from cuvil import _native
from torch import nn

ELEMENTWISE = {
    "relu": "",
    "silu": "",
    "sigmoid": "",
    "tanh": "",
    "hardswish": "",
    "hardsigmoid": "",
    "hardtanh": ", Scalar -0.5, Scalar 0.5",
    "leaky_relu": ", Scalar 0.01",
}
ARGUMENTS: dict[str, tuple[float, ...]] = {"hardtanh": (-0.5, 0.5), "leaky_relu": (0.01,)}
FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    name: getattr(torch, name, None) or getattr(nn.functional, name) for name in ELEMENTWISE
}
MODES: list[Any] = [torch.no_grad, torch.inference_mode]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_writing_over_an_operand_gives_the_same_bits(name: str, dtype: torch.dtype) -> None:
    kind = str(dtype).removeprefix("torch.")
    for size in (1, 7, 33, 1000, 70_001):
        value = f"{kind}[{size}]{{1}} cpu"
        plan = _native._plan_build(
            'cir 1\nsource 0 ""\n'
            f"%0 : {value} @0 = input 0\n"
            f"#0 aten::neg(Tensor %0) -> (%1 : {value} @1) source 0\n"
            f"#1 aten::{name}(Tensor %1{ELEMENTWISE[name]}) -> (%2 : {value} @2) source 0\n"
            f"#2 aten::neg(Tensor %2) -> (%3 : {value} @3) source 0\n"
            "return %3\n",
            [],
            True,
            True,
        )
        assert _native._plan_describe(plan)["in_place"] == 1
        x = torch.randn(size, dtype=dtype) * 3
        before = x.clone()
        with torch.no_grad():
            (actual,), _ = _native._plan_run(plan, [x], [])
            expected = FUNCTIONS[name](x.neg(), *ARGUMENTS.get(name, ())).neg()
        assert torch.equal(actual, expected)
        assert torch.equal(x, before)


@pytest.fixture(params=MODES, ids=["no_grad", "inference_mode"])
def planned(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Runs a model until its plan serves, and again, each time compared with its twin in eager."""
    monkeypatch.setenv("CUVIL_PREPARE", "sync")
    monkeypatch.setenv("CUVIL_ADOPT", "always")
    _native.reset()
    cuvil.enable()

    def check(model: nn.Module, *args: Any, calls: int = 4) -> Any:
        twin = cuvil.opt_out(copy.deepcopy(model))
        for _ in range(calls):
            before = cuvil.stats()["planned"]
            actual, expected = model(*args), twin(*args)
            for a, e in zip(
                torch.utils._pytree.tree_leaves(actual), torch.utils._pytree.tree_leaves(expected), strict=True
            ):
                assert torch.equal(a, e)
                assert (a.stride(), a.dtype, a.is_inference()) == (e.stride(), e.dtype, e.is_inference())
                if not a.is_inference():
                    assert (a._version, a._is_view()) == (e._version, e._is_view())
        assert cuvil.stats()["planned"] > before, cuvil.explain(model)
        return model

    with request.param():
        yield check
    cuvil.disable()
    _native._quiesce()
    _native.reset()


def mlp(layers: int = 3, width: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU()))).eval()


@pytest.mark.parametrize("rows", [1, 5])
def test_small_layers_give_eagers_bits(planned: Any, rows: int) -> None:
    planned(mlp(width=64), torch.randn(rows, 64))
    planned(mlp(width=64).double(), torch.randn(rows, 64, dtype=torch.float64))


def test_an_argument_of_other_strides_is_eagers_too(planned: Any) -> None:
    planned(mlp(), torch.randn(16, 4).t())
    planned(mlp(), torch.randn(4, 32)[:, ::2])


def test_new_memory_under_a_weight_is_read(planned: Any) -> None:
    model, x = mlp(), torch.randn(2, 16)
    planned(model, x)
    model[0].weight.data = torch.randn(16, 16)
    planned(model, x)
    model[2].bias.data = torch.randn(16)
    planned(model, x)


def test_a_weight_with_an_offset_is_read_where_it_lies(planned: Any) -> None:
    model, x = mlp(), torch.randn(2, 16)
    memory = torch.randn(40, 16)
    model[0].weight = nn.Parameter(memory[7:23], requires_grad=False)
    model[0].bias = nn.Parameter(memory.view(-1)[3:19], requires_grad=False)
    planned(model, x)
    memory.mul_(2)
    planned(model, x)


def test_a_transposed_weight_is_torchs_business(planned: Any) -> None:
    model, x = mlp(), torch.randn(2, 16)
    planned(model, x)
    model[0].weight.data = torch.randn(16, 16).t()
    planned(model, x)


class Activations(nn.Module):
    """Hands out what lies between the layers."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.which = which
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.first(x)
        active = torch.relu(hidden)
        out = self.second(active)
        return {
            "hidden": (hidden, out),
            "active": (active, out),
            "view": (active[0], out),
            "both": (hidden, active, out),
            "sum": out + hidden,
            "neither": torch.sigmoid(torch.tanh(out)),
        }[self.which]


@pytest.mark.parametrize("which", ["hidden", "active", "view", "both", "sum", "neither"])
def test_what_is_returned_is_not_written_over(planned: Any, which: str) -> None:
    planned(Activations(which).eval(), torch.randn(3, 8))
