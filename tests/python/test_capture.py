"""What one traced call becomes: a tensor program, or a refusal with its reason (agent/capture.h)."""

import collections
import contextlib
import contextvars
import copy
import dataclasses
import functools
import math
import types
import weakref

import pytest

torch = pytest.importorskip("torch")
native = pytest.importorskip("cuvil._native")
nn = torch.nn


def capture(module, *args, calls=1, **kwargs):
    """Traces `calls` calls and returns the last result with what the trace became."""
    for _ in range(calls):
        result, info = native._capture_call(module, args, kwargs)
    return result, info


def module_of(function, **attributes):
    """A module whose forward is `function(self, x, ...)`, with attributes."""
    made = type("Made", (nn.Module,), {"forward": function})()
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def planned(info):
    return "cir" in info


X = torch.ones(3)

SETTING = 2.0
TABLE = {"k": 3.0}
VARIABLE = contextvars.ContextVar("VARIABLE", default=1.0)
REGISTRY = weakref.WeakKeyDictionary()
SIDE_EFFECTS = []


@functools.lru_cache(None)
def cached(n):
    return float(n)


@dataclasses.dataclass
class Pair:
    first: object
    second: object = None


class Config:
    def __init__(self):
        self.causal = False


Named = collections.namedtuple("Named", "a b")


def recursive(self, x):
    def visit(t, depth):
        return t if depth == 0 else visit(t * 2, depth - 1) + 1

    return visit(x, 3)


def restores(self, x):
    old = self.config.causal
    self.config.causal = True
    try:
        return x.tril() if x.dim() == 2 and self.config.causal else x + 1
    finally:
        self.config.causal = old


def context_variable(self, x):
    token = VARIABLE.set(VARIABLE.get() + 1)
    try:
        return x * VARIABLE.get()
    finally:
        VARIABLE.reset(token)


@contextlib.contextmanager
def doubled(self):
    self.k, old = self.k * 2, self.k
    try:
        yield
    finally:
        self.k = old


def with_block(self, x):
    with doubled(self):
        y = x * self.k
    return y


def generators(self, x):
    return sum(t * i for i, t in enumerate(v + 1 for v in [x, x]))


def matched(self, x):
    match {"mode": "add", "n": 2}:
        case {"mode": "add", "n": int(n)}:
            return x + n
        case _:
            return x


def caught(self, x):
    try:
        {}["missing"]
    except KeyError as error:
        return x + len(error.args)


PLANNED = {
    "arithmetic": (lambda self, x: (x + 1) * 2 - x / 3, {}),
    "attribute": (lambda self, x: x * self.k, {"k": 2.0}),
    "global": (lambda self, x: x * SETTING + TABLE["k"], {}),
    "containers": (lambda self, x: {"a": x + 1, "b": [x, (x * 2, None)], "n": len([x])}, {}),
    "dataclass": (lambda self, x: Pair(x + 1, {"n": x.shape[0]}), {}),
    "namedtuple": (lambda self, x: Named(x + 1, 2), {}),
    "ordered": (lambda self, x: collections.OrderedDict([("b", x), ("a", x + 1)]), {}),
    "comprehension": (lambda self, x: [x * i for i in range(3)], {}),
    "generators": (generators, {}),
    "recursion": (recursive, {}),
    "set and restored": (restores, {"config": Config()}),
    "context variable": (context_variable, {}),
    "with": (with_block, {"k": 1.5}),
    "match": (matched, {}),
    "except": (caught, {}),
    "in place on its own": (lambda self, x: (x * 2).add_(1).relu_(), {}),
    "constant written": (lambda self, x: torch.tensor([1.0, 2.0, 3.0]).add_(x), {}),
    "format": (lambda self, x: {f"{self.k:.1f}-{x.dim()}": x + 1}, {"k": 0.5}),
    "random": (lambda self, x: torch.rand(3) + x, {}),
    "constant read": (lambda self, x: x + 1 if bool((torch.arange(3) < 3).all()) else x, {}),
    "math": (lambda self, x: x * math.sqrt(4) + max(1, 2) + min([3, 1]), {}),
    "partial": (lambda self, x: functools.partial(torch.add, x)(x), {}),
    "views": (lambda self, x: (x.view(3, 1).t(), x[1:], x.chunk(3)[0]), {}),
    "returns its argument": (lambda self, x: (x, x + 1), {}),
    "weak registry": (lambda self, x: x * REGISTRY.get(self, 2.0), {}),
}


@pytest.mark.parametrize("name", PLANNED)
def test_is_planned(name):
    function, attributes = PLANNED[name]
    module = module_of(function, **attributes)
    torch.manual_seed(1)
    with torch.no_grad():
        result, info = capture(module, X)
    assert planned(info), info
    assert info["matches"] and info["hold"], info
    torch.manual_seed(1)
    with torch.no_grad():
        expected = module(X)
    torch.testing.assert_close(_tensors(result), _tensors(expected), rtol=0, atol=0)


def _tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        value = list(vars(value).values())
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def counts(self, x):
    self.calls += 1
    return x * self.calls


def appends(self, x):
    SIDE_EFFECTS.append(x.dim())
    return x


def reads_the_clock(self, x):
    import time

    return x + time.time()


def old_generator(self, x):
    return x * next(self.generator)


def old_iterator(self, x):
    return x * next(self.iterator)


def numbers():
    yield from range(100)


REFUSED = {
    "branch on data": (lambda self, x: x if x.sum() > 0 else -x, {}, "data-read"),
    "item": (lambda self, x: x * x[0].item(), {}, "data-read"),
    "tolist": (lambda self, x: len(x.tolist()), {}, "data-read"),
    "tensor of tensors": (lambda self, x: torch.tensor([x.max(), 1.0]), {}, "data-read"),
    "mask": (lambda self, x: x[x > 0], {}, "data-read"),
    "nonzero": (lambda self, x: torch.nonzero(x), {}, "data-read"),
    "net write": (counts, {"calls": 0}, "net-write"),
    "global list": (appends, {}, "net-write"),
    "input written": (lambda self, x: x.add_(1), {}, "tensor-write"),
    "buffer written": (lambda self, x: x + self.buffer.mul_(2), {"buffer": torch.ones(3)}, "tensor-write"),
    "clock": (reads_the_clock, {}, "c-callable"),
    "print": (lambda self, x: print(x.dim()) or x, {}, "c-callable"),
    "address": (lambda self, x: x + x.data_ptr() % 2, {}, "data-read"),
    "data attribute": (lambda self, x: x.data + 1, {}, "tensor-attribute"),
    "old generator": (old_generator, {"generator": numbers()}, None),
    "old iterator": (old_iterator, {"iterator": iter(range(100))}, "opaque-state"),
    "own generator": (lambda self, x: torch.rand(3, generator=self.g), {"g": torch.Generator()}, "generator"),
    "numpy": (lambda self, x: x.numpy().sum(), {}, "data-read"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused(name):
    function, attributes, code = REFUSED[name]
    module = module_of(function, **attributes)
    with torch.no_grad():
        _, info = capture(module, X.clone())
    assert not planned(info)
    if code is not None:
        assert info["code"] == code, info
    assert info["message"] and info["advice"]
    assert info["file"].endswith("test_capture.py"), info
    assert info["line"] > 0


def test_autograd_runs_untouched():
    module = nn.Linear(3, 2)
    result, info = capture(module, X)
    assert info["code"] == "autograd"
    result.sum().backward()
    assert module.weight.grad is not None and result.grad_fn is not None


def test_grad_mode_without_grad_is_planned():
    _, info = capture(module_of(lambda self, x: x * 2), X)
    assert planned(info), info


def test_a_cache_filled_once_makes_the_next_call_traceable():
    def forward(self, x):
        if self.cache is None:
            self.cache = 2.0
        return x * self.cache

    module = module_of(forward, cache=None)
    _, first = capture(module, X)
    assert first["code"] == "net-write" and first["retry"]
    _, second = capture(module, X)
    assert planned(second), second


def test_lru_cache_is_planned_from_its_first_hit_on():
    module = module_of(lambda self, x: x * cached(7))
    cached.cache_clear()
    _, first = capture(module, X)
    assert first["code"] == "net-write"
    _, second = capture(module, X)
    assert planned(second), second


def test_operators_are_recorded_as_python_called_them():
    module = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Dropout()).eval()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            _, info = capture(module, X)
        names = [line.split()[1].split("(")[0] for line in info["cir"].splitlines() if line.startswith("#")]
        assert names == ["aten::linear", "aten::layer_norm", "aten::dropout"]


def test_subclasses_and_modes_run_untouched():
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    module = module_of(lambda self, x: x + 1)
    with Mode():
        _, info = capture(module, X)
    assert info["code"] == "torch-mode"

    class Tagged(torch.Tensor):
        pass

    _, info = capture(module, X.as_subclass(Tagged))
    assert info["code"] == "argument"


def test_exceptions_pass_through_a_trace():
    def forward(self, x):
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside") as caught_error:
        capture(module_of(forward), X)
    assert caught_error.traceback[-1].name == "forward"


def test_a_finalizer_that_runs_inside_is_not_the_model():
    class Noisy:
        def __del__(self):
            SIDE_EFFECTS.append("gone")

    def forward(self, x):
        noisy = Noisy()
        del noisy
        return x + 1

    _, info = capture(module_of(forward), X)
    assert info["code"] == "foreign-frame" and info["retry"]


def test_traced_modules_are_left_as_they_were():
    module = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    before = {name: list(vars(child)) for name, child in module.named_modules()}
    with torch.no_grad():
        capture(module, X)
    assert {name: list(vars(child)) for name, child in module.named_modules()} == before
    assert type(module) is nn.Sequential
    assert list(copy.deepcopy(module).state_dict()) == list(module.state_dict())
    assert isinstance(module.forward, types.MethodType)


def test_nothing_of_a_trace_outlives_it():
    module = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    with torch.no_grad():
        capture(module, X)
    reference = weakref.ref(module)
    child = weakref.ref(module[0])
    del module
    assert reference() is None and child() is None
