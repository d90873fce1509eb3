# Question: how far is a model on a GPU from what its memory and its tensor cores allow?
# Baseline: the layer roofline of one H200. Unit: us. Budget: none; docs/performance.md has the gaps.
"""Layer rooflines of the models of gpu_suite.py: no GPU needed, every tensor is on torch's meta device.

    python benchmarks/gpu_floors.py [--only resnet50,bert] [--json floors.json]

A layer is a convolution, a matrix product or an attention. Its floor is the longer of its arithmetic at 790 TFLOP/s and
of its bytes (operands, weights, result, each once) at 4.3 TB/s, both measured on an H200; what is between layers counts
as fused into them. Where a sum or a product joins a layer's result with that of an earlier one (a residual, a gate), the
earlier one has to be read, and counts to the layer. The model's floor is the sum, which no schedule of these layers one
after the other can beat.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import gpu_suite
import torch
import torch.nn.functional as F
from cuvil.measure import save, table
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

FLOPS_PER_US = 790e6
BYTES_PER_US = 4.3e6
JOINS = {"aten::add", "aten::add_", "aten::mul", "aten::mul_"}


def num_bytes(value: Any) -> int:
    return sum(t.numel() * t.element_size() for t in gpu_suite.tensors_of(value))


class Layers(TorchDispatchMode):
    """Sums over the layers that run while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.work: list[tuple[int, int]] = []  # of each layer: flops, bytes
        self.newest = WeakIdKeyDictionary()  # the last layer that a tensor comes from

    def add(self, flops: int, moved: int) -> None:
        self.work.append((flops, moved))

    def floor_us(self) -> float:
        return sum(max(flops / FLOPS_PER_US, moved / BYTES_PER_US) for flops, moved in self.work)

    def layer_of(self, tensor: torch.Tensor) -> int:
        return self.newest.get(tensor, -1)

    def read_again(self, args: Any, result: torch.Tensor) -> int:
        """Bytes of the operands that the last layer's result is joined with."""
        large = [t for t in gpu_suite.tensors_of(args) if t.numel() == result.numel()]
        last = len(self.work) - 1
        if last < 0 or all(self.layer_of(t) != last for t in large):
            return 0
        return num_bytes([t for t in large if self.layer_of(t) != last])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return True  # the one thing that a row asks of its data: are the positions those of one sequence
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            moved = num_bytes([*args, *(kwargs or {}).values()]) + num_bytes(result)
            self.add(int(count(*args, **(kwargs or {}), out_val=result)), moved)
            newest = len(self.work) - 1
        else:
            if func._schema.name in JOINS:
                extra = self.read_again(args, result)
                if extra:
                    flops, moved = self.work[-1]
                    self.work[-1] = (flops, moved + extra)
            newest = max((self.layer_of(t) for t in gpu_suite.tensors_of(args)), default=-1)
        for tensor in gpu_suite.tensors_of(result):
            self.newest[tensor] = newest
        return result


class Attention(TorchFunctionMode):
    """One layer for each attention, whose scores need not be written to memory."""

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        self.layers = layers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            # A mode is off inside of the functions that it is told of, and multi_head_attention_forward is one of them.
            with self:
                return func(*args, **(kwargs or {}))
        query, key, value = (*args, *(kwargs or {}).values())[:3]
        result = query.new_empty((*query.shape[:-1], value.shape[-1]))
        pairs = query.shape[:-1].numel() * key.shape[-2]
        self.layers.add(2 * pairs * (query.shape[-1] + value.shape[-1]), num_bytes([query, key, value, result]))
        self.layers.newest[result] = len(self.layers.work) - 1
        return result


def floors(name: str, build: Any) -> dict[str, Any]:
    model, args, kwargs = build()
    layers = Layers()
    with torch.no_grad(), layers, Attention(layers):
        model(*args, **kwargs)
    return {
        "row": name,
        "layers": len(layers.work),
        "gflop": sum(flops for flops, _ in layers.work) / 1e9,
        "mbytes": sum(moved for _, moved in layers.work) / 1e6,
        "weight_mbytes": num_bytes(list(model.parameters())) / 1e6,
        "floor_us": layers.floor_us(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name contains one of these, comma-separated")
    parser.add_argument("--json", help="write the records to this file")
    options = parser.parse_args()
    gpu_suite.DEVICE = "meta"
    wanted = [part for part in options.only.split(",") if part]
    rows = [row for row in gpu_suite.ROWS if not wanted or any(part in row[0] for part in wanted)]
    records = [floors(name, build) for name, build in rows]
    shown = [
        [
            r["row"],
            str(r["layers"]),
            f"{r['gflop']:.1f}",
            f"{r['mbytes']:.0f}",
            f"{r['weight_mbytes']:.0f}",
            f"{r['floor_us']:.0f}",
        ]
        for r in records
    ]
    print(table(["row", "layers", "GFLOP", "MB moved", "MB weights", "floor µs"], shown))
    if options.json:
        save(options.json, sys.argv, records=records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
