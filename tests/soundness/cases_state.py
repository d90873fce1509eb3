"""State that changes between calls: attributes, weights, hooks, code, globals, containers."""

import copy
import types

import torch
import torch.nn as nn
from harness import DEVICE, WARM, case, fill, full, ramp, rn, warm


@case("guard-attr", "pytorch#98928", "pytorch#124717")
def case_flag_toggle():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.flag = False
            self.lin = nn.Linear(3, 3)

        def forward(self, x):
            y = self.lin(x)
            return -y if self.flag else y

    torch.manual_seed(0)
    m, x = fill(M()), rn(2, 3)
    with torch.no_grad():
        yield from warm("off", m, x)
        m.flag = True
        yield from warm("on", m, x)
        m.flag = False
        yield "off-again", m(x)
        m.flag = "non-empty"  # same truthiness, other type
        yield "truthy-string", m(x)


@case("guard-attr", "pytorch#111785")
def case_scalar_attribute_values():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = 1.0

        def forward(self, x):
            return x * self.scale

    m, x = M(), ramp(4)
    for s in (1.0, 2.0, 2, True, 0.0, -0.0, float("inf"), float("nan"), 10**6):
        m.scale = s
        yield f"scale={s!r}", m(x)
        yield f"scale={s!r}/again", m(x)


@case("guard-module", "pytorch#197859")
def case_swap_submodule_in_modulelist():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(3)])

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    torch.manual_seed(1)
    m, x = fill(M()), rn(2, 4)
    with torch.no_grad():
        yield from warm("before", m, x)
        before = m(x).clone()
        m.layers[1] = fill(nn.Linear(4, 4, bias=False), 0.25)
        after = m(x)
        yield "swapped", after
        yield "must:swap-has-effect", not torch.equal(before, after)
        m.layers[1] = nn.Identity()
        yield "identity", m(x)
        m.layers.append(nn.ReLU())
        yield "appended", m(x)
        del m.layers[0]
        yield "deleted", m(x)
        m.layers = nn.ModuleList([m.layers[1], m.layers[0]])
        yield "reordered", m(x)


@case("guard-param", "sglang#30247", "diffusers#5227")
def case_param_data_replaced():
    torch.manual_seed(3)
    m, x = fill(nn.Linear(3, 2)), rn(4, 3)
    with torch.no_grad():
        yield from warm("orig", m, x)
        m.weight.data = full(0.5, 2, 3)  # storage swap, same Parameter
        yield from warm("data-assigned", m, x)
        m.weight.data.mul_(3.0)  # does not bump weight._version
        yield from warm("data-mul_", m, x)
        m.weight.data.copy_(full(-1.0, 2, 3))  # nor does this
        yield "data-copy_", m(x)
        m.weight.data = full(0.1, 3, 2).t()  # other strides, same shape
        yield "data-transposed", m(x)
        m.weight.data[0, 0] = 100.0
        yield "data-setitem", m(x)
        m.bias.data.zero_()
        yield "bias-zero", m(x)


@case("guard-param")
def case_param_object_replaced():
    torch.manual_seed(4)
    m, x = fill(nn.Linear(3, 2)), rn(4, 3)
    with torch.no_grad():
        yield from warm("orig", m, x)
        m.weight = nn.Parameter(full(0.5, 2, 3))
        yield "parameter", m(x)
        m.bias = None
        yield "no-bias", m(x)
        m.bias = nn.Parameter(full(1.0, 2))
        yield "bias-back", m(x)
        m._parameters["weight"] = nn.Parameter(full(2.0, 2, 3))
        yield "through-_parameters", m(x)
        m.weight = nn.Parameter(full(1.0, 5, 3))  # output width changes
        m.bias = nn.Parameter(full(0.0, 5))
        yield "wider", m(x)


@case("guard-param", "torchtitan-style weight refit", "NVIDIA/TensorRT#3628")
def case_load_state_dict_in_place():
    def build():
        return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))

    torch.manual_seed(5)
    m, x = fill(build()), rn(3, 4)
    sds = []
    for v in (0.1, -0.3):
        sds.append(copy.deepcopy(fill(build(), v).state_dict()))
    orig = copy.deepcopy(m.state_dict())
    with torch.no_grad():
        yield from warm("orig", m, x)
        for i, sd in enumerate(sds):
            m.load_state_dict(sd)
            yield from warm(f"sd{i}", m, x)
        m.load_state_dict(orig)
        yield "restored", m(x)
        for p in m.parameters():
            p.add_(0.01)  # optimiser-style update
        yield "add_", m(x)
        torch.nn.utils.vector_to_parameters(
            torch.linspace(-1, 1, sum(p.numel() for p in m.parameters())).to(DEVICE), m.parameters()
        )
        yield "vector_to_parameters", m(x)


@case("guard-buffer", "pytorch#115774", "pytorch#111785")
def case_buffer_rebound_and_sliced():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("store", torch.zeros(4, 3))
            self.cur = self.store[0]

        def pick(self, i):
            self.cur = self.store[i]

        def forward(self, x):
            self.cur.copy_(x)
            return self.store.sum() + self.cur

    m = M().to(DEVICE)
    m.pick(0)
    with torch.no_grad():
        for i in range(4):
            m.pick(i)
            yield f"out{i}", m(full(float(i + 1), 3))
            yield f"store{i}", m.store
        m.store = torch.ones(4, 3, device=DEVICE)
        m.pick(2)
        yield "rebound", m(full(7.0, 3))
        yield "rebound-store", m.store


@case("guard-buffer")
def case_batchnorm_train_then_eval():
    torch.manual_seed(7)
    m, x = fill(nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU())), rn(2, 2, 5, 5)
    with torch.no_grad():
        m.eval()
        yield from warm("eval", m, x)
        m.train()
        yield "train", m(x * 3 + 1)
        yield "running_mean", m[1].running_mean
        yield "batches", m[1].num_batches_tracked
        m.eval()
        yield from warm("eval-after", m, x)
        m[1].reset_running_stats()
        yield "reset", m(x)
        m[1].eps = 0.5
        yield "eps", m(x)
        m[1].momentum = None
        m.train()
        yield "cumulative", m(x)
        yield "running_var", m[1].running_var


@case("guard-hooks", "pytorch#117758", "pytorch#91665")
def case_forward_hooks_and_pre_hooks():
    torch.manual_seed(8)
    m, x = fill(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))), rn(2, 3)
    seen = []
    with torch.no_grad():
        yield from warm("none", m, x)
        h1 = m[0].register_forward_hook(lambda mod, i, o: seen.append(tuple(o.shape)))
        yield "observer", m(x)
        yield "observer-again", m(x)
        h2 = m[2].register_forward_hook(lambda mod, i, o: o + 10)
        yield "rewriter", m(x)
        h3 = m[0].register_forward_pre_hook(lambda mod, i: (i[0] * 2,))
        yield "pre-hook", m(x)
        h4 = m.register_forward_hook(lambda mod, i, o: {"wrapped": o})
        yield "outer-hook", m(x)
        h4.remove()
        h2.remove()
        yield "two-removed", m(x)
        h3.remove()
        h1.remove()
        yield "all-removed", m(x)
        yield "seen", list(seen)


@case("guard-code", "pytorch#117265")
def case_monkeypatched_forward():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 3)

        def forward(self, x):
            return self.lin(x)

    torch.manual_seed(10)
    m, x = fill(M()), rn(2, 3)
    with torch.no_grad():
        yield from warm("class", m, x)
        m.forward = types.MethodType(lambda self, x: self.lin(x) * 5, m)
        yield from warm("instance-method", m, x)
        m.forward = lambda x: x - 1
        yield "plain-lambda", m(x)
        del m.forward
        yield "deleted", m(x)
        m.lin.forward = lambda x: x * 0 + 3
        yield "inner-patched", m(x)
        del m.lin.forward
        old = M.forward
        M.forward = lambda self, x: self.lin(x).relu()
        yield "class-patched", m(x)
        M.forward = old
        yield "class-restored", m(x)


GLOBAL_SCALE = 1.0
GLOBAL_TABLE = {"mode": "add", "k": 1}


@case("guard-global", "pytorch#191821")
def case_global_constant_change():
    global GLOBAL_SCALE
    GLOBAL_SCALE = 1.0
    GLOBAL_TABLE.update(mode="add", k=1)

    class M(nn.Module):
        def forward(self, x):
            y = x * GLOBAL_SCALE
            if GLOBAL_TABLE["mode"] == "add":
                return y + GLOBAL_TABLE["k"]
            return y - GLOBAL_TABLE["k"]

    m, x = M(), ramp(3)
    yield from warm("one", m, x)
    GLOBAL_SCALE = 10.0
    yield from warm("ten", m, x)
    GLOBAL_TABLE["k"] = 5
    yield "table", m(x)
    GLOBAL_TABLE["mode"] = "sub"
    yield "mode", m(x)
    GLOBAL_SCALE = 1.0
    yield "back", m(x)


@case("guard-closure", "pytorch#172382")
def case_closure_cell_change():
    def build():
        k = 2.0

        def setk(v):
            nonlocal k
            k = v

        class M(nn.Module):
            def forward(self, x):
                return x * k

        return M(), setk

    m, setk = build()
    x = ramp(3)
    yield from warm("two", m, x)
    setk(5.0)
    yield from warm("five", m, x)
    setk(torch.tensor(0.5, device=DEVICE))
    yield "tensor-cell", m(x)


@case("guard-default", "pytorch#178365")
def case_default_arg_list_mutation():
    class M(nn.Module):
        def forward(self, x, hist=[]):  # noqa: B006 - the shared default is the point
            hist.append(x.shape[0])
            return x * len(hist)

    m, x = M(), ramp(3)
    yield from warm("grow", m, x)
    yield "explicit", m(x, [])
    yield "default", m(x)
    M.forward.__defaults__[0].clear()
    yield "cleared", m(x)


@case("guard-container")
def case_nested_dict_config_change():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.cfg = {"attn": {"scale": 2.0, "heads": [1, 2]}, "act": "relu"}

        def forward(self, x):
            y = x * self.cfg["attn"]["scale"]
            for h in self.cfg["attn"]["heads"]:
                y = y + h
            if self.cfg.get("act") == "relu":
                y = y.relu()
            return y

    m, x = M(), ramp(4) - 2
    yield from warm("start", m, x)
    m.cfg["attn"]["scale"] = 3.0
    yield "scale", m(x)
    m.cfg["attn"]["heads"].append(10)
    yield "append", m(x)
    m.cfg["act"] = None
    yield "act", m(x)
    del m.cfg["act"]
    yield "del", m(x)
    m.cfg = {"attn": {"scale": 1.0, "heads": []}}
    yield "replaced", m(x)


@case("side-effect")
def case_python_counter_in_self():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return x * self.calls

    m, x = M(), ramp(3) + 1
    yield from warm("count", m, x)
    yield "calls", m.calls
    m.calls = 100
    yield "hundred", m(x)
    yield "calls-after", m.calls


@case("side-effect")
def case_buffer_updated_inside_forward():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("ema", torch.zeros(3))
            self.register_buffer("n", torch.zeros((), dtype=torch.long))

        def forward(self, x):
            self.ema.mul_(0.5).add_(x.mean(0), alpha=0.5)
            self.n += 1
            return x - self.ema

    m = M().to(DEVICE)
    with torch.no_grad():
        for i in range(WARM + 2):
            yield f"out{i}", m(ramp(2, 3) + i)
        yield "ema", m.ema
        yield "n", m.n
