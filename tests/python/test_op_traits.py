"""The table of operator traits (jit/cir/ops.def) against the running torch: its schemas, its tags."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cuvil import _native

# Tagged as random, but what the tag means does not concern a plan.
NOT_RANDOM = {
    # Returns an int, which no plan holds.
    "aten::_fused_sdp_choice",
}


def overloads() -> Iterator[tuple[str, Any]]:
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, rest = qualified.split("::")
        name, _, overload = rest.partition(".")
        if namespace not in ("aten", "prims") or rest.endswith("_out") or overload == "out":
            continue
        packet = getattr(getattr(torch.ops, namespace), name, None)
        op = getattr(packet, overload or "default", None)
        if op is not None:
            yield qualified, op


def facts(op: Any) -> dict[str, Any] | None:
    try:
        return _native._cir_schema(str(op._schema))
    except NotImplementedError:
        return None  # a type without a kind: never in a plan


def test_every_schema_of_aten_is_read_or_refused_for_a_type() -> None:
    total = refused = 0
    for name, op in overloads():
        total += 1
        try:
            read = _native._cir_schema(str(op._schema))
        except NotImplementedError as error:
            refused += 1
            assert "no kind for arguments of type" in str(error), name
            continue
        assert len(read["kinds"]) == len(op._schema.arguments), name
        expected = sum(
            1 << i for i, a in enumerate(op._schema.arguments) if a.alias_info is not None and a.alias_info.is_write
        )
        assert read["writes"] & expected == expected, name
    assert total > 2000
    assert refused < total / 10


@pytest.mark.parametrize(
    ("tag", "fact"),
    [(torch.Tag.nondeterministic_seeded, "random"), (torch.Tag.dynamic_output_shape, "dynamic")],
)
def test_tagged_operators_are_in_the_table(tag: torch.Tag, fact: str) -> None:
    missing = []
    for name, op in overloads():
        if tag not in op.tags or name.split(".")[0] in NOT_RANDOM:
            continue
        read = facts(op)
        # A mask makes `index` dynamic; that shows in operands, which this view of the table does not have.
        if read is None or name == "aten::index.Tensor":
            continue
        if not read[fact] and read["allowed"] is None:
            missing.append(name)
    assert missing == []


def test_operators_that_leave_the_tensor_world_are_denied() -> None:
    for name in ("item", "_local_scalar_dense", "is_nonzero", "equal", "allclose"):
        assert _native._cir_schema(str(getattr(torch.ops.aten, name).default._schema))["allowed"] is not None
    assert _native._cir_schema("my_library::op(Tensor x) -> Tensor")["allowed"] is not None
    assert _native._cir_schema(str(torch.ops.aten.set_.source_Tensor._schema))["allowed"] is not None


def test_hidden_writes_of_batch_norm_are_known() -> None:
    # Flags count as set in this view of the table: training mode.
    read = _native._cir_schema(str(torch.ops.aten.batch_norm.default._schema))
    assert read["writes"] == 0  # the running statistics are absent by default
