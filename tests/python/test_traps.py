"""Traps 1-8 of the design: reads that do not look like reads, inputs that look unchanged and are not."""

from __future__ import annotations

import io
import math
import pickle
import struct

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from eager_twin import Fn, attempt, compare_with_eager, eager_twin, fill, ramp, warm

# ------------------------------------------------------------------ 1. reads that do not look like reads
# Each reads the data of x in Python, so that a plan made for one x is wrong for the next.
DATA_READS = {
    "tensor_of_tensors": lambda s, x: torch.tensor([x.max(), 1.0]) + x,
    "tensor_of_tensor": lambda s, x: torch.tensor(x.sum().detach()) * x,
    "as_tensor_of_list": lambda s, x: torch.as_tensor([x.sum(), x.max()]),
    "new_tensor": lambda s, x: x.new_tensor([x.sum(), 2.0]),
    "legacy_constructor": lambda s, x: torch.FloatTensor([x.sum(), 3.0]),
    "stack_by_python_numbers": lambda s, x: torch.tensor([[float(v) for v in x]]),
    "asarray": lambda s, x: torch.asarray([x.max().item()]),
    "full_of_tensor": lambda s, x: torch.full((2,), x.sum()),
    "scalar_tensor": lambda s, x: torch.scalar_tensor(x.sum()),
    "arange_to_tensor": lambda s, x: torch.arange(x.max()),
    "linspace_of_items": lambda s, x: torch.linspace(0.0, x.sum().item(), 3),
    "item": lambda s, x: x * x.max().item(),
    "float": lambda s, x: x * float(x.max()),
    "int": lambda s, x: x * int(x.max()),
    "complex": lambda s, x: x * complex(x.max()).real,
    "bool": lambda s, x: x + 1 if bool(x.sum() > 4) else x - 1,
    "branch": lambda s, x: x + 1 if x.sum() > 4 else x - 1,
    "not": lambda s, x: x + 1 if not x.sum() > 4 else x - 1,
    "and": lambda s, x: (x.sum() > 4) and x,
    "is_nonzero": lambda s, x: x + 1 if torch.is_nonzero(x[0]) else x,
    "index_protocol": lambda s, x: x * [1.0, 2.0, 4.0, 8.0, 16.0, 32.0][x.long()[1]],
    "slice_by_tensor": lambda s, x: x[: x.long()[1]],
    "range": lambda s, x: sum((x + i for i in range(x.long()[1])), x),
    "str_repeat": lambda s, x: x * len("a" * x.long()[1]),
    "math": lambda s, x: x * math.floor(x.sum()),
    "round": lambda s, x: (x * 1, round(x.sum().item())),
    "struct": lambda s, x: (x * 1, struct.pack("f", x.sum())),
    "tolist": lambda s, x: (x * 1, x.tolist()),
    "numpy": lambda s, x: x * float(x.numpy().sum()),
    "np_asarray": lambda s, x: torch.from_numpy(np.asarray(x) * 2),
    "array_protocol": lambda s, x: torch.from_numpy(x.__array__() + 1),
    "dlpack": lambda s, x: (x * 1, float(np.from_dlpack(x.clone()).sum())),
    "memory_of_storage": lambda s, x: (x * 1, list(x.clone().untyped_storage())[:8]),
    "str": lambda s, x: (x * 1, str(x)),
    "repr": lambda s, x: (x * 1, repr(x.sum())),
    "format": lambda s, x: (x * 1, f"{x.sum():.2f}"),
    "pickle": lambda s, x: (x * 1, len(pickle.dumps(x)), torch.equal(pickle.loads(pickle.dumps(x)), x)),
    "save": lambda s, x: (x * 1, _saved(x)),
    "tensor_split": lambda s, x: torch.tensor_split(x, x.long()[1:2]),
    "equal": lambda s, x: x + 1 if torch.equal(x, s.reference) else x - 1,
    "allclose": lambda s, x: x + 1 if torch.allclose(x, s.reference) else x - 1,
    "contains": lambda s, x: x + 1 if 3.0 in x else x - 1,
    "in_list": lambda s, x: x + 1 if x[0] in [x[1], s.reference[1]] else x - 1,
    "max_builtin": lambda s, x: max(x[0], x[1], x[2]) * x,
    "sorted_builtin": lambda s, x: torch.stack(sorted([x[0], x[2], x[1]])),
    "any_builtin": lambda s, x: x + 1 if any(v > 2 for v in x) else x - 1,
    "dict_key": lambda s, x: x * {True: 2.0, False: 3.0}[bool(x[0] > 0)],
    "while": lambda s, x: _until(x),
    "assert": lambda s, x: _asserting(x),
    "match": lambda s, x: _matching(x),
    "comparison_chain": lambda s, x: x + 1 if 0 < x[0] < 2 else x - 1,
    "repeat_by_item": lambda s, x: x.repeat(int(x[1])),
    "clamp_by_item": lambda s, x: x.clamp(max=x[0].item()),
    "dropout_p": lambda s, x: F.dropout(x, p=min(float(x[0]) / 100, 1.0), training=False) * float(x[0]),
    "hash_of_bytes": lambda s, x: (x * 1, x.numpy().tobytes()),
    "unique_consecutive_length": lambda s, x: x * len(x.unique_consecutive()),
    "view_by_item": lambda s, x: x.view(int(x[1] > 0) + 1, -1) if x.numel() % 2 == 0 else x,
    "default_of_next": lambda s, x: next((v for v in x if v > 1), x[0]),
    "checksum_hash_tensor": lambda s, x: (x * 1, x.double().sum().item()),
}
VALUES = (
    [1.0, 2.0, 3.0],
    [1.0, 2.0, 3.0],
    [1.0, 2.0, 3.0],
    [1.0, 2.0, 3.0],
    [0.0, 3.0, 2.0],
    [5.0, 1.0, 0.0],
    [1.0, 2.0, 3.0],
    [-4.0, 2.0, 2.0],
    [1.0, 2.0, 3.0],
)


def _saved(x: torch.Tensor) -> float:
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return float(torch.load(buffer).sum())


def _until(x: torch.Tensor) -> torch.Tensor:
    n = 0
    while x.sum() > n:
        n += 1
    return x * n


def _asserting(x: torch.Tensor) -> torch.Tensor:
    assert x[0] < 2, "first element"
    return x + 1


def _matching(x: torch.Tensor) -> torch.Tensor:
    match int(x[0]):
        case 1:
            return x
        case 0:
            return x * 2
        case _:
            return x * 3


@pytest.mark.parametrize("read", DATA_READS)
def test_trap_01_data_read_in_python(read):
    def program():
        m = Fn(DATA_READS[read], reference=torch.tensor(VALUES[0]))
        with torch.no_grad():
            for i, value in enumerate(VALUES):
                yield f"{i}", attempt(m, torch.tensor(value))

    compare_with_eager(program)


# ------------------------------------------------------------------ 2. constants made in the call may be written
@eager_twin
def test_trap_02_constant_made_in_the_call_is_written():
    def forward(s, x):
        t = torch.tensor([0.0, 0.0, 0.0])
        t.add_(x)
        u = torch.zeros(3)
        u[1] = 5.0
        u.mul_(x)
        v = torch.arange(3.0)
        v[0] += 1
        return t, u, v, torch.ones(3).add_(x)

    m = Fn(forward)
    with torch.no_grad():
        for i in range(7):
            yield f"{i}", m(ramp(3) + i)


@eager_twin
def test_trap_02_constant_that_leaves_is_written_by_the_caller():
    m = Fn(lambda s, x: (x + 1, torch.tensor([1.0, 2.0]), torch.zeros(2), torch.arange(2)))
    with torch.no_grad():
        for i in range(7):
            y, a, b, c = m(ramp(3))
            yield f"{i}", (y, a, b, c)
            a.add_(1)
            b.add_(1)
            c.add_(1)


# ------------------------------------------------------------------ 3. data-dependent shapes are data
DYNAMIC_SHAPES = {
    "mask": lambda s, x: x[x > 0].sum() / x[x > 0].shape[0],
    "masked_select_numel": lambda s, x: x.masked_select(x > 0).numel() * x,
    "nonzero_len": lambda s, x: x * len(x.nonzero()),
    "where_len": lambda s, x: x * len(torch.where(x > 0)[0]),
    "argwhere": lambda s, x: x + torch.argwhere(x > 0).size(0),
    "unique": lambda s, x: x.unique().size(0) * x,
    "unique_counts": lambda s, x: x.unique(return_counts=True)[1].shape[0] + x,
    "bincount": lambda s, x: x.long().abs().bincount().shape[0] + x,
    "repeat_interleave": lambda s, x: x.repeat_interleave(x.long().abs()).shape[0] * x,
    "zeros_of_that_shape": lambda s, x: torch.zeros(x[x > 0].shape) + 1,
    "zeros_like": lambda s, x: torch.zeros_like(x[x > 0]) + 1,
    "expand_as": lambda s, x: torch.ones(1).expand_as(x[x > 0]),
    "new_zeros": lambda s, x: x.new_zeros(x[x > 0].size()) + 2,
    "arange_of_it": lambda s, x: torch.arange(x[x > 0].shape[0]),
    "view_minus_one": lambda s, x: x[x > 0].view(-1, 1),
    "reshape_known": lambda s, x: x[x > 0].reshape(x[x > 0].shape[0], 1),
    "chunks": lambda s, x: len(x[x > 0].split(1)) * x,
    "iterate": lambda s, x: sum((v * 2 for v in x[x > 0]), x.sum()),
    "unbind": lambda s, x: torch.stack(x[x > 0].unbind() or [x.sum()]),
    "stride_of_it": lambda s, x: (x[x > 0].outer(x[x > 0]).stride(), x * 1),
    "only_returned": lambda s, x: x[x > 0],
    "assigned": lambda s, x: x.clone().masked_fill(x > 0, 9.0),
    "mask_assign": lambda s, x: _mask_assign(x),
    "combinations": lambda s, x: torch.combinations(x[x > 0]),
    "cartesian": lambda s, x: torch.cartesian_prod(x[x > 0], x),
    "cat_then_size": lambda s, x: torch.cat([x, x[x > 0]]).shape[0] * x,
    "linear_of_it": lambda s, x: F.linear(x[x > 0][:, None], torch.ones(2, 1)),
    "mean_by_len": lambda s, x: x[x > 0].sum() / max(len(x[x > 0]), 1),
    "if_empty": lambda s, x: x if x[x > 5].numel() == 0 else x * 100,
    "pad_sequence": lambda s, x: nn.utils.rnn.pad_sequence([x, x[x > 0]], batch_first=True),
}


def _mask_assign(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[x > 0] = x[x > 0] * 2
    return y


@pytest.mark.parametrize("shape", DYNAMIC_SHAPES)
def test_trap_03_data_dependent_shape(shape):
    def program():
        m = Fn(DYNAMIC_SHAPES[shape])
        with torch.no_grad():
            for i, value in enumerate((*VALUES, [6.0, 6.0, 6.0], [-1.0, -1.0, -1.0], [1.0, 2.0, 3.0])):
                yield f"{i}", attempt(m, torch.tensor(value))

    compare_with_eager(program)


@eager_twin
def test_trap_03_packed_sequence():
    lstm = fill(nn.LSTM(2, 3, batch_first=True))

    def forward(s, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, (h, c) = lstm(packed)
        padded, n = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
        return padded, n, h, c

    m = Fn(forward)
    with torch.no_grad():
        for i, lengths in enumerate(([3, 2], [3, 2], [3, 2], [3, 2], [1, 3], [2, 1], [3, 3])):
            yield f"{i}", m(ramp(2, 3, 2) * 0.1, torch.tensor(lengths))


@eager_twin
def test_trap_03_nms_and_roi():
    ops = pytest.importorskip("torchvision.ops")
    m = Fn(lambda s, boxes, scores: boxes[ops.nms(boxes, scores, 0.5)])
    base = torch.tensor([[0.0, 0, 10, 10], [1, 1, 11, 11], [20, 20, 30, 30]])
    with torch.no_grad():
        for i, scores in enumerate(([0.9, 0.8, 0.7],) * 4 + ([0.1, 0.8, 0.7],)):
            yield f"{i}", m(base, torch.tensor(scores))
        yield "apart", m(base * torch.tensor([[1.0], [3.0], [1.0]]), torch.tensor([0.9, 0.8, 0.7]))


# ------------------------------------------------------------------ 4. getters of tensors are reads
def _pair(a, b):
    return [a, a, a, a, b, a, b]


GETTERS = {
    "stride": (lambda x: x.stride(), lambda: _pair(ramp(3, 3), ramp(3, 3).t())),
    "stride_of_one": (lambda x: x.stride(0), lambda: _pair(ramp(4, 1), ramp(8, 1)[::2])),
    "storage_offset": (lambda x: x.storage_offset(), lambda: _pair(ramp(8)[:4], ramp(8)[4:])),
    "storage_size": (lambda x: x.untyped_storage().nbytes(), lambda: _pair(ramp(8)[:4], ramp(4))),
    "is_contiguous": (lambda x: x.is_contiguous(), lambda: _pair(ramp(2, 2), ramp(2, 2).t())),
    "channels_last": (
        lambda x: x.is_contiguous(memory_format=torch.channels_last),
        lambda: _pair(ramp(1, 2, 2, 2), ramp(1, 2, 2, 2).to(memory_format=torch.channels_last)),
    ),
    "version": (lambda x: x._version, lambda: _pair(ramp(3), ramp(3).add_(1))),
    "is_inference": (lambda x: x.is_inference(), lambda: _pair(ramp(3), _inference(ramp(3)))),
    "is_conj": (lambda x: x.is_conj(), lambda: _pair(_complex(), _complex().conj())),
    "is_neg": (lambda x: x.is_neg(), lambda: _pair(_complex().imag, _complex().conj().imag)),
    "is_leaf": (lambda x: x.is_leaf, lambda: _pair(ramp(3), (ramp(3).requires_grad_() * 1).detach())),
    "requires_grad": (lambda x: x.requires_grad, lambda: _pair(ramp(3), ramp(3).requires_grad_())),
    "grad_fn": (lambda x: x.grad_fn is None, lambda: _pair(ramp(3), ramp(3).requires_grad_() * 1)),
    "grad": (lambda x: x.grad is None, lambda: _pair(ramp(3), _with_grad())),
    "is_view": (lambda x: x._is_view(), lambda: _pair(ramp(3), ramp(4)[:3])),
    "base": (lambda x: x._base is None, lambda: _pair(ramp(3), ramp(4)[:3])),
    "layout": (lambda x: x.layout, lambda: _pair(ramp(2, 2), ramp(2, 2).to_sparse())),
    "dim_order": (lambda x: x.dim_order(), lambda: _pair(ramp(2, 3), ramp(3, 2).t())),
    "output_nr": (lambda x: x.output_nr, lambda: _pair(ramp(3), ramp(6).requires_grad_().chunk(2)[1])),
    "retains_grad": (lambda x: x.retains_grad, lambda: _pair(ramp(3), _retains())),
    "is_shared": (lambda x: x.is_shared(), lambda: _pair(ramp(3), ramp(3).share_memory_())),
    "python_attribute": (lambda x: getattr(x, "tag", 0), lambda: _pair(ramp(3), _tagged())),
    "same_pointer_as_before": (lambda x: x.data_ptr() == _first_pointer(x), lambda: _pair(ramp(3), ramp(3))),
    "element_size": (lambda x: x.element_size(), lambda: _pair(ramp(3), ramp(3).double())),
    "type_string": (lambda x: x.type(), lambda: _pair(ramp(3), ramp(3).double())),
    "class": (lambda x: type(x).__name__, lambda: _pair(ramp(3), nn.Parameter(ramp(3), requires_grad=False))),
    "is_parameter": (
        lambda x: isinstance(x, nn.Parameter),
        lambda: _pair(ramp(3), nn.Parameter(ramp(3), requires_grad=False)),
    ),
    "hooks": (lambda x: bool(x._backward_hooks), lambda: _pair(ramp(3).requires_grad_(), _hooked())),
}
if hasattr(torch.Tensor, "names"):
    GETTERS["names"] = (lambda x: x.names, lambda: _pair(ramp(2), torch.zeros(2, names=("n",))))
_POINTER: list[int] = []


def _first_pointer(x):
    if not _POINTER:
        _POINTER.append(x.data_ptr())
    return _POINTER[0]


def _inference(x):
    with torch.inference_mode():
        return x.clone()


def _complex():
    return torch.complex(ramp(3), ramp(3) + 1)


def _with_grad():
    x = ramp(3).requires_grad_()
    x.sum().backward()
    return x


def _retains():
    x = ramp(3).requires_grad_() * 2
    x.retain_grad()
    return x


def _tagged():
    x = ramp(3)
    x.tag = 7
    return x


def _hooked():
    x = ramp(3).requires_grad_()
    x.register_hook(lambda g: g)
    return x


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("getter", GETTERS)
def test_trap_04_getter_is_a_read(getter):
    read, inputs = GETTERS[getter]

    def program():
        _POINTER.clear()
        m = Fn(lambda s, x: (read(x), x.shape[0]))
        branching = Fn(lambda s, x: (torch.ones(2) if read(x) else torch.zeros(2)) + x.dim())
        made = inputs()
        with torch.no_grad():
            for i, x in enumerate(made):
                yield f"{i}", m(x)
                yield f"branch{i}", branching(x)

    compare_with_eager(program)


# ------------------------------------------------------------------ 6. type, dtype, sizes, strides, pointer are not all
@eager_twin(served=True)
def test_trap_06_neg_bit():
    m = Fn(lambda s, x: (x + 1, x * x, x.relu(), x.sum()))
    z = torch.complex(ramp(4), ramp(4) + 1)
    with torch.no_grad():
        yield from warm("plain", m, z.imag)
        yield "neg", m(z.conj().imag)
        yield from warm("neg", m, z.conj().imag)
        yield "plain-again", m(z.imag)


@eager_twin(served=True)
def test_trap_06_conj_bit():
    m = Fn(lambda s, z: (z + 1, z.abs(), torch.view_as_real(z.resolve_conj()), z * z))
    z = torch.complex(ramp(4), ramp(4) + 1)
    with torch.no_grad():
        yield from warm("plain", m, z)
        yield "conj", m(z.conj())
        yield from warm("conj", m, z.conj())
        yield "physical", m(z.conj_physical())


@eager_twin
def test_trap_06_zero_tensor():
    m = Fn(lambda s, x: x + 1)
    with torch.no_grad():
        yield from warm("plain", m, ramp(3))
        yield "zerotensor", m(torch._efficientzerotensor(3))
        yield "again", m(ramp(3))


@eager_twin
def test_trap_06_quantized_with_other_scale():
    m = Fn(lambda s, q: q.dequantize() + 1)
    a = torch.quantize_per_tensor(ramp(4), 0.1, 0, torch.quint8)
    b = torch.quantize_per_tensor(ramp(4) * 5, 0.5, 0, torch.quint8)
    with torch.no_grad():
        yield from warm("a", m, a)
        yield "b", m(b)
        yield "a-again", m(a)


@eager_twin
def test_trap_06_sparse_and_mkldnn_layouts():
    m = Fn(lambda s, x: (x.to_dense() if x.layout != torch.strided else x) + 1)
    with torch.no_grad():
        yield from warm("dense", m, ramp(3, 3))
        yield "coo", m(ramp(3, 3).to_sparse())
        yield "csr", m(ramp(3, 3).to_sparse_csr())
        if torch.backends.mkldnn.is_available():
            yield "mkldnn", m(ramp(3, 3).to_mkldnn())
        yield "again", m(ramp(3, 3))


@eager_twin
def test_trap_06_forward_ad_under_no_grad():
    import torch.autograd.forward_ad as fwAD

    m = fill(nn.Linear(3, 2))
    with torch.no_grad():
        yield from warm("plain", m, ramp(2, 3))
        with fwAD.dual_level():
            dual = fwAD.make_dual(ramp(2, 3), torch.ones(2, 3))
            out = fwAD.unpack_dual(m(dual))
            yield "primal", out.primal
            yield "must:tangent-kept", out.tangent is not None
            yield "tangent", out.tangent
        yield "again", m(ramp(2, 3))


@eager_twin(served=True)
def test_trap_06_inference_tensor_under_no_grad():
    m = fill(nn.Linear(3, 2))
    x = ramp(2, 3)
    with torch.inference_mode():
        xi = x.clone()
    with torch.no_grad():
        yield from warm("normal", m, x)
        yield "inference-input", m(xi)
        yield "normal", m(x)
    with torch.inference_mode():
        yield from warm("inference-mode", m, x)
        yield "inference-both", m(xi)


# ------------------------------------------------------------------ 7. storage offset as a value
@eager_twin
def test_trap_07_storage_offset_as_a_value():
    m = Fn(lambda s, x: torch.as_strided(x, (2,), (1,), x.storage_offset() + 1) * 1)
    base = ramp(8)
    with torch.no_grad():
        yield from warm("low", m, base[0:4])
        yield from warm("high", m, base[4:8])
        yield "low", m(base[0:4])


@eager_twin(served=True)
def test_trap_07_as_strided_with_a_fixed_offset():
    m = Fn(lambda s, x: torch.as_strided(x, (2,), (1,), 3) + x.as_strided((2,), (1,)))
    base = ramp(8)
    with torch.no_grad():
        yield from warm("low", m, base[0:4])
        yield "high", m(base[4:8])
        yield "own", m(ramp(8)[1:5])


# ------------------------------------------------------------------ 8. aliasing and identity
@eager_twin(served=True)
def test_trap_08_identity_of_input_and_weight():
    m = Fn(
        lambda s, x, y=None: (x + 1 if x is s.w else x - 1, y is x, y is s.w),
        w=nn.Parameter(ramp(3), requires_grad=False),
    )
    x = ramp(3)
    with torch.no_grad():
        yield from warm("other", m, x)
        yield "weight", m(m.w)
        yield "weight-twice", m(m.w, m.w)
        yield "x-twice", m(x, x)
        yield "x-and-weight", m(x, m.w)
        yield from warm("weight", m, m.w)
        yield "other-again", m(x)


@eager_twin(served=True)
def test_trap_08_input_that_is_a_view_of_a_weight():
    lin = fill(nn.Linear(3, 3, bias=False))
    m = Fn(lambda s, x: (lin(x), x.add(1)))
    with torch.no_grad():
        yield from warm("other", m, ramp(3, 3))
        yield "weight", m(lin.weight)
        yield "view", m(lin.weight.view(3, 3))
        yield "transposed", m(lin.weight.t())
        yield "data", m(lin.weight.data)


@eager_twin
def test_trap_08_write_to_an_input_that_aliases_another_or_a_weight():
    lin = fill(nn.Linear(4, 4, bias=False))

    def forward(s, a, b):
        a.add_(1)
        return lin(b), b * 1

    m = Fn(forward)
    with torch.no_grad():
        for i in range(5):
            yield f"apart{i}", m(ramp(1, 4), ramp(1, 4))
        x = ramp(1, 4)
        yield "same", m(x, x)
        base = ramp(2, 4)
        yield "views", (m(base[:1], base[:1]), base)
        yield "weight", (m(lin.weight, ramp(1, 4)), lin.weight)
        yield "apart", m(ramp(1, 4), ramp(1, 4))
