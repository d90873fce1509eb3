"""Plans on a GPU called from many threads and streams at once, beside a model of torch.compile's own graphs."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

# Read when cuvil is imported.
os.environ.setdefault("CUVIL_PREPARE", "sync")
os.environ.setdefault("CUVIL_ADOPT", "always")
import cuvil  # noqa: E402

pytestmark = pytest.mark.gpu

THREADS, STREAMS, CALLS = 32, 8, 200
SHAPES = (1, 3, 8, 17)


@pytest.fixture(autouse=True)
def _enabled() -> Iterator[None]:
    cuvil.reset()
    with cuvil.scope():
        yield
    torch.cuda.synchronize()


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.layers:
            x = layer(x).relu()
        return x, x.sum(-1)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.a(x).relu(), self.b(x).relu()], 1)


def test_threads_and_streams() -> None:
    torch.manual_seed(0)
    models = [Perceptron().cuda().eval(), Convolutions().cuda().eval()]
    inputs = [
        [torch.randn(size, 64, device="cuda") for size in SHAPES],
        [torch.randn(size, 3, 16, 16, device="cuda") for size in SHAPES],
    ]
    compiled = cuvil.opt_out(torch.compile(nn.Sequential(nn.Linear(64, 64), nn.GELU()).cuda(), mode="reduce-overhead"))
    beside = torch.randn(4, 64, device="cuda")
    with torch.inference_mode():
        twins = [cuvil.opt_out(copy.deepcopy(model)) for model in models]
        references = [[model(x) for x in of_model] for model, of_model in zip(twins, inputs, strict=True)]
        for _ in range(3):
            compiled(beside)
        compiled_reference = compiled(beside).clone()
        for model, of_model in zip(models, inputs, strict=True):
            for x in of_model:
                for _ in range(4):
                    model(x)
    torch.cuda.synchronize()
    planned = cuvil.stats()["planned"]
    streams = [torch.cuda.Stream() for _ in range(STREAMS)]
    problems: list[str] = []
    start = threading.Barrier(THREADS + 1)

    def work(number: int) -> None:
        held: list[tuple[torch.Tensor, torch.Tensor]] = []
        stream = streams[number % STREAMS]
        start.wait()
        with torch.inference_mode(), torch.cuda.stream(stream):
            for call in range(CALLS):
                which, shape = (number + call) % 2, (number // 2 + call) % len(SHAPES)
                output = models[which](inputs[which][shape])
                reference = references[which][shape]
                if which == 0:
                    held += [(output[0], reference[0]), (output[1], reference[1])]
                else:
                    held.append((output, reference))
        # What came first must still be there after everything else.
        stream.synchronize()
        wrong = sum(not torch.equal(a, b) for a, b in held)
        if wrong:
            problems.append(f"thread {number}: {wrong} of {len(held)} outputs differ")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    start.wait()
    with torch.inference_mode():
        while any(thread.is_alive() for thread in threads):
            if not torch.equal(compiled(beside), compiled_reference):
                problems.append("the compiled model differs")
                break
    for thread in threads:
        thread.join()
    assert not problems
    assert cuvil.stats()["planned"] - planned >= THREADS * CALLS * 0.9
