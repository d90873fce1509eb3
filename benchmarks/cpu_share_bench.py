# Question: how much of one core does serving take while the GPU works?
# Baseline: eager and torch.compile, awaited the same way. Unit: process time / wall time. Budget: 41 %.
"""CPU share of back-to-back calls of ResNet-50 (fp16, batch 32), each awaited with a blocking event.

    python benchmarks/cpu_share_bench.py [--seconds 10] [--engines eager,compile,cuvil] [--json FILE]

Engines take turns of a second each, so that they see the same machine.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable
from typing import Any

import cuvil
import torch
from cuvil.measure import save, table


def engines(names: list[str]) -> dict[str, Callable[[], Any]]:
    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.resnet50(weights=None).eval().half().cuda()
    x = torch.randn(32, 3, 224, 224, device="cuda").half()
    calls: dict[str, Callable[[], Any]] = {}
    for name in names:
        if name == "cuvil":
            served = model
        elif name == "eager":
            served = cuvil.opt_out(copy.deepcopy(model))
        else:
            served = cuvil.opt_out(torch.compile(cuvil.opt_out(copy.deepcopy(model)), dynamic=False))
        calls[name] = lambda served=served: served(x)
    return calls


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=10, help="for each engine (default 10)")
    parser.add_argument("--engines", default="eager,compile,cuvil")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("cpu_share_bench: torch finds no GPU; run this on a machine with one", file=sys.stderr)
        return 2
    cuvil.enable()
    # The thread sleeps until the event, instead of asking for it all the time.
    event = torch.cuda.Event(blocking=True)
    with torch.inference_mode():
        calls = engines(options.engines.split(","))
        for call in calls.values():
            for _ in range(100):
                call()
                event.record()
                event.synchronize()
        busy = dict.fromkeys(calls, 0.0)
        wall = dict.fromkeys(calls, 0.0)
        count = dict.fromkeys(calls, 0)
        for _ in range(options.seconds):
            for name, call in calls.items():
                start, cpu = time.perf_counter(), time.process_time()
                while time.perf_counter() - start < 1:
                    call()
                    event.record()
                    event.synchronize()
                    count[name] += 1
                busy[name] += time.process_time() - cpu
                wall[name] += time.perf_counter() - start
    shares = {name: busy[name] / wall[name] for name in calls}
    rows = [
        [name, f"{shares[name]:.1%}", f"{wall[name] / count[name] * 1e3:.3f} ms", f"{count[name]:,}"] for name in calls
    ]
    print(table(["", "CPU share", "a call", "calls"], rows))
    if "cuvil" in shares:
        print(f"budget (41 %) {'met' if shares['cuvil'] <= 0.41 else 'NOT met'}")
    if options.json:
        save(options.json, ["python", *sys.argv], shares=shares, calls=count)
    return 0


if __name__ == "__main__":
    sys.exit(main())
