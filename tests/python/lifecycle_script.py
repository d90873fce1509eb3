"""A scripted tracer for the lifecycle tests: plans that answer, differ, fail, stall or wait as a test wants."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def signature(args: Args, kwargs: Kwargs) -> tuple[Any, ...]:
    return tuple(tuple(a.shape) if isinstance(a, torch.Tensor) else a for a in (*args, *kwargs.values()))


class Plan:
    """Answers by `answer`; counts its runs."""

    def __init__(self, answer: Callable[..., Any], shapes: tuple[Any, ...], **options: Any) -> None:
        self.answer = answer
        self.shapes = shapes
        self.runs = 0
        self.guard_checks = 0
        self.valid = True
        self.guard: Callable[[], bool] = lambda: True
        self.build_error: str | None = None
        self.build_seconds = 0.0
        self.delay = 0.0
        self.is_random = False
        self.uninitialized = False
        self.__dict__.update(options)

    def matches(self, args: Args, kwargs: Kwargs) -> bool:
        return signature(args, kwargs) == self.shapes

    def guards(self) -> bool:
        self.guard_checks += 1
        return self.valid and self.guard()

    def run(self, args: Args, kwargs: Kwargs) -> Any:
        self.runs += 1
        if self.delay:
            time.sleep(self.delay)
        return self.answer(*args, **kwargs)


class Script:
    """Makes a plan of every traced call unless `refuse` gives a reason; remembers all of them in `plans`."""

    def __init__(self, answer: Callable[..., Any] | None = None, **options: Any) -> None:
        self.answer = answer
        self.options = options
        self.plans: list[Plan] = []
        self.traced = 0
        self.hashed = 0
        self.refuse: Callable[[Args, Kwargs], tuple[str, str, bool] | None] = lambda args, kwargs: None

    def hash(self, args: Args, kwargs: Kwargs) -> int:
        self.hashed += 1
        return hash(signature(args, kwargs))

    def trace(self, args: Args, kwargs: Kwargs, result: Any) -> Plan | tuple[str, str, bool]:
        self.traced += 1
        refusal = self.refuse(args, kwargs)
        if refusal is not None:
            return refusal
        assert self.answer is not None
        plan = Plan(self.answer, signature(args, kwargs), **self.options)
        self.plans.append(plan)
        return plan
