"""Does anything grow over 100,000 calls? Resident memory, Python references, live tensors and objects.

Baseline: the same counts after a warm-up, when plans serve.
Unit:     KiB of RSS, references, objects; sampled ten times over the run.
Budget:   no growth: RSS within 2 MiB of the first sample, the same number of objects and of references to the model's
          parts, its inputs and the singletons that are not immortal.

    python benchmarks/soak_bench.py [--calls 100000] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from typing import Any

os.environ["CUVIL_PREPARE"] = "sync"
os.environ["CUVIL_ADOPT"] = "always"

import cuvil
import torch
from cuvil import models
from cuvil.measure import Progress, save, table

SAMPLES = 10
RSS_BUDGET_KIB = 2048


def rss_kib() -> int:
    with open("/proc/self/statm", encoding="utf-8") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def sample(module: torch.nn.Module, x: torch.Tensor) -> dict[str, int]:
    gc.collect()
    objects = gc.get_objects()
    found = {
        "rss_kib": rss_kib(),
        "objects": len(objects),
        "tensors": sum(1 for entry in objects if isinstance(entry, torch.Tensor)),
        "file_handles": len(os.listdir("/proc/self/fd")),
        "references": sys.getrefcount(module)
        + sys.getrefcount(x)
        + sum(sys.getrefcount(p) for p in module.parameters())
        + sum(sys.getrefcount(m.__dict__) for m in module.modules())
        + sys.getrefcount(type(module))
        + sys.getrefcount(torch.nn.Module.__call__),
    }
    del objects
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = models.build("mlp")
    (x,) = model.args
    y = torch.randn(3, 64)
    cuvil.enable()
    progress = Progress("calls")
    samples: list[dict[str, int]] = []
    with torch.inference_mode():
        for _ in range(2_000):
            model.module(x)
            model.module(y)
        start = cuvil.stats()["planned"]
        samples.append(sample(model.module, x))
        for part in range(SAMPLES):
            for _ in range(options.calls // SAMPLES // 2):
                model.module(x)
                model.module(y)
            samples.append(sample(model.module, x))
            progress((part + 1) / SAMPLES)
    progress.close()
    planned = cuvil.stats()["planned"] - start
    keys = list(samples[0])
    first, last = samples[1], samples[-1]  # The very first sample itself allocates what sampling needs.
    rows: list[list[str]] = [[key, str(samples[0][key]), str(first[key]), str(last[key])] for key in keys]
    print(table(["", "after warm-up", "after 10 %", "after 100 %"], rows))
    grown: list[str] = [key for key in keys if last[key] > first[key] + (RSS_BUDGET_KIB if key == "rss_kib" else 0)]
    share = planned / max(1, options.calls // SAMPLES // 2 * 2 * SAMPLES)
    print(f"{options.calls:,} calls, {share:.1%} planned; {'grew: ' + ', '.join(grown) if grown else 'nothing grew'}")
    if options.json:
        result: dict[str, Any] = {"samples": samples, "grown": grown, "planned_share": share, "calls": options.calls}
        save(options.json, ["python", *sys.argv], **result)
    return 1 if grown or share < 0.99 else 0


if __name__ == "__main__":
    sys.exit(main())
