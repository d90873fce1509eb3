"""Cuvil: a tensor JIT for PyTorch inference.

    import cuvil
    cuvil.enable()

From then on the outermost ``torch.nn.Module`` calls of the process are traced, guarded and replayed without Python.
A call that Cuvil cannot handle runs as CPython would, and :func:`explain` says which line is the reason.
Importing this package installs nothing and imports no framework.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from cuvil.explanation import Explanation

if TYPE_CHECKING:
    from cuvil.profiling import Profile

try:
    from cuvil import _native
except ImportError as error:  # No engine for this Python: enable() will say so.
    from cuvil import unavailable

    unavailable.load_error = str(error)
    _native = unavailable  # type: ignore[misc]

__all__ = [
    "Explanation",
    "__version__",
    "disable",
    "enable",
    "enabled",
    "explain",
    "opt_out",
    "prepare",
    "profile",
    "reset",
    "scope",
    "stats",
]

__version__ = "0.1.0"

_Module = TypeVar("_Module")


def enable() -> None:
    """Turn Cuvil on for this process; imports torch if nothing has yet.

    Raises RuntimeError with one sentence, and changes nothing, where it cannot work (an unsupported Python or torch,
    another frame evaluator, a self-test that fails). With CUVIL_DISABLE=1 in the environment it does nothing.
    """
    _native.enable()


def disable() -> None:
    """Turn Cuvil off; every call runs as CPython would. Plans are kept for the next :func:`enable`."""
    _native.disable()


def enabled() -> bool:
    """Whether module calls are being intercepted."""
    return _native.enabled()


@contextmanager
def scope() -> Iterator[None]:
    """Turn Cuvil on for a ``with`` block and leave it as it was before. The switch is the process's, not the thread's."""
    was_enabled = _native.enabled()
    _native.enable()
    try:
        yield
    finally:
        if not was_enabled:
            _native.disable()


def prepare(model: object, *args: object, **kwargs: object) -> bool:
    """Prepare the plan for ``model(*args, **kwargs)`` now, with a few real calls of it.

    Returns whether a plan will serve such calls; :func:`explain` tells why not. Call it under the same
    ``torch.inference_mode()`` or ``torch.no_grad()`` as the calls to come: the mode is part of what is guarded.
    """
    return _native.prepare(model, args, kwargs)


def explain(model: object, *args: object, **kwargs: object) -> Explanation:
    """Tell what Cuvil does with `model`: plans, refusals with file and line, operators, guards, times.

    With arguments, the plan for that call is prepared first (see :func:`prepare`); Cuvil is turned on for it if it is
    off. ``print`` the result, or take ``.to_dict()``.
    """
    if args or kwargs:
        with scope():
            _native.prepare(model, args, kwargs)
            return Explanation(_native.explain(model))
    return Explanation(_native.explain(model))


def profile(path: str | os.PathLike[str] | None = None) -> Profile:
    """Time the steps of plans and the module calls of a ``with`` block, on every thread.

    With a path, a trace for https://ui.perfetto.dev is written there when the block ends, whichever way. Afterwards
    ``p.table(by="line")``, ``"module"``, ``"operator"`` or ``"kernel"`` is text, ``p.to_dict()`` has the numbers, and
    ``p.save_html(path)`` writes one page. Only calls that Cuvil intercepts are seen: turn it on first. One profile at a
    time: a second one raises RuntimeError.
    """
    from cuvil.profiling import Profile

    return Profile(path)


def stats() -> dict[str, Any]:
    """Counters of the process since the last :func:`reset`: calls, planned, eager, traces, refusals by reason, times."""
    return _native.stats()


def reset() -> None:
    """Drop all plans, what was learned about modules, and the counters."""
    _native.reset()


def opt_out(module: _Module, value: bool = True) -> _Module:
    """Keep Cuvil away from calls of `module` and of everything below it (``False`` takes that back); returns `module`."""
    _native.opt_out(module, value)
    return module
