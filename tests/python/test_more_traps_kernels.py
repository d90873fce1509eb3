"""Kernels that the program registers for torch's own operators, before and after a plan exists."""

from __future__ import annotations

import gc
import warnings

import cuvil
import pytest
import torch
import torch.nn.functional as F
from eager_twin import Fn, eager_twin, fill, ramp, warm

aten = torch.ops.aten


def register(op, kernel, key="CPU"):
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it replaces a kernel of its own
        library.impl(op, kernel, key)
    return library


def arange(end, **options):
    return torch.full((end,), 7.0)


LINEAR = (lambda s, x: s.layer(x), "linear", lambda x, w, b=None: x.sum() + torch.zeros(x.shape[0], w.shape[0]))
RELU = (lambda s, x: torch.relu(x * 2 - 3) + 1, "relu", lambda x: x.clone() - 100)
CLAMP = (lambda s, x: torch.relu(x * 2 - 3) + 1, "clamp_min", lambda x, low: x.clone() - 50)
ADDMM = (lambda s, x: s.layer(x), "addmm", lambda b, x, w, beta=1, alpha=1: torch.zeros(x.shape[0], w.shape[1]) + 5)
ARANGE = (lambda s, x: x + torch.arange(3), "arange", arange)
INNER = (lambda s, x: x + torch.full((3,), 2.0).sqrt(), "sqrt", lambda x: x.clone() + 30)
CASES = {"linear": LINEAR, "relu": RELU, "clamp": CLAMP, "addmm": ADDMM, "arange": ARANGE, "constant": INNER}


def model(forward):
    return fill(Fn(forward, layer=torch.nn.Linear(3, 3)))


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_that_is_registered_after_the_plan_was_made(name):
    forward, op, kernel = CASES[name]

    @eager_twin(served=True)
    def program():
        m = model(forward)
        with torch.no_grad():
            yield from warm("torch's", m, ramp(2, 3))
            library = register(op, kernel)
            try:
                yield from warm("own", m, ramp(2, 3))
            finally:
                library._destroy()
            yield from warm("torch's-again", m, ramp(2, 3))

    program()


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_that_stands_when_the_call_is_traced(name):
    forward, op, kernel = CASES[name]

    @eager_twin(served=True)
    def program():
        library = register(op, kernel)
        m = model(forward)
        with torch.no_grad():
            try:
                yield from warm("own", m, ramp(2, 3))
            finally:
                library._destroy()
            yield from warm("torch's", m, ramp(2, 3))
            yield from warm("torch's-still", m, ramp(2, 3))

    program()


def test_a_kernel_for_cuda_only_is_no_concern_of_plans_on_the_cpu():
    m = model(RELU[0])
    with torch.no_grad(), cuvil.scope():
        library = register("relu", RELU[2], "CUDA")
        try:
            for _ in range(4):
                m(ramp(2, 3))
            before = cuvil.stats()["planned"]
            assert torch.equal(m(ramp(2, 3)), torch.relu(ramp(2, 3) * 2 - 3) + 1)
            assert cuvil.stats()["planned"] == before + 1, str(cuvil.explain(m))
        finally:
            library._destroy()


@pytest.mark.gpu
def test_a_kernel_for_cuda_stops_plans_with_tensors_there():
    m = model(RELU[0]).cuda()
    x = ramp(2, 3).cuda()
    with torch.no_grad(), cuvil.scope():
        library = register("relu", RELU[2], "CUDA")
        try:
            before = cuvil.stats()["planned"]
            for _ in range(5):
                assert torch.equal(m(x), (x * 2 - 3) - 100 + 1)
            assert cuvil.stats()["planned"] == before
            assert "aten::relu (CUDA)" in str(cuvil.explain(m))
        finally:
            library._destroy()


@eager_twin(served=True)
def test_a_kernel_that_goes_with_the_last_reference_to_its_library():
    m = model(RELU[0])
    with torch.no_grad():
        yield from warm("torch's", m, ramp(2, 3))
        library = register("relu", RELU[2])
        yield from warm("own", m, ramp(2, 3))
        del library
        gc.collect()
        yield from warm("torch's-again", m, ramp(2, 3))


@eager_twin(served=True)
def test_kernels_by_the_other_functions_that_register():
    m = model(RELU[0])
    n = model(lambda s, x: torch.tanh(x * 2) + 1)
    with torch.no_grad():
        yield from warm("torch's", m, ramp(2, 3))
        yield from warm("torch's-n", n, ramp(2, 3))
        scope = torch.library.Library("aten", "FRAGMENT")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.library.register_kernel("aten::relu", "cpu", lambda x: x.clone() - 9, lib=scope)
                torch.library.impl("aten::tanh", "cpu", lib=scope)(lambda x: x.clone() - 8)
            yield from warm("own", m, ramp(2, 3))
            yield from warm("own-n", n, ramp(2, 3))
        finally:
            scope._destroy()
        yield from warm("torch's-again", m, ramp(2, 3))


@eager_twin(served=True)
def test_a_kernel_that_a_second_library_replaces_and_outlives():
    m = model(RELU[0])
    with torch.no_grad():
        yield from warm("torch's", m, ramp(2, 3))
        first, second = register("relu", RELU[2]), torch.library.Library("aten", "IMPL")
        try:
            yield from warm("first", m, ramp(2, 3))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                second.impl("relu", lambda x: x.clone() + 1000, "CPU", allow_override=True)
            yield from warm("second", m, ramp(2, 3))
            first._destroy()
            yield from warm("second-alone", m, ramp(2, 3))
        finally:
            second._destroy()
        yield from warm("torch's-again", m, ramp(2, 3))


@eager_twin
def test_a_kernel_that_the_call_itself_registers():
    def forward(s, x):
        library = register("relu", RELU[2])
        y = torch.relu(x - 3)
        library._destroy()
        return y, torch.relu(x - 3)

    m = model(forward)
    with torch.no_grad():
        for i in range(5):
            yield f"{i}", m(ramp(2, 3))


def served(module, *args):
    before = cuvil.stats()["planned"]
    for _ in range(4):
        module(*args)
    return cuvil.stats()["planned"] - before


def test_registrations_that_are_none_of_a_plans_business_cost_no_plan():
    cuvil.enable()
    try:
        m = model(RELU[0])
        with torch.no_grad():
            assert served(m, ramp(2, 3)) > 0, cuvil.explain(m)
            library = torch.library.Library("cuvil_test_kernels", "DEF")
            library.define("twice(Tensor x) -> Tensor")
            library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
            sparse = register("relu", lambda x: x, "SparseCPU")
            other = torch.library.Library("prims", "IMPL")
            other.impl("sin", lambda x: x, "AutogradCPU")
            assert served(m, ramp(2, 3)) == 4
            other._destroy()
            sparse._destroy()
            library._destroy()
            assert served(m, ramp(2, 3)) == 4
    finally:
        cuvil.disable()


def test_the_reason_names_the_operator():
    cuvil.enable()
    library = register("relu", RELU[2])
    try:
        m = model(RELU[0])
        with torch.no_grad():
            assert served(m, ramp(2, 3)) == 0
        assert "aten::relu (CPU)" in str(cuvil.explain(m))
        library._destroy()
        with torch.no_grad():
            for _ in range(200):
                m(ramp(2, 3))
            assert served(m, ramp(2, 3)) == 4
    finally:
        library._destroy()
        cuvil.disable()


def test_linear_without_bias_is_torch_s_own():
    # The kernels above must be able to show: without Cuvil they replace torch's.
    library = register("linear", LINEAR[2])
    try:
        assert F.linear(torch.ones(1, 2), torch.ones(3, 2)).tolist() == [[2.0, 2.0, 2.0]]
        assert aten.linear(torch.ones(1, 2), torch.zeros(3, 2)).tolist() == [[2.0, 2.0, 2.0]]
    finally:
        library._destroy()
