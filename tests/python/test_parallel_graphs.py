"""Independent branches of a CUDA graph on several streams. Run on a machine with a GPU."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Iterator
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
def _enabled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Both sides choose the same algorithms, so that equal means equal in every bit.
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    cuvil.reset()
    with cuvil.scope(), torch.inference_mode():
        yield
    torch.cuda.synchronize()


def conv(channels: int, kernel: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, channels, kernel, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
    )


class Mixed(nn.Module):
    """A block as Inception has them: branches of different lengths, one of which splits again."""

    def __init__(self, channels: int = 64) -> None:
        super().__init__()
        self.first = nn.Sequential(*[conv(channels, 3) for _ in range(3)])
        self.second = nn.Sequential(*[conv(channels, 1) for _ in range(4)])
        self.stem = conv(channels, 1)
        self.left, self.right = conv(channels, 3), conv(channels, 5)
        self.last = conv(channels, 1)
        self.join = nn.Conv2d(5 * channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stem = self.stem(x)
        pooled = nn.functional.avg_pool2d(x, 3, stride=1, padding=1)
        branches = [self.first(x), self.second(x), self.left(stem), self.right(stem), self.last(pooled)]
        return self.join(torch.cat(branches, 1)).relu_()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Mixed() for _ in range(4)])
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x).mean((2, 3)))


def make() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    with torch.inference_mode(False):
        model = Net().cuda().half().eval()
        return model, cuvil.opt_out(copy.deepcopy(model))


def image(seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(1, 64, 17, 17, device="cuda", dtype=torch.half, generator=generator)


def streams_of(model: nn.Module) -> dict[str, Any]:
    plans = [p for m in cuvil.explain(model).to_dict()["modules"] for p in m["plans"]]
    assert plans, str(cuvil.explain(model))
    graph = plans[-1]["cuda_graph"]
    assert graph["captured"], graph
    return dict(graph["streams"])


def test_branches_run_on_streams_and_equal_eager_in_every_bit() -> None:
    model, twin = make()
    for seed in range(3):
        model(image(seed))
    streams = streams_of(model)
    assert streams["skipped"] == "", streams
    assert streams["count"] > 1, streams
    chosen = next(c for c in streams["candidates"] if c["chosen"])
    assert chosen["replay_ns"] <= 0.97 * streams["candidates"][0]["replay_ns"]
    assert streams["launches"] <= 30
    before = cuvil.stats()["planned"]
    held = [model(image(seed)) for seed in range(200)]
    assert cuvil.stats()["planned"] == before + 200
    for seed, result in enumerate(held):
        assert torch.equal(result, twin(image(seed))), seed
    text = str(cuvil.explain(model))
    assert "(used)" in text
    assert "stream 1 |" in text


def test_several_threads_on_streams_of_their_own() -> None:
    model, twin = make()
    for seed in range(3):
        model(image(seed))
    assert streams_of(model)["count"] > 1
    wrong: list[int] = []

    def work(number: int) -> None:
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
            for i in range(50):
                x = image(100 * number + i)
                if not torch.equal(model(x), twin(x)):
                    wrong.append(100 * number + i)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_memory_grows_within_the_stated_bounds_and_goes_back() -> None:
    model, _ = make()
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    for seed in range(3):
        model(image(seed))
    candidates = streams_of(model)["candidates"]
    for candidate in candidates:
        if candidate["replay_ns"]:
            assert candidate["pool_bytes"] <= 1.1 * candidates[0]["pool_bytes"] + 40 * 2**20, candidate
    # The trial's own pool is torch's cache: what is left without that is the plan's, and a workspace.
    torch.cuda.empty_cache()
    chosen = next(c for c in candidates if c["chosen"])
    assert torch.cuda.memory_reserved() <= reserved + chosen["pool_bytes"] + 64 * 2**20


def test_another_shape_has_a_measurement_of_its_own() -> None:
    model, twin = make()
    for seed in range(3):
        model(image(seed))
    assert streams_of(model)["count"] > 1
    large = torch.randn(8, 64, 64, 64, device="cuda", dtype=torch.half)
    for _ in range(3):
        result = model(large)
    assert torch.equal(result, twin(large))
    streams = streams_of(model)
    assert streams["skipped"] or streams["launches"] > 0
    # The first shape is served as before.
    assert torch.equal(model(image(7)), twin(image(7)))


def test_one_stream_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUVIL_STREAMS", "1")
    cuvil.disable()
    with cuvil.scope():
        model, twin = make()
        for seed in range(3):
            result = model(image(seed))
        assert torch.equal(result, twin(image(2)))
        assert streams_of(model)["count"] == 1
    monkeypatch.undo()
    cuvil.enable()
