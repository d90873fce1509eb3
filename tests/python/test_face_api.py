"""The public functions: what they pass on, and what importing the package does and does not do."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import cuvil
import pytest


class FakeEngine:
    """Stands in for cuvil._native and writes down what it is asked."""

    def __init__(self) -> None:
        self.on = False
        self.log: list[tuple[Any, ...]] = []

    def enable(self) -> None:
        self.log.append(("enable",))
        self.on = True

    def disable(self) -> None:
        self.log.append(("disable",))
        self.on = False

    def enabled(self) -> bool:
        return self.on

    def prepare(self, module: object, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
        self.log.append(("prepare", module, args, kwargs, self.on))
        return True

    def explain(self, module: object) -> dict[str, Any]:
        return {"type": type(module).__name__, "modules": []}

    def opt_out(self, module: object, value: bool) -> None:
        self.log.append(("opt_out", module, value))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = FakeEngine()
    monkeypatch.setattr(cuvil, "_native", fake)
    return fake


def test_importing_cuvil_imports_no_framework_and_installs_nothing() -> None:
    program = (
        "import sys; before = set(sys.modules); hooks = list(sys.meta_path); import cuvil\n"
        "assert not any(m.split('.')[0] in ('torch', 'numpy', 'transformers') for m in sys.modules), 'framework'\n"
        "assert sys.meta_path == hooks and sys.getprofile() is None and sys.gettrace() is None\n"
        "assert not cuvil.enabled() if hasattr(cuvil._native, 'enabled') else True\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_every_public_name_exists_and_is_documented() -> None:
    for name in cuvil.__all__:
        value = getattr(cuvil, name)
        assert name == "__version__" or value.__doc__, name


def test_scope_turns_off_what_it_turned_on(engine: FakeEngine) -> None:
    with cuvil.scope():
        assert engine.on
    assert not engine.on


def test_scope_leaves_cuvil_on_where_it_was_on(engine: FakeEngine) -> None:
    cuvil.enable()
    with cuvil.scope(), cuvil.scope():
        pass
    assert engine.on


def test_scope_turns_off_after_an_exception(engine: FakeEngine) -> None:
    with pytest.raises(KeyError), cuvil.scope():
        raise KeyError
    assert not engine.on


def test_explain_with_arguments_prepares_with_cuvil_on(engine: FakeEngine) -> None:
    model = object()
    cuvil.explain(model, 1, key=2)
    assert ("prepare", model, (1,), {"key": 2}, True) in engine.log
    assert not engine.on


def test_explain_without_arguments_makes_no_call(engine: FakeEngine) -> None:
    cuvil.explain(object())
    assert engine.log == []


def test_opt_out_returns_the_module(engine: FakeEngine) -> None:
    model = object()
    assert cuvil.opt_out(model) is model
    assert cuvil.opt_out(model, False) is model
    assert engine.log == [("opt_out", model, True), ("opt_out", model, False)]


def test_without_an_engine_import_works_and_enable_says_why() -> None:
    program = (
        "import sys; sys.modules['cuvil._native'] = None; import cuvil\n"
        "assert not cuvil.enabled() and cuvil.stats() == {} and cuvil.prepare(print) is False\n"
        "cuvil.disable(); cuvil.reset(); cuvil.opt_out(print); print(cuvil.explain(print))\n"
        "try:\n    cuvil.enable()\nexcept RuntimeError as e:\n    assert 'cannot be loaded' in str(e), e\n"
        "else:\n    raise AssertionError\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
