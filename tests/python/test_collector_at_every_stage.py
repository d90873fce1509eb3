"""The garbage collector is as the program set it, and collections at every stage of a plan's life change nothing."""

from __future__ import annotations

import pytest
from soak_process import NOT_CUVIL, succeeds

pytestmark = pytest.mark.skipif(NOT_CUVIL, reason="looks at cuvil's own process behaviour")


def test_the_model_sees_and_sets_the_collectors_state() -> None:
    """Also in the call that is traced, which keeps the collector from starting by itself."""
    succeeds("""
        class Looks(nn.Module):
            def forward(self, x): return x + gc.isenabled() + gc.get_threshold()[0]
        class Disables(nn.Module):
            def forward(self, x): gc.disable(); return x + 1
        class Sets(nn.Module):
            def forward(self, x): gc.set_threshold(123, 4, 5); return x + 1
        class Collects(nn.Module):
            def forward(self, x):
                cycle = []
                cycle.append(cycle)
                del cycle
                return x + gc.collect()
        class Raises(nn.Module):
            def forward(self, x): raise ValueError
        one = torch.ones(1)
        gc.set_threshold(500, 6, 7)
        with torch.no_grad():
            for _ in range(4):
                assert Looks()(one).item() == 502
                gc.collect()
                assert Collects()(one).item() >= 2
                gc.disable()
                assert Looks()(one).item() == 501
                gc.enable()
                try: Raises()(one)
                except ValueError: pass
                check(m(x))
                assert gc.get_threshold() == (500, 6, 7) and gc.isenabled()
            for _ in range(4):
                Disables()(one)
                assert not gc.isenabled()
                gc.enable()
                Sets()(one)
                assert gc.get_threshold() == (123, 4, 5)
                gc.set_threshold(500, 6, 7)
    """)


def test_another_thread_may_use_the_collector_during_a_trace() -> None:
    succeeds("""
        class Slow(nn.Module):
            def forward(self, x):
                for _ in range(12): x = x.mm(x).tanh()
                return x
        big, seen = torch.randn(400, 400), []
        def user():
            import timeit, weakref
            class Node: pass
            while not seen or cuvil.stats()["captures"] < 3:
                timeit.timeit("pass", number=10)  # turns the collector off, and on again if it was on
                node = Node()
                node.me, ref = node, weakref.ref(node)
                del node
                gc.collect()
                assert ref() is None
                seen.append(gc.isenabled())
        thread = threading.Thread(target=user)
        thread.start()
        with torch.no_grad():
            while thread.is_alive(): Slow()(big)
        assert all(seen), seen
        assert gc.isenabled() and gc.get_threshold()[0] < 100_000
        # What another thread asks for during a trace stays.
        def off():
            while cuvil.stats()["traces"] == before: pass
            gc.disable()
        for _ in range(3):
            gc.enable()
            before = cuvil.stats()["traces"]
            thread = threading.Thread(target=off)
            thread.start()
            with torch.no_grad():
                while thread.is_alive(): Slow()(big)
            assert not gc.isenabled()
    """)


@pytest.mark.parametrize("prepare", ["sync", "background"])
def test_every_allocation_collects(prepare: str) -> None:
    """Finalizers and callbacks run models, make garbage and drop models wherever a collection may start."""
    environment = {} if prepare == "sync" else {"CUVIL_PREPARE": "", "CUVIL_ADOPT": ""}
    succeeds(
        """
        import dataclasses
        from collections import namedtuple
        Pair = namedtuple("Pair", "a b")
        @dataclasses.dataclass
        class Out:
            y: torch.Tensor
            pair: Pair
        class Shapes(nn.Module):
            def __init__(self):
                super().__init__()
                self.lin = nn.Linear(16, 16)
            def forward(self, x, drop=False):
                y = torch.nn.functional.dropout(self.lin(x), 0.5, drop)
                return Out(y, Pair(y.mean(), [y, {"n": len(x)}]))
        other = nn.Sequential(Block()).eval()
        inside = []
        class Finalized:
            def __init__(self): self.me = self
            def __del__(self):
                if inside: return
                inside.append(1)
                try:
                    with torch.no_grad(): assert other(x)["n"] == 4
                finally: inside.pop()
        failures = []
        sys.unraisablehook = lambda unraisable: failures.append(repr(unraisable.exc_value))
        collections = []
        gc.callbacks.append(lambda phase, info: collections.append(phase))
        torch.manual_seed(3)
        first = Shapes().eval()
        cuvil.disable()
        with torch.no_grad():
            want = [first(x[:n]).y.clone() for n in (2, 4)]
            torch.manual_seed(5)
            dropped = [first(x, True).y.clone() for _ in range(8)]
        cuvil.enable()
        with torch.no_grad():
            for threshold in ((1, 1, 1), (2, 1, 1), (7, 2, 2)):
                gc.set_threshold(*threshold)
                model = Shapes().eval()
                model.load_state_dict(first.state_dict())
                for _ in range(12):
                    Finalized()
                    for n, y in zip((2, 4), want):
                        out = model(x[:n])
                        assert torch.equal(out.y, y) and out.pair.b[1] == {"n": n}
                torch.manual_seed(5)
                for y in dropped:
                    Finalized()
                    assert torch.equal(model(x, True).y, y)
                for _ in range(3):
                    dies = nn.Sequential(Block()).eval()
                    dies.__dict__["me"] = dies
                    for _ in range(4): dies(x)
                    del dies
                assert gc.get_threshold() == threshold, gc.get_threshold()
        gc.set_threshold(700, 10, 10)
        gc.collect()
        assert not failures, failures[:3]
        assert len(collections) > 100
        """,
        **environment,
    )


def test_a_finalizer_replaces_weights_wherever_a_collection_starts() -> None:
    """Between the guards and the plan's run, say: every result is of the old or the new weights."""
    succeeds("""
        weights = [nn.Parameter(torch.randn(16, 16)) for _ in range(2)]
        model = nn.Sequential(nn.Linear(16, 16)).eval()
        results = []
        cuvil.disable()
        with torch.no_grad():
            for w in weights:
                model[0].weight = w
                results.append(model(x).clone())
        cuvil.enable()
        class Replaces:
            def __init__(self): self.me = self
            def __del__(self):
                model[0].weight = weights[model[0].weight is weights[0]]
        counts = [0, 0]
        with torch.no_grad():
            for turn in range(max(300, CALLS // 10)):
                gc.set_threshold(1 + turn % 60, 1, 1)
                Replaces()
                y = model(x)
                gc.set_threshold(0)
                found = [torch.equal(y, r) for r in results]
                assert any(found), turn
                counts[found.index(True)] += 1
        assert min(counts) > 0 and cuvil.stats()["planned"] > 100, (counts, cuvil.stats())
    """)
