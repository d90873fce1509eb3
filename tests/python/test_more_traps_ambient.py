"""Ambient state of torch and of Python that a call depends on without naming it."""

from __future__ import annotations

import contextlib
import contextvars
import decimal
import inspect
import io
import locale
import logging
import os
import random
import sys
import tempfile
import threading
import warnings

import cuvil
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from eager_twin import Fn, attempt, attempt_in_words, eager_twin, fill, ramp, warm
from torch.overrides import TorchFunctionMode


@eager_twin(served=True)
def test_default_dtype():
    m = Fn(
        lambda s, x: (
            x + torch.ones(3),
            torch.zeros(2),
            torch.tensor([1.0, 2.0]),
            torch.arange(0, 1, 0.5),
            x.long() / 2,
        )
    )
    try:
        with torch.no_grad():
            yield from warm("float", m, ramp(3))
            torch.set_default_dtype(torch.float64)
            yield from warm("double", m, torch.ones(3, dtype=torch.float32))
            torch.set_default_dtype(torch.bfloat16)
            yield "bfloat16", m(torch.ones(3, dtype=torch.float32))
            torch.set_default_dtype(torch.float32)
            yield "float-again", m(ramp(3))
    finally:
        torch.set_default_dtype(torch.float32)


@eager_twin(served=True)
def test_default_dtype_of_integer_division_and_mean():
    m = Fn(
        lambda s, n: (n / 2, n.mean(dtype=None) if n.is_floating_point() else n.float().mean(), torch.sqrt(n), n * 0.5)
    )
    try:
        with torch.no_grad():
            yield from warm("float", m, torch.arange(4))
            torch.set_default_dtype(torch.float64)
            yield "double", m(torch.arange(4))
    finally:
        torch.set_default_dtype(torch.float32)


@eager_twin(served=True)
def test_deterministic_algorithms():
    m = Fn(lambda s, x, i: (torch.zeros(4).index_add(0, i, x), torch.empty(3).fill_(1.0)))
    x, i = ramp(4), torch.tensor([0, 1, 1, 3])
    try:
        with torch.no_grad():
            yield from warm("off", m, x, i)
            torch.use_deterministic_algorithms(True)
            yield "on", attempt(m, x, i)
            torch.use_deterministic_algorithms(True, warn_only=True)
            with warnings.catch_warnings(record=True):
                warnings.simplefilter("always")
                yield "warn", attempt(m, x, i)
            torch.use_deterministic_algorithms(False)
            yield "off-again", m(x, i)
    finally:
        torch.use_deterministic_algorithms(False)


@eager_twin(served=True)
def test_deterministic_fill_of_uninitialised_memory():
    m = Fn(lambda s, x: x * 0 + torch.empty(8))
    torch.use_deterministic_algorithms(True)
    try:
        with torch.no_grad():
            yield from warm("filled-with-nan", m, ramp(8))
    finally:
        torch.use_deterministic_algorithms(False)


@eager_twin(served=True)
def test_autocast_dtypes_and_cache():
    m = fill(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)))
    x = ramp(2, 4) * 0.1
    with torch.no_grad():
        yield from warm("plain", m, x)
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype=dtype):
                yield from warm(str(dtype), m, x)
                m[0].weight.data.mul_(1.5)
                yield f"edited-in-scope-{dtype}", m(x)
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            yield "no-cache", m(x)
        with torch.autocast("cpu", enabled=False):
            yield "disabled", m(x)
        yield "plain-again", m(x)


@eager_twin
def test_autocast_default_dtype_changed():
    m = Fn(lambda s, x: _under_autocast(x))
    old = torch.get_autocast_dtype("cpu")
    try:
        with torch.no_grad():
            yield from warm("default", m, ramp(3, 3))
            torch.set_autocast_dtype("cpu", torch.float16)
            yield "half", m(ramp(3, 3))
    finally:
        torch.set_autocast_dtype("cpu", old)


def _under_autocast(x):
    with torch.autocast("cpu"):
        return x @ x


@eager_twin(served=True)
def test_sdpa_backend_flags():
    m = Fn(lambda s, q: F.scaled_dot_product_attention(q, q, q, is_causal=True))
    q = torch.linspace(-1, 1, 2 * 4 * 8 * 16).reshape(2, 4, 8, 16)
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with torch.no_grad():
        yield from warm("default", m, q)
        with sdpa_kernel(SDPBackend.MATH):
            yield from warm("math", m, q)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            yield "flash", attempt(m, q)
        yield "default-again", m(q)


@eager_twin(served=True)
def test_mkldnn_and_matmul_precision_flags():
    m = fill(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 4)))
    x = ramp(1, 3, 4, 4) * 0.01
    old = torch.get_float32_matmul_precision()
    try:
        with torch.no_grad():
            yield from warm("default", m, x)
            with torch.backends.mkldnn.flags(enabled=False):
                yield from warm("no-mkldnn", m, x)
            torch.set_float32_matmul_precision("medium")
            yield "medium", m(x)
            torch.set_float32_matmul_precision("highest")
            yield "highest", m(x)
    finally:
        torch.set_float32_matmul_precision(old)


@eager_twin(served=True)
def test_flush_denormal():
    m = Fn(lambda s, x: x * 0.5 + 0.0)
    x = torch.full((4,), 2e-38)
    try:
        with torch.no_grad():
            yield from warm("kept", m, x)
            if torch.set_flush_denormal(True):
                yield "flushed", m(x)
    finally:
        torch.set_flush_denormal(False)
    yield "kept-again", m(x).detach()


@eager_twin(served=True)
def test_number_of_threads_as_a_value():
    m = Fn(lambda s, x: x * torch.get_num_threads())
    old = torch.get_num_threads()
    try:
        with torch.no_grad():
            yield from warm("before", m, ramp(3))
            torch.set_num_threads(3)
            yield "three", m(ramp(3))
            torch.set_num_threads(1)
            yield "one", m(ramp(3))
    finally:
        torch.set_num_threads(old)


@eager_twin
def test_grad_mode_as_a_value_and_inside_the_call():
    def forward(s, x):
        with torch.enable_grad():
            inside = torch.is_grad_enabled()
            y = (x * s.w).sum()
        with torch.inference_mode():
            z = x + 1
        return y.requires_grad, inside, torch.is_grad_enabled(), z.is_inference(), y.detach() * 2

    m = Fn(forward, w=nn.Parameter(ramp(3)))
    with torch.no_grad():
        yield from warm("no-grad", m, ramp(3))
    with torch.inference_mode():
        yield from warm("inference", m, ramp(3))
    yield "grad", m(ramp(3))


@eager_twin
def test_call_leaves_grad_mode_changed():
    def forward(s, x):
        torch.set_grad_enabled(s.mode)
        return x * 1

    m = Fn(forward, mode=False)
    for i in range(5):
        with torch.no_grad():
            y = m(ramp(3))
            yield f"{i}", (y, torch.is_grad_enabled())
    m.mode = True
    with torch.no_grad():
        yield "true", (m(ramp(3)), torch.is_grad_enabled())


@eager_twin
def test_backward_inside_the_call():
    def forward(s, x):
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            (z * z).sum().backward()
        return z.grad + x

    m = Fn(forward)
    with torch.no_grad():
        for i in range(6):
            yield f"{i}", m(ramp(3) + i)


@eager_twin
def test_function_mode_pushed_inside_the_call():
    class Double(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            return out * 2 if func is torch.relu else out

    def forward(s, x):
        with Double():
            return torch.relu(x)

    m = Fn(forward)
    with torch.no_grad():
        yield from warm("m", m, ramp(3))


@eager_twin(served=True)
def test_function_mode_with_state_outside():
    class Scale(TorchFunctionMode):
        k = 2.0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            return out * self.k if func is torch.relu else out

    m = Fn(lambda s, x: torch.relu(x))
    with torch.no_grad():
        yield from warm("plain", m, ramp(3))
        with Scale() as mode:
            yield from warm("scaled", m, ramp(3))
            mode.k = 5.0
            yield "five", m(ramp(3))
            with torch._C.DisableTorchFunction():
                yield "disabled", m(ramp(3))
        yield "plain-again", m(ramp(3))


@eager_twin
def test_contextvar_in_thread_and_context():
    var = contextvars.ContextVar("cuvil_test", default=1.0)
    m = Fn(lambda s, x: x * var.get())
    with torch.no_grad():
        yield from warm("default", m, ramp(3))
        token = var.set(2.0)
        yield from warm("set", m, ramp(3))
        context = contextvars.copy_context()
        var.reset(token)
        yield "reset", m(ramp(3))
        yield "context", context.run(m, ramp(3))
        box = []

        def work():
            with torch.no_grad():
                var.set(7.0)
                box.append(m(ramp(3)))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        yield "thread", box[0]
        yield "main", m(ramp(3))


@eager_twin
def test_thread_local_values():
    local = threading.local()
    local.k = 1.0
    m = Fn(lambda s, x: x * getattr(local, "k", 9.0))
    with torch.no_grad():
        yield from warm("main", m, ramp(3))
        box = []

        def work():
            with torch.no_grad():
                box.extend([m(ramp(3)), m(ramp(3))])
                local.k = 4.0
                box.append(m(ramp(3)))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        yield "thread", box
        local.k = 2.0
        yield "main-again", m(ramp(3))


@eager_twin
def test_warnings_in_the_call_and_their_filters():
    def forward(s, x):
        warnings.warn("from the model", UserWarning, stacklevel=1)
        return x * 2

    m = Fn(forward)
    with torch.no_grad():
        for action in ("always", "always", "always", "always", "ignore", "once", "once", "default", "always"):
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter(action)
                y = m(ramp(3))
            yield action, (y, [str(w.message) for w in seen])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield "error", attempt_in_words(m, ramp(3))


@eager_twin
def test_torch_warnings_of_operators():
    m = Fn(lambda s, x: x.floor_divide(2) + torch.nn.functional.upsample(x[None, None], scale_factor=2.0)[0, 0, :3])
    with torch.no_grad():
        for i in range(6):
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                y = m(ramp(3))
            yield f"{i}", (y, sorted({type(w.message).__name__ for w in seen}))


@eager_twin
def test_logging_in_the_call():
    logger = logging.getLogger("cuvil.test.model")
    logger.propagate = False
    logger.setLevel(logging.WARNING)
    seen = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    logger.addHandler(handler)

    def forward(s, x):
        logger.info("shape %s", tuple(x.shape))
        logger.warning("called")
        return x + 1

    m = Fn(forward)
    try:
        with torch.no_grad():
            yield from warm("warning", m, ramp(3))
            logger.setLevel(logging.INFO)
            yield from warm("info", m, ramp(3))
            logger.setLevel(logging.CRITICAL)
            yield "critical", m(ramp(3))
            logger.disabled = True
            yield "disabled", m(ramp(3))
    finally:
        logger.disabled = False
        logger.removeHandler(handler)
    yield "seen", list(seen)


@eager_twin
def test_environment_variable():
    os.environ.pop("CUVIL_TEST_K", None)
    m = Fn(lambda s, x: x * float(os.environ.get("CUVIL_TEST_K", "1")))
    try:
        with torch.no_grad():
            yield from warm("unset", m, ramp(3))
            os.environ["CUVIL_TEST_K"] = "3"
            yield from warm("three", m, ramp(3))
            os.environ["CUVIL_TEST_K"] = "4"
            yield "four", m(ramp(3))
            yield "getenv", Fn(lambda s, x: x * float(os.getenv("CUVIL_TEST_K", "0")))(ramp(3))
    finally:
        os.environ.pop("CUVIL_TEST_K", None)


@eager_twin
def test_printing_in_the_call():
    m = Fn(lambda s, x: (print("shape", tuple(x.shape)), x + 1)[1])
    with torch.no_grad():
        for i in range(6):
            text = io.StringIO()
            with contextlib.redirect_stdout(text):
                y = m(ramp(3))
            yield f"{i}", (y, text.getvalue())


@eager_twin
def test_random_sources():
    import numpy as np

    def forward(s, x):
        return x * random.random() + float(np.random.rand()) + torch.rand(3) + random.randint(0, 9)

    m = Fn(forward)
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    with torch.no_grad():
        for i in range(7):
            yield f"{i}", m(ramp(3))
        yield "states", (random.random(), float(np.random.rand()), torch.rand(1))


@eager_twin
def test_own_random_generator_objects():
    import numpy as np

    m = Fn(
        lambda s, x: x + s.rng.random() + float(s.np_rng.random()) + torch.rand(3, generator=s.gen),
        rng=random.Random(1),
        np_rng=np.random.default_rng(1),
        gen=torch.Generator().manual_seed(1),
    )
    with torch.no_grad():
        for i in range(7):
            yield f"{i}", m(ramp(3))
        m.gen.manual_seed(5)
        yield "reseeded", m(ramp(3))
        m.gen = torch.Generator().manual_seed(1)
        yield "replaced", m(ramp(3))


@eager_twin(served=True)
def test_default_generator_stream_and_state_restored_by_the_user():
    m = fill(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))).train()
    x = ramp(2, 4)
    torch.manual_seed(0)
    with torch.no_grad():
        yield from warm("stream", m, x)
        state = torch.get_rng_state()
        a = m(x)
        torch.set_rng_state(state)
        b = m(x)
        yield "must:repeat", torch.equal(a, b)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            yield "forked", m(x)
        yield "stream", (m(x), torch.rand(2), torch.initial_seed())
        m[1].p = 0.1
        yield "p", m(x)
        m.eval()
        yield from warm("eval", m, x)
        yield "stream-untouched-by-eval", torch.rand(2)


@eager_twin(served=True)
def test_every_random_operator_draws_as_eager():
    def forward(s, x):
        y = torch.empty(3)
        return (
            torch.rand(2),
            torch.randn(2),
            torch.randint(0, 100, (3,)),
            torch.randperm(5),
            torch.rand_like(x),
            torch.randn_like(x),
            x.bernoulli(0.5) if False else torch.bernoulli(torch.full((4,), 0.5)),
            torch.multinomial(torch.ones(5), 3),
            torch.normal(0.0, 1.0, (2,)),
            y.uniform_(),
            y.clone().normal_(),
            y.clone().exponential_(),
            F.dropout(x, 0.5),
            F.dropout2d(x[None, :, None, None], 0.5),
            torch.poisson(torch.full((3,), 4.0)),
            y.clone().log_normal_(),
            y.clone().cauchy_(),
            y.clone().geometric_(0.5),
            F.rrelu(x, training=True),
            F.gumbel_softmax(x),
            F.alpha_dropout(x, 0.5, training=True),
        )

    m = Fn(forward)
    torch.manual_seed(7)
    with torch.no_grad():
        for i in range(6):
            yield f"{i}", m(ramp(3))
        yield "after", torch.rand(3)
        torch.manual_seed(7)
        yield "reseeded", m(ramp(3))


@eager_twin
def test_decimal_context_and_locale():
    m = Fn(lambda s, x: x * float(decimal.Decimal(1) / decimal.Decimal(3)))
    with torch.no_grad():
        yield from warm("default", m, ramp(3))
        with decimal.localcontext() as context:
            context.prec = 2
            yield "two-digits", m(ramp(3))
        yield "again", m(ramp(3))
        yield "locale", Fn(lambda s, x: (x, locale.localeconv()["decimal_point"]))(ramp(3))[1]


@eager_twin
def test_files_and_working_directory():
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "k")

        def forward(s, x):
            with open(path) as file:
                return x * float(file.read())

        def write(value):
            with open(path, "w") as file:
                file.write(value)

        m = Fn(forward)
        with torch.no_grad():
            write("1")
            yield from warm("one", m, ramp(3))
            write("2")
            yield "two", m(ramp(3))
            os.remove(path)
            yield "gone", attempt(m, ramp(3))
        exists = Fn(lambda s, x: x + 1 if os.path.exists(path) else x)
        with torch.no_grad():
            yield from warm("absent", exists, ramp(3))
            write("3")
            yield "present", exists(ramp(3))


@eager_twin
def test_recursion_limit_and_stack_depth():
    m = Fn(lambda s, x: x * sys.getrecursionlimit())
    old = sys.getrecursionlimit()
    try:
        with torch.no_grad():
            yield from warm("default", m, ramp(3))
            sys.setrecursionlimit(old + 500)
            yield "more", m(ramp(3))
    finally:
        sys.setrecursionlimit(old)


@eager_twin
def test_calling_frame_is_visible():
    m = Fn(lambda s, x: (x + 1, sys._getframe(3).f_code.co_name != "", inspect.stack()[0].function))

    def caller_a():
        return m(ramp(3))

    def caller_b():
        return m(ramp(3))

    names = Fn(lambda s, x: [frame.function for frame in inspect.stack() if frame.function.startswith("caller_")])
    with torch.no_grad():
        for i in range(5):
            yield f"a{i}", caller_a()
        yield "b", caller_b()

        def caller_c():
            return names(ramp(3))

        def caller_d():
            return names(ramp(3))

        for i in range(5):
            yield f"c{i}", caller_c()
        yield "d", caller_d()


@eager_twin(served=True)
def test_global_module_hooks():
    from torch.nn.modules import module as module_state

    m, x = fill(nn.Sequential(nn.Linear(3, 3), nn.ReLU())), ramp(2, 3)
    seen = []
    with torch.no_grad():
        yield from warm("plain", m, x)
        handle = module_state.register_module_forward_hook(lambda mod, args, out: seen.append(type(mod).__name__))
        yield "observed", m(x)
        handle.remove()
        handle = module_state.register_module_forward_pre_hook(lambda mod, args: (args[0] + 1,))
        yield "pre", m(x)
        handle.remove()
        handle = module_state.register_module_forward_hook(lambda mod, args, out: out * 2)
        yield from warm("doubled", m, x)
        handle.remove()
        handle = module_state.register_module_forward_hook(
            lambda mod, args, out: seen.append("always"), always_call=True
        )
        yield "always", m(x)
        handle.remove()
        yield "plain-again", m(x)
    yield "seen", list(seen)


@eager_twin(served=True)
def test_jit_tracing_and_export_run_the_module():
    m, x = fill(nn.Sequential(nn.Linear(3, 3), nn.ReLU())), ramp(2, 3)
    with torch.no_grad():
        yield from warm("plain", m, x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = torch.jit.trace(m, x)
        yield "traced", traced(x)
        kinds = [node.kind() for node in traced.inlined_graph.nodes() if node.kind() in ("aten::linear", "aten::relu")]
        yield "graph", kinds
        exported = torch.export.export(m, (x,))
        yield "exported", exported.module()(x)
        yield "plain-again", m(x)


@eager_twin(served=True)
def test_fx_symbolic_trace_runs_the_module():
    m, x = fill(nn.Sequential(nn.Linear(3, 3), nn.ReLU())), ramp(2, 3)
    with torch.no_grad():
        yield from warm("plain", m, x)
        graph = torch.fx.symbolic_trace(m)
        yield "ops", [node.op for node in graph.graph.nodes]
        yield "fx", graph(x)
        yield "plain-again", m(x)


@eager_twin(served=True)
def test_fake_tensors_meta_tensors_and_functional_transforms():
    from torch._subclasses.fake_tensor import FakeTensorMode

    m, x = fill(nn.Sequential(nn.Linear(3, 3), nn.ReLU())), ramp(2, 3)
    with torch.no_grad():
        yield from warm("plain", m, x)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = m(mode.from_tensor(x))
        yield "fake", (type(fake).__name__, tuple(fake.shape))
        yield "vmap", torch.vmap(m)(ramp(4, 3))
        yield "grad", torch.func.grad(lambda t: m(t).sum())(x)
        yield "jvp", torch.func.jvp(m, (x,), (torch.ones_like(x),))
        yield "functionalize", torch.func.functionalize(m)(x)
        yield "plain-again", m(x)
        meta = torch.nn.Sequential(nn.Linear(3, 3, device="meta"))
        yield "meta", [(str(meta(x.to("meta")).device), tuple(meta(x.to("meta")).shape)) for _ in range(5)]


@pytest.mark.filterwarnings("ignore")
@eager_twin(served=True)
def test_torch_compile_around_and_inside():
    m, x = fill(nn.Sequential(nn.Linear(3, 3), nn.ReLU())), ramp(2, 3)
    with torch.no_grad():
        yield from warm("plain", m, x)
        compiled = torch.compile(m, backend="eager")
        yield from warm("compiled", compiled, x)
        outer = nn.Sequential(nn.Identity(), compiled)
        yield from warm("inside", outer, x)
        yield "plain-again", m(x)
    torch._dynamo.reset()


@eager_twin(served=True)
def test_state_that_torch_shows_needs_no_guard_of_its_own():
    def forward(s, x):
        if torch.jit.is_tracing() or torch._C._get_tracing_state() is not None:
            return x * 2
        if torch.get_default_dtype() == torch.float64:
            return x * 3
        return x * (5 if torch.is_grad_enabled() else 7) + (11 if torch.is_inference_mode_enabled() else 13)

    m = Fn(forward)
    x = ramp(3)
    with torch.no_grad():
        yield from warm("no_grad", m, x)
        try:
            torch.set_default_dtype(torch.float64)
            yield from warm("float64", m, x)
        finally:
            torch.set_default_dtype(torch.float32)
        yield "traced", torch.jit.trace(m, x, check_trace=False)(x)
        yield from warm("after the trace", m, x)
    yield from warm("grad", m, x)
    with torch.inference_mode():
        yield from warm("inference", m, x)


def test_state_that_torch_shows_is_not_asked_for() -> None:
    asked = Fn(lambda s, x: x if torch.jit.is_tracing() or not torch.is_inference_mode_enabled() else x * 2)
    with cuvil.scope(), torch.inference_mode():
        for _ in range(4):
            asked(ramp(3))
    plans = [plan for module in cuvil.explain(asked).to_dict()["modules"] for plan in module["plans"]]
    assert plans[0]["guards"].get("ambient states", 0) == 0


@eager_twin
def test_what_jit_trace_made_runs_within_other_modules():
    # Its graphs fail inside of a dispatch mode, which the recorder of a trace is.
    def traced(factor: int) -> torch.jit.ScriptModule:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.jit.trace(Fn(lambda s, x: x * factor), ramp(3), check_trace=False)

    inner = traced(2)
    m = Fn(lambda s, x: s.inner(x + 1) - 3, inner=inner)
    late = Fn(lambda s, x: s.last(s.first(x)), first=fill(nn.Linear(3, 3)), last=traced(5))
    mode = Fn(torch.inference_mode()(lambda s, x: s.inner(x) + 1), inner=inner)
    with torch.no_grad():
        yield from warm("alone", inner, ramp(3))
        yield from warm("within", m, ramp(3))
        yield from warm("after another", late, ramp(3))
        yield from warm("inference mode", mode, ramp(3))
        yield from warm("a function", Fn(lambda s, x: inner(x) + 1), ramp(3))
        yield from warm("autocast", Fn(torch.autocast("cpu")(lambda s, x: traced(7)(x))), ramp(3))
    yield from warm("grad", m, ramp(3))
    yield from warm("no_grad within", Fn(torch.no_grad()(lambda s, x: traced(11)(x))), ramp(3))


@eager_twin
def test_a_refused_call_does_not_notice_that_it_was_traced():
    seen = []

    def forward(s, x):
        before = torch._C._len_torch_dispatch_stack()
        x = x * 2
        print(end="")  # refused here
        seen.append((before, torch._C._len_torch_dispatch_stack()))
        with torch.utils._python_dispatch._disable_current_modes():
            x = x + 1
        seen.append(torch._C._len_torch_dispatch_stack())
        return x

    with torch.no_grad():
        yield from warm("x", Fn(forward), ramp(3))
    yield "seen", seen


@pytest.mark.parametrize("scope", ["inference", "below"])
def test_a_refused_call_leaves_what_the_program_has_set(scope: str) -> None:
    def program():
        held = []

        def forward(s, x):
            print(end="")  # refused here
            made = torch._C._InferenceMode(True) if scope == "inference" else torch._C._AutoDispatchBelowAutograd()
            made.__enter__()
            held.append(made)
            return x * 2

        m = Fn(forward)
        p = nn.Parameter(torch.ones(2))
        for i in range(3):
            yield f"{i} result", m(ramp(3))
            with torch.enable_grad():
                made = p * 2
            yield f"{i} left on", (made.requires_grad, made.grad_fn is None, made.is_inference())
            held.pop().__exit__(None, None, None)
            yield f"{i} after", (p * 2).requires_grad

    eager_twin(program)()
