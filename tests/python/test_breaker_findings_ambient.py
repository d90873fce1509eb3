"""Differences that an attack found in what surrounds a call: warnings, errors, identity, lifetimes, re-initialised objects.

K9, K10 and K13 to K16; K1 to K8, K11 and K12 are in test_breaker_findings_state.py.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from eager_twin import Fn, eager_twin, ramp, warm

WARNING_CALLS: dict[str, tuple[Callable[..., Any], tuple[int, ...], bool]] = {
    # torch warns each time
    "std": (lambda s, x: x[:1].std(), (3,), False),
    "dead_var": (lambda s, x: (x[:1].var(), x * 2)[1], (3,), False),
    "var_mean": (lambda s, x: torch.var_mean(x[:1]), (3,), False),
    # torch warns once per process, or each time when told so
    "transpose": (lambda s, x: x.T, (1, 2, 3), True),
    "dead_transpose": (lambda s, x: (x.T, x * 2)[1], (1, 2, 3), True),
    "complex": (lambda s, x: torch.complex(x, x).float(), (3,), True),
    "out_resized": (lambda s, x: torch.add(x, x, out=torch.empty(2)), (3,), True),
    "padding_same": (lambda s, x: torch.conv1d(x, torch.ones(1, 1, 2), padding="same"), (1, 1, 5), True),
    "uint8_where": (lambda s, x: torch.where((x > 1).to(torch.uint8), x, x), (3,), True),
}


def warned_calls(name: str, action: str) -> Iterator[tuple[str, Any]]:
    forward, shape, always = WARNING_CALLS[name]
    m = Fn(forward)
    torch.set_warn_always(always)
    try:
        with torch.no_grad():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield from warm("quiet", m, ramp(*shape))
            for i in range(3):
                with warnings.catch_warnings(record=True) as seen:
                    warnings.simplefilter(action)  # type: ignore[arg-type]
                    try:
                        y: Any = m(ramp(*shape))
                    except UserWarning as warning:
                        y = str(warning)
                yield f"result {i}", y
                found = [(str(w.message), w.category.__name__, w.lineno, os.path.basename(w.filename)) for w in seen]
                yield f"warnings {i}", found
    finally:
        torch.set_warn_always(False)


@pytest.mark.parametrize("action", ["always", "error"])
@pytest.mark.parametrize("name", sorted(WARNING_CALLS))
def test_k15_operator_warns(name, action, capfd):
    eager_twin(lambda: warned_calls(name, action))()
    assert "Warning" not in capfd.readouterr().err


@eager_twin(served=True)
def test_k15_warning_wanted_after_the_plan():
    """An operator that warned once is planned; when it warns each time, eager does it again."""
    m = Fn(lambda s, x: torch.complex(x, x).float())
    with torch.no_grad(), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield from warm("once", m, ramp(3))
        seen.clear()
        torch.set_warn_always(True)
        try:
            yield "always", m(ramp(3))
            yield "count", len(seen)
        finally:
            torch.set_warn_always(False)


@eager_twin(served=True)
def test_k15_handler_is_put_back():
    """Warnings of eager calls after a planned one are Python's again."""
    m = Fn(lambda s, x: x * 2)
    with torch.no_grad(), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield from warm("planned", m, ramp(3))
        yield "eager", F.relu(ramp(3)[:1].std()).isnan().item()
        yield "count", len(seen)
