"""Every refusal says where and what to do: for each code of the source, a call that is refused with it."""

from __future__ import annotations

import array
import asyncio
import decimal
import linecache
import pathlib
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import cuvil
import pytest
import torch
from cuvil import _native
from sanitizers import UNDER_ASAN

AGENT = pathlib.Path(__file__).resolve().parent.parent.parent / "agent"

# Codes that no test can bring about on purpose, and why.
NOT_PROVOKED = {
    "build": "no traced program is known that the planner refuses for good; what fails by itself becomes internal",
    "concurrent-change": "another thread must change what the call reads between two of its instructions",
    "unknown-tensor": "every way to a tensor that is known of is watched or refused with another code",
    "operator-argument": "torch's own parser takes only what has a constant form",
    "match": "a mapping that is no dict and whose content cannot be watched, which only a C extension could make",
    "namespace": "interpreters before 3.13 look global names up in dicts only",
}


class Model(torch.nn.Module):
    """Calls what it is given, with itself."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.body = body
        self.child = torch.nn.Linear(2, 2)
        self.kept: Any = None

    def forward(self, *args: Any) -> Any:  # here
        return self.body(self, *args)  # or here


@pytest.fixture(autouse=True)
def _on(enable: Callable[..., Any]) -> None:
    enable()


X = torch.ones(2, 2)
CASES: dict[str, Callable[[], Any]] = {}


def case(code: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """The function brings a refusal with this code about and returns the model, or the refusal itself."""

    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        CASES[code] = function
        return function

    return add


def called(body: Callable[..., Any], *args: Any, kept: Any = None, times: int = 1) -> Model:
    model = Model(body)
    model.kept = kept
    for _ in range(times):
        model(X, *args)
    return model


@case("attribute")
def _attribute() -> Model:
    def body(m: Model, x: torch.Tensor) -> Any:
        return x, m.kept.typecode  # here

    return called(body, kept=array.array("i", [1]))


@case("c-callable")
def _c_callable() -> Model:
    def body(m: Model, x: torch.Tensor) -> Any:
        time.sleep(0)  # here
        return x

    return called(body)


@case("unknown-object")
def _unknown_object() -> Model:
    def body(m: Model, x: torch.Tensor) -> Any:
        return x, m.kept + 1  # here

    return called(body, kept=decimal.Decimal(1))


@case("torch-mode")
def _torch_mode() -> Model:
    with torch.autocast("cpu"):
        return called(lambda m, x: x + 1)


@case("generator")
def _generator() -> Model:
    def body(m: Model, x: torch.Tensor) -> Any:
        return x + torch.rand(2, generator=m.kept)  # here

    return called(body, kept=torch.Generator())


@case("call")
def _call() -> Model:
    def body(m: Model, x: torch.Tensor) -> Any:
        return x, max(*iter([1, 2]))  # here

    return called(body)


@case("unwatchable")
def _unwatchable() -> Model:
    class Finalized:
        def __del__(self) -> None:
            pass

    def body(m: Model, x: torch.Tensor) -> Any:
        m.kept  # here # noqa: B018
        return x

    return called(body, kept=Finalized())


@case("tensor-write")
def _tensor_write() -> Model:
    def body(m: Model, x: torch.Tensor) -> Any:
        m.kept.add_(1)  # here
        return x

    return called(body, kept=torch.ones(2))


@case("tensor-subclass")
def _tensor_subclass() -> Model:
    class Mine(torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl

    def body(m: Model, x: torch.Tensor) -> Any:
        return x + m.kept  # here

    return called(body, kept=torch.ones(2).as_subclass(Mine))


@case("tensor-kind")
def _tensor_kind() -> Model:
    def body(m: Model, x: torch.Tensor) -> Any:
        return torch.mm(m.kept, x)  # here

    return called(body, kept=torch.eye(2).to_sparse())


@case("tensor-attribute")
def _tensor_attribute() -> Model:
    def body(m: Model, x: torch.Tensor) -> Any:
        return x, x._version  # here

    return called(body)


@case("output")
def _output() -> Model:
    def body(m: Model, x: torch.Tensor) -> Any:
        return {1, 2}

    model = called(body)
    assert of(model)["output"]["message"] == "the result holds an object of type set"
    return model


@case("operator-error")
def _operator_error() -> Model:
    def body(m: Model, x: torch.Tensor) -> Any:
        try:
            x.view(7)  # here
        except RuntimeError:
            pass
        return x

    return called(body)


@case("operator")
def _operator() -> Model:
    def body(m: Model, x: torch.Tensor) -> Any:
        y = x + 1
        torch.ops.aten.resize_(y, [1])  # here
        return y

    return called(body)


@case("opaque-state")
def _opaque_state() -> Model:
    def body(m: Model, x: torch.Tensor) -> Any:
        return x, next(m.kept)  # here

    return called(body, kept=iter([1, 2, 3]))


@case("net-write")
def _net_write() -> Model:
    def body(m: Model, x: torch.Tensor) -> Any:
        m.kept += 1  # here
        return x

    return called(body, kept=0)


@case("mode-change")
def _mode_change() -> Model:
    def body(m: Model, x: torch.Tensor) -> Any:
        with torch.enable_grad():
            return x + 1  # here

    return called(body)


@case("lock")
def _lock() -> Model:
    def body(m: Model, x: torch.Tensor) -> Any:
        with m.kept:  # here
            return x + 1

    return called(body, kept=threading.Lock())


@case("internal")
def _internal() -> Model:
    _native._fault_inject("capture", 1)
    return called(lambda m, x: x + 1)


@case("instruction")
def _instruction() -> Model:
    scope: dict[str, Any] = {}
    lines = "def body(m, x):\n    try:\n        raise ValueError\n    except* ValueError:  # here\n        return x\n"
    linecache.cache["<except star>"] = (len(lines), None, lines.splitlines(keepends=True), "<except star>")
    exec(compile(lines.replace("return x", "pass") + "    return x\n", "<except star>", "exec"), scope)
    return called(scope["body"])


@case("import")
def _import() -> Model:
    def body(m: Model, x: torch.Tensor) -> Any:
        import colorsys  # here

        return x, colorsys.ONE_THIRD

    sys.modules.pop("colorsys", None)
    return called(body)


@case("identity")
def _identity() -> Model:
    def body(m: Model, x: torch.Tensor, items: list[int]) -> Any:
        return x, items is m.kept  # here

    items = [1]
    return called(body, [1], kept=items)


@case("frame")
def _frame() -> Model:
    def body(m: Model, x: torch.Tensor) -> Any:
        return x, next(m.kept)  # here

    return called(body, kept=(i for i in range(3)))


@case("generator-state")
def _generator_state() -> Model:
    def numbers() -> Iterator[int]:
        yield from (1, 2, 3)

    def body(m: Model, x: torch.Tensor, numbered: Iterator[int] | None = None) -> Any:
        if numbered is None:
            return numbers()
        return x, next(numbered)  # here

    # Made in a trace, so that the next one, of another module that has not been refused yet, sees its instructions.
    return called(body, Model(body)(X))


@case("foreign-frame")
def _foreign_frame() -> Model:
    class Finalized:
        def __del__(self) -> None:
            pass

    def body(m: Model, x: torch.Tensor) -> Any:
        Finalized()  # here
        return x

    return called(body)


@case("extent")
def _extent() -> Any:
    # The lifecycle does not even try while a tool watches the thread.
    previous = sys.getprofile()
    sys.setprofile(lambda *_: None)
    try:
        return _native._capture_call(Model(lambda m, x: x), (X,), {})[1]
    finally:
        sys.setprofile(previous)


@case("exception")
def _exception() -> Model:
    def inner(x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 2:
            raise ValueError("no")  # here
        return x

    def body(m: Model, x: torch.Tensor) -> Any:
        try:
            raise KeyError
        except KeyError:
            pass
        return inner(x)

    model = Model(body)
    with pytest.raises(ValueError, match="no"):
        model(X)
    assert of(model)["exception"]["message"] == "the call raised ValueError"
    return model


@case("data-read")
def _data_read() -> Model:
    def body(m: Model, x: torch.Tensor) -> Any:
        return x.sum().item()  # here

    return called(body)


@case("context-manager")
def _context_manager() -> Model:
    def body(m: Model, x: torch.Tensor) -> Any:
        with m.kept:  # here
            return x

    return called(body, kept=memoryview(b"x"))


@case("autograd")
def _autograd() -> Model:
    def body(m: Model, x: torch.Tensor) -> Any:
        return m.child(x)  # here

    with torch.enable_grad():
        return called(body)


@case("async")
def _async() -> Model:
    async def awaited(x: torch.Tensor) -> torch.Tensor:
        return await asyncio.sleep(0, x)  # here

    def body(m: Model, x: torch.Tensor) -> Any:
        coroutine = awaited(x)
        try:
            coroutine.send(None)
        except StopIteration:
            pass
        coroutine.close()
        return x

    return called(body)


@case("script")
def _script() -> Model:
    model = called(lambda m, x: x, times=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.child = torch.jit.trace(torch.nn.Linear(2, 2), X)
    model(X)
    return model


@case("argument")
def _argument() -> Model:
    return called(lambda m, x, y: x, torch.eye(2).to_sparse())


@case("ambient-write")
def _ambient_write() -> Model:
    def body(m: Model, x: torch.Tensor) -> Any:
        torch._C._set_grad_enabled(True)
        return x.shape

    with torch.no_grad():
        return called(body)


@case("aliased-argument")
def _aliased_argument() -> Model:
    def body(m: Model, x: torch.Tensor, items: list[int]) -> Any:
        return x + items[0] + m.kept[0]

    items = [1]
    return called(body, items, kept=items)


@case("opted-out")
def _opted_out() -> Model:
    model = Model(lambda m, x: m.child(x))
    cuvil.opt_out(model.child)
    model(X)
    return model


@case("differs")
def _differs() -> Model:
    _native._fault_inject("differ", 1)
    return called(lambda m, x: x + 1, times=2)


@case("uninitialized")
def _uninitialized() -> Model:
    def body(m: Model, x: torch.Tensor) -> Any:
        return torch.empty(2000)  # here

    model = Model(body)
    for _ in range(8):
        # What the next calls find: no two of these blocks hold the same, and a call leaves its own as it was.
        blocks = [torch.full((2000,), float(i)) for i in range(12)]
        del blocks
        kept = [model(X) for _ in range(2)]
    del kept
    return model


@case("warning")
def _warning() -> Model:
    def body(m: Model, x: torch.Tensor) -> Any:
        y = x + 1
        return torch.complex(y, y).float()  # here

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = called(body, times=3)
        torch.set_warn_always(True)  # torch has warned once, and the plan was made without a warning
        try:
            model(X)
        finally:
            torch.set_warn_always(False)
        return model


def of(model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    modules = cuvil.explain(model).to_dict()["modules"]
    return {refusal["code"]: refusal for refusal in modules[0]["refusals"]}


def codes_of_source() -> set[str]:
    patterns = [
        r'\b(?:Make)?Refus(?:e|al)\(\s*(?:[^"();]*\?\s*"([a-z-]+)"\s*:\s*)?"([a-z-]+)"',
        r'\.code = "([a-z-]+)"',
    ]
    found: set[str] = set()
    for file in sorted(AGENT.rglob("*.cc")):
        for pattern in patterns:
            for groups in re.findall(pattern, file.read_text()):
                found |= {code for code in ([groups] if isinstance(groups, str) else groups) if code}
    return found


def test_every_code_of_the_source_is_brought_about_or_cannot_be() -> None:
    codes = codes_of_source()
    assert len(codes) > 40
    assert set(CASES) & set(NOT_PROVOKED) == set()
    assert codes == set(CASES) | set(NOT_PROVOKED)


@pytest.mark.parametrize("code", CASES)
def test_a_refusal_says_where_and_what_to_do(code: str) -> None:
    if code == "uninitialized" and UNDER_ASAN:
        pytest.skip("memory that nobody wrote is filled alike")
    made = CASES[code]()
    refusal = made if isinstance(made, dict) else of(made)[code]
    assert refusal["code"] == code
    assert refusal["message"]
    assert len(refusal["advice"].split()) >= 2
    line = linecache.getline(refusal["file"], refusal["line"])
    assert "here" in line, f"{refusal['file']}:{refusal['line']}: {line}"
    if not isinstance(made, dict):
        text = str(cuvil.explain(made))
        assert re.search(rf"\[{code}\][^\n]*:{refusal['line']}: ", text)
        assert refusal["advice"] in text


def test_refusals_of_results_point_to_the_return_and_say_what_to_return() -> None:
    class Early(torch.nn.Module):
        def forward(self, x: torch.Tensor, early: bool) -> Any:
            if early:
                return {1}  # early
            y = x + 1
            return {str(y.dim()): frozenset([1])}  # late

    model = Early()
    model.register_forward_hook(lambda *_: None)  # returns after it
    for early, mark in ((True, "# early"), (False, "# late")):
        cuvil.reset()
        model(X, early)
        refusal = of(model)["output"]
        assert mark in linecache.getline(refusal["file"], refusal["line"])
    assert refusal["message"] == "the result holds an object of type frozenset"


def test_a_tensor_with_attributes_is_refused_with_advice_that_helps() -> None:
    class Notes(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + 1
            y.note = 1  # type: ignore[attr-defined]
            return y

    model = Notes()
    model(X)
    refusal = of(model)["output"]
    assert refusal["message"] == "a result tensor carries Python attributes"
    assert refusal["advice"] == "set no attributes on tensors; return the value beside the tensor"


def test_a_decorated_forward_is_found_below_its_decorators() -> None:
    class Decorated(torch.nn.Module):
        @torch.no_grad()
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x

    model = Decorated()
    model(X, torch.eye(2).to_sparse())
    refusal = of(model)["argument"]
    assert refusal["file"] == __file__
    assert "no_grad" in linecache.getline(refusal["file"], refusal["line"])  # where the function begins


def test_a_forward_of_the_object_itself_is_the_place() -> None:
    def replaced(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # replaced
        return x

    model = torch.nn.Linear(2, 2)
    model.forward = replaced  # type: ignore[method-assign,assignment]
    model(X, torch.eye(2).to_sparse())
    refusal = of(model)["argument"]
    assert "# replaced" in linecache.getline(refusal["file"], refusal["line"])


def test_a_forward_that_is_no_python_is_placed_at_the_call() -> None:
    model = torch.nn.Module()
    model.forward = len  # type: ignore[assignment]
    with torch.autocast("cpu"):
        assert model([1, 2]) == 2
    refusal = of(model)["torch-mode"]
    assert refusal["file"].endswith("module.py")
    assert refusal["line"] > 0
