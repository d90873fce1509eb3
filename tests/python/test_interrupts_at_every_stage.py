"""KeyboardInterrupt during a trace, a comparison, a served call: it is raised as in eager, and everything works after.

The signal comes from a timer while an operator runs without the GIL, so each stage is hit on purpose.
"""

from __future__ import annotations

import pytest
from soak_process import NOT_CUVIL, succeeds

pytestmark = pytest.mark.skipif(NOT_CUVIL, reason="looks at cuvil's own process behaviour")

PROGRAM = """
class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)
    def forward(self, x, random=False):
        y = x
        for _ in range(10): y = torch.mm(y, x).tanh()
        return {"y": torch.nn.functional.dropout(y, 0.5, random), "n": x.shape[0]}
signal.signal(signal.SIGALRM, signal.default_int_handler)
big = torch.randn(400, 400)
cuvil.disable()
with torch.no_grad():
    Slow()(big)
    start = time.perf_counter()
    plain = Slow()(big)["y"]
    seconds = time.perf_counter() - start
cuvil.enable()

def interrupted(model, after, **kwargs):
    signal.setitimer(signal.ITIMER_REAL, after)
    try:
        model(big, **kwargs)
        while True: pass  # The call ended before the signal: it is delivered here.
    except KeyboardInterrupt as e:
        frames, traceback = [], e.__traceback__
        while traceback is not None:
            frames.append(traceback.tb_frame.f_code.co_name)
            traceback = traceback.tb_next
        assert e.__cause__ is None and e.__context__ is None, (e.__cause__, e.__context__)
        return frames
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
"""


@pytest.mark.parametrize("stage", ["traced", "compared", "served"])
def test_an_interrupt(stage: str) -> None:
    """Traced, the call is aborted at the next instruction; compared, at the latest by eager's part of the call."""
    succeeds(
        PROGRAM
        + f"""
STAGE = {stage!r}
with torch.no_grad():
    inside = 0
    # Twelve moments within a call; on a busy machine more rounds until enough of them have hit it.
    for attempt in range(120):
        if attempt >= 12 and (STAGE == "served" or inside >= 4): break
        model = Slow().eval()
        for _ in range(("traced", "compared", "served").index(STAGE)): model(big)
        threads, blocks = threading.active_count(), gc.isenabled()
        before = cuvil.stats()
        # A comparing call runs the plan and then eager.
        length = seconds * (2 if STAGE == "compared" else 1)
        inside += "forward" in interrupted(model, length * (0.1 + 0.07 * (attempt % 12)))
        assert gc.isenabled() and gc.get_threshold()[0] < 10_000
        for _ in range(5):
            y = model(big)
            assert torch.equal(y["y"], plain) and y["n"] == 400
        after = cuvil.stats()
        assert after["planned"] >= before["planned"] + 2, (attempt, before, after)
        assert after["compare_failures"] == 0 and after["faults"] == 0, after
    # A plan has no frame: the interrupt is raised when it has returned, with its result thrown away.
    assert inside == 0 if STAGE == "served" else inside >= 4, inside
"""
    )


def test_an_interrupted_random_plan_leaves_the_generator_as_one_call_would() -> None:
    succeeds(
        PROGRAM
        + """
with torch.no_grad():
    model = Slow().eval()
    torch.manual_seed(4)
    states = [torch.get_rng_state()]
    for _ in range(12):
        model(big, random=True)
        states.append(torch.get_rng_state())
    for stage in range(8):
        model = Slow().eval()
        torch.manual_seed(4)
        for _ in range(stage): model(big, random=True)
        assert torch.equal(torch.get_rng_state(), states[stage])
        interrupted(model, seconds * 0.4, random=True)
        # The draw is the last operator: eager was aborted before it or, late, after it.
        now = torch.get_rng_state()
        assert torch.equal(now, states[stage]) or torch.equal(now, states[stage + 1]), stage
        torch.set_rng_state(states[stage])
        for i in range(stage, 10):
            model(big, random=True)
            assert torch.equal(torch.get_rng_state(), states[i + 1]), (stage, i)
"""
    )


def test_a_stream_of_interrupts_with_plans_prepared_in_the_background() -> None:
    succeeds(
        """
        import random
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        raised = 0
        with torch.no_grad():
            end = time.monotonic() + SECONDS
            while time.monotonic() < end:
                model = nn.Sequential(Block()).eval()
                model.load_state_dict(m.state_dict())
                try:
                    try:
                        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 1e-2))
                        for _ in range(200): check(model(x))
                    finally:
                        signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    raised += 1
            for _ in range(300): check(m(x))
        assert raised > 20, raised
        assert gc.isenabled() and gc.get_threshold()[0] < 10_000
        stats = cuvil.stats()
        assert stats["planned"] > 0 and stats["compare_failures"] == 0 and stats["faults"] == 0, stats
        """,
        CUVIL_PREPARE="",
        CUVIL_ADOPT="",
    )
