"""Net-zero writes, ambient state, aliases of weights, call paths, transforms, class surgery."""

import asyncio
import contextvars
import functools
import gc
import weakref

import torch
import torch.nn as nn
from harness import DEVICE, DEVICE_TYPE, WARM, case, fill, rn, warm


class Cfg:
    def __init__(self, **k):
        self.__dict__.update(k)


@case("net-zero")
def case_config_set_and_restored():
    cfg = Cfg(causal=False, scale=2.0)

    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.l = nn.Linear(3, 3)
            s.cfg = cfg

        def forward(s, x, causal=None):
            old = s.cfg.causal
            s.cfg.causal = old if causal is None else causal
            try:
                y = s.l(x) * s.cfg.scale
                return y.tril() if s.cfg.causal else y
            finally:
                s.cfg.causal = old

    m, x = fill(M()), rn(3, 3)
    with torch.no_grad():
        yield from warm("plain", m, x)
        yield from warm("kw", m, x, causal=True)
        yield "restored", cfg.causal
        cfg.causal = True
        yield "cfg-true", m(x)
        yield "kw-false", m(x, causal=False)
        cfg.scale = 3.0
        yield "scale", m(x)
        yield "end", cfg.causal


@case("ambient")
def case_contextvar_outer_value():
    v = contextvars.ContextVar("v", default=1.0)

    class M(nn.Module):
        def forward(s, x):
            t = v.set(v.get() + 1)
            try:
                return x * v.get()
            finally:
                v.reset(t)

    m, x = M(), rn(3)
    with torch.no_grad():
        yield from warm("default", m, x)
        tok = v.set(5.0)
        yield from warm("five", m, x)
        v.reset(tok)
        yield "back", m(x)

        def inner():
            v.set(9.0)
            return m(x)

        yield "copied", contextvars.copy_context().run(inner)
        yield "after", m(x)


@case("ambient")
def case_weak_registry():
    reg = weakref.WeakKeyDictionary()

    class M(nn.Module):
        def forward(s, x):
            return x * reg.get(s, 1.0)

    m, x = M(), rn(3)
    with torch.no_grad():
        yield from warm("none", m, x)
        reg[m] = 4.0
        yield from warm("four", m, x)
        reg[m] = 5.0
        yield "five", m(x)
        del reg[m]
        yield "gone", m(x)


@case("ambient")
def case_lru_cache_cleared():
    k = {"v": 2.0}

    @functools.lru_cache(None)
    def f(n):
        return torch.full((n,), k["v"])

    class M(nn.Module):
        def forward(s, x):
            return x * f(x.shape[0])

    m, x = M(), rn(3)
    with torch.no_grad():
        yield from warm("two", m, x)
        k["v"] = 3.0
        yield "stale-is-right", m(x)
        f.cache_clear()
        yield from warm("three", m, x)
        f(3).mul_(10)
        yield "cached-tensor-edited", m(x)


@case("weight-alias")
def case_numpy_owns_the_weight():
    import numpy as np

    a = np.linspace(-1, 1, 9, dtype=np.float32).reshape(3, 3).copy()
    m = nn.Linear(3, 3, bias=False)
    m.weight = nn.Parameter(torch.from_numpy(a), requires_grad=False)
    m = nn.Sequential(m, nn.ReLU())
    x = torch.randn(2, 3)
    with torch.no_grad():
        yield from warm("a", m, x)
        a *= -2
        yield from warm("neg", m, x)
        a[1] = 0
        yield "row", m(x)
        del a
        gc.collect()
        yield "kept", m(x)


@case("weight-alias")
def case_conv_bn_edited_through_aliases():
    m = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU()).eval()
    fill(m)
    x = rn(1, 2, 6, 6)
    with torch.no_grad():
        yield from warm("a", m, x)
        m[0].weight.data.mul_(2)
        yield "data-mul", m(x)
        m[1].running_mean.data.add_(0.5)
        yield "mean", m(x)
        if DEVICE_TYPE == "cpu":
            m[0].weight.detach().numpy()[...] *= 0.5
            m[1].running_var.numpy()[...] += 1
        yield "numpy", m(x)
        v = m[0].weight.view(-1)
        v[:5] = 0
        yield "view", m(x)
        torch.from_dlpack(m[0].bias.detach()).add_(3)
        yield "dlpack", m(x)
        m[1].eps = 0.5
        yield "eps", m(x)
        m[1].weight.untyped_storage().copy_(torch.full((3,), 2.0).to(DEVICE).untyped_storage())
        yield "storage", m(x)


@case("paths")
def case_every_way_to_call():
    class A(nn.Module):
        def forward(s, x):
            return x + 1

    class B(A):
        def __call__(s, x):
            return super().__call__(x) * 2

    a, b, x = A(), B(), rn(3)
    with torch.no_grad():
        for i in range(WARM):
            yield (
                f"n{i}",
                [
                    a(x),
                    a.__call__(x),
                    nn.Module.__call__(a, x),
                    b(x),
                    list(map(a, [x, x])),
                    a.forward(x),
                    functools.partial(a, x)(),
                    type(a).__call__(a, x),
                    a._call_impl(x),
                ],
            )
        h = a.register_forward_hook(lambda m, i, o: o * 100)
        yield "hook", [a(x), a.__call__(x), a.forward(x), b(x)]
        h.remove()
        yield "removed", a(x)
        B.__call__ = lambda s, x: x * 0
        yield "patched", b(x)
        del B.__call__
        yield "deleted", b(x)


@case("paths")
def case_generator_and_coroutine_forward():
    class G(nn.Module):
        def __init__(s):
            super().__init__()
            s.k = 1.0

        def forward(s, x):
            for i in range(3):
                yield x * s.k + i

    class C(nn.Module):
        def __init__(s):
            super().__init__()
            s.k = 1.0

        async def forward(s, x):
            await asyncio.sleep(0)
            y = x * s.k
            await asyncio.sleep(0)
            return y + s.k

    g, c, x = G(), C(), rn(2)
    with torch.no_grad():
        for i in range(WARM):
            it = g(x)
            a = next(it)
            g.k = 2.0 + i
            b = next(it)
            g.k = 1.0
            yield f"g{i}", [a, b, next(it), list(it)]

            async def go():
                t = asyncio.gather(c(x), c(x + 1))
                await asyncio.sleep(0)
                c.k += 1
                return list(await t)

            yield f"c{i}", asyncio.run(go())


@case("transforms")
def case_vmap_and_functional_call():
    m = fill(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    x = rn(4, 3)
    with torch.no_grad():
        yield from warm("plain", m, x)
        yield "vmap", torch.vmap(m)(x)
        p = {k: v * 2 for k, v in m.named_parameters()}
        yield "functional", torch.func.functional_call(m, p, (x,))
        yield "plain2", m(x)
        yield (
            "vmap-params",
            torch.vmap(lambda s: torch.func.functional_call(m, {k: v * s for k, v in m.named_parameters()}, (x,)))(
                torch.tensor([1.0, 2.0]).to(DEVICE)
            ),
        )
    yield "jacobian", torch.func.jacrev(m)(x[0])
    yield "jvp", torch.func.jvp(m, (x,), (torch.ones_like(x),))


@case("classes")
def case_class_surgery_after_warmup():
    class Base(nn.Module):
        def act(s, x):
            return x.relu()

        def forward(s, x):
            return s.act(x) * s.k

        k = 2.0

    class M(Base):
        pass

    class Other(Base):
        def act(s, x):
            return -x

    m, x = M(), rn(3)
    with torch.no_grad():
        yield from warm("a", m, x)
        M.act = lambda s, x: x + 1
        yield "sub-act", m(x)
        del M.act
        yield "undone", m(x)
        M.__getattribute__ = lambda s, n: 5.0 if n == "k" else object.__getattribute__(s, n)
        yield "getattribute", m(x)
        del M.__getattribute__
        yield "undone2", m(x)
        m.__class__ = Other
        yield "class=", m(x)
        M.__bases__ = (Other,)
        m.__class__ = M
        yield "bases=", m(x)
        Base.k = property(lambda s: 11.0)
        yield "property", m(x)
