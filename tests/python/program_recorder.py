"""Writes a sequence of operator calls down as CIR text while running them eagerly.

What the tracer does for a real call, without a tracer: every call goes through `Recorder.call`, values are tensor
objects, storage ids are storage objects.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import torch
from cuvil import _native


def _quote(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _float(value: float) -> str:
    if math.isnan(value):
        return f"nan({struct.unpack('<Q', struct.pack('<d', value))[0]:016x})"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return repr(float(value))


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _float(value)
    return f"complex({_float(value.real)}, {_float(value.imag)})"


_DTYPES_BY_CODE = {4: torch.int64, 6: torch.float32}


def _attr(value: Any, kind: str) -> str:
    base = kind.rstrip("?").replace("[]", "")
    if value is None:
        return "none"
    if base == "ScalarType" and isinstance(value, int):  # a schema's default
        value = _DTYPES_BY_CODE[value]
    if base == "MemoryFormat" and isinstance(value, int):
        value = torch.contiguous_format
    if isinstance(value, torch.dtype):
        return f"dtype({str(value)[6:]})"
    if isinstance(value, torch.layout):
        return f"layout({str(value)[6:]})"
    if isinstance(value, torch.memory_format):
        return f"format({str(value)[6:].removesuffix('_format')})"
    if isinstance(value, torch.device):
        return f"device({value})"
    if isinstance(value, str):
        return f"device({value})" if base == "Device" else _quote(value)
    if isinstance(value, (list, tuple)):
        if base == "float":
            return f"floats[{', '.join(_float(v) for v in value)}]"
        if base.startswith("bool"):
            return f"bools[{', '.join(_scalar(bool(v)) for v in value)}]"
        if base == "Scalar":
            return f"scalars[{', '.join(_scalar(v) for v in value)}]"
        return f"ints[{', '.join(str(int(v)) for v in value)}]"
    if base == "float":
        return _float(value)
    if base == "bool":
        return _scalar(bool(value))
    return _scalar(value)


_SCHEMAS: dict[str, dict[str, Any]] = {}


def schema_facts(schema: Any) -> dict[str, Any]:
    text = str(schema)
    if text not in _SCHEMAS:
        _SCHEMAS[text] = _native._cir_schema(text)
    return _SCHEMAS[text]


class Recorder:
    """One program: leaves first, then calls, then outputs."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.inputs: list[torch.Tensor] = []
        self.captured: list[torch.Tensor] = []
        self.constants: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []  # keeps every tensor alive, so that ids are not reused
        self.outputs: list[torch.Tensor] = []
        self._value_ids: dict[int, int] = {}
        self._storage_ids: dict[int, int] = {}
        self._num_ops = 0

    def value_id(self, tensor: torch.Tensor) -> int:
        return self._value_ids[id(tensor)]

    def knows(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._value_ids

    def storage_id(self, tensor: torch.Tensor) -> int:
        return self._storage_ids.setdefault(tensor.untyped_storage()._cdata, len(self._storage_ids))

    def _declare(self, tensor: torch.Tensor) -> str:
        assert id(tensor) not in self._value_ids
        number = len(self.values)
        self._value_ids[id(tensor)] = number
        self.values.append(tensor)
        sizes = ",".join(map(str, tensor.shape))
        strides = ",".join(map(str, tensor.stride()))
        text = f"%{number} : {str(tensor.dtype)[6:]}[{sizes}]{{{strides}}} {tensor.device} @{self.storage_id(tensor)}"
        if tensor.requires_grad:
            text += " requires_grad"
        if tensor.is_inference():
            text += " inference"
        return text

    def add_input(self, tensor: torch.Tensor) -> torch.Tensor:
        self.lines.append(f"{self._declare(tensor)} = input {len(self.inputs)}")
        self.inputs.append(tensor)
        return tensor

    def add_captured(self, tensor: torch.Tensor) -> torch.Tensor:
        self.lines.append(f"{self._declare(tensor)} = captured {len(self.captured)}")
        self.captured.append(tensor)
        return tensor

    def add_constant(self, tensor: torch.Tensor) -> torch.Tensor:
        # The plan gets a copy: the program may write the tensor that it made itself.
        self.lines.append(f"{self._declare(tensor)} = constant {len(self.constants)}")
        self.constants.append(tensor.clone())
        return tensor

    def call(self, op: Any, *args: Any, random: bool = False, dynamic: bool = False, **kwargs: Any) -> Any:
        """Runs `torch.ops.ns.name.overload` and writes it down. Raises what the operator raises."""
        schema = op._schema
        kinds = schema_facts(schema)["kinds"]
        operands = []
        written = 0
        for position, (argument, kind) in enumerate(zip(schema.arguments, kinds, strict=True)):
            if position < len(args):
                value = args[position]
            else:
                value = kwargs.get(argument.name, argument.default_value)
            mark = ""
            if argument.alias_info is not None and argument.alias_info.is_write and value is not None:
                mark = " !"
                written += 1
            if isinstance(value, torch.Tensor):
                text = f"%{self.value_id(value)}"
            elif kind.startswith("Tensor") and isinstance(value, (list, tuple)):
                elements = ("none" if v is None else f"%{self.value_id(v)}" for v in value)
                text = f"[{', '.join(elements)}]"
            else:
                text = _attr(value, kind)
            operands.append(f"{kind}{mark} {text}")
        result = op(*args, **kwargs)

        returned = result if len(schema.returns) != 1 else [result]
        if any(self.knows(v) for r in returned if isinstance(r, (list, tuple)) for v in r):
            raise NotImplementedError("CIR has no form for a list that holds an argument (broadcast_tensors)")
        results = []
        is_view = False
        sources = {self.storage_id(t) for a in [*args, *kwargs.values()] for t in _tensors(a)}
        for position, declared in enumerate(schema.returns):
            value = returned[position]
            reference = "& " if declared.alias_info is not None and declared.alias_info.is_write else ""
            if value is None:
                results.append("_")
            elif isinstance(value, torch.Tensor):
                if id(value) in self._value_ids:
                    results.append(f"{reference}same %{self.value_id(value)}")
                else:
                    is_view |= self.storage_id(value) in sources
                    results.append(self._declare(value) + (" dynamic" if dynamic else ""))
            else:
                is_view |= any(self.storage_id(v) in sources for v in value)
                results.append(f"[{', '.join(self._declare(v) for v in value)}]")
        name = op.name()
        flags = (" view" if is_view else "") + (" random" if random else "")
        self.lines.append(f"#{self._num_ops} {name}({', '.join(operands)}) -> ({', '.join(results)}){flags} source 0")
        self._num_ops += 1
        return result

    def text(self) -> str:
        outputs = ", ".join(f"%{self.value_id(t)}" for t in self.outputs)
        return "\n".join(["cir 1", 'source 0 "program"', *self.lines, f"return {outputs}", ""])


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [v for v in value if isinstance(v, torch.Tensor)]
    return []


def describe_tensors(tensors: list[torch.Tensor], versions: bool = True) -> list[Any]:
    """Everything about tensors that a program could see, except their values: geometry, identity, sharing."""
    identity: dict[int, int] = {}
    storage: dict[int, int] = {}
    facts = []
    for t in tensors:
        base = t._base
        facts.append(
            (
                str(t.dtype),
                str(t.device),
                tuple(t.shape),
                t.stride(),
                t.storage_offset(),
                t.untyped_storage().nbytes(),
                t.requires_grad,
                t.is_inference(),
                -1 if t.is_inference() or not versions else t._version,
                None if base is None else (tuple(base.shape), base.stride()),
                t.is_conj(),
                t.is_neg(),
                identity.setdefault(id(t), len(identity)),
                storage.setdefault(t.untyped_storage()._cdata, len(storage)),
            )
        )
    return facts


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in every element, a NaN equal to a NaN, 0.0 different from -0.0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype.is_complex:
        return same_bits(torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj()))
    if a.dtype.is_floating_point:
        nan = a.isnan()
        return bool((nan == b.isnan()).all()) and bool(((a == b) & (a.signbit() == b.signbit()) | nan).all())
    return torch.equal(a, b)
