"""Locks that a model takes: whoever holds one makes eager wait, found by an attack."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from eager_twin import Fn, eager_twin, ramp

LOCKS = [threading.RLock, threading.Lock, threading.Condition]


@contextmanager
def held_by_another_thread(lock: Any) -> Iterator[None]:
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("make", LOCKS)
def test_lock_that_is_taken(make):
    def forward(self, x):
        if self.lock.acquire(blocking=False):
            self.lock.release()
            return x * 2
        return x * 3

    def program():
        m = Fn(forward, lock=make())
        with torch.no_grad():
            for i in range(5):
                yield f"free {i}", m(ramp(2))
            with held_by_another_thread(m.lock):
                for i in range(5):
                    yield f"taken {i}", m(ramp(2))
            for i in range(5):
                yield f"free again {i}", m(ramp(2))

    eager_twin(program)()


@pytest.mark.parametrize("make", LOCKS)
def test_call_waits_for_a_lock(make):
    def forward(self, x):
        with self.lock:
            return x * self.factor

    def program():
        m, results = Fn(forward, lock=make(), factor=2.0), []

        def call() -> None:
            with torch.no_grad():
                results.append(m(ramp(2)))

        for _ in range(5):
            call()
        thread = threading.Thread(target=call)
        with m.lock:
            thread.start()
            thread.join(0.2)
            m.factor = 3.0
        thread.join()
        yield "results", results

    eager_twin(program)()
