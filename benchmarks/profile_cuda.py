# Question: what does a profile of a GPU see, and what does it leave behind?
# Baseline: the same calls before the first profile. Unit: ms. Budget: 99 % of kernel time with its line; kernels' time
# within 2 % of CUPTI's own; median of calls after the profile within 2 % of before.
"""Profiles of four models on a GPU, fp16, as plans.

    CUVIL_PREPARE=sync CUVIL_ADOPT=always python benchmarks/profile_cuda.py --json profile.json

Prints one line for each model, PASS or FAIL for each budget, and with --out writes each model's trace and page.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("CUVIL_PREPARE", "sync")
os.environ.setdefault("CUVIL_ADOPT", "always")
import cuvil
import torch
from cuvil.profiling import Profile
from gpu_suite import bert, llama, mlp, vision

WARM_CALLS = 4
PROFILED_CALLS = 20


MODELS = {"resnet50": vision("resnet50", 1), "bert": bert, "llama": llama, "mlp": mlp}


def median_ms(call: Callable[[], Any], count: int = 300) -> float:
    times = []
    for _ in range(count):
        start = time.perf_counter_ns()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / 1e6


def measure(name: str, out: str | None) -> dict[str, Any]:
    model, args, kwargs = MODELS[name]()

    def call() -> Any:
        return model(*args, **kwargs)

    for _ in range(WARM_CALLS):
        call()
    torch.cuda.synchronize()
    planned = cuvil.stats()["planned"]
    before = median_ms(call)
    start = time.perf_counter()
    profile = Profile()
    with profile:
        entered = time.perf_counter()
        for _ in range(PROFILED_CALLS):
            call()
        torch.cuda.synchronize()
        left = time.perf_counter()
    end = time.perf_counter()
    after = median_ms(call)
    kernels = [a for a in profile.activities() if a.kind == "kernel"]
    if out is not None:
        profile.save_trace(os.path.join(out, f"{name}.json"))
        profile.save_html(os.path.join(out, f"{name}.html"))
        print(profile.table(by="line", limit=12))
        print(profile.table(by="kernel", limit=8))
    total = sum(kernel.duration_ns for kernel in kernels)
    return {
        "model": name,
        "planned": cuvil.stats()["planned"] - planned,
        "kernels": len(kernels),
        "in_graphs": sum(kernel.in_graph for kernel in kernels),
        "with_operator": sum(k.site is not None and bool(k.site.operator) for k in kernels),
        "attributed_share": profile.attributed_share,
        "of_raw": total / profile.raw_kernel_ns if profile.raw_kernel_ns else 0.0,
        "before_ms": before,
        "profiled_ms": (left - entered) * 1e3 / PROFILED_CALLS,
        "after_ms": after,
        "attach_ms": (entered - start) * 1e3,
        "detach_ms": (end - left) * 1e3,
        "outside": sum(kernel.start_ns < profile.start_ns for kernel in kernels),
        "notes": profile.notes,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="resnet50,bert,llama,mlp")
    parser.add_argument("--json")
    parser.add_argument("--out", help="a folder for traces and pages")
    options = parser.parse_args()
    cuvil.enable()
    results = []
    failed = False
    with torch.inference_mode():
        for name in options.only.split(","):
            result = measure(name, options.out)
            results.append(result)
            print({key: round(value, 4) if isinstance(value, float) else value for key, value in result.items()})
            budgets = {
                "kernels are recorded": result["kernels"] >= PROFILED_CALLS,
                "kernels of graphs": result["in_graphs"] >= 0.9 * result["kernels"],
                "99 % of kernel time has its line": result["attributed_share"] >= 0.99,
                "totals are CUPTI's": abs(result["of_raw"] - 1) <= 0.02,
                "speed afterwards is as before": result["after_ms"] <= 1.02 * result["before_ms"],
                "kernels lie inside of the profile": result["outside"] == 0,
                "nothing is missing": not result["notes"],
            }
            for text, holds in budgets.items():
                print(f"{'PASS' if holds else 'FAIL'} {name}: {text}", flush=True)
                failed = failed or not holds
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(
                {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": results}, file, indent=1
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
