"""Weights that another thread replaces while calls trace, compare and serve: a result is one of eager's, never a mix.

One replacement is atomic for Python (one parameter's data, one entry of a dict); eager sees the old or the new one, so
every result must equal one of the two exactly.
"""

from __future__ import annotations

import textwrap

import pytest
from soak_process import NOT_CUVIL, python, succeeds

pytestmark = pytest.mark.skipif(NOT_CUVIL, reason="looks at cuvil's own process behaviour")

# `replace(i)` and what it needs comes from the test; threads call meanwhile.
THREADS = """
import copy
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.head = nn.Linear(16, 16), nn.Linear(16, 4)
    def forward(self, x):
        return self.head(torch.relu(self.fc(x)))
m = Net().eval()
old, new = m.fc, nn.Linear(16, 16)
old_state = {k: v.clone() for k, v in m.state_dict().items()}
new_state = {**old_state, **{"fc." + k: v.clone() for k, v in new.state_dict().items()}}
old_weight, new_weight = old.weight, nn.Parameter(torch.randn(16, 16))
PREPARE
cuvil.disable()
results = []
with torch.no_grad():
    for i in range(2):
        replace(i)
        results.append(m(x).clone())
assert not torch.equal(*results)
cuvil.enable()

stop, errors, counts = threading.Event(), [], [0, 0]
def calls():
    try:
        with torch.no_grad():
            while not stop.is_set():
                y = m(x)
                found = [torch.equal(y, r) for r in results]
                assert any(found), y
                counts[found.index(True)] += 1
    except BaseException as e:
        errors.append(repr(e))
def replacing():
    i = 0
    while not stop.is_set():
        replace(i)
        i += 1
        PAUSE
sys.setswitchinterval(1e-4)
threads = [threading.Thread(target=calls) for _ in range(4)] + [threading.Thread(target=replacing)]
for t in threads: t.start()
time.sleep(SECONDS)
stop.set()
for t in threads: t.join(60)
assert not errors, errors[:3]
assert not any(t.is_alive() for t in threads)
assert min(counts) > 0, counts
# What a thread left behind is noticed as always.
with torch.no_grad():
    for i in (0, 1, 0, 1):
        replace(i)
        for _ in range(4): assert torch.equal(m(x), results[i])
print(counts, {k: cuvil.stats()[k] for k in ("planned", "eager", "traces", "refused", "compare_failures")})
assert SERVED == 0 or cuvil.stats()["planned"] > SERVED, cuvil.stats()
"""

REPLACEMENTS = {
    # The same parameter with other data.
    "data": """
data = [old_weight.detach().clone(), new_weight.detach().clone()]
def replace(i): m.fc.weight.data = data[i % 2]
""",
    "parameter": """
def replace(i): m.fc.weight = (old_weight, new_weight)[i % 2]
""",
    "module": """
def replace(i): m.fc = (old, new)[i % 2]
""",
    # Never the same object twice: every replacement ends the plans made so far.
    "fresh_module": """
def replace(i): m.fc = copy.deepcopy((old, new)[i % 2])
""",
    "forward": """
forwards = [nn.Linear.forward, lambda self, x: torch.nn.functional.linear(x, self.weight * 2, self.bias)]
def replace(i): m.fc.__dict__["forward"] = forwards[i % 2].__get__(m.fc)
""",
}


@pytest.mark.parametrize(("prepare", "pause"), [("sync", "pass"), ("background", "time.sleep(0.002)")])
@pytest.mark.parametrize("what", REPLACEMENTS)
def test_trap_10_results_are_of_the_old_or_the_new_weights(what: str, prepare: str, pause: str) -> None:
    program = THREADS.replace("PREPARE", REPLACEMENTS[what]).replace("PAUSE", pause)
    # Calls that are never the same twice may be served by no plan.
    program = program.replace("SERVED", "0" if what in ("fresh_module", "forward") or prepare != "sync" else "100")
    environment = {} if prepare == "sync" else {"CUVIL_PREPARE": "", "CUVIL_ADOPT": ""}
    succeeds(program, **environment)


def test_load_state_dict_during_calls() -> None:
    """Not atomic: parameters are copied one after the other. Nothing breaks, and the end is exact."""
    program = THREADS.replace(
        "PREPARE",
        "def replace(i): m.load_state_dict((old_state, new_state)[i % 2])",
    )
    program = program.replace("assert any(found), y", "assert y.shape == (4, 4) and bool(torch.isfinite(y).all()), y")
    program = program.replace("counts[found.index(True)] += 1", "counts[found[0]] += 1")
    succeeds(program.replace("PAUSE", "time.sleep(0.001)").replace("SERVED", "100"))


# A call's lines are told apart by their numbers; between them an operator runs for some milliseconds without the GIL.
PUT_BACK = """
code = Reads.forward.__code__
m = Reads().eval()
big = torch.randn(500, 500)
main = threading.main_thread().ident
def line():
    f = sys._current_frames().get(main)
    while f is not None:
        if f.f_code.co_filename == code.co_filename and f.f_code.co_name == "forward" and f.f_code.co_firstlineno == (
            code.co_firstlineno
        ):
            return f.f_lineno - code.co_firstlineno
        f = f.f_back
    return None
stop = False
def put_back():
    while not stop:
        n = line()
        want = n is not None and n in NEW_AT
        if is_new() is not want: use(want)
        time.sleep(0.0005)
with torch.no_grad():
    use(False)
    cuvil.disable()
    plain = m(big)
    cuvil.enable()
    thread = threading.Thread(target=put_back)
    thread.start()
    for attempt in range(30):
        cuvil.reset()
        mixed = []
        for _ in range(2):
            time.sleep(0.005)
            mixed.append(not torch.equal(m(big), plain))
        # On a busy machine the other thread may come too late for the call that is traced or for the one compared.
        if all(mixed): break
    assert all(mixed), "the other thread was never in time"
    noticed = cuvil.stats()["refusals"]
    stop = True
    thread.join()
    use(False)
    for i in range(6): assert torch.equal(m(big), plain), i
    assert noticed.get("concurrent-change", 0) > 0, noticed
"""


# Each reads the same place twice, with the other thread's turn in between, and again before the call's end.
def scaled_by(read: str, before: str = "", after: str = "") -> str:
    """A class body whose forward reads the same scale twice."""
    return f"""{before}
        def forward(self, x):
            y = x * {read}
            y = y.mm(x)
            y = y * {read}
            return y.mm(x)
    NEW_AT = (2, 3){after}
    """


def with_attribute(assignment: str) -> str:
    return f"""
        def __init__(self):
            super().__init__()
            {assignment}"""


READS = {
    "module": """
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(500, 500)
        def forward(self, x):
            y = self.fc(x)
            y = y.mm(x)  # 2: replaced
            y = self.fc(y)
            return y.mm(x)  # 4: put back
    NEW_AT = (2, 3)
    """,
    "list": scaled_by("self.scales[0]", with_attribute("self.scales = [1.0, 2.0]")),
    "global": scaled_by("SCALE", after="\n    SCALE = 1.0"),
    "class": scaled_by("self.scale", "\n        scale = 1.0"),
    "instance_dict": scaled_by("self.scale", with_attribute("self.scale = 1.0")),
    "whole_dict": scaled_by("list(self.table.values())[0]", with_attribute('self.table = {"a": 1.0}')),
    "slot": scaled_by("self.holder.scale", with_attribute("self.holder = Holder()")),
    "function": scaled_by("scale_of()", after="\n    def scale_of(value=1.0): return value"),
    "cell": scaled_by(
        "get_scale()",
        after="""
    def closure():
        scale = 1.0
        def get(): return scale
        return get
    get_scale = closure()""",
    ),
    "shape_of_a_weight": """
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(torch.ones(2))
        def forward(self, x):
            y = x * self.p.sum()
            y = y.mm(x)
            y = y * self.p.shape[0]
            return y.mm(x)
    NEW_AT = (2, 3)
    """,
}

SETTERS = {
    "module": """
    first, second = None, nn.Linear(500, 500)
    def is_new(): return m._modules["fc"] is second
    def use(new):
        global first
        first = first or m.fc
        m._modules["fc"] = second if new else first
    """,
    "list": "use, is_new = lambda new: m.scales.__setitem__(0, 3.0 if new else 1.0), lambda: m.scales[0] == 3.0",
    "global": """
    def use(new):
        global SCALE
        SCALE = 3.0 if new else 1.0
    is_new = lambda: SCALE == 3.0
    """,
    "class": "use, is_new = lambda new: setattr(Reads, 'scale', 3.0 if new else 1.0), lambda: Reads.scale == 3.0",
    "instance_dict": """
    use, is_new = lambda new: m.__dict__.__setitem__("scale", 3.0 if new else 1.0), lambda: m.scale == 3.0
    """,
    "whole_dict": """
    use, is_new = lambda new: m.table.__setitem__("a", 3.0 if new else 1.0), lambda: m.table["a"] == 3.0
    """,
    "slot": "use, is_new = lambda new: setattr(m.holder, 'scale', 3.0 if new else 1.0), lambda: m.holder.scale == 3.0",
    "function": """
    defaults = [(1.0,), (3.0,)]
    use = lambda new: setattr(scale_of, "__defaults__", defaults[new])
    is_new = lambda: scale_of.__defaults__[0] == 3.0
    """,
    "cell": """
    cell = get_scale.__closure__[0]
    use, is_new = lambda new: setattr(cell, "cell_contents", 3.0 if new else 1.0), lambda: cell.cell_contents == 3.0
    """,
    "shape_of_a_weight": """
    data = [torch.ones(2), torch.ones(3)]
    use, is_new = lambda new: setattr(m.p, "data", data[new]), lambda: m.p.shape[0] == 3
    """,
}


@pytest.mark.parametrize("what", READS)
def test_what_is_replaced_and_put_back_during_a_trace(what: str) -> None:
    """The trace would hold both states, and at its end nothing has changed."""
    holder = "class Holder:\n    __slots__ = ('scale',)\n    def __init__(self): self.scale = 1.0\n"
    definition = textwrap.dedent("    class Reads(nn.Module):" + READS[what].rstrip())
    succeeds(holder + definition + "\n" + textwrap.dedent(SETTERS[what]) + PUT_BACK)


def test_the_programs_can_fail() -> None:
    """Eager itself mixes two replacements that do not come as one."""
    program = THREADS.replace("PREPARE", "def replace(i): m.fc = (old, new)[i % 2]").replace("PAUSE", "pass")
    program = program.replace("results.append(m(x).clone())", "results.append(m(x) + 1)").replace("SERVED", "0")
    result = python(program)
    assert result.returncode != 0 and "AssertionError" in result.stderr, result.stderr[-2000:]
