"""Model surgery, copies, lifetime; threads, processes, failures, nested models."""

import copy
import gc
import io
import os
import pickle
import threading
import time
import traceback
import warnings

import torch
import torch.nn as nn
import torch.nn.functional as F
from harness import DEVICE, DEVICE_TYPE, WARM, attempt, case, fill, full, ramp, warm


def case_weight_tying():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(6, 4)
            self.head = nn.Linear(4, 6, bias=False)
            self.head.weight = self.emb.weight

        def forward(self, ids):
            return self.head(self.emb(ids))

    m, ids = fill(M()), torch.tensor([0, 3, 5], device=DEVICE)
    with torch.no_grad():
        yield from warm("tied", m, ids)
        m.emb.weight[3] = 1.0
        yield "row-changed", m(ids)
        m.head.weight = nn.Parameter(m.emb.weight.detach().clone())
        yield "untied", m(ids)
        m.emb.weight.zero_()
        yield "only-one-changed", m(ids)
        m.head.weight = m.emb.weight
        yield "retied", m(ids)


GLOBAL_MODEL = None


@case("surgery", "pytorch#121304", "pytorch#115744")
def case_parametrizations():
    import torch.nn.utils.parametrize as P

    class Symmetric(nn.Module):
        def forward(self, w):
            return w.triu() + w.triu(1).transpose(-1, -2)

        def right_inverse(self, w):
            return w.triu()

    class Scaled(nn.Module):
        def __init__(self, k):
            super().__init__()
            self.k = k

        def forward(self, w):
            return w * self.k

        def right_inverse(self, w):
            return w / self.k

    m, x = fill(nn.Sequential(nn.Linear(3, 3), nn.Tanh())), ramp(2, 3) * 0.1
    with torch.no_grad():
        yield from warm("plain", m, x)
        P.register_parametrization(m[0], "weight", Symmetric())
        yield from warm("symmetric", m, x)
        P.register_parametrization(m[0], "weight", Scaled(2.0))
        yield "scaled", m(x)
        m[0].parametrizations.weight[1].k = 5.0
        yield "k-changed", m(x)
        m[0].parametrizations.weight.original.mul_(0.5)
        yield "original-changed", m(x)
        m[0].weight = full(0.3, 3, 3)
        yield "assigned", m(x)
        with P.cached():
            yield "cached", m(x)
        P.remove_parametrizations(m[0], "weight")
        yield "removed", m(x)


class PickleMe(nn.Module):
    def __init__(self, k=2.0):
        super().__init__()
        self.lin, self.k, self.calls = nn.Linear(3, 3), k, 0

    def forward(self, x):
        self.calls += 1
        return self.lin(x) * self.k


@case("copies", "pytorch#128121", "pytorch#101107")
def case_deepcopy_and_pickle_after_calls():
    m, x = fill(PickleMe()), ramp(2, 3)
    with torch.no_grad():
        yield from warm("orig", m, x)
        d = copy.deepcopy(m)
        d.k = 5.0
        d.lin.weight.mul_(2)
        yield "deep", d(x)
        s = copy.copy(m)  # shares parameters
        s.k = -1.0
        yield "shallow", s(x)
        m.lin.bias.add_(1)
        yield "shallow-sees-write", s(x)
        yield "deep-does-not", d(x)
        p = pickle.loads(pickle.dumps(m))
        p.lin.weight.zero_()
        yield "pickled", p(x)
        yield "orig-after", m(x)
        yield "state-keys", list(m.state_dict())
        yield "attrs", sorted(k for k in m.__dict__ if not k.startswith("_"))
        yield "type", type(m).__name__
        yield "calls", (m.calls, d.calls, s.calls, p.calls)
        buf = io.BytesIO()
        torch.save(m.state_dict(), buf)
        buf.seek(0)
        fresh = PickleMe(7.0).to(DEVICE)
        fresh.load_state_dict(torch.load(buf))
        yield "reloaded", fresh(x)


@case("lifetime")
def case_model_deleted_and_id_reused():
    x = ramp(2, 3)

    class M(nn.Module):
        def __init__(self, v):
            super().__init__()
            self.lin = nn.Linear(3, 3)
            self.v = v
            nn.init.constant_(self.lin.weight, v)
            nn.init.constant_(self.lin.bias, -v)

        def forward(self, x):
            return self.lin(x) + self.v

    with torch.no_grad():
        for i in range(12):
            m = M(float(i)).to(DEVICE)
            for j in range(2):
                yield f"m{i}-{j}", m(x)
            del m
            if i % 3 == 0:
                gc.collect()


# --------------------------------------------------------------------------


def case_two_threads_one_model():
    m = fill(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)))
    got, errors = {}, []
    gate = threading.Barrier(4)

    def work(k):
        try:
            gate.wait(10)
            with torch.no_grad():
                outs = [m(ramp(k + 1, 4) * 0.1 + i) for i in range(12)]
            got[k] = (torch.stack(outs), torch.is_grad_enabled())
        except Exception as e:  # noqa: BLE001
            errors.append(repr(e))

    ts = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in ts:
        t.start()
    for t in ts:
        t.join(60)
    yield "errors", errors
    for k in sorted(got):
        yield f"thread{k}", got[k]


@case("threads", "pytorch#111569")
def case_thread_local_grad_mode():
    m, x = fill(nn.Linear(3, 2)), ramp(2, 3)
    with torch.no_grad():
        yield from warm("main-no_grad", m, x)
        box = []
        t = threading.Thread(target=lambda: box.append(m(x)))  # a new thread starts with grad enabled
        t.start()
        t.join(60)
        yield "other-thread", box[0]
    yield "main-grad", m(x)


@case("process")
def case_fork_after_warmup():
    if not hasattr(os, "fork") or DEVICE_TYPE != "cpu":
        yield "skipped", True
        return
    m, x = fill(nn.Sequential(nn.Linear(3, 3), nn.Tanh())), ramp(2, 3)
    with torch.no_grad():
        yield from warm("parent", m, x)
        r, w = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(r)
                m[0].weight.fill_(0.5)
                data = pickle.dumps(m(x).tolist())
                os.write(w, data)
                os.close(w)
                code = 0
            finally:
                os._exit(code)
        os.close(w)
        end, status = time.time() + 30, None
        while time.time() < end:
            p, st = os.waitpid(pid, os.WNOHANG)
            if p:
                status = st
                break
            time.sleep(0.01)
        if status is None:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
        data = b""
        while status == 0:
            chunk = os.read(r, 65536)
            if not chunk:
                break
            data += chunk
        os.close(r)
        yield "child-exit", status
        yield "child", torch.tensor(pickle.loads(data)) if data else None
        yield "parent-after", m(x)


@case("failures")
def case_exception_then_good_call():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.n = nn.Linear(4, 2), 0

        def forward(self, x, boom=False):
            self.n += 1
            y = self.lin(x)
            if boom:
                raise ValueError(f"boom {self.n}")
            return y * self.n

    m, x = fill(M()), ramp(2, 4)
    with torch.no_grad():
        yield from warm("good", m, x)
        yield "boom", attempt(m, x, boom=True)
        yield "good-after", m(x)
        yield "bad-shape", attempt(m, ramp(2, 5))
        yield "good-after2", m(x)
        yield "bad-type", attempt(m, "not a tensor")
        yield "too-many", attempt(m, x, 1, 2, 3)
        yield "n", m.n
        try:
            m(x, boom=True)
        except ValueError as e:
            yield "message", str(e)
            names = [f.name for f in traceback.extract_tb(e.__traceback__)]
            yield "must:traceback-has-forward", "forward" in names


@case("structure")
def case_recursive_module():
    class Tree(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 3)

        def forward(self, x, depth):
            if depth == 0:
                return x
            return torch.tanh(self.lin(self(x, depth - 1))) + depth

    m, x = fill(Tree()), ramp(2, 3) * 0.1
    with torch.no_grad():
        for d in (2, 2, 2, 0, 1, 4, 2):
            yield f"depth{d}", m(x, d)
        m.lin.bias.add_(1)
        yield "after", m(x, 3)


@case("structure")
def case_module_calls_other_models():
    global GLOBAL_MODEL
    GLOBAL_MODEL = fill(nn.Linear(3, 3), 0.1)
    teacher = fill(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))

    class Student(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 3)
            self.__dict__["hidden_ref"] = teacher  # not registered as a submodule

        def forward(self, x, other=None):
            with torch.no_grad():
                t = self.hidden_ref(x)
            y = self.lin(x) - t + GLOBAL_MODEL(x)
            return y if other is None else other(y)

    m, x = fill(Student()), ramp(2, 3) * 0.1
    yield from warm("start", m, x)
    with torch.no_grad():
        teacher[0].weight.mul_(-1)
    yield "teacher-changed", m(x)
    GLOBAL_MODEL = fill(nn.Linear(3, 3), -0.1)
    yield "global-replaced", m(x)
    m.__dict__["hidden_ref"] = nn.Identity()
    yield "ref-replaced", m(x)
    yield "argument-model", m(x, other=nn.Softmax(dim=-1))
    yield "argument-model2", m(x, other=nn.Sigmoid())
    shared = fill(nn.Linear(3, 3))
    a, b = nn.Sequential(shared, nn.ReLU()), nn.Sequential(shared, nn.Tanh())
    with torch.no_grad():
        yield from warm("shared-a", a, x)
        yield "shared-b", b(x)
        shared.bias.add_(2)
        yield "shared-after", (a(x), b(x))


@case("structure")
def case_two_instances_same_class():
    class M(nn.Module):
        def __init__(self, k, act, bias):
            super().__init__()
            self.k, self.act, self.lin = k, act, nn.Linear(3, 3, bias=bias)

        def forward(self, x):
            return self.act(self.lin(x)) * self.k

    ms = [fill(M(1.0, torch.relu, True)), fill(M(2.0, torch.tanh, False)), fill(M(3.0, F.gelu, True))]
    x = ramp(2, 3) * 0.1
    with torch.no_grad():
        for rnd in range(3):
            for i, m in enumerate(ms):
                yield f"r{rnd}m{i}", m(x)
        ms[0].act, ms[1].act = ms[1].act, ms[0].act
        for i, m in enumerate(ms):
            yield f"swapped-m{i}", m(x)


@case("structure")
def case_num_threads_and_matmul_flags():
    m, x = fill(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))), ramp(16, 32) * 0.01
    old = torch.get_num_threads()
    try:
        with torch.no_grad():
            yield from warm("default", m, x)
            torch.set_num_threads(1)
            yield "one-thread", m(x)
            yield "reported", torch.get_num_threads()
            torch.set_num_threads(2)
            yield "two-threads", m(x)
    finally:
        torch.set_num_threads(old)
    with torch.no_grad():
        det = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            yield "deterministic", attempt(m, x)
        finally:
            torch.use_deterministic_algorithms(det)


@case("structure")
def case_numpy_round_trip():
    try:
        import numpy as np
    except ImportError:
        yield "skipped", True
        return

    class M(nn.Module):
        def forward(self, x):
            a = x.detach().cpu().numpy()
            top = np.argsort(-a)[:2].copy()
            a2 = np.clip(a * 2, 0, 5)
            return torch.from_numpy(a2), torch.from_numpy(top), float(a.mean()), x + np.float32(a.max())

    class Shares(nn.Module):
        def forward(self, x):
            x.numpy()[0] = 99.0  # writes through to the tensor
            return x * 1

    m = M()
    for i in range(WARM + 1):
        yield f"m{i}", m(ramp(4) - i)
    if DEVICE_TYPE == "cpu":
        s = Shares()
        for i in range(WARM + 1):
            x = ramp(3) + i
            yield f"shares{i}", (s(x), x)
