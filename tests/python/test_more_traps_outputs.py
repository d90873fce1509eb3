"""What a call hands back: containers, identities, views, versions, autograd behaviour, pickles; and who keeps it alive."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import gc
import io
import pickle
import types
import typing
import weakref

import torch
import torch.nn as nn
from eager_twin import Fn, attempt, eager_twin, fill, ramp, warm


class Mode(enum.IntFlag):
    A = 1
    B = 2


class Triple(typing.NamedTuple):
    a: torch.Tensor
    b: int
    c: typing.Any = None


@dataclasses.dataclass
class Data:
    t: torch.Tensor
    extra: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True)
class Slotted:
    t: torch.Tensor
    k: float = 2.0


@dataclasses.dataclass(frozen=True)
class Frozen:
    t: torch.Tensor


class Bag(dict):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.made = len(self)


class Stack(list):
    name = "stack"


class Plain:
    def __init__(self, t):
        self.t, self.items = t, [t]


@eager_twin(served=True)
def test_containers_are_rebuilt_exactly():
    makers = {
        "tuple": lambda y: (y, (y, ()), [], {}),
        "list": lambda y: [y, [y, [y]]],
        "dict": lambda y: {"b": y, "a": {1: y, None: y, (1, 2): y}},
        "ordered": lambda y: collections.OrderedDict(z=y, a=y),
        "default": lambda y: collections.defaultdict(list, k=[y]),
        "namedtuple": lambda y: Triple(y, 3, Triple(y, 4)),
        "dataclass": lambda y: Data(y, {"n": [y]}),
        "frozen": lambda y: Frozen(y),
        "bag": lambda y: Bag(a=y),
        "stack": lambda y: Stack([y]),
        "deque": lambda y: collections.deque([y], maxlen=3),
        "set": lambda y: {1, 2, "a"},
        "frozenset": lambda y: frozenset([1, (2, 3)]),
        "none": lambda y: None,
        "numbers": lambda y: (1, 1.0, True, -0.0, 2**70, 1j, "s", b"b", float("nan"), ...),
        "torch": lambda y: (y.dtype, y.device, y.shape, torch.strided, torch.channels_last, y.size(0)),
        "enum": lambda y: (Mode.A | Mode.B, Mode.A),
        "slice": lambda y: (slice(1, y.shape[0]), range(3)),
        "mapping": lambda y: types.MappingProxyType({"y": y}),
        "namespace": lambda y: types.SimpleNamespace(y=y, k=1),
        "empty": lambda y: y[:0],
        "scalar": lambda y: y.sum(),
        "same": lambda y: [y, y, {"y": y}],
    }
    m = Fn(lambda s, x, how: makers[how](x * 2))
    with torch.no_grad():
        for how in makers:
            for i in range(4):
                yield f"{how}{i}", m(ramp(3), how)


@eager_twin(served=True)
def test_objects_are_fresh_in_every_call():
    m = Fn(lambda s, x: ([x + 1], {"k": [1]}, Data(x + 2), Plain(x), Slotted(x * 1), Bag(a=x)))
    with torch.no_grad():
        kept = []
        for i in range(6):
            out = m(ramp(3))
            kept.append(out)
            yield f"{i}", (out[0], out[1], out[2], out[3].t, out[3].items, out[4].t, out[4].k, out[5].made)
            out[0].append("mine")
            out[1]["k"].append(2)
            out[2].extra["mine"] = 1
            out[3].items.append(3)
        yield "must:apart", len({id(o) for out in kept for o in out}) == 36
        yield "kept", [(len(out[0]), len(out[1]["k"]), len(out[3].items)) for out in kept]


@eager_twin(served=True)
def test_objects_of_the_module_come_back_themselves():
    shared, table = [1, 2], {"k": 1}
    m = Fn(lambda s, x: (x + 1, shared, s.table, s.inner, s.inner.weight, torch.relu, type(s), Mode.A), table=table)
    m.inner = fill(nn.Linear(3, 3))
    with torch.no_grad():
        for i in range(6):
            out = m(ramp(3))
            yield (
                f"must:identity{i}",
                (
                    out[1] is shared
                    and out[2] is table
                    and out[3] is m.inner
                    and out[5] is torch.relu
                    and out[4] is m.inner.weight
                    and out[6] is Fn
                    and out[7] is Mode.A
                ),
            )
            shared.append(i)
            yield f"{i}", (out[0], out[1])


@eager_twin
def test_inputs_come_back_themselves():
    m = Fn(lambda s, x, d, k: (x, d, k, [x], d["t"], {**d}))
    with torch.no_grad():
        for i in range(6):
            x, d, k = ramp(3), {"t": ramp(2), "n": [1]}, float(i)
            out = m(x, d, k)
            yield f"must:{i}", out[0] is x and out[1] is d and out[2] is k and out[3][0] is x and out[4] is d["t"]
            yield f"{i}", out


@eager_twin(served=True)
def test_backward_after_and_through_a_plan():
    m = fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    with torch.no_grad():
        yield from warm("plain", m, ramp(2, 3))
        features = m(ramp(2, 3))
    w = ramp(2).requires_grad_()
    (features * w).sum().backward()
    yield "grad-of-head", w.grad
    yield "cannot", attempt(lambda: features.sum().backward())
    x = ramp(2, 3).requires_grad_()
    m(x).sum().backward()
    yield "grads", [x.grad, *(p.grad for p in m.parameters())]
    with torch.no_grad():
        y = m(ramp(2, 3))
    y.requires_grad_()
    (y * y).sum().backward()
    yield "leaf", (y.grad, y.is_leaf)


@eager_twin(served=True)
def test_output_saved_by_autograd_and_overwritten():
    m = fill(nn.Linear(3, 3))
    with torch.no_grad():
        yield from warm("plain", m, ramp(2, 3))
        y = m(ramp(2, 3))
    w = torch.ones(2, 3, requires_grad=True)
    loss = (y * w).sum()
    y.add_(1)
    yield "raises", attempt(loss.backward)


@eager_twin(served=True)
def test_in_place_on_outputs_views_and_bases():
    def forward(s, x):
        y = x + 1
        return y, y[0], y.t(), y.chunk(2), y.split(1, 1), y.unbind(0), y.view(-1), y.detach(), y.expand(2, 2, 2)

    m = Fn(forward)
    with torch.no_grad():
        for i in range(6):
            out = m(ramp(2, 2))
            out[1].zero_()
            out[6].add_(10)
            out[3][1].mul_(2)
            yield f"{i}", out
            yield f"bases{i}", [o._base is out[0] for o in (out[1], out[2], *out[3], *out[4], *out[5], out[6])]
            yield f"versions{i}", [o._version for o in (out[0], out[1], out[3][0], out[7])]


@eager_twin(served=True)
def test_output_that_is_a_view_of_a_weight():
    m = fill(nn.Linear(3, 3))
    f = Fn(lambda s, x: (s.m.weight[0], s.m.weight.t(), s.m.bias.view(3, 1), s.m.weight.detach()), m=m)
    with torch.no_grad():
        for i in range(6):
            out = f(ramp(3))
            yield f"{i}", (out, out[0]._base is m.weight, out[1].requires_grad)
            out[0].add_(1)
            yield f"weight{i}", (m.weight, m.weight._version)


@eager_twin(served=True)
def test_outputs_are_pickled_saved_and_copied():
    m = fill(nn.Linear(3, 2))
    with torch.no_grad():
        for i in range(6):
            y = m(ramp(2, 3))
            buffer = io.BytesIO()
            torch.save([y, y.t()], buffer)
            size = buffer.tell()
            buffer.seek(0)
            a, b = torch.load(buffer)
            yield f"{i}", (pickle.loads(pickle.dumps(y)), copy.deepcopy(y), copy.copy(y), a, b, size)
            yield f"shares{i}", a.data_ptr() == b.data_ptr()


@eager_twin(served=True)
def test_outputs_are_freed_when_dropped():
    m = fill(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    with torch.no_grad():
        for i in range(6):
            y = m(ramp(2, 3))
            ref, storage = weakref.ref(y), weakref.ref(y.untyped_storage())
            del y
            yield f"must:freed{i}", ref() is None and storage() is None


@eager_twin(served=True)
def test_inputs_are_freed_when_dropped():
    m = fill(nn.Linear(3, 2))
    with torch.no_grad():
        for i in range(6):
            x = ramp(2, 3)
            ref = weakref.ref(x)
            y = m(x)
            del x
            yield f"must:freed{i}", ref() is None
            yield f"{i}", y


@eager_twin
def test_input_and_output_objects_die_in_the_same_place():
    log = []

    class Token:
        def __del__(self):
            log.append("token")

    def forward(s, x, token):
        del token
        log.append("body")
        return x + 1

    m = Fn(forward)
    with torch.no_grad():
        for i in range(6):
            log.clear()
            y = m(ramp(3), Token())
            log.append("after")
            yield f"{i}", (y, list(log))


@eager_twin(served=True)
def test_inference_and_no_grad_outputs_mixed():
    m = fill(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    x = ramp(2, 3)
    with torch.inference_mode():
        yield from warm("inference", m, x)
        a = m(x)
    with torch.no_grad():
        yield from warm("no-grad", m, x)
        b = m(x)
        yield "fed-back", m(a)
    yield "kinds", (a.is_inference(), b.is_inference())
    yield "write", attempt(lambda: a.add_(1))
    yield "write-b", b.add_(1)
    w = torch.ones(3, requires_grad=True)
    yield "save-inference", attempt(lambda: (a * w).sum().backward())
    yield "save-normal", attempt(lambda: (b * w).sum().backward())


@eager_twin(served=True)
def test_views_made_in_inference_mode_of_normal_inputs():
    m = Fn(lambda s, x: (x.view(-1), x[0], x + 1))
    x = ramp(2, 2)
    with torch.inference_mode():
        yield from warm("inference", m, x)
        out = m(x)
    yield "flags", [(o.is_inference(), o._is_view()) for o in out]
    yield "write-view", attempt(lambda: out[0].add_(1))
    yield "x", x


@eager_twin(served=True)
def test_output_of_one_model_into_another_and_back():
    a, b = fill(nn.Linear(3, 3)), fill(nn.Linear(3, 3), 0.25)
    x = ramp(2, 3) * 0.1
    with torch.no_grad():
        for i in range(6):
            for _ in range(3):
                x = b(a(x)).tanh()
            yield f"{i}", x


@eager_twin(served=True)
def test_exceptions_and_types_of_results():
    class Refuses(nn.Module):
        def forward(self, x):
            if x.dim() == 1:
                raise KeyError("one-dimensional")
            return x + 1

    m = Refuses()
    with torch.no_grad():
        yield from warm("fine", m, ramp(2, 2))
        yield from warm("raises", attempt, m, ramp(2))
        yield "fine", m(ramp(2, 2))


@eager_twin
def test_generator_outputs_are_lazy():
    m = Fn(lambda s, x: (x * s.k * i for i in range(3)), k=1.0)
    with torch.no_grad():
        for i in range(5):
            m.k = 1.0
            g = m(ramp(3))
            first = next(g)
            m.k = 5.0 + i
            yield f"{i}", (type(g).__name__, first, list(g))


@eager_twin
def test_closures_and_bound_methods_as_outputs():
    m = Fn(lambda s, x: ((lambda t: t + x), x.add, s.scale))
    m.scale = lambda t: t * 2
    with torch.no_grad():
        for i in range(5):
            f, g, h = m(ramp(3) + i)
            yield f"{i}", (f(ramp(3)), g(1), h(ramp(3)))


@eager_twin(served=True)
def test_output_strides_and_memory_formats():
    m = fill(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(2))).eval()
    x = ramp(1, 3, 8, 8) * 0.01
    with torch.no_grad():
        yield from warm("contiguous", m, x)
        yield from warm("channels-last", m, x.to(memory_format=torch.channels_last))
        m.to(memory_format=torch.channels_last)
        yield from warm("weights-channels-last", m, x)
        yield "strided", m((ramp(1, 3, 16, 16) * 0.01)[:, :, ::2, ::2])
        yield "batch", m(x.expand(4, 3, 8, 8))


@eager_twin
def test_out_arguments():
    def forward(s, x):
        torch.add(x, 1, out=s.buffer)
        return s.buffer * 2

    m = Fn(forward, buffer=torch.empty(3))
    fresh = Fn(lambda s, x: torch.mul(x, 2, out=torch.empty(3)))
    given = Fn(lambda s, x, out: torch.mul(x, 2, out=out))
    with torch.no_grad():
        for i in range(6):
            yield f"{i}", (m(ramp(3) + i), m.buffer, m.buffer._version)
            yield f"fresh{i}", fresh(ramp(3) + i)
            out = torch.zeros(3)
            y = given(ramp(3) + i, out)
            yield f"given{i}", (y is out, out)


@eager_twin
def test_resized_outputs_and_inputs():
    m = Fn(lambda s, x: (x.resize_(2), x.shape))
    with torch.no_grad():
        for i in range(6):
            x = ramp(4)
            yield f"{i}", (m(x), x, x.shape)


@eager_twin
def test_tensor_data_assigned_in_the_call():
    def forward(s, x):
        y = torch.zeros(3)
        y.data = x.data * 2
        x.data = torch.ones(3)
        return y + x

    m = Fn(forward)
    with torch.no_grad():
        for i in range(6):
            x = ramp(3)
            yield f"{i}", (m(x), x)


@eager_twin
def test_numpy_views_of_results_made_in_the_call():
    def forward(s, x):
        y = x + 1
        array = y.numpy()
        array[0] = 99.0
        return y, array.sum()

    m = Fn(forward)
    with torch.no_grad():
        for i in range(6):
            y, total = m(ramp(3) + i)
            yield f"{i}", (y, float(total))


@eager_twin(served=True)
def test_garbage_cycles_of_the_call_are_collected():
    class Node:
        def __init__(self, t):
            self.t, self.me = t, self

    refs = []

    def forward(s, x):
        node = Node(x * 2)
        refs.append(weakref.ref(node)) if s.watch else None
        return node.t + 1

    m = Fn(forward, watch=False)
    with torch.no_grad():
        yield from warm("quiet", m, ramp(3))
        m.watch = True
        for i in range(4):
            yield f"{i}", m(ramp(3))
        gc.collect()
        yield "must:collected", all(ref() is None for ref in refs)


@eager_twin(served=True)
def test_repeated_immutable_objects_in_results():
    m = Fn(lambda s, x: {"a": x + 1, "dtypes": [x.dtype, x.dtype], "devices": (x.device, x.device, x.shape, x.shape)})
    with torch.no_grad():
        yield from warm("m", m, ramp(3))


@eager_twin
def test_marked_tensors_in_a_state_object():
    """The shape of the linear-attention caches of model libraries: dicts filled in, tensors with an attribute."""

    class State:
        def __init__(self):
            self.states, self.ready, self.size = dict.fromkeys(range(1)), dict.fromkeys(range(1), False), {}
            self.device = self.dtype = None

        def fill(self, x):
            self.dtype, self.device = x.dtype, x.device
            self.states[0] = torch.zeros((*x.shape[:-1], 4), dtype=x.dtype, device=x.device)
            self.states[0].marked = "static"
            self.ready[0], self.size[0] = True, x.shape[-1]
            self.states[0].copy_(torch.nn.functional.pad(x, (4 - x.shape[-1], 0)))

    def forward(s, x):
        layers = [State(), State()]
        for layer in layers:
            layer.fill(x)
        return {"y": x + 1, "layers": layers}

    m = Fn(forward)
    with torch.no_grad():
        for i in range(6):
            out = m(ramp(2, 3) + i)
            layer = out["layers"][1]
            yield f"{i}", (out["y"], layer.states, layer.ready, layer.size, layer.dtype, layer.states[0].marked)
