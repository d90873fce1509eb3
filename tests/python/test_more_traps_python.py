"""Python's own dynamics: classes, descriptors, functions, modules, iteration, exceptions, containers changed in place."""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib
import itertools
import operator
import sys
import types

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from eager_twin import Fn, attempt, attempt_in_words, eager_twin, fill, ramp, warm
from torch._dynamo import mutation_guard


@eager_twin(served=True)
def test_module_in_sys_modules_replaced():
    first, second = types.ModuleType("cuvil_test_mod"), types.ModuleType("cuvil_test_mod")
    first.k, second.k = 1.0, 2.0
    sys.modules["cuvil_test_mod"] = first

    def forward(s, x):
        import cuvil_test_mod

        return x * cuvil_test_mod.k

    m = Fn(forward)
    try:
        with torch.no_grad():
            yield from warm("one", m, ramp(3))
            sys.modules["cuvil_test_mod"] = second
            yield from warm("two", m, ramp(3))
            second.k = 3.0
            yield "three", m(ramp(3))
            del sys.modules["cuvil_test_mod"]
            yield "gone", attempt(m, ramp(3))
    finally:
        sys.modules.pop("cuvil_test_mod", None)


@eager_twin(served=True)
def test_import_machinery_patched():
    import builtins

    def forward(s, x):
        import math

        return x * math.pi

    m = Fn(forward)
    original = builtins.__import__
    fake = types.SimpleNamespace(pi=2.0)
    with torch.no_grad():
        yield from warm("pi", m, ramp(3))
        builtins.__import__ = lambda name, *args: fake if name == "math" else original(name, *args)
        try:
            y = m(ramp(3))
        finally:
            builtins.__import__ = original
        yield "patched", y


@eager_twin
def test_module_reloaded():
    source = "k = {}\ndef scale(x):\n    return x * k\n"
    module = types.ModuleType("cuvil_test_reload")
    exec(source.format("1.0"), module.__dict__)
    m = Fn(lambda s, x: module.scale(x))
    with torch.no_grad():
        yield from warm("one", m, ramp(3))
        exec(source.format("2.0"), module.__dict__)
        yield from warm("two", m, ramp(3))
        old = module.scale
        exec(source.format("3.0"), module.__dict__)
        yield "three", (m(ramp(3)), old(ramp(3)))
    yield "importlib", importlib.import_module("math").pi


@eager_twin(served=True)
def test_torch_function_replaced():
    m = Fn(lambda s, x: torch.relu(x) + F.silu(x))
    relu, silu = torch.relu, F.silu
    try:
        with torch.no_grad():
            yield from warm("plain", m, ramp(3) - 1)
            torch.relu = torch.tanh
            yield from warm("relu", m, ramp(3) - 1)
            F.silu = lambda x: x * 100
            yield "silu", m(ramp(3) - 1)
    finally:
        torch.relu, F.silu = relu, silu
    yield "restored", m(ramp(3) - 1)


@eager_twin(served=True)
def test_tensor_method_replaced():
    m = Fn(lambda s, x: x.relu() + x)
    try:
        with torch.no_grad():
            yield from warm("plain", m, ramp(3) - 1)
            torch.Tensor.relu = lambda self: self * 100
            yield from warm("relu", m, ramp(3) - 1)
            del torch.Tensor.relu
            yield "plain", m(ramp(3) - 1)
            original = torch.Tensor.__add__
            torch.Tensor.__add__ = lambda self, other: original(self, other).neg()
            try:
                yield "add", m(ramp(3) - 1)
            finally:
                torch.Tensor.__add__ = original
            yield "plain", m(ramp(3) - 1)
    finally:
        torch.Tensor.__dict__.get("relu") and delattr(torch.Tensor, "relu")


@eager_twin(served=True)
def test_functional_and_module_classes_patched():
    m = fill(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    forward, linear = nn.ReLU.forward, F.linear
    try:
        with torch.no_grad():
            yield from warm("plain", m, ramp(2, 3))
            nn.ReLU.forward = lambda self, x: x * 3
            yield from warm("class", m, ramp(2, 3))
            F.linear = lambda x, w, b=None: linear(x, w, b) + 1
            yield "functional", m(ramp(2, 3))
    finally:
        nn.ReLU.forward, F.linear = forward, linear
    with torch.no_grad():
        yield "restored", m(ramp(2, 3))


@eager_twin
def test_module_call_replaced():
    m = fill(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    original, impl = nn.Module.__call__, nn.Module._call_impl
    calls = []
    with torch.no_grad():
        yield from warm("plain", m, ramp(2, 3))
        nn.Module._call_impl = lambda self, *a, **k: calls.append(type(self).__name__) or impl(self, *a, **k)
        try:
            yield "impl", (m(ramp(2, 3)), list(calls))
        finally:
            nn.Module._call_impl = impl
        nn.Module.__call__ = lambda self, *a, **k: original(self, *a, **k) * 2
        try:
            yield "call", m(ramp(2, 3))
        finally:
            nn.Module.__call__ = original
        yield from warm("plain", m, ramp(2, 3))


@eager_twin(served=True)
def test_subclass_overrides_call():
    class Doubles(nn.Linear):
        def __call__(self, x):
            return super().__call__(x) * 2

    m = fill(nn.Sequential(Doubles(3, 3), nn.ReLU()))
    alone = fill(Doubles(3, 3))
    with torch.no_grad():
        yield from warm("nested", m, ramp(2, 3))
        yield from warm("alone", alone, ramp(2, 3))
        Doubles.__call__ = lambda self, x: x
        yield "patched", (m(ramp(2, 3)), alone(ramp(2, 3)))
        del Doubles.__call__
        yield "deleted", (m(ramp(2, 3)), alone(ramp(2, 3)))


@eager_twin(served=True)
def test_module_getattr_overrides():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 3)
            self.alias = {"inner": "lin"}

        def __getattr__(self, name):
            alias = self.__dict__.get("alias", {})
            return super().__getattr__(alias.get(name, name))

        def forward(self, x):
            return self.inner(x)

    m = fill(Odd())
    with torch.no_grad():
        yield from warm("alias", m, ramp(2, 3))
        m.other = fill(nn.Linear(3, 3), 0.5)
        m.alias["inner"] = "other"
        yield from warm("other", m, ramp(2, 3))
        m.inner = nn.Identity()
        yield "own", m(ramp(2, 3))


@eager_twin(served=True)
def test_instance_attribute_shadows_class_attribute_and_submodule():
    class M(nn.Module):
        k = 1.0

        def __init__(self):
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, x):
            return self.act(x - 1) * self.k

    m = M()
    with torch.no_grad():
        yield from warm("class", m, ramp(3))
        m.k = 2.0
        yield from warm("instance", m, ramp(3))
        del m.k
        yield "class", m(ramp(3))
        M.k = 3.0
        yield "class-changed", m(ramp(3))
        object.__setattr__(m, "act", torch.tanh)
        yield "shadowed-submodule", m(ramp(3))
        del m.__dict__["act"]
        yield "submodule", m(ramp(3))
        m._modules["act"] = nn.Identity()
        yield "through-_modules", m(ramp(3))
        M.act = property(lambda self: torch.sigmoid)
        yield "property-wins", m(ramp(3))


@eager_twin(served=True)
def test_properties_cached_properties_and_static_methods():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = 2.0

        @property
        def scale(self):
            return self.base * 2

        @functools.cached_property
        def once(self):
            return self.base + 1

        @staticmethod
        def shift(x):
            return x + 1

        @classmethod
        def name(cls):
            return len(cls.__name__)

        def forward(self, x):
            return self.shift(x * self.scale) + self.once + self.name()

    m = M()
    with torch.no_grad():
        yield from warm("start", m, ramp(3))
        m.base = 3.0
        yield from warm("base", m, ramp(3))
        del m.once
        yield "recomputed", m(ramp(3))
        M.shift = staticmethod(lambda x: x - 1)
        yield "static", m(ramp(3))
        M.__name__ = "LongerName"
        yield "renamed-seen-by-eager", m(ramp(3)).shape


@eager_twin(served=True)
def test_super_and_mro_changes():
    class A(nn.Module):
        def forward(self, x):
            return x + 1

    class B(A):
        def forward(self, x):
            return super().forward(x) * 2

    class C(A):
        def forward(self, x):
            return super().forward(x) * 3

    class D(B, C):
        def forward(self, x):
            return super().forward(x) - 1

    m = D()
    with torch.no_grad():
        yield from warm("bc", m, ramp(3))
        D.__bases__ = (C, B)
        yield from warm("cb", m, ramp(3))
        D.__bases__ = (C,)
        yield "c", m(ramp(3))
        A.forward = lambda self, x: x * 10
        yield "a", m(ramp(3))


@eager_twin(served=True)
def test_partial_lru_cache_and_wrapped_functions():
    def scale(x, k, *, shift=0.0):
        return x * k + shift

    part = functools.partial(scale, k=2.0)

    @functools.wraps(scale)
    def wrapped(*args, **kwargs):
        return scale(*args, **kwargs)

    m = Fn(lambda s, x: part(x) + wrapped(x, 1.0) + s.method(x))
    m.method = functools.partial(scale, k=3.0)
    with torch.no_grad():
        yield from warm("start", m, ramp(3))
        part.keywords["k"] = 5.0
        yield from warm("keywords", m, ramp(3))
        m.method = functools.partial(scale, k=7.0, shift=1.0)
        yield "replaced", m(ramp(3))
        part.__setstate__((scale, (), {"k": 9.0}, {}))
        yield "setstate", m(ramp(3))
        scale.__kwdefaults__["shift"] = 100.0
        yield "kwdefaults", m(ramp(3))


@eager_twin(served=True)
def test_bound_method_and_operator_callables():
    class Helper:
        k = 2.0

        def scale(self, x):
            return x * self.k

        def __call__(self, x):
            return x + self.k

        def __mul__(self, x):
            return x - self.k

        __rmul__ = __mul__

        def __getitem__(self, i):
            return self.k + i

        def __len__(self):
            return int(self.k)

        def __contains__(self, v):
            return v == self.k

        def __iter__(self):
            return iter([self.k])

        def __bool__(self):
            return self.k < 5

    helper = Helper()
    m = Fn(
        lambda s, x: (
            s.f(x) + helper(x) + helper * x + helper[1] + len(helper) + (2.0 in helper) + sum(helper) + bool(helper)
        )
    )
    m.f = helper.scale
    with torch.no_grad():
        yield from warm("start", m, ramp(3))
        helper.k = 3.0
        yield from warm("attribute", m, ramp(3))
        Helper.scale = lambda self, x: x
        yield "bound-stays", m(ramp(3))
        Helper.__mul__ = lambda self, x: x * 50
        yield "special", m(ramp(3))
        Helper.__rmul__ = Helper.__len__ = lambda self, *a: 4
        yield "len", m(ramp(3))
        helper.__len__ = lambda: 99
        yield "instance-special-ignored", m(ramp(3))
        del Helper.__bool__
        yield "bool-by-len", m(ramp(3))
        yield (
            "getter",
            Fn(lambda s, x: x * operator.attrgetter("k")(helper) + operator.itemgetter(1)([1.0, 2.0]))(ramp(3)),
        )


@eager_twin
def test_containers_mutated_in_place():
    deque, ordered = collections.deque([1.0, 2.0], maxlen=2), collections.OrderedDict(a=1.0, b=2.0)
    chain, counter, nested = (
        collections.ChainMap({"k": 1.0}, {"k": 2.0, "j": 3.0}),
        collections.Counter("aab"),
        [[1.0], [2.0]],
    )

    def forward(s, x):
        x = x * deque[0] + len(deque)
        for key in ordered:
            x = x * 2 + ordered[key]
        return x + chain["k"] + counter["a"] + nested[0][0] + sum(map(len, nested))

    m = Fn(forward)
    with torch.no_grad():
        yield from warm("start", m, ramp(3))
        deque.append(5.0)
        yield "deque-append", m(ramp(3))
        deque.rotate()
        yield "deque-rotate", m(ramp(3))
        ordered["a"] = ordered.pop("a")
        yield "reordered", m(ramp(3))
        ordered.popitem(last=False)
        yield "popitem", m(ramp(3))
        chain.maps[0].clear()
        yield "chain", m(ramp(3))
        chain.maps.reverse()
        yield "chain-reversed", m(ramp(3))
        counter.update("aaa")
        yield "counter", m(ramp(3))
        nested[0][0] = 7.0
        yield "nested", m(ramp(3))
        nested[1].append(1.0)
        yield "nested-append", m(ramp(3))
        nested[0], nested[1] = nested[1], nested[0]
        yield "nested-swap", m(ramp(3))


@eager_twin(served=True)
def test_module_containers_mutated():
    m = Fn(lambda s, x: [layer(x) for layer in s.layers][-1] + s.named["a"](x) + len(s.layers))
    m.layers = nn.ModuleList([nn.ReLU(), nn.Tanh()])
    m.named = nn.ModuleDict({"a": nn.Sigmoid(), "b": nn.Tanh()})
    with torch.no_grad():
        yield from warm("start", m, ramp(3))
        m.layers.insert(0, nn.Identity())
        yield from warm("insert", m, ramp(3))
        m.layers.extend([nn.Softplus()])
        yield "extend", m(ramp(3))
        m.layers._modules["3"] = nn.Identity()
        yield "raw", m(ramp(3))
        m.named.update({"a": nn.Identity()})
        yield "update", m(ramp(3))
        m.named.pop("b")
        yield "pop", m(ramp(3))
        m.layers._modules.move_to_end("0") if hasattr(m.layers._modules, "move_to_end") else None
        yield "order", m(ramp(3))


@eager_twin(served=True)
def test_sequential_slicing_and_appending():
    m = fill(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)))
    with torch.no_grad():
        yield from warm("three", m, ramp(2, 3))
        m.append(nn.Tanh())
        yield from warm("four", m, ramp(2, 3))
        m[1] = nn.Identity()
        yield "replaced", m(ramp(2, 3))
        del m[0]
        yield "deleted", m(ramp(2, 3))
        yield "sliced", m[:1](ramp(2, 3))
        m._modules.clear()
        yield "empty", m(ramp(2, 3))


@eager_twin
def test_exceptions_raised_and_caught_inside():
    class Stop(Exception):
        pass

    def forward(s, x, n):
        try:
            for i in itertools.count():
                if i == n:
                    raise Stop(i)
                x = x + 1
        except Stop as e:
            x = x * (e.args[0] + 1)
        with contextlib.suppress(KeyError):
            {}["missing"]  # noqa: B018 - raises
        try:
            return x if n < 3 else 1 / (n - 3)
        finally:
            s.n = n

    m = Fn(forward, n=0)
    with torch.no_grad():
        for n in (1, 1, 1, 1, 2, 2, 2, 3, 4, 1):
            yield f"{n}", (attempt_in_words(m, ramp(3), n), m.n)


@eager_twin(served=True)
def test_exception_groups_and_chained_exceptions():
    def forward(s, x):
        try:
            raise ValueError("inner")
        except ValueError as e:
            if x.shape[0] > 3:
                raise RuntimeError("outer") from e
        return x + 1

    m = Fn(forward)
    with torch.no_grad():
        yield from warm("fine", m, ramp(3))
        for i in range(4):
            try:
                m(ramp(4))
            except RuntimeError as e:
                yield f"{i}", (str(e), str(e.__cause__), e.__context__ is e.__cause__)


@eager_twin(served=True)
def test_control_flow_of_all_kinds():
    def forward(s, x, n, mode):
        total = x
        for i in range(n):
            if i == 2:
                continue
            if i == 5:
                break
            total = total + i
        else:
            total = total * 2
        while n > 0:
            n -= 1
            total = total - (n if n % 2 else 0.5)
        match mode:
            case {"k": k, **rest}:
                total = total * k + len(rest)
            case [a, *_]:
                total = total + a
            case str() as name if name.startswith("x"):
                total = total + len(name)
            case None:
                total = -total
        first, *middle, last = range(4)
        x = (y := total + last + first) if middle else total
        return x + (lambda *a, **k: len(a) + len(k))(*middle, q=1), y

    m = Fn(forward)
    with torch.no_grad():
        for n, mode in (
            (3, None),
            (3, None),
            (3, None),
            (7, None),
            (3, {"k": 2.0}),
            (3, {"k": 2.0}),
            (3, {"k": 2.0}),
            (3, {"k": 3.0, "z": 1}),
            (0, [1.0, 2.0]),
            (3, "xyz"),
            (3, "abc"),
            (3, None),
        ):
            yield f"{n}{mode}", m(ramp(3), n, mode)


@eager_twin
def test_comprehensions_generators_and_closures_over_loops():
    def pieces(x, n):
        for i in range(n):
            got = yield x * i
            if got:
                return "stopped"
        return "done"

    def delegating(x, n):
        result = yield from pieces(x, n)
        yield x * len(result)

    def forward(s, x, n):
        functions = [lambda t, i=i: t + i for i in range(n)]
        late = [lambda t: t + i for i in range(n)]  # noqa: B023 - late binding is the point
        squares = {i: x * i for i in range(n) if i % 2}
        nested = [[x + i * j for j in range(2)] for i in range(n)]
        return (
            sum(f(x) for f in functions),
            [f(x) for f in late],
            squares,
            nested,
            list(delegating(x, n)),
            list(map(torch.neg, pieces(x, n))),
            dict(zip("ab", pieces(x, n), strict=False)),
            [a + b for a, b in itertools.pairwise(pieces(x, n))],
        )

    m = Fn(forward)
    with torch.no_grad():
        for n in (2, 2, 2, 2, 3, 1, 2):
            yield f"{n}", m(ramp(2), n)


@eager_twin(served=True)
def test_recursion_depth_as_data():
    def forward(s, x, depth):
        return x if depth == 0 else s(x * 2, depth - 1) + depth

    m = Fn(forward)
    with torch.no_grad():
        for depth in (3, 3, 3, 3, 0, 5, 3, 40, 3):
            yield f"{depth}", m(ramp(2), depth)
        yield "too-deep", attempt(m, ramp(2), 10**6)
        yield "after", m(ramp(2), 3)


@eager_twin
def test_class_bodies_and_functions_made_in_the_call():
    def forward(s, x):
        class Local:
            k = x.shape[0]

            def scale(self, t):
                return t * self.k

        def local(t, *, k=Local.k):
            return t + k

        return local(Local().scale(x)), Local.__name__, local.__defaults__

    m = Fn(forward)
    with torch.no_grad():
        for n in (3, 3, 3, 3, 4, 3):
            yield f"{n}", m(torch.ones(n))


@eager_twin
def test_eval_exec_and_compile_in_the_call():
    m = Fn(lambda s, x: x * eval(s.text), text="1 + 1")
    with torch.no_grad():
        yield from warm("two", m, ramp(3))
        m.text = "3.0"
        yield "three", m(ramp(3))
        m.text = "x.shape[0]"
        yield "closure", m(ramp(3))


@eager_twin
def test_locals_globals_and_vars():
    def forward(s, x, k=2.0):
        found = locals()
        return x * found["k"] + len(found) + vars(s)["scale"] + globals().get("_MISSING", 0.0)

    m = Fn(forward, scale=1.0)
    try:
        with torch.no_grad():
            yield from warm("start", m, ramp(3))
            m.scale = 4.0
            yield "vars", m(ramp(3))
            globals()["_MISSING"] = 7.0
            yield "globals", m(ramp(3))
            yield "argument", m(ramp(3), k=3.0)
    finally:
        globals().pop("_MISSING", None)


@eager_twin(served=True)
def test_id_hash_and_repr_of_objects():
    m = Fn(lambda s, x, o: (x + (hash(o) == s.expected), id(o) == s.identity, repr(o)), expected=hash("a"), identity=0)
    with torch.no_grad():
        yield from warm("a", m, ramp(3), "a")
        yield "b", m(ramp(3), "b")
        m.expected = hash("b")
        yield "b-expected", m(ramp(3), "b")
        o = (1, 2)
        m.identity = id(o)
        yield "identity", m(ramp(3), o)[:2]


@eager_twin
def test_type_of_module_seen_by_the_model():
    m = fill(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    with torch.no_grad():
        yield from warm("plain", m, ramp(2, 3))
        yield "type", (type(m) is nn.Sequential, isinstance(m, nn.Sequential), type(m).__call__ is nn.Module.__call__)
        yield "attributes", (sorted(vars(m)), [n for n, _ in m.named_modules()])
        yield "dir", len(dir(m))
        yield (
            "call",
            (nn.Module.__call__.__name__, nn.Module.__call__.__qualname__, nn.Module.__call__.__code__.co_name),
        )
        yield "state", list(m.state_dict())


@pytest.mark.skipif(sys.version_info < (3, 12), reason="PEP 695 and PEP 709 are new in Python 3.12")
@eager_twin(served=True)
def test_inlined_comprehension_variables():
    m = Fn(lambda s, x, i: ([x * i for i in range(3)], i, {i: [i for i in range(i)] for i in range(3)}, x + i))  # noqa: C416
    with torch.no_grad():
        for i in (1, 1, 1, 1, 5, 1):
            yield f"{i}", m(ramp(2), i)


class Sliced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.num_layers = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[: self.num_layers]:  # makes a module of its own
            x = layer(x)
        return x


@eager_twin(served=True)
def test_modules_made_inside_after_torch_compile_was_used():
    # What torch.compile does at its first use: every module that is made is noted in a weak dict.
    mutation_guard.install_generation_tagging_init()
    torch.manual_seed(0)
    model = Sliced().eval()
    with torch.no_grad():
        yield from warm("two", model, ramp(2, 4))
        model.num_layers = 3
        yield from warm("three", model, ramp(2, 4))
    yield "noted", mutation_guard.GenerationTracker.get_generation_value(model) >= 0
