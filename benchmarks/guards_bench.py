"""What a planned call costs before the plan runs: finding the plan whose signature and guards fit.

Baseline: none; the absolute is the subject. torch's own work is not in it.
Unit:     µs per call. "warm" is the median of checks back to back. "in calls" is the mean of the checks that the engine
          timed within real calls, where the operators in between have evicted from the caches what the guards look at.
Budget:   warm, ResNet-50 5, BERT-base 5, decoder of 32 layers 10.

    python benchmarks/guards_bench.py [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from typing import Any

os.environ["CUVIL_PREPARE"] = "sync"
os.environ["CUVIL_ADOPT"] = "always"

import cuvil
import torch
from cuvil import _native, models
from cuvil.measure import Timing, save, table

BUDGETS_US = {"resnet50": 5.0, "bert-base": 5.0, "decoder32": 10.0}


def measure(name: str, calls: int, checks: int) -> dict[str, Any]:
    model = models.build(name)
    with torch.inference_mode():
        for _ in range(4):
            model.module(*model.args, **model.kwargs)
        before = cuvil.stats()
        for _ in range(calls):
            model.module(*model.args, **model.kwargs)
        after = cuvil.stats()
        times = _native._check_times(model.module, model.args, model.kwargs, checks)
    samples = after["guard_samples"] - before["guard_samples"]
    explanation = cuvil.explain(model.module)
    plans = [plan for module in explanation.to_dict()["modules"] for plan in module.get("plans", [])]
    return {
        "name": name,
        "warm": Timing.of(times).to_dict() if times else None,
        "warm_us": statistics.median(times) / 1e3 if times else None,
        "in_calls_us": (after["guard_ns_total"] - before["guard_ns_total"]) / samples / 1e3 if samples else None,
        "guards": max((sum(plan.get("guards", {}).values()) for plan in plans), default=0),
        "planned_share": (after["planned"] - before["planned"]) / calls,
        "budget_us": BUDGETS_US[name],
        "state": explanation.summary(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(BUDGETS_US), help="which of the three models")
    parser.add_argument("--calls", type=int, default=48, help="real calls (default 48)")
    parser.add_argument("--checks", type=int, default=5_000, help="checks back to back (default 5000)")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    cuvil.enable()
    results = [measure(name, options.calls, options.checks) for name in options.names]

    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    rows = [
        [
            r["name"],
            shown(r["warm_us"]),
            shown(r["warm"] and r["warm"]["p99_ns"] / 1e3),
            f"{r['budget_us']:.0f}",
            shown(r["in_calls_us"]),
            f"{r['guards']:,}",
            f"{r['planned_share']:.0%}",
        ]
        for r in results
    ]
    print(table(["", "warm µs", "p99", "budget", "in calls µs", "guards", "planned calls"], rows))
    for result in results:
        if not result["planned_share"]:
            print(f"{result['name']}: {result['state']}")
    if options.json:
        save(options.json, ["python", *sys.argv], results=results)
    met = all(r["warm_us"] is not None and r["warm_us"] <= r["budget_us"] for r in results)
    print("budget met" if met else "budget NOT met")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
