# Deliberately wrong accelerators: a harness that lets one of them pass has no teeth.
"""Four wrong accelerators that the soundness programs must catch."""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
import torch.nn as nn


class Fake:
    """Replaces nn.Module.__call__ for outermost calls only."""

    def __init__(self) -> None:
        self.original: Any = None
        self.depth = threading.local()

    def call(self, original: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError

    def enable(self) -> None:
        self.original = original = nn.Module.__call__
        fake = self

        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if getattr(fake.depth, "n", 0):
                return original(module, *args, **kwargs)
            fake.depth.n = 1
            try:
                return fake.call(original, module, args, kwargs)
            finally:
                fake.depth.n = 0

        nn.Module.__call__ = __call__  # type: ignore[method-assign]

    def disable(self) -> None:
        nn.Module.__call__ = self.original  # type: ignore[method-assign]

    @staticmethod
    def key(module: nn.Module, args: Any, kwargs: Any) -> Any:
        def describe(o: Any) -> Any:
            if isinstance(o, torch.Tensor):
                return ("t", tuple(o.shape), o.dtype)
            if isinstance(o, (list, tuple)):
                return tuple(describe(i) for i in o)
            if isinstance(o, dict):
                return tuple((a, describe(b)) for a, b in o.items())
            return o if isinstance(o, (int, float, str, bool, type(None))) else type(o)

        return id(module), describe(args), describe(kwargs)


class FakeMemo(Fake):
    """Returns the first result ever seen for a module and input signature."""

    def __init__(self) -> None:
        super().__init__()
        self.memo: dict[Any, Any] = {}

    def call(self, original: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        key = self.key(module, args, kwargs)
        if key not in self.memo:
            self.memo[key] = original(module, *args, **kwargs)
        return self.memo[key]


class FakeFrozen(Fake):
    """Runs a deep copy taken at the first call, so later edits are not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: dict[int, nn.Module] = {}

    def call(self, original: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if id(module) not in self.copies:
            try:
                self.copies[id(module)] = copy.deepcopy(module)
            except Exception:
                self.copies[id(module)] = module
        return original(self.copies[id(module)], *args, **kwargs)


class FakeStaticOutputs(Fake):
    """Hands out the same output buffer every time, like a naive graph replay."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers: dict[Any, torch.Tensor] = {}

    def call(self, original: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        out = original(module, *args, **kwargs)
        if type(out) is not torch.Tensor or out.requires_grad or out.is_inference():
            return out
        key = (*self.key(module, args, kwargs), tuple(out.shape), tuple(out.stride()), out.dtype)
        if key not in self.buffers:
            self.buffers[key] = out
        else:
            self.buffers[key].copy_(out)
        return self.buffers[key]


class FakeVersionKeyed(Fake):
    """Trusts (data_ptr, _version) of parameters as proof that weights are unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.memo: dict[Any, Any] = {}

    def call(self, original: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        flat = [a for a in list(args) + list(kwargs.values()) if isinstance(a, torch.Tensor)]
        try:
            signature = tuple(
                (id(p), p.data_ptr(), p._version, tuple(p.stride()))
                for p in list(module.parameters()) + list(module.buffers()) + flat
            )
        except RuntimeError:
            return original(module, *args, **kwargs)
        key = (*self.key(module, args, kwargs), signature, torch.is_grad_enabled())
        if key not in self.memo:
            self.memo[key] = (original(module, *args, **kwargs), args, kwargs)
        return self.memo[key][0]


FAKES = {"memo": FakeMemo, "frozen": FakeFrozen, "static": FakeStaticOutputs, "version": FakeVersionKeyed}
