"""Traps 9-16 of the design: baselines, serve time, writes, errors after writes, outputs, custom operators."""

from __future__ import annotations

import gc
import io
import signal
import sys
import threading

import pytest
import torch
import torch.nn as nn
from eager_twin import Fn, attempt, attempt_in_words, eager_twin, fill, full, ramp, warm


# ------------------------------------------------------------------ 9. when is the baseline taken
@eager_twin
def test_trap_09_finalizer_inside_the_call_writes_what_was_read():
    class Sets:
        def __init__(self, owner):
            self.owner = owner

        def __del__(self):
            self.owner.flag = not self.owner.flag

    def forward(s, x):
        guard = Sets(s)
        y = x * 2 if s.flag else x
        del guard
        return y

    m = Fn(forward, flag=False)
    with torch.no_grad():
        for i in range(9):
            yield f"{i}", (m(ramp(3)), m.flag)


@eager_twin
def test_trap_09_finalizer_inside_a_collection_triggered_by_the_call():
    class Sets:
        def __init__(self, owner):
            self.owner, self.me = owner, self

        def __del__(self):
            self.owner.flag += 1

    def forward(s, x):
        y = x * s.flag
        Sets(s)
        gc.collect()
        return y

    m = Fn(forward, flag=1)
    with torch.no_grad():
        for i in range(7):
            yield f"{i}", (m(ramp(3)), m.flag)


@eager_twin
def test_trap_09_gc_callback_that_runs_in_the_call():
    m = Fn(lambda s, x: [x * s.flag, [[] for _ in range(3)]], flag=1.0)

    def callback(phase, info):
        if phase == "stop":
            m.flag = 2.0

    with torch.no_grad():
        yield from warm("one", m, ramp(3))
        gc.callbacks.append(callback)
        threshold = gc.get_threshold()
        gc.set_threshold(1, 1, 1)
        try:
            m(ramp(3))
        finally:
            gc.set_threshold(*threshold)
            gc.callbacks.remove(callback)
        gc.collect()
        m.flag = 2.0
        yield "after", m(ramp(3))


@eager_twin
def test_trap_09_signal_handler_during_calls():
    m = Fn(lambda s, x: x * s.flag if s.flag < 3 else x - s.flag, flag=1.0)

    def handler(number, frame):
        m.flag = 5.0

    previous = signal.signal(signal.SIGALRM, handler)
    try:
        with torch.no_grad():
            yield from warm("before", m, ramp(3))
            signal.setitimer(signal.ITIMER_REAL, 0.005)
            while m.flag != 5.0:
                m(ramp(3))
            yield from warm("after", m, ramp(3))
    finally:
        signal.signal(signal.SIGALRM, previous)


@eager_twin
def test_trap_09_other_thread_writes_while_a_call_is_traced():
    shapes = iter(range(2, 400))
    m = Fn(lambda s, x: (x + 1 if s.flag else x - 1) * s.scale, flag=False, scale=1.0)
    stop = threading.Event()

    def toggle():
        while not stop.is_set():
            m.flag = not m.flag
            m.scale += 1.0

    with torch.no_grad():
        thread = threading.Thread(target=toggle)
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        thread.start()
        try:
            used = [next(shapes) for _ in range(60)]
            for n in used:
                for _ in range(4):
                    m(torch.ones(n))
        finally:
            stop.set()
            thread.join()
            sys.setswitchinterval(interval)
        # Whatever was traced meanwhile, each value must be what the attributes say now.
        for flag, scale in ((False, 2.0), (True, 2.0), (True, 3.0)):
            m.flag, m.scale = flag, scale
            yield f"{flag}{scale}", [m(torch.ones(n)) for n in used]


# ------------------------------------------------------------------ 11. serve time
@eager_twin(served=True)
def test_trap_11_settrace_after_the_plan():
    m, x = fill(nn.Sequential(nn.Linear(3, 3), nn.ReLU())), ramp(2, 3)
    seen = []
    with torch.no_grad():
        yield from warm("plain", m, x)
        previous = sys.gettrace()
        sys.settrace(lambda frame, event, arg: seen.append(frame.f_code.co_name))
        try:
            y = m(x)
        finally:
            sys.settrace(previous)
        yield "traced", y
        yield "must:saw-forward", "forward" in seen
        yield "count", seen.count("forward")
        yield "again", m(x)


@eager_twin(served=True)
def test_trap_11_setprofile_after_the_plan():
    m, x = fill(nn.Sequential(nn.Linear(3, 3), nn.ReLU())), ramp(2, 3)
    seen = []
    with torch.no_grad():
        yield from warm("plain", m, x)
        sys.setprofile(lambda frame, event, arg: seen.append((event, frame.f_code.co_name)))
        try:
            y = m(x)
        finally:
            sys.setprofile(None)
        yield "profiled", y
        yield "count", seen.count(("call", "forward"))
        yield "must:saw-forward", ("call", "forward") in seen


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring is new in Python 3.12")
@eager_twin(served=True)
def test_trap_11_monitoring_after_the_plan():
    m, x = fill(nn.Sequential(nn.Linear(3, 3), nn.ReLU())), ramp(2, 3)
    seen = []
    monitoring = sys.monitoring
    with torch.no_grad():
        yield from warm("plain", m, x)
        monitoring.use_tool_id(monitoring.DEBUGGER_ID, "test")
        try:
            monitoring.register_callback(
                monitoring.DEBUGGER_ID, monitoring.events.PY_START, lambda code, offset: seen.append(code.co_name)
            )
            monitoring.set_events(monitoring.DEBUGGER_ID, monitoring.events.PY_START)
            y = m(x)
            monitoring.set_events(monitoring.DEBUGGER_ID, 0)
        finally:
            monitoring.free_tool_id(monitoring.DEBUGGER_ID)
        yield "monitored", y
        yield "count", seen.count("forward")
        yield "must:saw-forward", "forward" in seen


@eager_twin(served=True)
def test_trap_11_profiler_after_the_plan():
    m, x = fill(nn.Sequential(nn.Linear(3, 3), nn.ReLU())), ramp(2, 3)
    with torch.no_grad():
        yield from warm("plain", m, x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            y = m(x)
        yield "profiled", y
        names = sorted(event.key for event in profile.key_averages() if event.key in ("aten::linear", "aten::relu"))
        yield "operators", names


@eager_twin(served=True)
def test_trap_11_function_mode_after_the_plan():
    from torch.overrides import TorchFunctionMode

    class Log(TorchFunctionMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.names.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    m, x = fill(nn.Sequential(nn.Linear(3, 3), nn.ReLU())), ramp(2, 3)
    with torch.no_grad():
        yield from warm("plain", m, x)
        with Log() as log:
            y = m(x)
        yield "mode", (y, log.names)
        yield "again", m(x)


@eager_twin(served=True)
def test_trap_11_dispatch_mode_after_the_plan():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Log(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    m, x = fill(nn.Sequential(nn.Linear(3, 3), nn.ReLU())), ramp(2, 3)
    with torch.no_grad():
        yield from warm("plain", m, x)
        with Log() as log:
            y = m(x)
        yield "mode", (y, log.names)
        yield "again", m(x)


# ------------------------------------------------------------------ 12. the default device is a mode
@eager_twin(served=True)
def test_trap_12_default_device_mode():
    m = Fn(lambda s, x: (x + torch.ones(3), torch.zeros(2), torch.arange(3)))
    try:
        with torch.no_grad():
            torch.set_default_device("cpu")
            yield from warm("cpu", m, torch.ones(3))
            torch.set_default_device("meta")
            meta = Fn(lambda s: torch.zeros(2))
            for i in range(4):
                yield f"meta{i}", str(meta().device)
            torch.set_default_device("cpu")
            yield "cpu-after-meta", meta()
            torch.set_default_device(None)
            yield from warm("none", m, torch.ones(3))
            with torch.device("meta"):
                yield "meta-scope", str(meta().device)
            yield "after-scope", meta()
    finally:
        torch.set_default_device(None)


# ------------------------------------------------------------------ 13. version counters
@eager_twin
def test_trap_13_in_place_write_is_seen_by_backward():
    def forward(s, t):
        t.mul_(2.0)
        return t + 1

    m = Fn(forward)
    with torch.no_grad():
        for i in range(5):
            yield f"warm{i}", m(ramp(3))
    w = ramp(3).requires_grad_()
    h = w * 2
    loss = (h * h).sum()  # autograd saves h
    before = h._version
    with torch.no_grad():
        yield "write", m(h.detach())
    yield "bumps", h._version - before
    yield "backward", attempt(loss.backward)
    yield "grad", w.grad


@eager_twin(served=True)
def test_trap_13_versions_of_outputs():
    def forward(s, x):
        y = x + 1
        y.mul_(2).relu_()
        z = y.clone()
        z[0] = 3.0
        return y, z, y.view(-1)

    m = Fn(forward)
    for i in range(6):
        with torch.no_grad():
            y, z, v = m(ramp(2, 2))
        yield f"{i}", (y._version, z._version, v._version, v._base is y)
        y.add_(1)
        yield f"shared{i}", (v._version, v)


# ------------------------------------------------------------------ 14. errors after writes
@eager_twin
def test_trap_14_error_after_a_write_to_the_input():
    emb = fill(nn.Embedding(4, 3))

    def forward(s, x, ids):
        x.add_(1)
        return x + emb(ids)

    m = Fn(forward)
    good, bad = torch.tensor([0, 1, 2]), torch.tensor([0, 9, 1])
    with torch.no_grad():
        for i in range(5):
            x = ramp(3, 3)
            yield f"good{i}", (m(x, good), x)
        x = ramp(3, 3)
        yield "bad", (attempt_in_words(m, x, bad), x)
        yield "again", m(ramp(3, 3), good)


@eager_twin(served=True)
def test_trap_14_error_of_an_operator_inside_a_plan():
    m = nn.Sequential(fill(nn.Embedding(4, 3)), nn.Dropout(0.0), fill(nn.Linear(3, 2)))
    with torch.no_grad():
        yield from warm("good", m, torch.tensor([0, 1, 2]))
        for i in range(4):
            yield f"bad{i}", attempt_in_words(m, torch.tensor([0, 9, 1]))
        yield from warm("good", m, torch.tensor([3, 1, 2]))


@eager_twin
def test_trap_14_error_after_random_numbers_were_drawn():
    emb = fill(nn.Embedding(4, 3))
    m = Fn(lambda s, ids: torch.rand(3, 3) + emb(ids))
    with torch.no_grad():
        torch.manual_seed(0)
        for i in range(5):
            yield f"good{i}", m(torch.tensor([0, 1, 2]))
        yield "bad", attempt_in_words(m, torch.tensor([0, 9, 1]))
        yield "stream", torch.rand(3)
        yield "good", m(torch.tensor([0, 1, 2]))


@eager_twin
def test_trap_14_error_during_the_comparing_call():
    m = nn.Sequential(fill(nn.Embedding(4, 3)), fill(nn.Linear(3, 2)))
    with torch.no_grad():
        yield "first", m(torch.tensor([0, 1, 2]))
        yield "second-fails", attempt_in_words(m, torch.tensor([0, 9, 1]))
        yield from warm("good", m, torch.tensor([0, 1, 2]))


# ------------------------------------------------------------------ 15. what outputs own
@eager_twin(served=True)
def test_trap_15_outputs_own_what_eager_outputs_own():
    def forward(s, x):
        y = x + 1
        a, b = y.chunk(2)
        return a, b, y[1:], y.t(), y.view(-1)[2:5], (x * 2)[0], x.narrow(0, 1, 1), y.expand(2, 4, 4), x.unfold(0, 2, 1)

    m = Fn(forward)
    for i in range(6):
        with torch.no_grad():
            outs = m(ramp(4, 4))
        yield f"{i}", outs
        yield f"owned{i}", [(o.untyped_storage().nbytes(), o._base is None, _size_saved(o)) for o in outs]
        yield f"one-storage{i}", len({o.untyped_storage().data_ptr() for o in outs})
        outs[0].zero_()
        yield f"shared{i}", outs
        yield f"versions{i}", [o._version for o in outs]


def _size_saved(t: torch.Tensor) -> int:
    buffer = io.BytesIO()
    torch.save(t, buffer)
    return len(buffer.getvalue())


@eager_twin(served=True)
def test_trap_15_views_of_inputs_and_weights_have_their_base():
    m = Fn(lambda s, x: (x.view(-1), x[0], s.w[0], s.w.t(), x.detach(), s.w.detach()), w=nn.Parameter(ramp(2, 2)))
    for i in range(6):
        x = ramp(2, 2)
        with torch.no_grad():
            outs = m(x)
        yield f"{i}", outs
        yield f"base{i}", [(o._base is x, o._base is m.w, o._is_view()) for o in outs]
        outs[0].add_(10)
        yield f"x{i}", (x, x._version)


# ------------------------------------------------------------------ 16. custom operators
@torch.library.custom_op("cuvil_tests::counted", mutates_args=())
def _counted(x: torch.Tensor) -> torch.Tensor:
    _COUNTS["calls"] += 1
    return x * _COUNTS["calls"]


@torch.library.custom_op("cuvil_tests::hidden_write", mutates_args=("x",))
def _declared_write(x: torch.Tensor) -> None:
    x.add_(1)


_COUNTS = {"calls": 0}


@eager_twin
def test_trap_16_custom_operator_with_hidden_state():
    _COUNTS["calls"] = 0
    m = Fn(lambda s, x: torch.ops.cuvil_tests.counted(x) + 1)
    with torch.no_grad():
        for i in range(7):
            yield f"{i}", (m(ramp(3)), _COUNTS["calls"])


@eager_twin
def test_trap_16_custom_operator_that_writes():
    def forward(s, x):
        torch.ops.cuvil_tests.hidden_write(x)
        return x * 2

    m = Fn(forward)
    with torch.no_grad():
        for i in range(7):
            x = full(float(i), 3)
            yield f"{i}", (m(x), x, x._version)
