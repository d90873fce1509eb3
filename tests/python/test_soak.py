"""Thousands of calls: nothing grows, nothing is lost, and the process ends as it should.

Every program runs in an interpreter of its own; soak_process.py says how the tests are made longer.
"""

from __future__ import annotations

import signal

import pytest
from sanitizers import UNDER_ASAN
from soak_process import NOT_CUVIL, python, succeeds

pytestmark = pytest.mark.skipif(NOT_CUVIL, reason="looks at cuvil's own process behaviour")


def test_resident_memory_and_references_do_not_grow():
    succeeds("""
        def turn(n):
            with torch.inference_mode():
                for _ in range(n):
                    y = m(x)
                check(y)
        turn(500)
        gc.collect()
        memory, blocks, open_handles = resident(), sys.getallocatedblocks(), handles()
        references = [sys.getrefcount(o) for o in (m, m[0], x, m[0].lin.weight, None, Block, m[0].__dict__)]
        turn(CALLS)
        gc.collect()
        now = [sys.getrefcount(o) for o in (m, m[0], x, m[0].lin.weight, None, Block, m[0].__dict__)]
        assert all(abs(a - b) <= 20 for a, b in zip(references, now)), (references, now)
        assert sys.getallocatedblocks() - blocks < 200, sys.getallocatedblocks() - blocks
        assert resident() - memory < 4 << 20, resident() - memory
        assert handles() == open_handles
        assert cuvil.stats()["planned"] >= CALLS, cuvil.stats()
    """)


def test_memory_does_not_grow_with_changing_attributes_and_shapes():
    succeeds("""
        def turn(n, base):
            with torch.no_grad():
                for i in range(n):
                    m[0].k = float(base + i)
                    y = m[0](torch.ones(1 + i % 40, 16), scale=float(i % 3))
        turn(600, 0)
        gc.collect()
        memory, blocks = resident(), sys.getallocatedblocks()
        turn(CALLS // 4, 1000)
        gc.collect()
        assert resident() - memory < 16 << 20, resident() - memory
        assert sys.getallocatedblocks() - blocks < 5000, sys.getallocatedblocks() - blocks
    """)


def test_memory_does_not_grow_with_new_models():
    succeeds("""
        import weakref
        def turn(n):
            refs = []
            with torch.no_grad():
                for i in range(n):
                    model = nn.Sequential(Block()).eval()
                    for _ in range(4):
                        model(x)
                    refs.append(weakref.ref(model))
                    del model
            gc.collect()
            assert all(ref() is None for ref in refs)
        turn(60)
        memory, blocks = resident(), sys.getallocatedblocks()
        turn(CALLS // 25)
        assert resident() - memory < 24 << 20, resident() - memory
        assert sys.getallocatedblocks() - blocks < 5000, sys.getallocatedblocks() - blocks
    """)


def test_memory_does_not_grow_with_failing_calls():
    succeeds("""
        emb = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 2)).eval()
        good, bad = torch.tensor([0, 1]), torch.tensor([0, 9])
        def turn(n):
            with torch.no_grad():
                for _ in range(n):
                    emb(good)
                    try:
                        emb(bad)
                    except IndexError:
                        pass
        turn(300)
        gc.collect()
        memory, blocks = resident(), sys.getallocatedblocks()
        turn(CALLS // 2)
        gc.collect()
        assert resident() - memory < 8 << 20, resident() - memory
        assert sys.getallocatedblocks() - blocks < 1000, sys.getallocatedblocks() - blocks
    """)


def test_enabling_and_disabling_many_times():
    succeeds("""
        with torch.no_grad():
            for i in range(300):
                cuvil.disable()
                check(m(x))
                cuvil.enable()
                for _ in range(4):
                    check(m(x))
        memory = resident()
        for i in range(2000):
            cuvil.disable()
            cuvil.enable()
        assert resident() - memory < 4 << 20
    """)


def test_thirty_two_threads_on_one_model():
    succeeds("""
        errors, gate = [], threading.Barrier(32)
        def work(k):
            try:
                gate.wait(60)
                with torch.inference_mode():
                    for i in range(max(CALLS // 32, 20)):
                        n = 1 + (i + k) % 3
                        y = m(x[:n])
                        assert torch.allclose(y["y"], expected[:n], rtol=1e-5, atol=1e-6), (k, i)
                        assert y["n"] == n
            except BaseException as e:
                errors.append(repr(e))
        threads = [threading.Thread(target=work, args=(k,)) for k in range(32)]
        for t in threads: t.start()
        for t in threads: t.join(280)
        assert not errors, errors[:3]
        assert not any(t.is_alive() for t in threads)
        assert cuvil.stats()["planned"] > 0
    """)


def test_threads_enable_disable_edit_and_collect_during_calls():
    succeeds("""
        stop, errors = threading.Event(), []
        def calls():
            try:
                with torch.no_grad():
                    while not stop.is_set():
                        y = m(x)
                        assert y["n"] == 4 and len(y["parts"]) == 2
            except BaseException as e:
                errors.append(repr(e))
        def churn():
            i = 0
            while not stop.is_set():
                i += 1
                m[0].k = float(i % 3)
                m[0].lin.weight = nn.Parameter(torch.randn(16, 16))
                if i % 7 == 0: gc.collect()
                if i % 11 == 0: cuvil.disable()
                if i % 11 == 5: cuvil.enable()
                if i % 31 == 0: cuvil.reset()
                if i % 13 == 0: cuvil.explain(m); cuvil.stats()
        threads = [threading.Thread(target=calls) for _ in range(4)] + [threading.Thread(target=churn)]
        for t in threads: t.start()
        time.sleep(4)
        stop.set()
        for t in threads: t.join(60)
        assert not errors, errors[:3]
        assert not any(t.is_alive() for t in threads)
    """)


def test_fork_in_the_middle():
    succeeds("""
        with torch.inference_mode():
            for _ in range(50): check(m(x))
            for child in range(5):
                pid = os.fork()
                if pid == 0:
                    code = 1
                    try:
                        before = cuvil.stats()["planned"]
                        for _ in range(50): check(m(x))
                        assert cuvil.stats()["planned"] > before, cuvil.stats()
                        fresh = nn.Sequential(Block()).eval()
                        a = fresh(x)["y"].clone()
                        for _ in range(6): assert torch.equal(fresh(x)["y"], a)
                        code = 0
                    finally:
                        os._exit(code)
                _, status = os.waitpid(pid, 0)
                assert status == 0, status
                for _ in range(20): check(m(x))
    """)


# llvm/llvm-project#75290, which the runtime of GCC 12 does not have.
@pytest.mark.skipif(UNDER_ASAN, reason="AddressSanitizer's locks are not held over a fork: a child may hang in malloc")
def test_fork_while_other_threads_call():
    succeeds("""
        stop = threading.Event()
        def calls():
            with torch.inference_mode():
                while not stop.is_set(): m(x)
        threads = [threading.Thread(target=calls) for _ in range(3)]
        for t in threads: t.start()
        try:
            for _ in range(10):
                pid = os.fork()
                if pid == 0:
                    code = 1
                    try:
                        with torch.inference_mode():
                            for _ in range(10): check(m(x))
                        code = 0
                    finally:
                        os._exit(code)
                deadline = time.monotonic() + 60
                while True:
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done: break
                    if time.monotonic() > deadline:
                        os.kill(pid, signal.SIGABRT)
                        raise SystemExit("the child hangs")
                    time.sleep(0.01)
                assert status == 0, status
        finally:
            stop.set()
            for t in threads: t.join()
    """)


def test_fork_during_a_trace_of_another_thread():
    """The child has no such thread: it traces on its own, with the collector as the program set it."""
    succeeds("""
        class Slow(nn.Module):
            def forward(self, x):
                for _ in range(20): x = x.mm(x).tanh()
                return x
        slow, big, thresholds = Slow().eval(), torch.randn(400, 400), gc.get_threshold()
        finished = []
        def calls():
            with torch.no_grad(): slow(big)
            finished.append(1)
        for _ in range(3):
            slow = Slow().eval()
            before = cuvil.stats()["traces"]
            thread = threading.Thread(target=calls)
            thread.start()
            while cuvil.stats()["traces"] == before: time.sleep(0.001)
            time.sleep(0.02)
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    signal.alarm(60)
                    assert gc.get_threshold() == thresholds and gc.isenabled()
                    fresh = nn.Sequential(Block()).eval()
                    fresh.load_state_dict(m.state_dict())
                    planned = cuvil.stats()["planned"]
                    with torch.no_grad():
                        for _ in range(6): check(fresh(x))
                    assert cuvil.stats()["planned"] > planned, cuvil.stats()
                    # Not joined: from 3.13 on a join waits for the system's thread, which in such a child may hang at its
                    # end in MKL (mm_cleanup_thread_cbk spins, without Cuvil too), whose memory was busy at the fork.
                    finished.clear()
                    for _ in range(4): threading.Thread(target=calls).start()
                    while len(finished) < 4: time.sleep(0.001)
                    code = 0
                finally:
                    os._exit(code)
            _, status = os.waitpid(pid, 0)
            assert status == 0, status
            thread.join()
        assert gc.get_threshold() == thresholds
    """)


def test_keyboard_interrupts_leave_everything_working():
    succeeds("""
        import random
        raised = 0
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        with torch.no_grad():
            for i in range(200):
                try:
                    signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 4e-3))
                    model = nn.Sequential(Block()).eval()
                    for _ in range(40): model(x)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    raised += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert raised > 20, raised
            for _ in range(20): check(m(x))
            fresh = nn.Sequential(Block()).eval()
            before = cuvil.stats()["planned"]
            for _ in range(10): fresh(x)
            assert cuvil.stats()["planned"] > before
    """)


def test_exit_with_plans_alive():
    output = succeeds("""
        keep = []
        with torch.no_grad():
            for _ in range(10): keep.append(m(x))
        sys.modules["kept_alive"] = m
        print("done", flush=True)
    """)
    assert output.strip() == "done"


def test_exit_with_threads_calling():
    program = """
        if not ON: cuvil.disable()
        def calls():
            with torch.no_grad():
                while True: m(x)
        for _ in range(3): threading.Thread(target=calls, daemon=True).start()
        with torch.no_grad():
            for _ in range(50): m(x)
        print("done", flush=True)
    """
    # Some versions of Python and torch abort by themselves when daemon threads are inside torch at exit.
    eager = python(program.replace("ON", "False"))
    result = python(program.replace("ON", "True"))
    assert result.stdout.strip() == "done"
    assert result.returncode == 0 or eager.returncode != 0, (result.returncode, result.stderr[-3000:])


def test_exit_during_background_preparation():
    for _ in range(3):
        output = succeeds(
            """
            models = [nn.Sequential(*[Block() for _ in range(1)]).eval() for _ in range(20)]
            with torch.no_grad():
                for model in models:
                    for _ in range(2): model(x)
            print("done", flush=True)
            """,
            CUVIL_PREPARE="",
            CUVIL_ADOPT="",
        )
        assert output.strip() == "done"


def test_exit_by_exception_signal_and_os_exit():
    program = "\nwith torch.no_grad():\n    for _ in range(8): m(x)\n"
    assert python(program + "raise ValueError('end')").returncode == 1
    assert python(program + "sys.exit(7)").returncode == 7
    assert python(program + "os._exit(9)").returncode == 9
    assert python(program + "os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)").returncode == -signal.SIGTERM


def test_gc_callbacks_and_finalizers_at_exit_may_call_models():
    output = succeeds("""
        import atexit
        class Last:
            def __del__(self):
                with torch.no_grad(): print("del", m(x)["n"], flush=True)
        last = Last()
        with torch.no_grad():
            for _ in range(8): m(x)
        atexit.register(lambda: print("atexit", m(x)["n"], flush=True))
        del last
    """)
    assert output.split() == ["del", "4", "atexit", "4"]


def test_collector_with_every_threshold():
    succeeds("""
        with torch.no_grad():
            for threshold in ((1, 1, 1), (2, 2, 2), (50, 3, 3), (0, 0, 0)):
                gc.set_threshold(*threshold)
                model = nn.Sequential(Block()).eval()
                reference = None
                for _ in range(6):
                    y = model(x)["y"]
                    assert reference is None or torch.equal(y, reference)
                    reference = y
                check(m(x))
    """)


def test_python_development_mode():
    succeeds(
        """
        with torch.no_grad():
            for _ in range(20): check(m(x))
        assert cuvil.stats()["planned"] > 0
        """,
        "-X",
        "dev",
        "-W",
        "ignore",
    )
