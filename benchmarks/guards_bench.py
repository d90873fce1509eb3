"""What a planned call costs before the plan runs: interception, lookup, guards, collecting tensors.

Baseline: none; the absolute is the subject. torch's own work is not in it.
Unit:     µs per call, warm; median over blocks of calls of the engine's own clock around that part.
Budget:   ResNet-50 5, BERT-base 5, decoder of 32 layers 10.

    python benchmarks/guards_bench.py [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys

os.environ["CUVIL_PREPARE"] = "sync"
os.environ["CUVIL_ADOPT"] = "always"

import cuvil
import torch
from cuvil import models
from cuvil.measure import Progress, save, table

BUDGETS_US = {"resnet50": 5.0, "bert-base": 5.0, "decoder32": 10.0}


def measure(name: str, calls_per_block: int, blocks: int) -> dict[str, object]:
    model = models.build(name)
    with torch.inference_mode():
        for _ in range(6):
            model.module(*model.args, **model.kwargs)
        samples_us: list[float] = []
        progress = Progress(f"{name}: timing")
        planned = 0
        for block in range(blocks):
            before = cuvil.stats()
            for _ in range(calls_per_block):
                model.module(*model.args, **model.kwargs)
            after = cuvil.stats()
            planned += after["planned"] - before["planned"]
            timed = after["guard_samples"] - before["guard_samples"]
            if timed:
                samples_us.append((after["guard_ns_total"] - before["guard_ns_total"]) / timed / 1e3)
            progress((block + 1) / blocks)
        progress.close()
    record = cuvil.explain(model.module).to_dict()
    guards = [sum(plan.get("guards", {}).values()) for module in record["modules"] for plan in module.get("plans", [])]
    return {
        "name": name,
        "median_us": statistics.median(samples_us) if samples_us else None,
        "max_us": max(samples_us, default=None),
        "blocks": len(samples_us),
        "guards": max(guards, default=0),
        "planned_share": planned / (blocks * calls_per_block),
        "budget_us": BUDGETS_US[name],
        "state": cuvil.explain(model.module).summary(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(BUDGETS_US), help="which of the three models")
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--calls", type=int, default=20, help="calls per block")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    cuvil.enable()
    results = [measure(name, options.calls, options.blocks) for name in options.names]
    rows = [
        [
            str(r["name"]),
            "-" if r["median_us"] is None else f"{r['median_us']:.2f}",
            "-" if r["max_us"] is None else f"{r['max_us']:.2f}",
            f"{r['budget_us']:.0f}",
            str(r["guards"]),
            f"{r['planned_share']:.0%}",
        ]
        for r in results
    ]
    print(table(["", "median µs", "worst block µs", "budget µs", "guards", "planned calls"], rows))
    for result in results:
        if not result["planned_share"]:
            print(f"{result['name']}: {result['state']}")
    if options.json:
        save(options.json, ["python", *sys.argv], results=results)
    met = all(r["median_us"] is not None and r["median_us"] <= r["budget_us"] for r in results)  # type: ignore[operator]
    print("budget met" if met else "budget NOT met")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
