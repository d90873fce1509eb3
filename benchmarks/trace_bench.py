"""What getting a plan costs: the traced call, the time to the first planned call, a stream of new shapes.

Baseline: eager calls of the same model in the same process.
Unit:     ms, and ratios to eager's median; each figure is the median over fresh processes, since a first trace happens
          once in a process.
Budget:   first trace <= 3 × eager + 50 ms; a further shape <= 1.3 × eager + 50 ms; first planned call <= 4 eager calls
          + 0.5 s after the first call (resnet50, bert-base; defaults, that is background preparation); 200 random
          sequence lengths in a row <= 1.02 × eager in all (bert-base, defaults).

    python benchmarks/trace_bench.py [--repeat N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from cuvil.measure import Progress, save, table

MODELS = ("resnet50", "bert-base")


def seconds_of(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def child_trace(name: str) -> dict[str, Any]:
    """In a fresh process, prepared in the calling thread: the first traced call, and the first of a further shape."""
    import cuvil
    import torch
    from cuvil import models

    model, other = models.build(name), models.build(name, batch=2)
    twin = models.twin(model.module)

    def median(call: Callable[[], object]) -> float:
        return statistics.median(seconds_of(call) for _ in range(7))

    def ours(inputs: models.Model) -> Callable[[], object]:
        return lambda: model.module(*inputs.args, **inputs.kwargs)

    def eager(inputs: models.Model) -> Callable[[], object]:
        return lambda: twin(*inputs.args, **inputs.kwargs)

    with torch.inference_mode():
        for _ in range(3):
            eager(model)()
            eager(other)()
        eager_first, eager_further = median(eager(model)), median(eager(other))
        cuvil.enable()
        first = seconds_of(ours(model))
        for _ in range(3):
            ours(model)()
        further = seconds_of(ours(other))
    stats = cuvil.stats()
    return {
        "eager": eager_first,
        "eager_further": eager_further,
        "first": first,
        "further": further,
        "traces": stats["traces"],
        "planned": stats["planned"],
        "state": cuvil.explain(model.module).summary(),
    }


def child_ready(name: str) -> dict[str, Any]:
    """In a fresh process with the defaults: from the start of the first call to the end of the first planned one."""
    import cuvil
    import torch
    from cuvil import models

    model = models.build(name)
    twin = models.twin(model.module)
    with torch.inference_mode():
        for _ in range(3):
            twin(*model.args, **model.kwargs)
        eager = statistics.median(seconds_of(lambda: twin(*model.args, **model.kwargs)) for _ in range(7))
        cuvil.enable()
        begin = time.perf_counter()
        calls = 0
        ready = None
        model.module(*model.args, **model.kwargs)
        after_first = time.perf_counter()
        while time.perf_counter() - begin < 30 + 10 * eager:
            before = cuvil.stats()["planned"]
            model.module(*model.args, **model.kwargs)
            calls += 1
            if cuvil.stats()["planned"] > before:
                ready = time.perf_counter() - after_first
                break
    return {"eager": eager, "ready": ready, "calls": calls, "state": cuvil.explain(model.module).summary()}


def child_lengths(name: str) -> dict[str, Any]:
    """200 random sequence lengths in a row, eager and Cuvil in turns on the same inputs."""
    import cuvil
    import torch
    from cuvil import models

    del name
    model = models.build("bert-base")
    twin = cuvil.opt_out(models.twin(model.module))
    generator = random.Random(7)
    lengths = [generator.randint(8, 160) for _ in range(200)]
    ids = torch.randint(1, 30_000, (1, 160))
    totals = {"eager": 0.0, "cuvil": 0.0}
    with torch.inference_mode():
        for length in (8, 64, 160):
            twin(input_ids=ids[:, :length])
        cuvil.enable()
        for index, length in enumerate(lengths):
            x = ids[:, :length].contiguous()
            for who in ("eager", "cuvil") if index % 2 else ("cuvil", "eager"):
                module = twin if who == "eager" else model.module
                totals[who] += seconds_of(lambda m=module, x=x: m(input_ids=x))  # type: ignore[misc]
    return {**totals, "distinct": len(set(lengths)), "traces": cuvil.stats()["traces"]}


CHILDREN: dict[str, Callable[[str], dict[str, Any]]] = {
    "trace": child_trace,
    "ready": child_ready,
    "lengths": child_lengths,
}


def run_child(kind: str, name: str) -> dict[str, Any]:
    environment = dict(os.environ)
    if kind == "trace":
        environment |= {"CUVIL_PREPARE": "sync", "CUVIL_ADOPT": "always"}
    result = subprocess.run(
        [sys.executable, __file__, "--child", kind, name],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    record: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, help="fresh processes per figure (default 3)")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--child", nargs=2, metavar=("KIND", "NAME"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        kind, name = options.child
        print(json.dumps(CHILDREN[kind](name)))
        return 0

    jobs = [(kind, name) for name in MODELS for kind in ("trace", "ready")] + [("lengths", "bert-base")]
    raw: dict[str, list[dict[str, Any]]] = {}
    progress = Progress("fresh processes")
    for turn in range(options.repeat):
        for index, (kind, name) in enumerate(jobs):
            raw.setdefault(f"{kind} {name}", []).append(run_child(kind, name))
            progress((turn * len(jobs) + index + 1) / (options.repeat * len(jobs)))
    progress.close()

    def median(job: str, key: str) -> float:
        values = [record[key] for record in raw[job]]
        return float("inf") if None in values else statistics.median(values)

    figures: list[tuple[str, float, float, float]] = []  # What, eager, measured, allowed; seconds.
    for name in MODELS:
        eager, further = median(f"trace {name}", "eager"), median(f"trace {name}", "eager_further")
        figures.append((f"{name}: first traced call", eager, median(f"trace {name}", "first"), 3 * eager + 0.05))
        figures.append(
            (
                f"{name}: first call of a further shape",
                further,
                median(f"trace {name}", "further"),
                1.3 * further + 0.05,
            )
        )
        eager = median(f"ready {name}", "eager")
        figures.append(
            (f"{name}: first planned call after the first", eager, median(f"ready {name}", "ready"), 4 * eager + 0.5)
        )
    eager = median("lengths bert-base", "eager")
    figures.append(
        ("bert-base: 200 random lengths in a row", eager, median("lengths bert-base", "cuvil"), 1.02 * eager)
    )
    rows = [
        [
            what,
            f"{eager * 1e3:.1f}",
            f"{found * 1e3:.1f}",
            f"{allowed * 1e3:.1f}",
            "met" if found <= allowed else "NOT met",
        ]
        for what, eager, found, allowed in figures
    ]
    print(table(["", "eager ms", "measured ms", "budget ms", ""], rows))
    for job, records in raw.items():
        states = {str(record["state"]) for record in records if "state" in record}
        if states:
            print(f"{job}: {'; '.join(sorted(states))}")
    if options.json:
        save(
            options.json,
            ["python", *sys.argv],
            figures=[dict(zip(("what", "eager_s", "measured_s", "budget_s"), f, strict=True)) for f in figures],
            processes=raw,
        )
    return 0 if all(found <= allowed for _, _, found, allowed in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
