"""The interpreter ends while plans are traced, prepared, served or owned by what dies last: no crash, no hang.

scripts/pytest_asan.sh runs these programs under AddressSanitizer.
"""

from __future__ import annotations

import pytest
from soak_process import NOT_CUVIL, python

pytestmark = pytest.mark.skipif(NOT_CUVIL, reason="looks at cuvil's own process behaviour")

BACKGROUND = {"CUVIL_PREPARE": "", "CUVIL_ADOPT": ""}

WARM = """
with torch.no_grad():
    for _ in range(8): check(m(x))
class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)
    def forward(self, x):
        for _ in range(30): x = x.mm(x).tanh()
        return x
slow, big = Slow().eval(), torch.randn(300, 300)
def serve_slow(warm=3):
    with torch.no_grad():
        for _ in range(warm): slow(big)
def daemon(body):
    def run():
        with torch.no_grad():
            while True: body()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread
"""


def ends(program: str, status: int = 0, **environment: str) -> str:
    """Runs it. Torch itself may abort when threads are inside of it at the end: then Cuvil may, in the same way."""
    result = python(WARM + program, **environment)
    if result.returncode != status:
        eager = python("cuvil.disable()\n" + WARM + program, **environment)
        assert eager.returncode == result.returncode, (result.returncode, result.stdout[-1000:], result.stderr[-4000:])
    assert "Sanitizer" not in result.stderr, result.stderr[-4000:]
    return result.stdout + result.stderr


WAYS = {
    "end": ("", 0),
    "sys.exit": ("sys.exit(5)", 5),
    "os._exit": ("os._exit(6)", 6),
    "exception": ("raise ValueError('the end')", 1),
    "SystemExit in a call": ("with torch.no_grad(): Ends()(x)", 7),
    "KeyboardInterrupt": ("signal.raise_signal(signal.SIGINT)", -2),
    "exception at exit": ("import atexit\natexit.register(lambda: 1 / 0)", 0),
}


@pytest.mark.parametrize(
    ("stage", "way"),
    [("served", way) for way in WAYS] + [(stage, "end") for stage in ("traced", "compared", "prepared")],
)
def test_the_main_thread_ends_while_daemons_are_inside_of_calls(stage: str, way: str) -> None:
    """The daemons wake up in a dying interpreter, at the end of an operator."""
    program = "class Ends(nn.Module):\n    def forward(self, x): sys.exit(7)\n"
    if stage == "served":
        program += "serve_slow()\nfor _ in range(3): daemon(lambda: slow(big))\n"
    elif stage == "traced":
        program += "daemon(lambda: Slow()(big))\n"
    elif stage == "compared":
        program += "serve_slow(1)\ndaemon(lambda: slow(big))\n"
    else:
        program += "for _ in range(2): daemon(lambda: nn.Sequential(Block()).eval()(x))\n"
    body, status = WAYS[way]
    ends(program + "time.sleep(0.15)\n" + body, status, **(BACKGROUND if stage == "prepared" else {}))


OWNERS = {
    "a module's globals": "import types\nsys.modules['keeps'] = types.ModuleType('keeps')\nsys.modules['keeps'].m = m",
    "a cycle": "m.__dict__['me'] = [m, lambda: m]",
    "a class attribute": "Block.keep = m",
    "builtins": "import builtins\nbuiltins.keep = m",
    "a thread-local": "local = threading.local()\nlocal.m = m",
    "a context variable": "import contextvars\nv = contextvars.ContextVar('v')\nv.set(m)",
    "atexit": "import atexit\natexit.register(lambda m=m: check(m(x)))",
    "a weakref callback": "import weakref\nr = weakref.ref(m[0], lambda _, m=m: m(x))",
    "a finalizer": """
class Last:
    def __init__(self): self.me = self
    def __del__(self, m=m, x=x, no_grad=torch.no_grad):
        with no_grad(): m(x)
last = Last()""",
    "a generator": "def g():\n    try: yield m(x)\n    finally: m(x)\ng = g()\nnext(g)",
    "a result": "with torch.no_grad(): sys.modules['result'] = m(x)",
    "a tensor's attribute": "x.m = m\nsys.modules['tensor'] = x",
    "many": "many = [nn.Sequential(Block()).eval() for _ in range(30)]\nfor k in range(4):\n    for o in many: o(x)",
}


@pytest.mark.parametrize("prepare", ["sync", "background"])
def test_plans_live_in_what_dies_last(prepare: str) -> None:
    environment = BACKGROUND if prepare == "background" else {}
    output = ends("\n".join(OWNERS.values()) + "\nprint('done', flush=True)", **environment)
    assert "done" in output and "Traceback" not in output, output[-3000:]


def test_the_end_comes_during_background_preparation() -> None:
    for pause in ("0", "0.001", "0.01"):
        ends(
            f"""
            models = [nn.Sequential(*[nn.Linear(16, 16) for _ in range(40)]).eval() for _ in range(6)]
            with torch.no_grad():
                for _ in range(2):
                    for model in models: model(x)
            time.sleep({pause})
            """.replace("\n            ", "\n"),
            **BACKGROUND,
        )


def test_switching_off_and_on_at_exit() -> None:
    output = ends("""
import atexit
def last():
    cuvil.disable(); check(m(x))
    try: cuvil.enable()
    except RuntimeError as e: print("told:", e)
    check(m(x)); cuvil.stats(); cuvil.explain(m); cuvil.reset()
atexit.register(last)
cuvil.disable(); cuvil.enable()
""")
    assert "Traceback" not in output, output[-3000:]
