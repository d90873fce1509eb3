"""What a planned call costs beside its operators: guards, and the dispatch around them.

Baseline: none; the absolute is the subject. torch's own work is not in it.
Unit:     µs per call, warm, medians of calls back to back.
          "guards": finding that signature and guards of the plan fit.
          "whole": the call from outside to its result, with guards: the interception, the decision, the tensors of the
          call and the weights, pinned while the plan runs, the GIL given up and taken back, the executor, the result
          rebuilt. The plan's program is replaced by one with the same inputs, weights and form of result that has no
          operators, but one `detach` for each tensor that it returns. (A run also clears 8 bytes for each tensor of the
          program; those of operators that are left out are not counted: 5 kB for ResNet-50.)
          "detach": what those operators take, found by a program that has two in the place of each one; the second
          includes letting go of the first one's tensor. "dispatch" is "whole" without them.
          Blocks of all take turns, so that a machine that is slow for a while is slow for all.
          "in calls" is the mean of the guard checks that the engine timed within real calls, where the operators in
          between have evicted from the caches what the guards look at.
Budget:   dispatch, median: ResNet-50 5, BERT-base 5, decoder of 32 layers 10.

    python benchmarks/guards_bench.py [--json FILE]

On a machine that others use look at "least", and compare two states of the code by runs that take turns.
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

BLOCKS = 20
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
        call = (model.module, model.args, model.kwargs, checks // BLOCKS)
        guards: list[int] = []
        whole: list[int] = []
        twice: list[int] = []
        if after["planned"] > before["planned"]:
            for _ in range(BLOCKS):
                guards += _native._check_times(*call)
                if guards:  # otherwise only modules inside have plans
                    whole += _native._dispatch_times(*call, 1)
                    twice += _native._dispatch_times(*call, 2)
    samples = after["guard_samples"] - before["guard_samples"]
    explanation = cuvil.explain(model.module)
    plans = [plan for module in explanation.to_dict()["modules"] for plan in module.get("plans", [])]
    detach_ns = statistics.median(twice) - statistics.median(whole) if whole else 0.0
    return {
        "name": name,
        "guards_warm": Timing.of(guards).to_dict() if guards else None,
        "whole_warm": Timing.of(whole).to_dict() if whole else None,
        "detach_us": detach_ns / 1e3,
        "dispatch_us": (statistics.median(whole) - detach_ns) / 1e3 if whole else None,
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
    parser.add_argument("--checks", type=int, default=5_000, help="checks, and calls without operators (default 5000)")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    cuvil.enable()
    results = [measure(name, options.calls, options.checks) for name in options.names]

    def shown(timing: dict[str, float] | None, *names: str) -> list[str]:
        return ["-" if timing is None else f"{timing[name] / 1e3:.2f}" for name in names]

    rows = [
        [
            r["name"],
            "-" if r["dispatch_us"] is None else f"{r['dispatch_us']:.2f}",
            f"{r['budget_us']:.0f}",
            *shown(r["whole_warm"], "median_ns", "p99_ns", "min_ns"),
            f"{r['detach_us']:.2f}",
            *shown(r["guards_warm"], "median_ns", "p99_ns", "min_ns"),
            "-" if r["in_calls_us"] is None else f"{r['in_calls_us']:.0f}",
            f"{r['guards']:,}",
            f"{r['planned_share']:.0%}",
        ]
        for r in results
    ]
    heads = [
        "",
        "dispatch µs",
        "budget",
        "whole µs",
        "p99",
        "least",
        "detach",
        "guards µs",
        "p99",
        "least",
        "in calls",
        "guards",
        "planned calls",
    ]
    print(table(heads, rows))
    for result in results:
        if not result["planned_share"]:
            print(f"{result['name']}: {result['state']}")
    if options.json:
        save(options.json, ["python", *sys.argv], results=results)
    met = all(r["dispatch_us"] is not None and r["dispatch_us"] <= r["budget_us"] for r in results)
    print("budget met" if met else "budget NOT met")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
