"""Kernels in profiles: every one with its module, line and operator. Run on a machine with a GPU."""

from __future__ import annotations

import inspect
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

# Read when cuvil is imported.
os.environ.setdefault("CUVIL_PREPARE", "sync")
os.environ.setdefault("CUVIL_ADOPT", "always")
import cuvil  # noqa: E402
from cuvil.profile_device import TORCH_IS_PROFILING, Activity  # noqa: E402
from cuvil.profiling import Profile  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _enabled() -> Iterator[None]:
    torch.cuda.init()
    cuvil.reset()
    with cuvil.scope(), torch.inference_mode():
        yield
    torch.cuda.synchronize()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        return torch.relu(y)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        h = torch.softmax(h, -1)
        return self.second(h)


def line_of(function: Any, text: str) -> str:
    lines, first = inspect.getsourcelines(function)
    (offset,) = (i for i, line in enumerate(lines) if text in line)
    return f"{inspect.getsourcefile(function)}:{first + offset}"


def make() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    with torch.inference_mode(False):
        return Net().cuda().eval(), torch.randn(64, 256, device="cuda")


def warm(model: nn.Module, x: torch.Tensor) -> None:
    for _ in range(4):
        model(x)
    torch.cuda.synchronize()


def kernels(profile: Profile) -> list[Activity]:
    return [activity for activity in profile.activities() if activity.kind == "kernel"]


def notes(profile: Profile) -> list[str]:
    """On kernels; whether a machine has counters is another matter."""
    return [note for note in profile.notes if "ounters" not in note]


def test_kernels_of_a_graph_name_module_line_and_operator() -> None:
    model, x = make()
    warm(model, x)
    expected = model(x)
    with cuvil.profile() as p:
        result = model(x)
    assert torch.equal(result, expected)
    assert notes(p) == []
    found = kernels(p)
    assert sum(kernel.in_graph for kernel in found) >= 5
    by_place: dict[tuple[str, str], set[str]] = {}
    for kernel in found:
        assert kernel.site is not None
        by_place.setdefault((kernel.site.module, kernel.site.place), set()).add(kernel.site.operator)
    assert by_place["Net", line_of(Net.forward, "softmax")] == {"aten::softmax.int"}
    for module in ("Net.first", "Net.second"):
        assert by_place[f"{module}.fc", line_of(Block.forward, "self.fc")] == {"aten::linear"}
    assert "aten::relu" in by_place["Net.first", line_of(Block.forward, "relu")]
    assert p.attributed_share == 1.0
    assert sum(kernel.duration_ns for kernel in found) == pytest.approx(p.raw_kernel_ns, rel=0.02)


def test_times_lie_inside_of_the_call_that_waited_for_them() -> None:
    model, x = make()
    warm(model, x)
    with cuvil.profile() as p:
        model(x)
        torch.cuda.synchronize()
    (call,) = [i for i in p.intervals() if i.site.kind == "plan"]
    for kernel in kernels(p):
        assert call.start_ns <= kernel.start_ns <= kernel.end_ns <= p.end_ns


def test_eager_code_is_attributed_to_the_innermost_module_call() -> None:
    model, x = make()
    cuvil.opt_out(model)
    model(x)
    with cuvil.profile() as p:
        model(x)
    modules = {kernel.site.module for kernel in kernels(p)}
    assert modules == {"Net", "Net.first", "Net.first.fc", "Net.second", "Net.second.fc"}
    fc = next(kernel for kernel in kernels(p) if kernel.site.module == "Net.first.fc")
    assert fc.site.place == line_of(Block.forward, "self.fc")
    assert p.attributed_share == 1.0


def test_copies_have_their_bytes_and_the_module_that_makes_them() -> None:
    class Moves(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.to("cuda") + 1

    model = cuvil.opt_out(Moves())
    host = torch.ones(1 << 20)
    model(host)
    with cuvil.profile() as p:
        model(host)
    (copy,) = [activity for activity in p.activities() if activity.kind == "copy"]
    assert copy.name == "copy host to device"
    assert copy.bytes == 4 << 20
    assert copy.site.module == "Moves"


def test_work_outside_of_module_calls_is_recorded_without_a_line() -> None:
    x = torch.ones(1 << 20, device="cuda")
    x.mul(2)
    with cuvil.profile() as p:
        x.mul(2)
    (kernel,) = kernels(p)
    assert kernel.site is None
    assert p.attributed_share == 0.0
    assert "(outside of module calls)" in p.table()


def test_a_plan_keeps_answering_rightly_during_and_after_profiles() -> None:
    model, x = make()
    warm(model, x)
    y = torch.randn_like(x)
    expected = [model(x), model(y)]
    for _ in range(3):
        with cuvil.profile() as p:
            during = [model(x), model(y)]
        assert kernels(p)
        after = [model(x), model(y)]
        for results in (during, after):
            assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_a_model_whose_first_calls_are_profiled_is_right() -> None:
    model, x = make()
    twin = cuvil.opt_out(Net().cuda().eval())
    twin.load_state_dict(model.state_dict())
    expected = twin(x)
    with cuvil.profile() as p:
        for _ in range(5):
            torch.testing.assert_close(model(x), expected, rtol=1e-3, atol=1e-3)
    assert any(kernel.in_graph for kernel in kernels(p))
    torch.testing.assert_close(model(x), expected, rtol=1e-3, atol=1e-3)


OTHERS = "other threads use the GPU"
STAYS = "CUPTI is still attached"


class Launches:
    """Threads that call a model on streams of their own while the block lasts."""

    def __init__(self, model: nn.Module, x: torch.Tensor, expected: torch.Tensor) -> None:
        self.model, self.x, self.expected = model, x, expected
        self.stop = threading.Event()
        self.wrong: list[object] = []
        self.threads = [threading.Thread(target=self.work) for _ in range(3)]

    def work(self) -> None:
        try:
            with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
                while not self.stop.is_set():
                    result = self.model(self.x)
                    torch.cuda.current_stream().synchronize()
                    # Without its graph a plan may have other kernels of the BLAS.
                    if not torch.allclose(result, self.expected, rtol=1e-3, atol=1e-3):
                        self.wrong.append(result)
        except Exception as error:
            self.wrong.append(error)

    def __enter__(self) -> Launches:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()


def test_beside_threads_that_launch_there_are_no_kernels_and_nothing_is_disturbed() -> None:
    model, x = make()
    warm(model, x)
    expected = model(x)
    torch.cuda.synchronize()
    with Launches(model, x, expected) as launches:
        for _ in range(5):
            with cuvil.profile() as p:
                model(x)
            assert p.streams == []
            assert any(OTHERS in note for note in p.notes)
    assert not launches.wrong


def test_threads_that_begin_inside_of_a_profile_are_right_and_cupti_stays() -> None:
    model, x = make()
    warm(model, x)
    expected = model(x)
    torch.cuda.synchronize()
    with cuvil.profile() as p:
        model(x)
        with Launches(model, x, expected) as launches:
            time.sleep(0.2)
    assert not launches.wrong
    assert kernels(p)
    assert any(STAYS in note for note in p.notes)
    with cuvil.profile() as p:
        model(x)
    assert not any(STAYS in note for note in p.notes)


def test_a_graph_of_the_programs_own_is_attributed_to_the_call_that_replays_it() -> None:
    x = torch.ones(1 << 16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2

    class Replays(nn.Module):
        def forward(self) -> torch.Tensor:
            graph.replay()
            return y

    model = cuvil.opt_out(Replays())
    with cuvil.profile() as p:
        model()
    (kernel,) = kernels(p)
    assert kernel.site.module == "Replays"


def cuda_events(profiler: Any) -> int:
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profiler.events())


def test_torch_profiler_works_before_and_after_and_comes_first_beside() -> None:
    model, x = make()
    warm(model, x)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]

    def torchs() -> int:
        with torch.profiler.profile(activities=activities) as profiler:
            model(x)
            torch.cuda.synchronize()
        return cuda_events(profiler)

    assert torchs() >= 5
    with cuvil.profile() as p:
        model(x)
    assert len(kernels(p)) >= 5
    assert torchs() >= 5
    with torch.profiler.profile(activities=activities) as profiler:
        with cuvil.profile() as p:
            model(x)
            torch.cuda.synchronize()
        model(x)
        torch.cuda.synchronize()
    assert notes(p) == [TORCH_IS_PROFILING]
    assert p.streams == []
    assert "torch.profiler is at work" in p.table()
    assert cuda_events(profiler) >= 8
    with cuvil.profile() as p:
        model(x)
    assert len(kernels(p)) >= 5


def test_torch_profiler_that_begins_inside_gets_its_kernels_and_the_profile_says_so() -> None:
    model, x = make()
    warm(model, x)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities):  # what it sets up once
        model(x)
    profiler = torch.profiler.profile(activities=activities)
    with cuvil.profile() as p:
        model(x)
        torch.cuda.synchronize()
        profiler.__enter__()
        model(x)
        torch.cuda.synchronize()
    model(x)
    torch.cuda.synchronize()
    profiler.__exit__(None, None, None)
    assert cuda_events(profiler) >= 8
    assert any("torch.profiler was started inside" in note for note in p.notes)
    with cuvil.profile() as p:
        model(x)
    assert len(kernels(p)) >= 5
    assert notes(p) == []


def test_the_trace_has_streams_with_kernels(tmp_path: Path) -> None:
    model, x = make()
    warm(model, x)
    with cuvil.profile(tmp_path / "trace.json") as p:
        model(x)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    on_gpu = [event for event in events if event.get("cat") == "kernel"]
    assert len(on_gpu) == len(kernels(p))
    assert all({"module", "line", "operator", "grid", "block"} <= event["args"].keys() for event in on_gpu)


def test_counters_are_sampled_while_the_profile_lasts() -> None:
    model, x = make()
    warm(model, x)
    with cuvil.profile() as p:
        end = time.monotonic() + 0.8
        while time.monotonic() < end:
            model(x)
            torch.cuda.synchronize()
    counters = {counter.name: counter for counter in p.counters}
    memory = counters[f"GPU {torch.cuda.current_device()}: memory used"]
    assert memory.unit == "MiB"
    assert len(memory.samples) >= 2
    assert all(p.start_ns <= moment <= p.end_ns + 10**9 for moment, _ in memory.samples)
    used = (torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]) / 2**20
    assert memory.to_dict()["mean"] == pytest.approx(used, rel=0.3)


def test_memory_of_the_second_graphs_goes_back() -> None:
    model, x = make()
    warm(model, x)

    def used() -> int:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free

    with cuvil.profile():
        model(x)
    before = used()
    for _ in range(10):
        with cuvil.profile():
            model(x)
    assert used() <= before + (8 << 20)
