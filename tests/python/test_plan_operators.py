"""Every operator that 204 surveyed models use, as a plan of one call: reached without Python, with eager's result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuvil import _native
from program_recorder import Recorder, describe_tensors, same_bits

aten = torch.ops.aten


def f(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + len(shape))).to(dtype)


def i(*values: int) -> torch.Tensor:
    return torch.tensor(values)


IMAGE = (1, 4, 6, 6)

# name -> (weight in the survey, arguments). Weights are calls out of 74,080.
CASES: dict[str, tuple[int, Callable[[], tuple[Any, ...]], dict[str, Any]]] = {
    "conv2d.default": (10230, lambda: (f(*IMAGE), f(3, 4, 3, 3), f(3), [1, 1], [1, 1]), {}),
    "batch_norm.default": (7465, lambda: (f(*IMAGE), f(4), f(4), f(4), f(4).abs(), False, 0.1, 1e-5, True), {}),
    "add.Tensor": (5153, lambda: (f(3, 4), f(4)), {"alpha": 2}),
    "linear.default": (5066, lambda: (f(2, 4), f(3, 4), f(3)), {}),
    "relu_.default": (4301, lambda: (f(3),), {}),
    "reshape.default": (3171, lambda: (f(2, 3), [3, -1]), {}),
    "mul.Tensor": (3165, lambda: (f(3), 0.5), {}),
    "dropout.default": (3160, lambda: (f(3), 0.5, False), {}),
    "view.default": (2963, lambda: (f(2, 3), [6]), {}),
    "permute.default": (2901, lambda: (f(2, 3, 4), [2, 0, 1]), {}),
    "transpose.int": (2713, lambda: (f(2, 3), 0, 1), {}),
    "layer_norm.default": (2320, lambda: (f(2, 3), [3], f(3), f(3), 1e-6), {}),
    "slice.Tensor": (1893, lambda: (f(4, 3), 0, 1, 9), {}),
    "cat.default": (1386, lambda: ([f(2), f(3)], 0), {}),
    "gelu.default": (1326, lambda: (f(3),), {"approximate": "tanh"}),
    "relu.default": (1133, lambda: (f(3),), {}),
    "matmul.default": (950, lambda: (f(2, 3), f(3, 2)), {}),
    "unsqueeze.default": (906, lambda: (f(3), -1), {}),
    "silu_.default": (894, lambda: (f(3),), {}),
    "select.int": (800, lambda: (f(3, 2), 0, -1), {}),
    "add_.Tensor": (776, lambda: (f(3), 1), {}),
    "contiguous.default": (617, lambda: (f(3, 2).t(),), {"memory_format": torch.contiguous_format}),
    "sigmoid.default": (581, lambda: (f(3),), {}),
    "flatten.using_ints": (560, lambda: (f(2, 3, 1), 1), {}),
    "adaptive_avg_pool2d.default": (527, lambda: (f(*IMAGE), [1, 1]), {}),
    "softmax.int": (494, lambda: (f(2, 3), -1, torch.float64), {}),
    "to.dtype": (476, lambda: (f(3), torch.float16), {}),
    "scaled_dot_product_attention.default": (459, lambda: (f(1, 2, 3, 4),) * 3, {"scale": 0.3, "is_causal": True}),
    "unbind.int": (446, lambda: (f(3, 2), 0), {}),
    "fill_.Scalar": (387, lambda: (f(3), 2), {}),
    "pad.default": (381, lambda: (f(2, 3), [1, 1], "constant", 0.5), {}),
    "sub.Tensor": (351, lambda: (f(3), f(3)), {"alpha": 0.5}),
    "mean.dim": (323, lambda: (f(2, 3), [-1], True), {"dtype": torch.float64}),
    "index.Tensor": (313, lambda: (f(4, 3), [i(1, 0)]), {}),
    "div.Tensor": (280, lambda: (f(3), 3), {}),
    "split_with_sizes.default": (243, lambda: (f(5), [2, 3]), {}),
    "alias.default": (242, lambda: (f(3),), {}),
    "chunk.default": (200, lambda: (f(5), 3), {}),
    "exp.default": (194, lambda: (f(3),), {}),
    "linalg_vector_norm.default": (176, lambda: (f(2, 3), 2.5, [1], True), {}),
    "avg_pool2d.default": (170, lambda: (f(*IMAGE), [2, 2]), {"divisor_override": 3}),
    "reshape_as.default": (170, lambda: (f(6), f(2, 3)), {}),
    "arange.default": (167, lambda: (5,), {"dtype": torch.float32, "device": torch.device("cpu")}),
    "expand_as.default": (162, lambda: (f(1, 3), f(2, 3)), {}),
    "clamp_min.default": (162, lambda: (f(3), 0.1), {}),
    "max_pool2d.default": (146, lambda: (f(*IMAGE), [3, 3], [2, 2], [1, 1], [1, 1], True), {}),
    "silu.default": (142, lambda: (f(3),), {}),
    "roll.default": (120, lambda: (f(2, 3), [1, 2], [0, 1]), {}),
    "copy_.default": (114, lambda: (f(2, 3), f(3)), {}),
    "pow.Tensor_Scalar": (111, lambda: (f(3), 2), {}),
    "rsqrt.default": (109, lambda: (f(3).abs(),), {}),
    "conv1d.default": (109, lambda: (f(1, 2, 5), f(3, 2, 2), None, [2], [1], [1], 1), {}),
    "lift_fresh.default": (103, lambda: (f(3),), {}),
    "neg.default": (102, lambda: (f(3),), {}),
    "masked_fill.Scalar": (102, lambda: (f(3), f(3) > 0, float("-inf")), {}),
    "zeros.default": (101, lambda: ([2, 3],), {"dtype": torch.int64}),
    "hardswish_.default": (98, lambda: (f(3),), {}),
    "detach_.default": (97, lambda: (f(3),), {}),
    "expand.default": (82, lambda: (f(1, 3), [4, -1]), {}),
    "embedding.default": (79, lambda: (f(5, 3), i(1, 4), 0, False, False), {}),
    "einsum.default": (76, lambda: ("ij,jk->ik", [f(2, 3), f(3, 2)]), {"path": [0, 1]}),
    "type_as.default": (71, lambda: (f(3), i(1)), {}),
    "hardsigmoid.default": (71, lambda: (f(3),), {}),
    "maximum.default": (64, lambda: (f(3), f(3).neg()), {}),
    "dropout_.default": (62, lambda: (f(3), 0.5, False), {}),
    "clamp.default": (61, lambda: (f(3), -1, 0.5), {}),
    "hardswish.default": (61, lambda: (f(3),), {}),
    "eq.Scalar": (58, lambda: (i(1, 2), 2), {}),
    "upsample_bilinear2d.vec": (56, lambda: (f(*IMAGE), None, False, [2.0, 1.5]), {}),
    "ne.Scalar": (55, lambda: (i(1, 2), 2), {}),
    "leaky_relu_.default": (52, lambda: (f(3), 0.2), {}),
    "stack.default": (49, lambda: ([f(3), f(3)], -1), {}),
    "new_zeros.default": (47, lambda: (f(3), [2]), {}),
    "sum.dim_IntList": (39, lambda: (i(1, 2), [0]), {"dtype": torch.float32}),
    "upsample_nearest2d.vec": (37, lambda: (f(*IMAGE), [3, 8], None), {}),
    "zero_.default": (36, lambda: (f(3),), {}),
    "clone.default": (36, lambda: (f(2, 3, 2, 2),), {"memory_format": torch.channels_last}),
    "group_norm.default": (35, lambda: (f(*IMAGE), 2, f(4), f(4), 1e-5, True), {}),
    "repeat_interleave.self_int": (35, lambda: (f(2, 3), 2, 1), {}),
    "hardtanh_.default": (35, lambda: (f(3), 0.0, 6.0), {}),
    "to.device": (33, lambda: (f(3), torch.device("cpu"), torch.float32, False, True), {}),
    "conv2d.padding": (33, lambda: (f(*IMAGE), f(3, 4, 3, 3), None, [1, 1], "same"), {}),
    "hardtanh.default": (32, lambda: (f(3), -1, 1), {}),
    "to.dtype_layout": (30, lambda: (f(3),), {"dtype": torch.float64, "device": torch.device("cpu")}),
    "split.Tensor": (30, lambda: (f(5), 2), {}),
    "tanh.default": (27, lambda: (f(3),), {}),
    "ge.Scalar": (21, lambda: (f(3), 0), {}),
    "rsub.Scalar": (20, lambda: (f(3), 1.0), {}),
    "amax.default": (20, lambda: (f(2, 3), [1]), {}),
    "sin.default": (19, lambda: (f(3),), {}),
    "cos.default": (19, lambda: (f(3),), {}),
    "div.Tensor_mode": (19, lambda: (i(7, -7), 2), {"rounding_mode": "floor"}),
    "repeat.default": (16, lambda: (f(2, 1), [1, 3]), {}),
    "div_.Tensor": (16, lambda: (f(3), f(3)), {}),
    "addcmul.default": (14, lambda: (f(3), f(3), f(3)), {"value": 2}),
    "uniform_.default": (12, lambda: (f(3), -1.0, 1.0), {}),
    "where.self": (11, lambda: (f(3) > 0, f(3), f(1)), {}),
    "full_like.default": (11, lambda: (f(3), 2), {"dtype": torch.int32}),
    "ones.default": (10, lambda: ([3],), {}),
    "cumsum.default": (10, lambda: (i(1, 2), 0), {}),
    "as_strided.default": (10, lambda: (f(6), [2, 2], [3, 1], 1), {}),
    "bmm.default": (8, lambda: (f(2, 3, 2), f(2, 2, 3)), {}),
    "new_ones.default": (8, lambda: (f(3), [2]), {"dtype": torch.bool}),
    "flip.default": (8, lambda: (f(2, 3), [0, 1]), {}),
    "addmm.default": (8, lambda: (f(3), f(2, 4), f(4, 3)), {"beta": 0.5, "alpha": 2}),
    "conv_transpose2d.input": (7, lambda: (f(*IMAGE), f(4, 2, 2, 2), f(2), [2, 2]), {}),
    "gather.default": (6, lambda: (f(2, 3), 1, torch.tensor([[0, 2], [1, 1]])), {}),
    "arange.start": (6, lambda: (1, 4), {}),
    "any.default": (6, lambda: (f(3) > 0,), {}),
    "zeros_like.default": (6, lambda: (f(3),), {}),
    "where.ScalarOther": (6, lambda: (f(3) > 0, f(3), 0.0), {}),
    "unfold.default": (6, lambda: (f(6), 0, 3, 2), {}),
    "squeeze.dim": (5, lambda: (f(1, 3), 0), {}),
    "all.default": (5, lambda: (f(3) > 0,), {}),
    "lt.Scalar": (5, lambda: (f(3), 0.5), {}),
    "im2col.default": (5, lambda: (f(*IMAGE), [2, 2], [1, 1], [0, 0], [1, 1]), {}),
    "upsample_bicubic2d.vec": (4, lambda: (f(*IMAGE), [8, 8], False, None), {}),
    "min.other": (4, lambda: (f(3), f(3).neg()), {}),
    "__and__.Tensor": (4, lambda: (f(3) > 0, f(3) < 1), {}),
    "tril.default": (4, lambda: (f(3, 3), -1), {}),
    "col2im.default": (4, lambda: (f(1, 16, 25), [6, 6], [2, 2], [1, 1], [0, 0], [1, 1]), {}),
    "sum.default": (3, lambda: (f(3),), {}),
    "pow.Scalar": (3, lambda: (2, f(3)), {}),
    "square.default": (3, lambda: (f(3),), {}),
    "log.default": (3, lambda: (f(3).abs(),), {}),
    "le.Tensor": (3, lambda: (f(3), f(3)), {}),
    "bitwise_not.default": (3, lambda: (i(1, 2),), {}),
    "avg_pool1d.default": (3, lambda: (f(1, 2, 6), [2]), {}),
    "gt.Scalar": (2, lambda: (f(3), 0), {}),
    "abs.default": (2, lambda: (f(3),), {}),
    "_weight_norm.default": (2, lambda: (f(3, 2), f(3, 1), 0), {}),
    "sqrt.default": (2, lambda: (f(3).abs(),), {}),
    "softplus.default": (2, lambda: (f(3), 2, 10.0), {}),
    "ge.Tensor": (2, lambda: (f(3), f(3)), {}),
    "baddbmm.default": (2, lambda: (f(2, 3, 3), f(2, 3, 2), f(2, 2, 3)), {"beta": 1, "alpha": 0.25}),
    "unflatten.int": (1, lambda: (f(6), 0, [2, 3]), {}),
    "tile.default": (1, lambda: (f(3), [2]), {}),
    "sub_.Tensor": (1, lambda: (f(3), f(3)), {"alpha": 2}),
    "pow.Tensor_Tensor": (1, lambda: (f(3).abs(), f(3)), {}),
    "meshgrid.indexing": (1, lambda: ([f(2), f(3)],), {"indexing": "xy"}),
    "max.dim": (1, lambda: (f(2, 3), 1), {}),
    "masked_fill_.Scalar": (1, lambda: (f(3), f(3) > 0, 0), {}),
    "gt.Tensor": (1, lambda: (f(3), f(3).neg()), {}),
    "full.default": (1, lambda: ([2], 1.5), {}),
    "argmax.default": (1, lambda: (f(2, 3), -1), {}),
    "adaptive_avg_pool1d.default": (1, lambda: (f(1, 2, 6), [3]), {}),
    # Not in the survey, but of a shape that nothing above has.
    "bernoulli_.float": (0, lambda: (f(3), 0.5), {}),
    "index_put.default": (0, lambda: (f(4), [i(1, 2)], f(2)), {}),
    "var_mean.correction": (0, lambda: (f(2, 3), [1]), {"correction": 0, "keepdim": True}),
    "tril_indices.default": (0, lambda: (3, 3, 1), {}),
    "linspace.default": (0, lambda: (0, 1.5, 4), {}),
    "eye.default": (0, lambda: (3,), {"dtype": torch.float64}),
    "hann_window.default": (0, lambda: (8,), {}),
    "nan_to_num.default": (0, lambda: (f(3), 0.0, None, -1.0), {}),
    "stft.center": (0, lambda: (f(64), 16, 4, 16, torch.hann_window(16)), {"return_complex": True}),
    "cross_entropy_loss.default": (0, lambda: (f(2, 3), i(0, 2)), {}),
    "native_layer_norm.default": (0, lambda: (f(2, 3), [3], None, None, 1e-5), {}),
    "topk.default": (0, lambda: (f(6), 2), {}),
    "_foreach_add.Scalar": (0, lambda: ([f(2), f(3)], 2), {}),
    "rot90.default": (0, lambda: (f(2, 3),), {}),
}

# An argument list with absent elements exists only boxed.
DISPATCHER_ONLY = {"index.Tensor", "index_put.default"}
RANDOM = {"uniform_.default", "bernoulli_.float"}


def resolve(name: str) -> Any:
    packet, overload = name.split(".")
    return getattr(getattr(aten, packet), overload)


def record(name: str, arguments: Callable[[], tuple[Any, ...]], kwargs: dict[str, Any]) -> tuple[Recorder, list[Any]]:
    recorder = Recorder()
    values = arguments()
    seen: list[torch.Tensor] = []
    for value in values:
        for tensor in value if isinstance(value, list) else [value]:
            if isinstance(tensor, torch.Tensor) and not any(tensor is s for s in seen):
                seen.append(recorder.add_input(tensor))
    result = recorder.call(resolve(name), *values, random=name in RANDOM, **kwargs)
    flat = [
        t
        for r in (result if isinstance(result, (list, tuple)) else [result])
        for t in (r if isinstance(r, (list, tuple)) else [r])
    ]
    recorder.outputs = flat
    return recorder, flat


@pytest.mark.parametrize("unboxed", [True, False], ids=["unboxed", "boxed"])
@pytest.mark.parametrize("name", CASES)
def test_operator_runs_as_in_eager(name: str, unboxed: bool) -> None:
    _, arguments, kwargs = CASES[name]
    with torch.no_grad():
        torch.manual_seed(0)
        recorder, expected = record(name, arguments, kwargs)
        # Fold nothing: a factory has to be called.
        plan = _native._plan_build(recorder.text(), [], unboxed, False)
        counts = _native._plan_describe(plan)
        copies: list[torch.Tensor] = []
        for value in arguments():
            for tensor in value if isinstance(value, list) else [value]:
                if isinstance(tensor, torch.Tensor) and not any(tensor is c for c in copies):
                    copies.append(tensor)
        torch.manual_seed(0)
        actual, _ = _native._plan_run(plan, copies, [])
        assert describe_tensors(actual, unboxed) == describe_tensors(expected, unboxed)
        for a, e in zip(actual, expected, strict=True):
            assert same_bits(a, e)
        if unboxed:
            assert counts["python"] == 0
            assert counts["dispatcher"] == (name in DISPATCHER_ONLY)


def test_surveyed_calls_need_no_python() -> None:
    """The survey's share of calls that only Python reaches, over the operators above: none of them."""
    total = python = 0
    for name, (weight, arguments, kwargs) in CASES.items():
        with torch.no_grad():
            recorder, _ = record(name, arguments, kwargs)
            plan = _native._plan_build(recorder.text(), [], True, False)
        total += weight
        python += weight * _native._plan_describe(plan)["python"]
    assert (
        total > 73_000
    )  # of 74,080: the rest are item, is_nonzero and empty, which are no plan's matter, and the LSTM
    assert python == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("number", [2, -1, 0.5, True, float("nan"), complex(1.0, 2.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.bool, torch.bfloat16, torch.complex64])
def test_numbers_promote_as_in_eager(mode: Any, number: Any, dtype: torch.dtype) -> None:
    for name in ("add", "mul", "div", "eq", "ge", "pow", "maximum", "floor_divide", "bitwise_and", "where"):
        op = getattr(aten, name)
        overload = next(o for o in ("Tensor", "Tensor_Tensor", "self", "default") if o in op.overloads())
        recorder = Recorder()
        with mode():
            x = recorder.add_input(f(4).mul(3).to(dtype))
            leading = [recorder.add_input(f(4) > 0)] if name == "where" else []
            try:
                expected = recorder.call(getattr(op, overload), *leading, x, number)
            except (RuntimeError, NotImplementedError, TypeError):
                continue  # eager refuses this pair
            recorder.outputs = [expected]
            plan = _native._plan_build(recorder.text(), [])
            (actual,), _ = _native._plan_run(plan, [x, *leading], [])
        assert describe_tensors([actual]) == describe_tensors([expected]), (name, dtype, number)
        assert same_bits(actual, expected), (name, dtype, number)


def test_lstm_runs_as_in_eager() -> None:
    module = torch.nn.LSTM(4, 3, num_layers=2, bidirectional=True, batch_first=True).eval()
    with torch.no_grad():
        recorder = Recorder()
        x = recorder.add_input(f(2, 5, 4))
        state = [recorder.add_input(torch.zeros(4, 2, 3)), recorder.add_input(torch.zeros(4, 2, 3))]
        weights = [recorder.add_captured(p) for p in module._flat_weights]
        expected = recorder.call(aten.lstm.input, x, state, weights, True, 2, 0.0, False, True, True)
        recorder.outputs = list(expected)
        plan = _native._plan_build(recorder.text(), [])
        assert _native._plan_describe(plan)["python"] == 0
        actual, _ = _native._plan_run(plan, [x, *state], weights)
        assert all(same_bits(a, e) for a, e in zip(actual, expected, strict=True))
        assert same_bits(actual[0], module(x)[0])


def test_errors_name_the_operator_and_leave_nothing_behind() -> None:
    recorder = Recorder()
    with torch.no_grad():
        table, index = recorder.add_input(f(5, 3)), recorder.add_input(i(1, 4))
        doubled = recorder.call(aten.mul.Tensor, table, 2.0)
        recorder.outputs = [recorder.call(aten.embedding.default, doubled, index)]
        plan = _native._plan_build(recorder.text(), [])
        for _ in range(3):
            with pytest.raises(RuntimeError, match=r"#1 aten::embedding \(program\): index out of range in self"):
                _native._plan_run(plan, [table, i(1, 99)], [])
        (good,), _ = _native._plan_run(plan, [table, index], [])
        assert same_bits(good, recorder.outputs[0])


def test_constants_that_are_written_or_returned_are_made_anew() -> None:
    recorder = Recorder()
    with torch.no_grad():
        x = recorder.add_input(f(2))
        written = recorder.add_constant(torch.zeros(2))
        returned = recorder.add_constant(torch.ones(3))
        read = recorder.add_constant(torch.full((2,), 3.0))
        recorder.call(aten.add_.Tensor, written, x)
        recorder.outputs = [written, returned, recorder.call(aten.mul.Tensor, x, read)]
        plan = _native._plan_build(recorder.text(), recorder.constants)
        assert _native._plan_describe(plan)["clones"] == 2
        first, _ = _native._plan_run(plan, [x], [])
        first[1].zero_()
        second, _ = _native._plan_run(plan, [x], [])
    assert first[0] is not second[0]
    assert torch.equal(first[0], second[0])
    assert torch.equal(second[1], torch.ones(3))


def test_constant_parts_are_computed_once() -> None:
    recorder = Recorder()
    with torch.no_grad():
        x = recorder.add_input(f(4, 4))
        row = recorder.call(aten.arange.default, 4)
        column = recorder.call(aten.unsqueeze.default, row, 1)
        mask = recorder.call(aten.le.Tensor, row, column)
        recorder.outputs = [recorder.call(aten.masked_fill.Scalar, x, mask, float("-inf"))]
        plan = _native._plan_build(recorder.text(), [])
        described = _native._plan_describe(plan)
        assert (described["folded"], described["steps"]) == (3, 1)
        (actual,), _ = _native._plan_run(plan, [x], [])
        assert same_bits(actual, recorder.outputs[0])
