"""The smallest model that people run: 4 × (Linear(64, 64), ReLU), batch 1, where Python is most of eager's time.

Baseline: eager, and torch.compile in its default mode; all three interleaved in one process, one thread.
Unit:     µs per call, median and p99.
Budget:   planned call at least 2.5 times faster than eager and than torch.compile (goal 4).

    python benchmarks/mlp_bench.py [--no-compile] [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["CUVIL_PREPARE"] = "sync"
os.environ["CUVIL_ADOPT"] = "always"

import cuvil
import torch
from cuvil import models
from cuvil.explanation import duration
from cuvil.measure import interleaved, save, table

BUDGET = 2.5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = models.build("mlp")
    (x,) = model.args
    cuvil.enable()
    subjects: dict[str, Any] = {"eager": cuvil.opt_out(models.twin(model.module)), "cuvil": model.module}
    note = "left out"
    with torch.inference_mode():
        expected = subjects["eager"](x)
        if not options.no_compile:
            compiled: Any = cuvil.opt_out(torch.compile(cuvil.opt_out(models.twin(model.module))))
            try:
                compiled(x)
            except Exception as error:  # noqa: BLE001 - a rival that cannot run is a line of the table.
                note = f"cannot run: {(str(error).strip() or type(error).__name__).splitlines()[0]}"[:160]
            else:
                note = "ran"
                subjects["torch.compile"] = compiled
        for subject in subjects.values():
            for _ in range(50):
                subject(x)
        equal = torch.equal(model.module(x), expected)
        before = cuvil.stats()["planned"]

        def call(module: Any) -> Callable[[], object]:
            return lambda: module(x)

        timings = interleaved({k: call(v) for k, v in subjects.items()}, seconds=options.seconds, max_rounds=10**6)
        served = (cuvil.stats()["planned"] - before) / timings["cuvil"].n
    ours = timings["cuvil"].median_ns
    rows = [
        [name, duration(t.median_ns), duration(t.p99_ns), f"{t.median_ns / ours:.2f}×", str(t.n)]
        for name, t in timings.items()
    ]
    print(table(["", "median", "p99", "of cuvil's time", "n"], rows))
    print(f"torch.compile: {note}; planned calls {served:.0%}; same values as eager: {equal}")
    if served < 1:
        print(cuvil.explain(model.module))
    ratios = {name: t.median_ns / ours for name, t in timings.items() if name != "cuvil"}
    met = equal and served > 0.99 and all(ratio >= BUDGET for ratio in ratios.values())
    print(f"budget ({BUDGET}×) {'met' if met else 'NOT met'}")
    if options.json:
        save(
            options.json,
            ["python", *sys.argv],
            results={k: t.to_dict() for k, t in timings.items()},
            ratios=ratios,
            planned_share=served,
            torch_compile=note,
        )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
