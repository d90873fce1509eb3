"""Models copied, pickled, deleted, forked, interrupted and used from threads while plans exist."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import gc
import io
import os
import pickle
import queue
import signal
import threading
import time
import warnings
import weakref

import torch
import torch.nn as nn
from eager_twin import Fn, attempt, eager_twin, fill, ramp, warm


class Model(nn.Module):
    def __init__(self, k=2.0):
        super().__init__()
        self.lin, self.k = nn.Linear(3, 3), k

    def forward(self, x):
        return self.lin(x) * self.k


@eager_twin(served=True)
def test_copies_share_nothing_of_a_plan():
    m, x = fill(Model()), ramp(2, 3)
    with torch.no_grad():
        yield from warm("original", m, x)
        deep, shallow = copy.deepcopy(m), copy.copy(m)
        deep.lin.weight.mul_(2)
        deep.k = 5.0
        yield from warm("deep", deep, x)
        shallow.k = 7.0
        yield from warm("shallow", shallow, x)
        m.lin.bias.add_(1)
        yield "original", m(x)
        yield "shallow-sees", shallow(x)
        yield "deep-does-not", deep(x)
        m.__dict__.update(deep.__dict__)
        yield "dict-taken-over", m(x)


@eager_twin(served=True)
def test_pickle_and_state_of_a_planned_model():
    m, x = fill(Model()), ramp(2, 3)
    fresh = fill(Model())
    with torch.no_grad():
        yield "same-bytes-before", len(pickle.dumps(m))
        yield from warm("original", m, x)
        yield "same-bytes-after", len(pickle.dumps(m))
        again = pickle.loads(pickle.dumps(m))
        yield from warm("unpickled", again, x)
        buffer = io.BytesIO()
        torch.save(m, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        loaded.lin.weight.zero_()
        yield "loaded", loaded(x)
        yield "original", m(x)
        yield "attributes", (sorted(vars(m)), sorted(vars(fresh)))


@eager_twin(served=True)
def test_models_made_called_and_dropped():
    x = ramp(2, 3)
    refs = []
    with torch.no_grad():
        for i in range(15):
            m = fill(Model(float(i)), float(i % 4))
            for j in range(4):
                yield f"{i}.{j}", m(x)
            refs.append(weakref.ref(m))
            del m
            if i % 3 == 0:
                gc.collect()
        gc.collect()
        yield "must:all-freed", all(ref() is None for ref in refs)


@eager_twin(served=True)
def test_reference_counts_of_inputs_and_weights():
    import sys

    m, x = fill(Model()), ramp(2, 3)
    with torch.no_grad():
        yield from warm("warm", m, x)
        before = (sys.getrefcount(m), sys.getrefcount(x), sys.getrefcount(m.lin.weight), sys.getrefcount(m.lin))
        for _ in range(50):
            m(x)
        after = (sys.getrefcount(m), sys.getrefcount(x), sys.getrefcount(m.lin.weight), sys.getrefcount(m.lin))
        yield "must:constant", before == after


@eager_twin(served=True)
def test_training_loop_between_inference_calls():
    m, x = fill(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 1))), ramp(4, 3) * 0.1
    opt = torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(0)
    for epoch in range(4):
        m.eval()
        with torch.no_grad():
            yield from warm(f"eval{epoch}", m, x)
        m.train()
        for step in range(2):
            opt.zero_grad()
            loss = m(x).pow(2).mean()
            loss.backward()
            opt.step()
            yield f"loss{epoch}.{step}", loss.detach()
        with torch.no_grad():
            yield f"train-mode{epoch}", m(x)
        yield f"running{epoch}", (m[1].running_mean, m[1].num_batches_tracked)


@eager_twin(served=True)
def test_many_threads_one_model():
    m = fill(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)))
    results, errors = {}, []
    barrier = threading.Barrier(8)

    def work(k):
        try:
            barrier.wait(30)
            with torch.no_grad():
                results[k] = [m(ramp(1 + (i + k) % 3, 4) * 0.1 + k) for i in range(20)]
        except Exception as e:
            errors.append(repr(e))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    yield "errors", errors
    yield "results", [results.get(k) for k in range(8)]


@eager_twin(served=True)
def test_threads_with_their_own_grad_modes():
    m, x = fill(Model()), ramp(2, 3)
    with torch.no_grad():
        yield from warm("main", m, x)
    modes = {"grad": torch.enable_grad, "no": torch.no_grad, "inference": torch.inference_mode}

    def work(name):
        with modes[name]():
            y = m(x)
            return y.requires_grad, y.is_inference(), y.detach().clone()

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        for i in range(6):
            yield f"{i}", [(a, b, c.clone()) for a, b, c in pool.map(work, ("grad", "no", "inference"))]


@eager_twin(served=True)
def test_models_edited_between_calls_of_other_threads():
    m, x = fill(Model()), ramp(2, 3)
    requests: queue.Queue = queue.Queue()
    answers: queue.Queue = queue.Queue()

    def serve():
        with torch.no_grad():
            while requests.get(timeout=60) is not None:
                answers.put(m(x))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        for i in range(12):
            if i % 4 == 3:
                m.k = float(i)
                m.lin.bias.data.fill_(float(i))
            requests.put(1)
            yield f"{i}", answers.get(timeout=60)
    finally:
        requests.put(None)
        thread.join(60)


@eager_twin(served=True)
def test_asyncio_tasks_interleave():
    class Slow(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.k = fill(nn.Linear(3, 3)), 1.0

        async def forward(self, x):
            y = self.lin(x)
            await asyncio.sleep(0)
            return y * self.k

    m, inner = Slow(), fill(Model())

    async def run():
        with torch.no_grad():
            first = asyncio.gather(*(m(ramp(1, 3) + i) for i in range(3)))
            await asyncio.sleep(0)
            m.k += 1
            return [*(await first), inner(ramp(2, 3))]

    for i in range(6):
        yield f"{i}", asyncio.run(run())


@eager_twin(served=True)
def test_fork_after_plans_and_edits_in_the_child():
    m, x = fill(Model()), ramp(2, 3)
    with torch.no_grad():
        yield from warm("parent", m, x)
        reader, writer = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pid = os.fork()
        if pid == 0:
            code = 1
            try:
                answer = [m(x).tolist()]
                m.lin.weight.fill_(0.5)
                answer.append(m(x).tolist())
                m.k = 9.0
                answer += [m(x).tolist() for _ in range(4)]
                fresh = fill(Model(3.0))
                answer += [fresh(x).tolist() for _ in range(5)]
                os.write(writer, pickle.dumps(answer))
                code = 0
            finally:
                os._exit(code)
        os.close(writer)
        data = b""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            chunk = os.read(reader, 1 << 16)
            if not chunk:
                break
            data += chunk
        os.close(reader)
        _, status = os.waitpid(pid, 0)
        yield "child", (status, pickle.loads(data) if data else None)
        yield "parent", m(x)


@eager_twin
def test_interrupt_during_a_call():
    m = Fn(lambda s, x: _slow(s, x), n=0, slow=False)

    def _slow(s, x):
        if s.slow:
            signal.raise_signal(signal.SIGINT)
        return x * 2

    with torch.no_grad():
        yield from warm("fine", m, ramp(3))
        m.slow = True
        for i in range(4):
            try:
                m(ramp(3))
                yield f"not-raised{i}", True
            except KeyboardInterrupt:
                yield f"raised{i}", True
        m.slow = False
        yield from warm("fine", m, ramp(3))


@eager_twin(served=True)
def test_interrupts_at_random_moments():
    m, x = fill(nn.Sequential(*[nn.Linear(16, 16) for _ in range(8)])), torch.ones(2, 16)
    with torch.no_grad():
        yield from warm("before", m, x)
        raised = 0
        previous = signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            for i in range(25):
                timer = threading.Timer(0.0005 * (i % 7), os.kill, (os.getpid(), signal.SIGINT))
                try:
                    timer.start()
                    while timer.is_alive():
                        m(torch.ones(1 + i % 4, 16))
                    timer.join()
                except KeyboardInterrupt:
                    raised += 1
                    timer.join()
        except KeyboardInterrupt:
            raised += 1
        finally:
            signal.signal(signal.SIGINT, previous)
        yield "must:raised", raised > 0
        yield from warm("after", m, x)


@eager_twin(served=True)
def test_garbage_collector_off_on_and_frozen():
    m, x = fill(Model()), ramp(2, 3)
    gc.disable()
    try:
        with torch.no_grad():
            yield from warm("disabled", m, x)
            gc.freeze()
            yield from warm("frozen", m, x)
            gc.unfreeze()
            gc.collect()
            yield "collected", m(x)
    finally:
        gc.enable()


@eager_twin(served=True)
def test_reentrant_calls_from_hooks_and_finalizers():
    inner, outer = fill(Model()), fill(nn.Sequential(Model(), nn.ReLU()))
    seen = []
    outer[0].register_forward_hook(lambda mod, args, out: seen.append(inner(args[0]).sum()))

    class Calls:
        def __init__(self, x):
            self.x = x

        def __del__(self):
            with torch.no_grad():
                seen.append(inner(self.x).sum())

    with torch.no_grad():
        for i in range(6):
            y = outer(ramp(2, 3))
            token = Calls(ramp(2, 3))
            del token
            yield f"{i}", (y, list(seen))


@eager_twin(served=True)
def test_model_called_inside_its_own_weights_hook():
    m, x = fill(Model()), ramp(2, 3)
    handle = m.register_forward_pre_hook(lambda mod, args: [mod.lin.weight.data.add_(0.5), None][1])
    with torch.no_grad():
        for i in range(6):
            yield f"{i}", m(x)
        handle.remove()
        yield from warm("removed", m, x)


@eager_twin(served=True)
def test_data_parallel_style_replication():
    m, x = fill(nn.Sequential(nn.Linear(3, 3), nn.ReLU())), ramp(2, 3)
    with torch.no_grad():
        yield from warm("plain", m, x)
        replicas = [m._replicate_for_data_parallel() for _ in range(2)]
        for i, replica in enumerate(replicas):
            for key, child in m._modules.items():
                copied = child._replicate_for_data_parallel()
                copied._parameters = {k: None if p is None else p * (i + 1) for k, p in child._parameters.items()}
                replica._modules[key] = copied
        yield "replicas", [replica(x) for replica in replicas for _ in range(4)]
        yield "plain", m(x)


@eager_twin(served=True)
def test_ensembles_stacked_with_functional_call():
    models = [fill(Model(2.0), 0.1 * (i + 1)) for i in range(3)]
    params, buffers = torch.func.stack_module_state(models)
    x = ramp(2, 3)
    with torch.no_grad():
        yield from warm("plain", models[0], x)
        yield "vmap", torch.vmap(lambda p, b: torch.func.functional_call(models[0], (p, b), (x,)))(params, buffers)
        for i in range(4):
            state = {name: p[i % 3] for name, p in params.items()}
            yield f"functional{i}", torch.func.functional_call(models[0], state, (x,))
        yield "plain", models[0](x)


@eager_twin(served=True)
def test_models_with_equal_structure_do_not_share_plans():
    models = [fill(Model(float(k)), 0.1 * k) for k in range(1, 6)]
    x = ramp(2, 3)
    with torch.no_grad():
        for turn in range(5):
            yield f"{turn}", [m(x) for m in models]
        models[1].lin = models[2].lin
        yield "shared", [m(x) for m in models]


@eager_twin(served=True)
def test_shapes_beyond_the_plan_cache():
    m = fill(Model())
    with torch.no_grad():
        for turn in range(4):
            for n in range(1, 25):
                yield from warm(f"{turn}.{n}", m, ramp(n, 3) * 0.1)
        m.k = 3.0
        for n in range(1, 25):
            yield f"changed{n}", m(ramp(n, 3) * 0.1)


@eager_twin(served=True)
def test_failing_calls_do_not_disturb_later_ones():
    m = fill(Model())
    with torch.no_grad():
        yield "fails-first", attempt(m, ramp(2, 5))
        yield from warm("good", m, ramp(2, 3))
        for i in range(4):
            yield f"fails{i}", attempt(m, ramp(2, 5))
            yield f"good{i}", m(ramp(2, 3))
        yield "not-a-tensor", attempt(m, "x")
        yield "good", m(ramp(2, 3))
