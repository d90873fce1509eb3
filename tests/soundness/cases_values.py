"""Randomness and clocks, data-dependent control flow and shapes, layouts and dtypes, aliasing."""

import math
import random
import time

import torch
import torch.nn as nn
from harness import DEVICE, WARM, attempt, case, fill, full, ramp, rn, warm


@case("rng", "pytorch#118735", "pytorch#192635")
def case_dropout_in_train_mode():
    m = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 4), nn.Dropout(0.25))
    fill(m).train()
    x = ramp(3, 6)
    with torch.no_grad():
        torch.manual_seed(11)
        for i in range(WARM + 1):
            yield f"stream{i}", m(x)
        yield "rng-after", torch.rand(4, device=DEVICE)
        torch.manual_seed(11)
        yield "reseeded", m(x)
        m.eval()
        yield "eval", m(x)
        m[0].p = 0.9
        m.train()
        torch.manual_seed(12)
        yield "p-changed", m(x)


@case("rng", "pytorch#143431")
def case_rng_ops_and_generators():
    class M(nn.Module):
        def forward(self, x, gen=None):
            noise = torch.rand(x.shape, generator=gen)
            perm = torch.randperm(x.shape[0], generator=gen)
            return x.cpu()[perm] + noise, torch.bernoulli(torch.full((3,), 0.5), generator=gen)

    m, x = M(), ramp(5)
    torch.manual_seed(13)
    yield from warm("global", m, x)
    g = torch.Generator().manual_seed(14)
    yield from warm("own", m, x, gen=g)
    g.manual_seed(14)
    yield "own-reset", m(x, gen=g)
    yield "global-next", torch.rand(3)

    class Seeds(nn.Module):
        def forward(self, x):
            torch.manual_seed(99)
            return x.cpu() + torch.rand(x.shape)

    s = Seeds()
    yield from warm("seeds-inside", s, x)
    yield "state-left-behind", torch.rand(3)


@case("rng", "pytorch#197085", "pytorch#197101")
def case_python_random_in_forward():
    class M(nn.Module):
        def forward(self, x):
            order = list(range(x.shape[0]))
            random.shuffle(order)
            return x[order] * random.random() + random.choice([0.0, 1.0]), random.sample(range(50), 3)

    m, x = M(), ramp(6)
    random.seed(15)
    yield from warm("stream", m, x)
    yield "next", random.random()
    random.seed(15)
    yield "reseeded", m(x)


@case("clock")
def case_clock_in_forward():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.stamps = []

        def forward(self, x):
            self.stamps.append((time.time(), time.perf_counter(), time.monotonic_ns()))
            return x + 1

    m, x = M(), ramp(3)
    for i in range(WARM + 2):
        yield f"out{i}", m(x)
        time.sleep(0.002)
    yield "must:clock-advances", all(b[1] > a[1] and b[2] > a[2] for a, b in zip(m.stamps, m.stamps[1:], strict=False))
    yield "n", len(m.stamps)


@case("control-flow")
def case_branch_on_tensor_value():
    class M(nn.Module):
        def forward(self, x):
            if x.sum() > 0:
                return x * 2
            elif bool((x == 0).all()):
                return x + 100
            return x - 1

    m = M()
    pos, neg, zero = full(1.0, 3), full(-1.0, 3), full(0.0, 3)
    yield from warm("pos", m, pos)
    yield "neg", m(neg)
    yield "zero", m(zero)
    for i, v in enumerate((pos, neg, pos, zero, neg)):
        yield f"mix{i}", m(v)


@case("control-flow", "pytorch#93457")
def case_item_and_tolist():
    class M(nn.Module):
        def forward(self, x):
            k = int(x.abs().max().item())
            first = x[0].item()
            return x[: k % 3 + 1] * k, first, x.tolist()

    m = M()
    for vals in ([1, 2, 3], [1, 2, 3], [5, 0, 1], [7, 7, 7], [1, 2, 3]):
        yield str(vals), m(torch.tensor(vals, dtype=torch.float32, device=DEVICE))


@case("shapes")
def case_early_return_on_shape():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x):
            if x.dim() == 1:
                return self.lin(x)
            if x.shape[0] == 0:
                return x
            if x.size(0) == 1:
                return self.lin(x).squeeze(0)
            return self.lin(x).sum(0, keepdim=True)

    m = fill(M())
    with torch.no_grad():
        for s in ((2, 4), (2, 4), (1, 4), (4,), (0, 4), (3, 4), (1, 4), (2, 4)):
            yield str(s), m(ramp(*s))


@case("shapes", "pytorch#119640", "transformers#37908")
def case_varying_batch_and_sequence():
    class Block(nn.Module):
        def __init__(self, d=8, h=2):
            super().__init__()
            self.h, self.qkv, self.out = h, nn.Linear(d, 3 * d), nn.Linear(d, d)
            self.norm = nn.LayerNorm(d)

        def forward(self, x, mask=None):
            b, t, d = x.shape
            q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
            q, k, v = (z.view(b, t, self.h, d // self.h).transpose(1, 2) for z in (q, k, v))
            att = q @ k.transpose(-2, -1) / math.sqrt(d // self.h)
            if mask is not None:
                att = att.masked_fill(~mask, float("-inf"))
            return x + self.out((att.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))

    torch.manual_seed(16)
    m = fill(nn.ModuleList([Block(), Block()]))
    with torch.no_grad():
        for b, t in ((2, 3), (2, 3), (2, 3), (1, 3), (2, 7), (5, 1), (1, 1), (2, 3), (3, 16)):
            x = rn(b, t, 8)
            for blk in m:
                x = blk(x)
            yield f"b{b}t{t}", x
            causal = torch.ones(t, t, dtype=torch.bool, device=DEVICE).tril()
            yield f"masked-b{b}t{t}", m[0](x, causal)


@case("shapes", "transformers#37908", "torchtune#1663")
def case_kv_cache_growth():
    class Cache:
        def __init__(self):
            self.k, self.v = [], []

        def update(self, k, v, layer):
            if layer == len(self.k):
                self.k.append(k)
                self.v.append(v)
            else:
                self.k[layer] = torch.cat([self.k[layer], k], 1)
                self.v[layer] = torch.cat([self.v[layer], v], 1)
            return self.k[layer], self.v[layer]

        def __len__(self):
            return self.k[0].shape[1] if self.k else 0

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.ModuleList([nn.Linear(4, 12) for _ in range(2)])

        def forward(self, x, cache=None):
            for i, p in enumerate(self.proj):
                q, k, v = p(x).chunk(3, -1)
                if cache is not None:
                    k, v = cache.update(k, v, i)
                x = (q @ k.transpose(1, 2)).softmax(-1) @ v
            return x, cache

    m = fill(M())
    with torch.no_grad():
        for run in range(2):
            cache = Cache()
            for t in (3, 1, 1, 1, 1):
                y, cache = m(ramp(1, t, 4) * 0.1, cache=cache)
                yield f"run{run}-len{len(cache)}", y
            yield "keys", cache.k
        yield "no-cache", m(ramp(1, 2, 4))[0]


# --------------------------------------------------------------------------


def case_non_contiguous_inputs():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 3)

        def forward(self, x):
            return self.lin(x), x + 1, x.reshape(-1), x.sum(0)

    m, base = fill(M()), ramp(8, 8)
    views = [
        ramp(4, 4),
        ramp(4, 4).t(),
        base[::2, ::2],
        base[2:6, 1:5],
        ramp(1, 4).expand(4, 4),
        torch.as_strided(base, (4, 4), (3, 2), 1),
        base.t()[4:, :4],
        ramp(4, 4),
    ]
    with torch.no_grad():
        for i, v in enumerate(views):
            yield f"view{i}", m(v)


@case("dtype", "pytorch#174891", "pytorch#160495")
def case_complex_dtypes():
    class Rope(nn.Module):
        def __init__(self):
            super().__init__()
            ang = torch.outer(torch.arange(5.0), torch.tensor([1.0, 0.1]))
            self.register_buffer("freqs", torch.polar(torch.ones_like(ang), ang))

        def forward(self, x):
            z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * self.freqs
            one = torch.ones(5, 1, dtype=z.dtype, device=x.device)
            return torch.view_as_real(z).flatten(-2), z, z.abs(), z.conj() + one

    m = Rope().to(DEVICE)
    x = ramp(2, 5, 4)
    yield from warm("rope", m, x)
    yield "zero-dim", torch.tensor(1 + 2j) + torch.tensor(3 - 1j, dtype=torch.complex64)


@case("dtype")
def case_integer_and_bool_dtypes():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(10, 3)

        def forward(self, ids):
            mask = ids > 4
            return (
                self.emb(ids),
                mask,
                ids // 3,
                ids % 3,
                -ids // 2,
                ids & 3,
                ids / 2,
                ids * 2.5,
                ids[mask],
                ids.to(torch.uint8) + 250,
                mask.sum(),
                ids.float().argmax(),
            )

    m = fill(M())
    with torch.no_grad():
        for vals in ([0, 5, 9], [0, 5, 9], [1, 1, 1], [9, 8, 7, 6], [0, 5, 9]):
            for dt in (torch.int64, torch.int32):
                yield f"{vals}-{dt}", m(torch.tensor(vals, dtype=dt, device=DEVICE))


@case("dtype", "pytorch#185605", "pytorch#112449")
def case_dtype_promotion_and_scalars():
    class M(nn.Module):
        def forward(self, a, b):
            return a + b, a * b, torch.maximum(a, torch.as_tensor(b, dtype=a.dtype, device=a.device))

    m = M()
    tensors = [
        full(1.5, 3),
        full(1.5, 3, dtype=torch.float64),
        full(1.5, 3, dtype=torch.bfloat16),
        full(2, 3, dtype=torch.int64),
    ]
    scalars = [2, 2.0, True, torch.tensor(2.0, dtype=torch.float64), torch.tensor(2), torch.tensor(True)]
    for i, t in enumerate(tensors):
        for j, s in enumerate(scalars):
            s = s.to(DEVICE) if isinstance(s, torch.Tensor) else s
            yield f"t{i}-s{j}", m(t, s)


@case("dtype")
def case_float64_and_casts_after_warmup():
    m, x = fill(nn.Sequential(nn.Linear(4, 4), nn.Softplus(), nn.LayerNorm(4))), ramp(2, 4)
    with torch.no_grad():
        yield from warm("f32", m, x)
        m.double()
        yield from warm("f64", m, x.double())
        yield "mismatch", attempt(m, x)
        m.bfloat16()
        yield "bf16", m(x.bfloat16())
        m.float()
        yield "f32-again", m(x)


@case("size", "pytorch#98835", "pytorch#94830", "pytorch#197095")
def case_zero_size_tensors():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 2)

        def forward(self, x):
            y = self.lin(x)
            return y, y.sum(), y.sum(0), torch.cat([y, y]), y.softmax(-1), x[:0], x.new_empty(0)

    m = fill(M())
    with torch.no_grad():
        yield from warm("full", m, ramp(3, 4))
        yield "empty", m(ramp(0, 4))
        yield "empty3d", m(ramp(2, 0, 4))
        yield "full-again", m(ramp(3, 4))
        yield "max-of-empty", attempt(lambda: ramp(0, 4).max())
        yield "mean-of-empty", ramp(0, 4).mean()


@case("size")
def case_zero_dim_tensors():
    class M(nn.Module):
        def forward(self, a, b):
            c = a + b
            return c, c.unsqueeze(0), torch.stack([a, b]), float(c), a > b, a.expand(3)

    m = M()
    for a, b in ((1.0, 2.0), (1.0, 2.0), (5.0, -5.0), (0.0, 0.0)):
        yield f"{a},{b}", m(torch.tensor(a, device=DEVICE), torch.tensor(b, device=DEVICE))
    yield "mixed", m(torch.tensor(1, device=DEVICE), torch.tensor(2.5, dtype=torch.float64, device=DEVICE))


# --------------------------------------------------------------------------


def case_aliased_inputs():
    class M(nn.Module):
        def forward(self, a, b):
            a.mul_(2)
            return a + b, b.clone()

    m = M()
    with torch.no_grad():
        for i in range(WARM):
            a, b = full(1.0, 4), full(1.0, 4)
            yield f"distinct{i}", (m(a, b), a, b)
        x = full(1.0, 4)
        yield "same", (m(x, x), x)
        base = full(1.0, 8)
        yield "overlap", (m(base[:4], base[2:6]), base)
        base = full(1.0, 8)
        yield "disjoint-views", (m(base[:4], base[4:]), base)
        x = full(1.0, 4)
        yield "view-and-base", (m(x.view(4), x), x)
        a, b = full(1.0, 4), full(1.0, 4)
        yield "distinct-again", (m(a, b), a, b)

    class Lists(nn.Module):
        def forward(self, left, right, x):
            left.append(x + 1)
            right.append(x - 1)
            return len(left), len(right)

    n = Lists()
    for i in range(WARM):
        yield f"lists{i}", n([], [], full(0.0, 1))
    shared = []
    yield "shared-list", (n(shared, shared, full(0.0, 1)), shared)


@case("alias")
def case_returns_input_itself():
    class M(nn.Module):
        def forward(self, x, skip=True):
            return x if skip else x + 1

    m = M()
    for i in range(WARM + 1):
        x = ramp(3) + i
        y = m(x)
        yield f"must:is-input{i}", y is x
        y.add_(100)
        yield f"x{i}", x
    yield "no-skip", m(ramp(3), skip=False)


@case("alias")
def case_returns_parameter_and_buffer():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))
            self.register_buffer("b", torch.zeros(3))

        def forward(self, x):
            return x * self.w, self.w, self.b, self.w.view(3, 1)

    m, x = M().to(DEVICE), ramp(3)
    for i in range(WARM):
        y, w, b, v = m(x)
        yield f"must:param-identity{i}", w is m.w and b is m.b and v.data_ptr() == m.w.data_ptr()
        yield f"y{i}", (y, w, b, v)
    with torch.no_grad():
        b.add_(5)
        w.mul_(2)
    yield "after-external-write", m(x)


@case("alias", "pytorch#144386", "pytorch#148439", "pytorch#104435")
def case_outputs_kept_across_calls():
    m = fill(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
    with torch.no_grad():
        kept, copies = [], []
        for i in range(2 * WARM + 2):
            y = m(ramp(3, 4) * 0.1 + i)
            kept.append(y)
            copies.append(y.clone())
        yield "must:not-overwritten", all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))
        yield "must:distinct-storage", len({k.data_ptr() for k in kept}) == len(kept)
        yield "kept", kept
        views = [k[0] for k in kept]
        kept = None
        for i in range(WARM):
            m(ramp(3, 4) - i)
        yield "must:views-survive", all(torch.equal(v, c[0]) for v, c in zip(views, copies, strict=True))


@case("alias")
def case_input_buffer_reused_with_new_contents():
    m = fill(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    with torch.no_grad():
        buf = ramp(2, 4)
        for i in range(WARM + 3):
            buf.copy_(ramp(2, 4) * (i + 1))  # same object, same address, new data
            yield f"pass{i}", m(buf)
        y = m(buf)
        keep = y.clone()
        buf.fill_(1e6)  # write right after the call returns
        yield "must:result-not-lazy", torch.equal(y, keep)
        for i in range(8):  # same address, different object
            t = full(float(i), 2, 4)
            yield f"fresh{i}", m(t)
            del t


@case("alias")
def case_same_tensor_twice_in_output():
    class M(nn.Module):
        def forward(self, x):
            y = x + 1
            return {"a": y, "b": y, "nested": [y, (x, y.view(-1))]}

    m = M()
    for i in range(WARM + 1):
        x = ramp(3) + i
        out = m(x)
        yield f"out{i}", out
        yield f"must:identity{i}", out["a"] is out["b"] and out["nested"][0] is out["a"] and out["nested"][1][0] is x
        out["a"].zero_()
        yield f"shared-write{i}", out


# --------------------------------------------------------------------------
