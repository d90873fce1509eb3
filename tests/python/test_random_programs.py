"""Thousands of random programs, run eagerly and as a plan: same values, same geometry, same sharing, same generator.

CUVIL_RANDOM_PROGRAMS sets how many (default 2000), CUVIL_RANDOM_SEED where they begin. A failure prints the program.
"""

from __future__ import annotations

import contextlib
import copy
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuvil import _native
from program_recorder import Recorder, describe_tensors, same_bits

aten = torch.ops.aten

NUM_PROGRAMS = int(os.environ.get("CUVIL_RANDOM_PROGRAMS", "2000"))
FIRST_SEED = int(os.environ.get("CUVIL_RANDOM_SEED", "0"))
NUM_BATCHES = 20
DTYPES = [torch.float32] * 6 + [torch.float64, torch.int64, torch.int32, torch.bool, torch.bfloat16, torch.complex64]

UNARY = (
    "relu neg abs exp sigmoid tanh sin cos rsqrt silu hardswish hardsigmoid square sqrt floor erf logical_not "
    "bitwise_not isnan sign clone contiguous detach alias gelu log1p positive"
).split()
IN_PLACE_UNARY = "relu_ neg_ abs_ sigmoid_ tanh_ zero_ silu_ square_ hardswish_ exp_ floor_".split()
BINARY = "add sub mul div maximum minimum eq ne lt le gt ge pow remainder floor_divide atan2 fmod".split()
IN_PLACE_BINARY = "add_ sub_ mul_ div_".split()
SCALAR_BINARY = "eq ne lt le gt ge mul add sub div remainder fmod bitwise_and".split()


class Generator:
    """Makes one program; everything random comes from one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        # Leaves and constants must not draw from the generator that the program itself uses.
        self.numbers = torch.Generator().manual_seed(seed)
        self.recorder = Recorder()
        self.pool: list[torch.Tensor] = []

    # Leaves.

    def shape(self) -> list[int]:
        return [self.rng.choice((1, 1, 2, 3, 4, 5)) for _ in range(self.rng.randint(0, 4))]

    def tensor(self, shape: list[int] | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        shape = self.shape() if shape is None else shape
        dtype = dtype or self.rng.choice(DTYPES)
        if dtype == torch.bool:
            return torch.rand(shape, generator=self.numbers) > 0.5
        if dtype.is_floating_point or dtype.is_complex:
            value = torch.randn(shape, dtype=dtype, generator=self.numbers)
        else:
            value = torch.randint(-5, 6, shape, dtype=dtype, generator=self.numbers)
        if value.dim() > 1 and self.rng.random() < 0.3:
            value = value.transpose(0, -1)
        return value

    def make_leaves(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        inputs = [self.tensor() for _ in range(self.rng.randint(1, 3))]
        if self.rng.random() < 0.4:  # inputs that share memory
            base = self.tensor([4, 6])
            inputs += [base[1:3], base.t()] if self.rng.random() < 0.5 else [base, base[0]]
        captured = [self.tensor() for _ in range(self.rng.randint(0, 2))]
        return inputs, captured

    def number(self) -> Any:
        return self.rng.choice([2, -1, 0, 3, 0.5, -1.5, 2.0, True, 1e-3, 0.1, float("inf"), 7, complex(0.5, -1.0)])

    def real_number(self) -> Any:
        return self.rng.choice([2, -1, 0, 3, 0.5, -1.5, 2.0, 0.1])

    def pick(self, condition: Callable[[torch.Tensor], bool] = lambda t: True) -> torch.Tensor:
        candidates = [t for t in self.pool if condition(t)]
        if not candidates:
            raise RuntimeError("nothing to pick")
        # Recent tensors make chains, old ones make sharing.
        return self.rng.choice(candidates[-6:] if self.rng.random() < 0.6 else candidates)

    def pick_dim(self, tensor: torch.Tensor) -> int:
        if tensor.dim() == 0:
            raise RuntimeError("no dimension")
        return self.rng.randint(-tensor.dim(), tensor.dim() - 1)

    def pick_float(self) -> torch.Tensor:
        return self.pick(lambda t: t.dtype in (torch.float32, torch.float64))

    # Steps: each makes one call, or raises what the operator raises for arguments that do not fit.

    def step_unary(self) -> Any:
        return self.recorder.call(getattr(aten, self.rng.choice(UNARY)).default, self.pick())

    def step_in_place_unary(self) -> Any:
        return self.recorder.call(getattr(aten, self.rng.choice(IN_PLACE_UNARY)).default, self.pick())

    def step_binary(self) -> Any:
        name = self.rng.choice(BINARY)
        op = getattr(aten, name)
        overload = next(o for o in ("Tensor", "Tensor_Tensor", "default") if o in op.overloads())
        other = self.pick() if self.rng.random() < 0.6 else self.number()
        kwargs = {"alpha": self.real_number()} if name in ("add", "sub") and self.rng.random() < 0.4 else {}
        return self.recorder.call(getattr(op, overload), self.pick(), other, **kwargs)

    def step_in_place_binary(self) -> Any:
        op = getattr(aten, self.rng.choice(IN_PLACE_BINARY)).Tensor
        return self.recorder.call(op, self.pick(), self.pick() if self.rng.random() < 0.6 else self.number())

    def step_scalar_binary(self) -> Any:
        return self.recorder.call(getattr(aten, self.rng.choice(SCALAR_BINARY)).Scalar, self.pick(), self.number())

    def step_scalar_ops(self) -> Any:
        x = self.pick()
        choice = self.rng.randint(0, 11)
        call = self.recorder.call
        if choice == 0:
            return call(aten.clamp.default, x, self.rng.choice([None, -1, 0.5]), self.rng.choice([1, 2.5]))
        if choice == 1:
            return call(aten.clamp_min.default, x, self.real_number())
        if choice == 2:
            return call(aten.pow.Tensor_Scalar, x, self.rng.choice([2, 3, 0.5, 2.0, -1.0]))
        if choice == 3:
            return call(aten.pow.Scalar, 2.0, x)
        if choice == 4:
            return call(aten.rsub.Scalar, x, self.real_number(), 2)
        if choice == 5:
            return call(aten.leaky_relu.default, x, 0.1)
        if choice == 6:
            return call(aten.hardtanh.default, x, -0.5, 2)
        if choice == 7:
            return call(aten.masked_fill.Scalar, x, self.pick(lambda t: t.dtype == torch.bool), self.number())
        if choice == 8:
            return call(aten.where.ScalarOther, self.pick(lambda t: t.dtype == torch.bool), x, self.number())
        if choice == 9:
            return call(aten.softplus.default, x, 1, 20)
        if choice == 10:
            return call(aten.addcmul.default, x, self.pick(), self.pick(), value=0.5)
        return call(aten.fill_.Scalar, x, self.real_number())

    def step_view(self) -> Any:
        x = self.pick()
        call = self.recorder.call
        choice = self.rng.randint(0, 15)
        if choice == 0:
            return call(aten.transpose.int, x, self.pick_dim(x), self.pick_dim(x))
        if choice == 1:
            order = list(range(x.dim()))
            self.rng.shuffle(order)
            return call(aten.permute.default, x, order)
        if choice == 2:
            return call(aten.unsqueeze.default, x, self.rng.randint(0, x.dim()))
        if choice == 3:
            return call(aten.squeeze.dim, x, self.pick_dim(x))
        if choice == 4:
            return call(aten.select.int, x, self.pick_dim(x), -1)
        if choice == 5:
            return call(
                aten.slice.Tensor,
                x,
                self.pick_dim(x),
                self.rng.choice([None, 0, 1]),
                self.rng.choice([None, 2, -1]),
                self.rng.choice([1, 1, 2]),
            )
        if choice == 6:
            return call(aten.reshape.default, x, self.rng.choice([[-1], [x.numel()], [1, -1], list(x.shape)]))
        if choice == 7:
            return call(aten.view.default, x, self.rng.choice([[-1], list(x.shape), [*x.shape, 1]]))
        if choice == 8:
            return call(aten.expand.default, x, [self.rng.randint(1, 3), *x.shape])
        if choice == 9:
            return call(aten.chunk.default, x, self.rng.randint(1, 3), self.pick_dim(x))
        if choice == 10:
            return call(aten.unbind.int, x, self.pick_dim(x))
        if choice == 11:
            return call(aten.flatten.using_ints, x)
        if choice == 12:
            return call(aten.split.Tensor, x, self.rng.randint(1, 3), self.pick_dim(x))
        if choice == 13:
            return call(aten.diagonal.default, x)
        if choice == 14:
            return call(aten.narrow.default, x, self.pick_dim(x), 0, 1)
        return call(aten.movedim.int, x, self.pick_dim(x), self.pick_dim(x))

    def step_conversion(self) -> Any:
        x = self.pick()
        call = self.recorder.call
        choice = self.rng.randint(0, 6)
        if choice == 0:
            return call(aten.to.dtype, x, self.rng.choice(DTYPES))
        if choice == 1:
            return call(aten._to_copy.default, x, dtype=self.rng.choice(DTYPES))
        if choice == 2:
            return call(aten.type_as.default, x, self.pick())
        if choice == 3:
            return call(aten.contiguous.default, x, memory_format=torch.contiguous_format)
        if choice == 4:
            return call(aten.to.device, x, torch.device("cpu"), x.dtype)
        if choice == 5:
            return call(aten.dropout.default, x, 0.5, False)
        return call(aten.copy_.default, x, self.pick())

    def step_reduction(self) -> Any:
        x = self.pick()
        call = self.recorder.call
        choice = self.rng.randint(0, 11)
        keep = self.rng.random() < 0.5
        if choice == 0:
            return call(aten.sum.dim_IntList, x, self.rng.choice([None, [self.pick_dim(x)], []]), keep)
        if choice == 1:
            return call(aten.mean.dim, x, [self.pick_dim(x)], keep)
        if choice == 2:
            return call(aten.max.dim, x, self.pick_dim(x), keep)
        if choice == 3:
            return call(aten.amax.default, x, [self.pick_dim(x)], keep)
        if choice == 4:
            return call(aten.softmax.int, x, self.pick_dim(x))
        if choice == 5:
            return call(aten.cumsum.default, x, self.pick_dim(x))
        if choice == 6:
            return call(aten.any.default, x)
        if choice == 7:
            return call(aten.argmax.default, x, self.rng.choice([None, self.pick_dim(x)]), keep)
        if choice == 8:
            return call(aten.linalg_vector_norm.default, x, self.rng.choice([1, 2, 2.5]), [self.pick_dim(x)], keep)
        if choice == 9:
            return call(aten.std_mean.correction, x, [self.pick_dim(x)], correction=self.rng.choice([None, 0, 1]))
        if choice == 10:
            return call(aten.layer_norm.default, x, [x.shape[-1]] if x.dim() else [])
        return call(aten.sort.default, x, self.pick_dim(x))

    def step_join(self) -> Any:
        x = self.pick()
        same = [t for t in self.pool if t.shape == x.shape][:5]
        call = self.recorder.call
        choice = self.rng.randint(0, 4)
        if choice == 0:
            return call(aten.cat.default, [x, *same], self.pick_dim(x))
        if choice == 1:
            return call(aten.stack.default, [x, *same], self.rng.randint(0, x.dim()))
        if choice == 2:
            return call(aten.where.self, self.pick(lambda t: t.dtype == torch.bool), x, self.pick())
        if choice == 3:
            return call(aten.meshgrid.indexing, [x, x], indexing="ij")
        return call(aten.broadcast_tensors.default, [x, self.pick()])

    def step_index(self) -> Any:
        x = self.pick(lambda t: t.dim() > 0 and min(t.shape) > 0)
        call = self.recorder.call
        dim = self.pick_dim(x)
        index = self.make_constant(torch.tensor([self.rng.randint(0, x.shape[dim] - 1) for _ in range(3)]))
        choice = self.rng.randint(0, 5)
        if choice == 0:
            return call(aten.index_select.default, x, dim, index)
        if choice == 1:
            indices: list[torch.Tensor | None] = [None] * x.dim()
            indices[dim] = index
            return call(aten.index.Tensor, x, indices)
        if choice == 2:
            return call(aten.index_fill.int_Scalar, x, dim, index, self.real_number())
        if choice == 3:
            return call(aten.roll.default, x, [1], [dim])
        if choice == 4:
            return call(aten.flip.default, x, [dim])
        return call(aten.repeat.default, x, [2] + [1] * (x.dim() - 1))

    def step_contraction(self) -> Any:
        call = self.recorder.call
        x = self.pick_float()
        choice = self.rng.randint(0, 6)
        weight = self.tensor([4, x.shape[-1] if x.dim() else 1], x.dtype)
        if choice == 0:
            bias = self.make_constant(self.tensor([4], x.dtype)) if self.rng.random() < 0.6 else None
            return call(aten.linear.default, x, self.make_constant(weight), bias)
        if choice == 1:
            return call(aten.matmul.default, x, self.make_constant(weight.t()))
        if choice == 2:
            image = call(aten.reshape.default, x, [1, 1, 1, -1])
            self.keep(image)
            return call(aten.pad.default, image, [1, 1], self.rng.choice(["constant", "replicate"]))
        if choice == 3:
            return call(aten.einsum.default, "...i,...i->...", [x, x])
        if choice == 4:
            return call(aten.scaled_dot_product_attention.default, x, x, x, scale=self.rng.choice([None, 0.5]))
        if choice == 5:
            return call(aten.gelu.default, x, approximate=self.rng.choice(["none", "tanh"]))
        bias = self.make_constant(self.tensor([4], x.dtype))
        return call(aten.addmm.default, bias, x, self.make_constant(weight.t()), beta=0.5, alpha=2)

    def step_factory(self) -> Any:
        call = self.recorder.call
        choice = self.rng.randint(0, 7)
        if choice == 0:
            return call(aten.arange.default, self.rng.choice([3, 4.0]))
        if choice == 1:
            return call(aten.arange.start_step, 1, 4, self.rng.choice([1, 0.5]))
        if choice == 2:
            return call(aten.zeros.default, self.shape(), dtype=self.rng.choice(DTYPES))
        if choice == 3:
            return call(aten.full.default, self.shape(), self.number())
        if choice == 4:
            return call(aten.ones_like.default, self.pick())
        if choice == 5:
            return call(aten.new_zeros.default, self.pick(), self.shape())
        if choice == 6:
            return call(aten.scalar_tensor.default, self.number())
        return call(aten.full_like.default, self.pick(), self.real_number())

    def step_random(self) -> Any:
        call = self.recorder.call
        choice = self.rng.randint(0, 4)
        if choice == 0:
            return call(aten.rand.default, self.shape(), random=True)
        if choice == 1:
            return call(aten.uniform_.default, self.pick(), -1.0, 1.0, random=True)
        if choice == 2:
            return call(aten.dropout.default, self.pick_float(), 0.5, True, random=True)
        if choice == 3:
            return call(aten.bernoulli_.float, self.pick(), 0.3, random=True)
        return call(aten.randint.default, 7, self.shape(), random=True)

    STEPS = (
        [step_unary, step_binary, step_view, step_view] * 3
        + [step_in_place_unary, step_in_place_binary, step_scalar_binary, step_scalar_ops] * 2
        + [step_conversion, step_reduction, step_join, step_index, step_contraction, step_factory, step_random]
    )

    def make_constant(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.recorder.add_constant(tensor)

    def keep(self, result: Any) -> None:
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, torch.Tensor) and not any(t is tensor for t in self.pool):
                self.pool.append(tensor)

    def run(self, inputs: list[torch.Tensor], captured: list[torch.Tensor], num_steps: int) -> list[torch.Tensor]:
        self.pool = [self.recorder.add_input(t) for t in inputs] + [self.recorder.add_captured(t) for t in captured]
        done = 0
        for _ in range(num_steps * 4):
            if done >= num_steps:
                break
            # Arguments that do not fit raise before anything is written down.
            with contextlib.suppress(RuntimeError, IndexError, TypeError, NotImplementedError, ValueError):
                self.keep(self.rng.choice(self.STEPS)(self))
                done += 1
        outputs = [self.rng.choice(self.pool[-8:]) for _ in range(self.rng.randint(1, 4))]
        if self.rng.random() < 0.3:
            outputs += [outputs[0], self.rng.choice(self.pool)]
        self.recorder.outputs = outputs
        return outputs


MODES: list[Callable[[], Any]] = [torch.no_grad, torch.inference_mode, torch.enable_grad]


def check_program(seed: int) -> dict[str, int]:
    generator = Generator(seed)
    mode = generator.rng.choice(MODES)
    with mode():
        # Copies keep which leaves share memory; both sides get one, since a copy of a view is no view.
        originals = generator.make_leaves()
        leaves, copies = copy.deepcopy(originals), copy.deepcopy(originals)
        torch.manual_seed(seed + 1)
        expected = generator.run(*leaves, num_steps=generator.rng.randint(1, 20))
        expected_state = torch.get_rng_state()
        text = generator.recorder.text()
        unboxed, fold = generator.rng.choice([(True, True), (True, True), (True, False), (False, True)])
        try:
            plan = _native._plan_build(text, generator.recorder.constants, unboxed, fold)
            torch.manual_seed(seed + 1)
            try:
                actual, _ = _native._plan_run(plan, *copies)
            except NotImplementedError as error:
                # Of one element: no degrees of freedom. What warns is left to eager.
                assert "aten::std_mean" in str(error) and "warns, which only eager can do" in str(error)
                return _native._plan_describe(plan)
            state = torch.get_rng_state()
            before = [*leaves[0], *leaves[1]]
            after = [*copies[0], *copies[1]]
            # Without unboxed calls, `full` is a constant and its clone: a fresh tensor that nobody has filled in place.
            assert describe_tensors([*actual, *after], unboxed) == describe_tensors([*expected, *before], unboxed)
            for a, e in zip([*actual, *after], [*expected, *before], strict=True):
                assert same_bits(a, e), f"{a}\nis not\n{e}"
            assert torch.equal(state, expected_state), "the generator's state differs"
            # A second run owes nothing to the first.
            torch.manual_seed(seed + 1)
            again, _ = _native._plan_run(plan, *copy.deepcopy(originals))
            assert describe_tensors(again, unboxed) == describe_tensors(expected, unboxed)
            for a, e in zip(again, expected, strict=True):
                assert same_bits(a, e), "the second run differs"
        except Exception as error:
            raise AssertionError(f"seed {seed}, unboxed {unboxed}, fold {fold}:\n{text}\n{error}") from error
    return _native._plan_describe(plan)


@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_random_programs_run_as_in_eager(batch: int) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        totals: dict[str, int] = {}
        for i in range(batch, NUM_PROGRAMS, NUM_BATCHES):
            for key, value in check_program(FIRST_SEED + i).items():
                if isinstance(value, int):
                    totals[key] = totals.get(key, 0) + value
        assert totals.get("steps", 1) > 0
    finally:
        torch.set_num_threads(threads)
