"""What the agent asks of torch's CUDA allocator, with functions of the test in torch's place: no GPU is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

fake: Any = pytest.importorskip("_cuvil_lifecycle_fake")

POOL = (0, 77)


class Allocator:
    """Counts the users of one pool, as torch does: memory of a pool without users may go."""

    def __init__(self) -> None:
        self.users = 0
        self.fewest_users_in_use = 99
        self.calls: list[tuple[object, ...]] = []
        self.refuses = ""

    def note(self, name: str, *args: object) -> None:
        self.calls.append((name, *args))
        if name == self.refuses:
            raise RuntimeError("refused")

    def begin(self, device: int, pool: tuple[int, int]) -> None:
        self.note("begin", device, pool)
        self.users += 1

    def end(self, device: int, pool: tuple[int, int]) -> None:
        self.note("end", device, pool)

    def release(self, device: int, pool: tuple[int, int]) -> None:
        self.note("release", device, pool)
        self.users -= 1

    def snapshot(self, asked: tuple[object, ...]) -> dict[str, object]:
        self.note("snapshot", asked)
        self.fewest_users_in_use = min(self.fewest_users_in_use, self.users)
        return {"segments": [{"total_size": 2 << 20}, {"total_size": 20 << 20}]}


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    allocator = Allocator()
    c = torch._C
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(c, "_graph_pool_handle", lambda: POOL, raising=False)
    monkeypatch.setattr(c, "_cuda_beginAllocateCurrentThreadToPool", allocator.begin, raising=False)
    monkeypatch.setattr(c, "_cuda_endAllocateToPool", allocator.end, raising=False)
    monkeypatch.setattr(c, "_cuda_releasePool", allocator.release, raising=False)
    monkeypatch.setattr(c, "_cuda_memorySnapshot", allocator.snapshot, raising=False)
    return allocator


def test_a_pool_is_held_between_its_uses_and_let_go_with_its_owner(allocator: Allocator) -> None:
    assert fake.use_pool(3) == ("", 22 << 20)
    assert allocator.users == 0
    assert allocator.fewest_users_in_use == 2  # ours, and that of the use
    assert allocator.calls[:2] == [("begin", 3, POOL), ("end", 3, POOL)]
    assert ("snapshot", (0, 77, False)) in allocator.calls


def test_an_older_torch_is_asked_its_way(allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(pool: tuple[object, ...]) -> dict[str, object]:
        if len(pool) != 2:
            raise TypeError("a pool is expected")
        return allocator.snapshot(pool)

    monkeypatch.setattr(torch._C, "_cuda_memorySnapshot", snapshot)
    assert fake.use_pool(0) == ("", 22 << 20)


@pytest.mark.parametrize(
    ("refuses", "problem"),
    [
        ("begin", "does not make a private memory pool"),
        ("end", "does not make a private memory pool"),
        ("snapshot", "does not tell what a private memory pool has"),
    ],
)
def test_refusals_are_told_and_leave_no_user_behind(allocator: Allocator, refuses: str, problem: str) -> None:
    allocator.refuses = refuses
    text, _ = fake.use_pool(0)
    assert problem in text
    assert allocator.users == 0


def test_trap_18_an_allocator_that_puts_allocations_into_graphs_is_refused(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert "cudaMallocAsync" in fake.use_pool(0)[0]
    assert not allocator.calls


def room(monkeypatch: pytest.MonkeyPatch, share: float | None, reserved: int = 0) -> tuple[str, int, int]:
    monkeypatch.setattr(torch._C, "_cudart", SimpleNamespace(cudaMemGetInfo=lambda device: (600, 1000)), raising=False)
    if share is None:
        monkeypatch.delattr(torch._C, "_cuda_getMemoryFraction", raising=False)
    else:
        monkeypatch.setattr(torch._C, "_cuda_getMemoryFraction", lambda device: share, raising=False)
    stats = {"reserved_bytes": {"all": {"current": reserved}}}
    monkeypatch.setattr(torch._C, "_cuda_memoryStats", lambda device: stats, raising=False)
    result: tuple[str, int, int] = fake.device_room(1)
    return result


def test_room_is_what_the_device_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert room(monkeypatch, 1.0) == ("", 600, 1000)
    assert room(monkeypatch, None) == ("", 600, 1000)


def test_room_is_no_more_than_the_process_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    assert room(monkeypatch, 0.5, reserved=300) == ("", 200, 1000)
    assert room(monkeypatch, 0.5, reserved=700) == ("", 0, 1000)
    assert room(monkeypatch, 0.99, reserved=100) == ("", 600, 1000)


def test_a_device_that_cannot_be_asked_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cudart", None, raising=False)
    assert "does not tell how much memory" in fake.device_room(0)[0]
