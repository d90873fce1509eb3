"""Plans on a GPU: one CUDA graph each, with eager's answers. Run on a machine with a GPU."""

from __future__ import annotations

import copy
import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

# Read when cuvil is imported.
os.environ.setdefault("CUVIL_PREPARE", "sync")
os.environ.setdefault("CUVIL_ADOPT", "always")
import cuvil  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _enabled() -> Iterator[None]:
    cuvil.reset()
    with cuvil.scope(), torch.inference_mode():
        yield
    torch.cuda.synchronize()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.relu(self.first(x))
        return self.second(h), h.sum(-1)


def twin_of(module: nn.Module) -> nn.Module:
    return cuvil.opt_out(copy.deepcopy(module))


def make(kind: type[nn.Module] = Net) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    with torch.inference_mode(False):
        model = kind().cuda().eval()
        return model, twin_of(model)


def flat(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


def check(result: Any, expected: Any) -> None:
    for got, want in zip(flat(result), flat(expected), strict=True):
        assert got.dtype == want.dtype
        assert got.stride() == want.stride()
        assert got._is_view() == want._is_view()
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def graph_of(model: nn.Module) -> dict[str, Any]:
    plans = [p for m in cuvil.explain(model).to_dict()["modules"] for p in m["plans"]]
    assert plans, str(cuvil.explain(model))
    return dict(plans[-1]["cuda_graph"])


def warm(model: nn.Module, *args: Any) -> None:
    for _ in range(3):
        model(*args)


def test_a_plan_is_one_graph_and_explain_says_so():
    model, twin = make()
    x = torch.randn(8, 64, device="cuda")
    warm(model, x)
    before = cuvil.stats()["planned"]
    check(model(x), twin(x))
    assert cuvil.stats()["planned"] == before + 1
    assert graph_of(model)["captured"], graph_of(model)
    assert "CUDA graph" in str(cuvil.explain(model))


def test_a_thousand_outputs_are_never_overwritten():
    model, twin = make()
    inputs = [torch.randn(8, 64, device="cuda") for _ in range(1000)]
    warm(model, inputs[0])
    held = [model(x) for x in inputs]
    for x, result in zip(inputs, held, strict=True):
        check(result, twin(x))


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
def test_hidden_views_are_views(grad_mode):
    """`linear` of three dimensions returns a view of memory of its own."""
    with torch.inference_mode(False), grad_mode():
        model, twin = make(lambda: nn.Linear(64, 16))
        x = torch.randn(2, 3, 64, device="cuda")
        warm(model, x)
        check(model(x), twin(x))
        assert graph_of(model)["captured"], graph_of(model)


class Blocks(nn.Module):
    """Enough operators for a graph before and behind what no graph can hold."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor], last: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.before = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.ReLU())))
        self.after = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.ReLU())))
        self.between, self.last = between, last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.after(self.between(self.before(x))))


def parts_of(model: nn.Module) -> list[dict[str, Any]]:
    plans = [p for m in cuvil.explain(model).to_dict()["modules"] for p in m["plans"]]
    assert plans, str(cuvil.explain(model))
    return list(plans[-1].get("parts", []))


def same(x: torch.Tensor) -> torch.Tensor:
    return x


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "between, last, num_graphs",
    [
        (lambda x: x.cpu().cuda() * 2, same, 2),  # waits for the device
        (lambda x: x * x.abs().sum().cpu(), same, 2),  # a scalar on the CPU, which a kernel would have built in
        (lambda x: x + torch.nonzero(x[0] > -1e9)[:1, 0] * 0.5, same, 0),  # sizes that depend on data: not cut
        (same, lambda x: (x + 1).relu_(), 1),  # an output whose version counts
    ],
)
def test_what_no_graph_can_hold_runs_between_graphs(grad_mode, between, last, num_graphs):
    with torch.inference_mode(False), grad_mode():
        model, twin = make(lambda: Blocks(between, last))
        inputs = [torch.randn(8, 64, device="cuda") for _ in range(50)]
        for x in inputs[:3]:
            check(model(x), twin(x))
        held = [model(x) for x in inputs]
        for x, result in zip(inputs, held, strict=True):
            check(result, twin(x))
            if not result.is_inference():
                assert result._version == twin(x)._version
        parts = parts_of(model)
        if num_graphs == 1 and grad_mode is torch.inference_mode:
            assert parts == [] and graph_of(model)["captured"], str(cuvil.explain(model))  # there are no versions
            return
        captured = [p for p in parts if p.get("cuda_graph", {}).get("captured")]
        assert len(captured) == num_graphs, str(cuvil.explain(model))
        assert all(p["reason"] for p in parts if "cuda_graph" not in p)
        assert bool(parts) == bool(num_graphs), str(cuvil.explain(model))


class Shapes(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2 + 1
        return y, y[..., 1:], y.transpose(0, 1), x[..., :1], x


@pytest.mark.parametrize(
    "make_input",
    [
        lambda: torch.randn(6, 10, device="cuda"),
        lambda: torch.randn(10, 6, device="cuda").t(),
        lambda: torch.randn(1, 10, device="cuda").expand(6, 10),
        lambda: torch.randn(12, 20, device="cuda")[::2, ::2],
        lambda: torch.randn(61, device="cuda")[1:].view(6, 10),
        lambda: torch.randn(0, 10, device="cuda"),
    ],
    ids=["plain", "transposed", "expanded", "strided", "misaligned", "empty"],
)
def test_inputs_of_every_layout(make_input):
    model, twin = make(Shapes)
    for _ in range(6):
        x = make_input()
        result, expected = model(x), twin(x)
        check(result, expected)
        assert result[4] is x
        assert result[1].data_ptr() - result[0].data_ptr() == expected[1].data_ptr() - expected[0].data_ptr()
        assert result[3].data_ptr() == x.data_ptr()


class HostScalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.tensor(2.0)  # no buffer: stays on the CPU

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def test_trap_05_cpu_scalars_in_cuda_operators_are_read_at_each_call():
    model, _ = make(HostScalar)
    x = torch.ones(4, device="cuda")
    warm(model, x)
    model.scale.fill_(5.0)
    assert model(x).tolist() == [5.0] * 4


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return x * factor


def test_cpu_arguments_beside_cuda_arguments():
    model, twin = make(Scaled)
    x = torch.ones(4, device="cuda")
    for value in (1.0, 2.0, 3.0, 4.0, 5.0):
        factor = torch.tensor(value)
        check(model(x, factor), twin(x, factor))


class FromHost(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to("cuda", non_blocking=True) * 2


def test_trap_19_a_pinned_block_is_refilled_only_when_it_has_been_read():
    model, twin = make(FromHost)
    results = []
    # Each block goes back to the pinned allocator while its copy may still be under way, and is taken for the next one.
    for i in range(100):
        block = torch.full((1 << 20,), float(i)).pin_memory()
        results.append(model(block))
        if i == 0:
            check(results[0], twin(block))
        del block
    assert [(y.amin().item(), y.amax().item()) for y in results] == [(2.0 * i, 2.0 * i) for i in range(100)]


def test_weights_are_read_in_place_and_may_move():
    with torch.inference_mode(False), torch.no_grad():
        model, _ = make()
        x = torch.randn(8, 64, device="cuda")
        warm(model, x)
        model.second.weight.mul_(2)
        check(model(x), twin_of(model)(x))
        model.first.weight.data = torch.randn(64, 64, device="cuda")
        check(model(x), twin_of(model)(x))
        model.first = nn.Linear(64, 64).cuda()
        check(model(x), twin_of(model)(x))
        for _ in range(12):
            model.first.weight.data = torch.randn(64, 64, device="cuda")
            check(model(x), twin_of(model)(x))
        model.cpu()
        model.cuda()
        check(model(x), twin_of(model)(x))


def test_switches_that_choose_kernels():
    model, twin = make()
    x = torch.randn(256, 64, device="cuda")
    warm(model, x)
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for allowed in (True, False, True, False):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            torch.testing.assert_close(model(x)[0], twin(x)[0], rtol=1e-6, atol=1e-6)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


class Noisy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


def test_random_numbers_are_eagers():
    model, twin = make(Noisy)
    x = torch.zeros(1000, device="cuda")
    states = []
    for each in (model, twin):
        torch.cuda.manual_seed(7)
        results = [each(x) for _ in range(6)]
        states.append((torch.stack(results), torch.cuda.get_rng_state()))
    assert torch.equal(states[0][0], states[1][0])
    assert torch.equal(states[0][1], states[1][1])


class Inverse(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(x + 3 * torch.eye(8, device=x.device))  # looks at an error code on the host


def test_trap_17_a_failed_capture_leaves_everything_working():
    model, twin = make(Inverse)
    x = torch.rand(8, 8, device="cuda")
    for _ in range(5):
        check(model(x), twin(x))
    assert torch.rand(10, device="cuda").sum().item() > 0
    other, other_twin = make()
    y = torch.randn(8, 64, device="cuda")
    warm(other, y)
    check(other(y), other_twin(y))
    assert graph_of(other)["captured"]
    torch.cuda.empty_cache()
    check(other(y), other_twin(y))


def test_trap_18_threads_and_streams_share_a_plan():
    model, twin = make()
    shapes = [(8, 64), (3, 64), (2, 5, 64)]
    for shape in shapes:
        warm(model, torch.randn(*shape, device="cuda"))
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            stream = torch.cuda.Stream()
            generator = torch.Generator("cuda").manual_seed(seed)
            with torch.inference_mode(), torch.cuda.stream(stream):
                for i in range(100):
                    x = torch.randn(*shapes[(seed + i) % 3], device="cuda", generator=generator)
                    check(model(x), twin(x))
        except BaseException as error:  # reported by the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


@pytest.mark.parametrize("calls_before", [0, 1, 2, 5])
def test_trap_17_the_programs_own_captures_go_on_working(calls_before):
    """Whatever stage the module is at: no trace, no comparison and no graph of ours inside of a capture."""
    model, twin = make()
    static = torch.randn(8, 64, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        twin(static)
        for _ in range(calls_before):
            model(static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = model(static)
    for _ in range(3):
        static.copy_(torch.randn(8, 64, device="cuda"))
        graph.replay()
        check(result, twin(static))


def held_bytes() -> tuple[int, int]:
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def test_memory_goes_back_with_the_model():
    x = torch.randn(1 << 14, 64, device="cuda")

    def use_and_drop() -> tuple[int, int]:
        model, _ = make()
        for rows in (1 << 14, 1 << 13, 1 << 12):
            warm(model, x[:rows])
        assert graph_of(model)["captured"]
        del model
        return held_bytes()

    before = use_and_drop()  # torch keeps cuBLAS workspaces: those of the first capture stream stay
    for _ in range(3):
        after = use_and_drop()
        assert after[0] <= before[0]
        assert after[1] <= before[1]


def test_many_calls_do_not_grow():
    model, _ = make()
    x = torch.randn(8, 64, device="cuda")
    warm(model, x)
    model(x)
    before = held_bytes()
    for _ in range(3000):
        model(x)
    after = held_bytes()
    assert after[0] <= before[0]
    assert after[1] <= before[1]
